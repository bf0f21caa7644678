"""``taskqd health live|ready|startup``: asks a process over its unix socket. Imports next to nothing."""

import _socket
import os
import sys


def runtime_directories() -> list[str]:
    """Return where a group's socket may live, best first."""
    systemd, session = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0], os.environ.get("XDG_RUNTIME_DIR")
    own = session and session + "/taskqd"
    return [place for place in (systemd, own, "/run/taskqd", f"/tmp/taskqd-{os.getuid()}") if place]  # noqa: S108


def _only_socket() -> str:
    for directory in runtime_directories():
        try:
            names = [name for name in os.listdir(directory) if name.endswith(".sock")]
        except OSError:  # there is none, or it is another user's
            continue
        if len(names) > 1:
            raise OSError(f"{len(names)} groups in {directory}: name one with --socket or TASKQD_SOCKET")
        if names:
            return os.path.join(directory, names[0])
    raise OSError(f"no socket in {', '.join(runtime_directories())}: name it with --socket or TASKQD_SOCKET")


def main(argv: list[str]) -> int:
    """Return 0 when the answer is yes, 1 when it is no or none came within 2 s, 2 for wrong usage."""
    if len(argv) not in (1, 3) or argv[0] not in ("live", "ready", "startup") or argv[1:2] not in ([], ["--socket"]):
        print("usage: taskqd health live|ready|startup [--socket PATH]", file=sys.stderr)
        return 2
    try:
        path = argv[2] if argv[2:] else os.environ.get("TASKQD_SOCKET") or _only_socket()
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        sock.settimeout(1)  # to connect, and again to be answered
        sock.connect(path)
        sock.send(f"GET /{argv[0]} HTTP/1.1\r\nHost: taskqd\r\n\r\n".encode())
        _, code, reason = sock.recv(512).split(b"\r\n")[0].decode().split(" ", 2)
    except (OSError, ValueError) as error:
        code, reason = "", f"no answer: {error}"
    print(f"{argv[0]}: {reason}")
    return 0 if code == "200" else 1
