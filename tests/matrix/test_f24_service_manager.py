"""F24: The service manager is there, does not listen, or does not read: it hears of start, reload, stop and life in
their order, and nobody waits for it. A socket stands in for systemd's.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from taskqd.supervisor.sdnotify import Notifier
from tests.matrix.conftest import Trial
from tests.support import wait_until


class Manager:
    """A service manager's socket, and the messages that arrived, each with its time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        self._socket.setblocking(False)
        self.messages: list[tuple[float, dict[str, str]]] = []

    def read(self) -> list[dict[str, str]]:
        """Every message so far."""
        while True:
            try:
                text = self._socket.recv(65536).decode()
            except BlockingIOError:
                return [message for _, message in self.messages]
            fields = dict(line.split("=", 1) for line in text.splitlines())
            self.messages.append((time.monotonic(), fields))

    def wait_for(self, key: str, timeout: float = 30.0) -> dict[str, str]:
        """The first message that holds ``key``."""
        return wait_until(lambda: next((m for m in self.read() if key in m), None), timeout, key)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(short_dir: Path) -> Iterator[Manager]:
    made = Manager(str(short_dir / "notify"))
    yield made
    made.close()


def socket_is_full(address: str) -> bool:
    """True when whoever listens there takes no more messages."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            sender.sendto(b"X=1", address)
        except BlockingIOError:
            return True
    return False


def test_f24_a_group_from_its_start_to_its_stop(trial: Trial, manager: Manager) -> None:
    with trial(modes={"io": "slow"}, tables={"[workers]": "replicas = 2"}, ready=2, NOTIFY_SOCKET=manager.address) as g:
        assert manager.wait_for("STATUS")["STATUS"] == "checking the workgroup and the database"
        ready = manager.wait_for("READY")
        assert ready["STATUS"].startswith("2/2 ready, budget ")
        assert any("EXTEND_TIMEOUT_USEC" in message for message in manager.read())
        for process in g.processes():
            assert "NOTIFY_SOCKET" not in process.environ()
        g.command.signal(signal.SIGTERM)
        assert manager.wait_for("STOPPING")["STATUS"].startswith("stopping: 2 processes, 0 jobs, at most ")
        assert g.command.wait() == 0
    order = [next(iter(message)) for message in manager.read()]
    assert order.count("READY") == order.count("STOPPING") == 1
    assert not [m for m in manager.read()[order.index("READY") :] if "EXTEND_TIMEOUT_USEC" in m]
    assert "WATCHDOG" not in order


def test_f24_a_reload_is_told_from_its_begin_to_its_end(trial: Trial, manager: Manager) -> None:
    with trial(NOTIFY_SOCKET=manager.address) as g:
        manager.wait_for("READY")
        for ask in range(1, 3):
            g.command.signal(signal.SIGHUP)
            wait_until(lambda ask=ask: [*map(next, map(iter, manager.read()))].count("READY") == 1 + ask, 60)
            (g.directory / "group.toml").write_text("broken")
    states = [message for message in manager.read() if {"RELOADING", "READY", "STOPPING"} & message.keys()]
    assert [next(iter(state)) for state in states] == ["READY", *["RELOADING", "READY"] * 2, "STOPPING"]
    assert all("MONOTONIC_USEC" in state for state in states if "RELOADING" in state)


def test_f24_a_group_that_does_not_come_up_is_never_called_ready(trial: Trial, manager: Manager) -> None:
    quick = {"supervisor": "backoff_initial = 0.05"}
    with trial(modes={"io": "exit-70"}, tables=quick, ready=0, ends=70, NOTIFY_SOCKET=manager.address) as g:
        g.command.wait(60)
    assert not [message for message in manager.read() if "READY" in message]


def test_f24_a_change_of_state_changes_the_status(trial: Trial, manager: Manager) -> None:
    slow = {"supervisor": "backoff_initial = 3"}
    with trial(modes={"io": "crash-ready,once"}, tables=slow, NOTIFY_SOCKET=manager.address):
        manager.wait_for("READY")
        status = wait_until(lambda: next((m for m in manager.read() if "backoff" in m.get("STATUS", "")), None), 30)
        assert status["STATUS"].startswith("0/1 ready: io.0 is backoff (")
        wait_until(lambda: manager.read()[-1].get("STATUS", "").startswith("1/1 ready"), 30)


@pytest.mark.parametrize("address", ["/nonexistent/socket", "@nobody-listens-here", "/dev/null"])
def test_f24_a_manager_that_cannot_be_reached_is_no_trouble(trial: Trial, address: str) -> None:
    with trial(NOTIFY_SOCKET=address, WATCHDOG_USEC="200000") as g:
        g.command.signal(signal.SIGHUP)
        g.wait_for("reload-done")
        assert g.ask("/ready")[0] == 200


def test_f24_a_manager_that_stops_reading_holds_nobody_up(trial: Trial, manager: Manager) -> None:
    with trial(NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="2000") as g:
        wait_until(lambda: socket_is_full(manager.address), 30)
        rounds = g.ask("/status")[1]["up_s"]
        assert g.ask("/ready")[0] == 200
        wait_until(lambda: g.ask("/status")[1]["up_s"] > rounds + 1, 30)
        assert g.ask("/live")[0] == 200


def test_f24_the_watchdog_is_fed_from_the_rounds_alone(trial: Trial, manager: Manager) -> None:
    with trial(NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="2000000") as g:
        manager.wait_for("READY")

        def fed() -> list[float]:
            manager.read()
            return [at for at, message in manager.messages if "WATCHDOG" in message]

        wait_until(lambda: len(fed()) >= 4, 30)
        for process in g.processes():
            assert not [name for name in process.environ() if name.startswith("WATCHDOG")]
        g.command.signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(g.command.pid).status() == psutil.STATUS_STOPPED)
        before = len(fed())
        time.sleep(2.5)  # longer than the watchdog's patience
        assert len(fed()) == before
        g.command.signal(signal.SIGCONT)
        wait_until(lambda: len(fed()) > before, 30)


def test_f24_a_watchdog_that_is_meant_for_another_process_is_not_fed(manager: Manager) -> None:
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1000"}
    for pid, fed in ((os.getpid() + 1, False), (os.getpid(), True)):
        notifier = Notifier.from_environ({**environ, "WATCHDOG_PID": str(pid)})
        notifier.round("well", ready=False)
        notifier.close()
        assert any("WATCHDOG" in message for message in manager.read()) is fed


@pytest.mark.parametrize("address", ["", "/nonexistent/socket", "@nobody-listens-here"])
def test_f24_nobody_to_tell_is_no_trouble(address: str) -> None:
    notifier = Notifier(address, 0.001)
    notifier.round("well", ready=True)
    notifier.stopping("bye")
    notifier.close()


def test_f24_an_abstract_socket() -> None:
    manager = Manager(f"@taskqd-{uuid.uuid4()}")
    notifier = Notifier(manager.address)
    notifier.round("line\nbreak", ready=True)
    assert manager.read() == [{"READY": "1", "STATUS": "line break"}]
    notifier.close()
    manager.close()


def test_f24_a_reload_says_when_it_began_in_the_same_message_and_always_ends(manager: Manager) -> None:
    notifier = Notifier(manager.address)
    notifier.reloading("too early")
    notifier.reloaded("never began")
    assert manager.read() == []
    notifier.round("up", ready=True)
    before = time.monotonic_ns() // 1000
    notifier.reloading("reading the workgroup")
    notifier.round("not now", ready=True)
    notifier.reloaded("reload refused: group.toml:3")
    _, began, ended = manager.read()
    assert (began["RELOADING"], began["STATUS"]) == ("1", "reading the workgroup")
    assert before <= int(began["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
    assert ended == {"READY": "1", "STATUS": "reload refused: group.toml:3"}
    notifier.reloading("again")
    notifier.stopping("bye")
    notifier.reloaded("too late")
    assert [next(iter(message)) for message in manager.read()[3:]] == ["RELOADING", "STOPPING"]
    notifier.close()


def test_f24_more_time_is_asked_for_only_when_the_boot_gets_on(manager: Manager) -> None:
    notifier = Notifier(manager.address)
    now = time.monotonic()
    notifier.boot_until(now + 60)
    notifier.boot_until(now + 60.5)
    notifier.boot_until(now + 70)
    asked = [int(message["EXTEND_TIMEOUT_USEC"]) / 1e6 for message in manager.read()]
    assert asked == [pytest.approx(60, abs=1), pytest.approx(70, abs=1)]
    notifier.round("up", ready=True)
    notifier.boot_until(now + 90)
    assert len(manager.read()) == 3
    notifier.close()


def test_f24_the_status_changes_at_most_once_a_second(manager: Manager) -> None:
    notifier = Notifier(manager.address)
    for number in range(100):
        notifier.round(f"{number} ready", ready=False)
    assert manager.read() == [{"STATUS": "0 ready"}]
    notifier.close()
