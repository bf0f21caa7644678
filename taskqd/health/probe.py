"""``taskqd health live|ready|startup``: asks a process over its unix socket. Imports next to nothing."""

import _socket
import os
import sys
import time


def runtime_directories() -> list[str]:
    """Return where a group's socket may live, best first."""
    systemd, session = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0], os.environ.get("XDG_RUNTIME_DIR")
    own = session and session + "/taskqd"
    return [place for place in (systemd, own, "/run/taskqd", f"/tmp/taskqd-{os.getuid()}") if place]  # noqa: S108


def _socket_of(group: str | None) -> str:
    """Return the socket of a group, None: of the only one there is."""
    for directory in runtime_directories():
        try:
            names = [name for name in os.listdir(directory) if name.endswith(".sock")]
        except OSError:  # there is none, or it is another user's
            continue
        if group is not None:
            names = [name for name in names if name == f"{group}.sock"]
        if len(names) > 1:
            raise OSError(f"{len(names)} groups in {directory}: name one with --group, --socket or TASKQD_SOCKET")
        if names:
            return os.path.join(directory, names[0])
    what = "no socket" if group is None else f"no group {group!r}"
    raise OSError(f"{what} in {', '.join(runtime_directories())}: name it with --socket or TASKQD_SOCKET")


def _connect(sock: _socket.socket, path: str) -> None:
    deadline = time.monotonic() + 1
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:  # so many ask at this moment that they have to queue
            if time.monotonic() > deadline:
                raise TimeoutError("timed out") from None
            time.sleep(0.01)


def _ask(question: str, path: str | None, group: str | None) -> tuple[bool, str]:
    try:
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        sock.settimeout(1)  # to be answered, once connected
        known = path or (os.environ.get("TASKQD_SOCKET") if group is None else None)
        _connect(sock, known or _socket_of(group))
        sock.send(f"GET /{question} HTTP/1.1\r\nHost: taskqd\r\n\r\n".encode())
        _, code, reason = sock.recv(512).split(b"\r\n")[0].decode().split(" ", 2)
    except (OSError, ValueError) as error:
        return False, f"no answer: {error}"
    return code == "200", reason


def main(argv: list[str]) -> int:
    """Return 0 when the answer is yes, 1 when it is no or none came within 2 s, 2 for wrong usage.

    With ``--wait SECONDS`` (0 to 3600) it asks again, five times a second, until the answer is yes or they are over.
    """
    options = dict(zip(argv[1::2], argv[2::2], strict=False))
    wait = options.get("--wait", "0")
    wrong = len(argv) != 1 + 2 * len(options) or not options.keys() <= {"--group", "--socket", "--wait"}
    if wrong or argv[0] not in ("live", "ready", "startup"):
        print(
            "usage: taskqd health live|ready|startup [--group GROUP] [--socket PATH] [--wait SECONDS]", file=sys.stderr
        )
        return 2
    if not (wait.isascii() and wait.isdecimal() and len(wait) < 5 and int(wait) <= 3600):
        print(f"error: --wait {wait}: it is a whole number of seconds from 0 to 3600", file=sys.stderr)
        return 2
    deadline = time.monotonic() + int(wait)
    question = argv[0], options.get("--socket"), options.get("--group")
    yes, reason = _ask(*question)
    while not yes and time.monotonic() < deadline:
        time.sleep(0.2)
        yes, reason = _ask(*question)
    print(f"{argv[0]}: {reason}")
    return 0 if yes else 1
