"""A small child for tests of the supervisor: it speaks the real protocol and misbehaves as it is told.

``python standin.py MODE…``; modes are words, and ``MODE@INDEX`` holds for that replica alone.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import time

from taskqd.health.child import arm

arm()

from taskqd.health import control  # noqa: E402
from taskqd.health.control import ControlLink, Drain  # noqa: E402

BABBLE = {
    "bytes": b"\x00garbage\n",
    "no-object": b"[1, 2, 3]\n",
    "no-word": b'{"op": 5}\n',
    "deep": b"[" * 60_000 + b"\n",
    "long": b'{"op": "beat", "x": "' + b"x" * 2**20 + b'"}\n',
    "endless": b"y" * 2**20,
}
"""What one that babbles says on its link once it is ready, by the word after ``says-``."""

ORPHANS = 1_000
LINES = 20_000
LONG_LINE = 10 * 2**20
"""Lines, and bytes of one more, that a talkative one prints."""

PICKY = {13: {"never-ready"}, 14: {"crash-ready"}, 15: {"exit-78"}}
"""What a picky one does when it is given this ``max_concurrency``."""


class StandIn:
    def __init__(self, modes: set[str]) -> None:
        self.modes = modes
        self.age_ms = 0.0
        self.done = 0
        self.quiet = False
        self.ended = asyncio.Event()
        self.drains: list[Drain] = []
        self.hoard: list[bytearray] = []

    def has(self, mode: str) -> bool:
        return mode in self.modes

    def beat(self) -> dict[str, object]:
        if self.has("leaking"):
            self.hoard.append(bytearray(b"x") * (16 * 2**20))
        fields: dict[str, object] = {"phase": "running", "inflight": 0, "slots": 8, "claims": 0, "quiet": self.quiet}
        if self.has("loaded"):
            fields["inflight"] = 3
        if self.has("strange"):
            keys = ("seq", "lag_ms", "phase", "inflight", "slots", "claims", "polls", "poll_s", "done", "db_ok_age_ms")
            fields = dict(zip(keys, ("x", None, 1, "many", {}, [], -1.5, "y", True, "z"), strict=True))
        if self.has("busy"):
            self.done += 10
            fields["done"] = self.done
        if self.has("database-away"):
            fields["db_ok_age_ms"] = 1e9
        return fields

    def drain(self, drain: Drain) -> None:
        self.drains.append(drain)
        print("drained-by-message", len(self.drains), flush=True)
        print("cancel-in", round(drain.cancel_ns / 1e9 - time.monotonic(), 1), flush=True)
        if self.modes & {"deaf", "ignores-all"}:
            return
        if self.has("slow"):
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, drain.cancel_ns / 1e9 - time.monotonic()), self.ended.set)
        else:
            self.ended.set()

    def be_quiet(self, quiet: bool) -> None:
        self.quiet = quiet

    async def run(self) -> int:
        if self.has("mute"):
            time.sleep(1000)
        if self.has("wrong-version"):
            control.PROTOCOL_VERSION = 99
        if self.has("other-name"):
            os.environ["TASKQD_NAME"] = "somebody"
        if self.has("other-index"):
            os.environ["TASKQD_INDEX"] = "7"
        if self.has("no-hello"):
            blurt(b'{"op": "beat", "seq": 1}\n')
            await self.ended.wait()
        link = ControlLink.from_environ()
        assert link is not None
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: print("sigterm", flush=True))
        await link.start(self.beat, self.drain, self.be_quiet)
        if self.has("lazy"):
            await asyncio.sleep(0.7)  # so that somebody sees it start
        if self.has("never-ready"):
            await self.ended.wait()
        if self.has("slow-boot"):
            for step in range(12):
                link.send_progress(f"step {step}")
                await asyncio.sleep(0.25)
        if self.has("grandchild"):
            subprocess.Popen(["sleep", "1000"])
        if self.has("deaf-grandchild"):
            subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; sleep 1000; sleep 1000"])
        if self.has("escapee"):
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if self.has("bomb"):
            for _ in range(4):
                fork_for_ever()
        if self.has("ignores-all"):
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
        link.send_ready()
        print("ready", flush=True)
        await asyncio.sleep(0.05)
        self.after_ready()
        await self.ended.wait()
        await link.close("drained")
        return 75 if self.drains and self.drains[-1].recycle else 0

    def after_ready(self) -> None:
        if self.has("blocked"):
            time.sleep(1000)  # the loop stands still, the interpreter lock is free
        if self.has("blocked-a-while"):
            time.sleep(6)
        if self.has("hungry"):
            hoard = [bytearray(b"x") * 2**20 for _ in range(1024)]
            print(len(hoard), flush=True)
        if self.has("catastrophe"):
            re.match(r"(a|aa)+$", "a" * 60 + "b")  # one call in C, which no signal ends
        if self.has("stuck"):
            os.stat(os.environ["STUCK_PLACE"] + "/anything")
        if self.has("long-call"):
            max(range(10**10))
        if self.has("gil-held"):
            while True:  # a signal ends a sleep early
                ctypes.PyDLL(None).sleep(1000)
        if self.has("spinning"):
            while True:
                pass
        for mode in self.modes:
            if mode.startswith("says-"):
                blurt(BABBLE[mode.removeprefix("says-")])
        if not self.has("second-life") or count_lives() == 2:
            if self.has("talkative"):
                talk()
            if self.has("orphanage"):
                make_orphans()
        if self.has("odd-answers"):
            blurt(b'{"op": "released"}\n{"op": "reloaded", "id": []}\n{"op": "future"}\n{"op": "beat"}\n')
        if self.has("crash-until-calm") and not os.path.exists("calm"):
            os._exit(1)
        if self.has("lingers"):
            atexit.register(time.sleep, 0.6)
        if self.has("crash-ready"):
            raise RuntimeError("crashed after it was ready")
        for mode in self.modes:
            if mode.startswith("ready-exit-"):
                os._exit(int(mode.removeprefix("ready-exit-")))


def fork_for_ever() -> None:
    """Start a process that is another one each time somebody looks: each makes the next and ends."""
    until = time.monotonic() + 60
    if os.fork():
        return
    while time.monotonic() < until:
        if os.fork():
            os._exit(0)
        time.sleep(0.001)
    os._exit(0)


def talk() -> None:
    """Print more than anybody reads, and leave in a file how long the longest print took."""
    slowest = 0.0
    for number in range(LINES):
        began = time.monotonic()
        os.write(1, b"line %d %s\n" % (number, b"-" * 40))
        slowest = max(slowest, time.monotonic() - began)
    piece = b"x" * 65536
    for _ in range(LONG_LINE // len(piece)):
        rest = piece
        while rest:
            rest = rest[os.write(1, rest) :]
    os.write(1, b"\n")
    with open("talked.new", "w") as file:
        json.dump({"slowest_s": slowest, "lines": LINES, "long_line": LONG_LINE}, file)
    os.rename("talked.new", "talked")


def count_lives() -> int:
    """Return how many lives this one has had, the present one included."""
    with open("lives", "a+") as file:
        file.write(".")
        return file.tell()


def make_orphans() -> None:
    """Start many processes whose parents end before them."""
    script = f"i=0; while [ $i -lt {ORPHANS} ]; do (true &); i=$((i + 1)); done"
    subprocess.run(["sh", "-c", script], check=True)


def blurt(data: bytes) -> None:
    """Write on the link past everybody who speaks the protocol, as long as the supervisor listens."""
    number = int(os.environ["TASKQD_CONTROL_FD"])
    while data:
        select.select([], [number], [])
        try:
            data = data[os.write(number, data) :]
        except BlockingIOError:
            continue
        except OSError:
            return


def main() -> int:
    index = os.environ["TASKQD_INDEX"]
    words = [word.partition("@") for word in sys.argv[1:]]
    modes = {mode for mode, _, only in words if only in ("", index)}
    if "picky" in modes:  # whether it works depends on its settings
        modes |= PICKY.get(json.loads(os.environ["TASKQD_SETTINGS"]).get("max_concurrency"), set())
    for mode in modes:
        if mode.startswith("exit-"):
            return int(mode.removeprefix("exit-"))
    if "broken-import" in modes:
        raise ImportError("no module named 'gone'")
    if "once" in modes:  # misbehaves in its first life only
        marker = f"lived.{os.environ['TASKQD_NAME']}.{index}"
        if os.path.exists(marker):
            modes = set()
        else:
            open(marker, "w").close()
    return asyncio.run(StandIn(modes).run())


if __name__ == "__main__":
    sys.exit(main())
