"""F22: Every signal, once, again and again, too early and too late: a second request hurries, a third kills, a closed
terminal stops, and the exit code is never the signal's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.matrix.conftest import Trial
from tests.supervisor.conftest import ACTORS, RUNNER, Group
from tests.support import wait_until

TWO = {"[workers]": "replicas = 2"}
QUICK = {"supervisor": "settle_after = 0"}
BOTH_WAYS = pytest.mark.parametrize("preload", ["off", "require"], ids=["exec", "fork"])


@BOTH_WAYS
def test_f22_a_second_signal_cancels_now(trial: Trial, preload: str) -> None:
    graces = "cancellation_grace_period = 3.5\ncleanup_grace_period = 1"
    with trial(modes={"io": "slow"}, tables={"[workers]": graces}, preload=preload) as g:
        g.command.signal(signal.SIGTERM)
        g.wait_for("shutdown-begin")
        g.command.signal(signal.SIGINT)
        assert g.command.wait() == 0
        assert g.events("shutdown-hurry")[0]["reason"] == "SIGINT"
        at_first, then = [float(line.split()[1]) for line in g.command.stdout.splitlines() if "cancel-in" in line]
        assert 0 < at_first <= 3.5
        assert then <= 0


@BOTH_WAYS
def test_f22_a_third_signal_kills_now(trial: Trial, preload: str) -> None:
    with trial(modes={"io": "deaf"}, tables=TWO, ready=2, ends=3, preload=preload) as g:
        for event in ("shutdown-begin", "shutdown-hurry", "shutdown-kill"):
            g.command.signal(signal.SIGTERM)
            g.wait_for(event)
        assert g.command.wait(5) == 3


def test_f22_signals_to_the_very_last_moment_do_not_change_the_exit_code(trial: Trial) -> None:
    with trial(modes={"io": "deaf"}, ends=3) as g:
        while g.command.process.poll() is None:
            g.command.signal(signal.SIGTERM)
            g.command.signal(signal.SIGQUIT)
            time.sleep(0.0005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_f22_a_stop_that_comes_before_anything_is_loaded_is_a_stop(trial: Trial, number: signal.Signals) -> None:
    with trial(actors=ACTORS, ready=0) as g:
        for _ in range(3):
            signal_early(g, number)
        assert g.command.wait() == 0
        assert not g.events("spawn")


def test_f22_a_hang_up_that_comes_before_anything_is_loaded_is_a_reload(trial: Trial) -> None:
    with trial(actors=ACTORS, ready=0) as g:
        signal_early(g, signal.SIGHUP)
        g.wait_for("reload-done", timeout=60)


def test_f22_a_hang_up_before_there_is_a_plan_reloads_once_there_is_one(trial: Trial) -> None:
    with trial(ready=0) as g:
        g.wait_for("preflight")
        g.command.signal(signal.SIGHUP)
        g.command.signal(signal.SIGHUP)
        g.wait_for("ready")
        g.wait_for("reload-done")
        assert len(g.events("reload-begin")) == 1


def test_f22_a_hang_up_without_a_terminal_reloads(trial: Trial) -> None:
    with trial() as g:
        g.command.signal(signal.SIGHUP)
        (done,) = g.wait_for("reload-done")
        assert done["result"] == "reloaded: nothing to change"
        assert not g.events("child-exit")
        assert g.ask("/ready")[0] == 200


def test_f22_quit_shows_every_stack_and_kills_at_once(trial: Trial) -> None:
    with trial(modes={"io": "deaf"}, tables=TWO, ready=2, ends=3) as g:
        beating(g)
        began = time.monotonic()
        g.command.signal(signal.SIGQUIT)
        assert g.command.wait() == 3
        assert time.monotonic() - began < 10
        (told,) = g.events("shutdown-complete")
        assert told["not_clean"] == ["io.0", "io.1"]
        for name in ("io.0", "io.1"):
            shown = "".join(e.get("stacks", "") + e.get("left", "") for e in g.events() if e.get("child") == name)
            assert "standin.py" in shown, name


def test_f22_a_storm_of_usr1_shows_a_little_and_ends_nobody(trial: Trial) -> None:
    with trial(tables=TWO, ready=2) as g:
        beating(g)
        for _ in range(2000):
            g.command.signal(signal.SIGUSR1)
        g.wait_for("stacks", 2)
        assert len(g.events("status")) < 10
        told = g.events("status")[0]
        assert told["processes"] == {"io.0": "ready", "io.1": "ready"}
        assert told["group_is"].startswith("2/2 ready")
        assert {event["child"] for event in g.events("stacks")} == {"io.0", "io.1"}
        assert not g.events("child-exit")
        assert g.ask("/live")[0] == 200


def test_f22_usr2_puts_a_fresh_process_into_every_place(trial: Trial) -> None:
    with trial(tables={**TWO, **QUICK}, ready=2) as g:
        before = {event["pid"] for event in g.events("ready")}
        for _ in range(20):
            g.command.signal(signal.SIGUSR2)
        g.wait_for("renew-done")
        wait_until(lambda: g.ask("/status")[1]["change"] is None)
        assert len(g.events("renew-begin")) <= 3
        now = {child["pid"] for child in g.ask("/status")[1]["children"]}
        assert len(now) == 2
        assert not now & before
        assert {event["code"] for event in g.events("child-exit")} == {0}


@pytest.mark.parametrize(("how", "reason"), [("interrupt", "SIGINT"), ("hang up", "SIGHUP")])
def test_f22_a_terminal_stops_the_group_and_its_processes_only_by_way_of_it(
    trial: Trial, how: str, reason: str
) -> None:
    with trial() as g:
        assert g.stop() == 0
        with on_a_terminal(g) as (process, terminal, log):
            wait_until(lambda: '"event": "ready"' in log.read_text(), 30)
            if how == "interrupt":
                os.write(terminal, b"\x03")
            else:
                nothing = os.open(os.devnull, os.O_RDWR)
                os.dup2(nothing, terminal)
                os.close(nothing)
            assert process.wait(30) == 0
        assert f'"reason": "{reason}"' in log.read_text()
        assert '"class"' not in log.read_text(), "the worker ended as it was asked to, not by a signal of its own"


def signal_early(g: Group, number: signal.Signals) -> None:
    """Send a signal as soon as the process handles it, long before it has loaded what it needs."""
    status, bit = Path(f"/proc/{g.command.pid}/status"), 1 << (number - 1)

    def caught() -> bool:
        line = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
        # The interpreter handles SIGINT from its start, but not as we do.
        return bool(int(line.split()[1], 16) & bit) and bool(int(line.split()[1], 16) & (1 << (signal.SIGTERM - 1)))

    deadline = time.monotonic() + 30
    while not caught():
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    assert not g.events(), "it is not that far"
    g.command.signal(number)


def beating(g: Group) -> None:
    """Wait until everybody has beaten once, as no one shows a stack before."""
    wait_until(lambda: all(child["beat_age_s"] is not None for child in g.ask("/status")[1]["children"]), 30)


@contextlib.contextmanager
def on_a_terminal(g: Group) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """Start the group once more, on a terminal that is its own, and log to a file beside the first one's."""
    terminal, end = pty.openpty()
    log = g.directory / "terminal.stderr"
    with log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-P", str(RUNNER), str(g.directory / "group.toml")],
            cwd=g.directory,
            env=g._env,
            stdin=end,
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
    os.close(end)
    try:
        yield process, terminal, log
    finally:
        process.kill()
        process.wait(10)
        os.close(terminal)
