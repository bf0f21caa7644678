"""The group's health over TCP, for httpGet probes and scrapers."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from taskqd.supervisor.changes import needs_restart
from taskqd.supervisor.plan import Plan
from taskqd.supervisor.workgroup import parse_workgroup
from tests.supervisor.conftest import StartGroup, group  # noqa: F401 - the fixture


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_probes_and_metrics_are_served_and_nothing_else(group: StartGroup) -> None:  # noqa: F811
    port = free_port()
    g = group(tables={"supervisor": f'health_address = "127.0.0.1:{port}"'})
    g.wait_for("ready")
    assert [get(port, path)[0] for path in ("/startup", "/live", "/ready")] == [200] * 3
    assert "taskqd_child_up" in get(port, "/metrics")[1]
    assert g.ask("/status")[0] == 200
    code, body = get(port, "/status")
    assert code == 404
    assert "there are /live, /metrics, /ready, /startup" in body
    assert g.stop() == 0
    with pytest.raises(urllib.error.URLError):
        get(port, "/live")


def test_it_answers_before_the_group_is_ready(group: StartGroup) -> None:  # noqa: F811
    port = free_port()
    g = group(modes={"io": "never-ready"}, tables={"supervisor": f'health_address = "127.0.0.1:{port}"'})
    g.wait_for("spawn")
    assert get(port, "/live")[0] == 200
    assert get(port, "/startup")[0] == get(port, "/ready")[0] == 503
    assert g.stop() == 0


def test_a_taken_port_refuses_the_start_and_leaves_nothing(group: StartGroup) -> None:  # noqa: F811
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        g = group(tables={"supervisor": f'health_address = "127.0.0.1:{port}"'})
        assert g.command.wait() == 78
        assert f"cannot listen on 127.0.0.1:{port}" in g.command.stderr
        assert g.left_over() == []


def test_a_reload_cannot_change_it_and_says_so() -> None:
    plan = Plan(group="g", children=(), health_address="0.0.0.0:8081")
    assert needs_restart(plan, plan) == []
    (line,) = needs_restart(plan, replace(plan, health_address=None))
    assert line.startswith("[supervisor] health_address changes from '0.0.0.0:8081' to ")


@pytest.mark.parametrize(
    ("written", "expected"),
    [("0.0.0.0:8081", ("0.0.0.0", 8081)), ("[::]:80", ("::", 80)), ("localhost:1", ("localhost", 1))],
)
def test_an_address(written: str, expected: tuple[str, int]) -> None:
    found, wrong = parse_workgroup(_document(written), "g.toml")
    assert (found.supervisor.health_address, wrong) == (expected, [])


@pytest.mark.parametrize("written", ["8081", ":8081", "host", "host:0", "host:65536", "::1:80", "host:²", 8081, "h:"])
def test_what_is_no_address(written: object) -> None:
    _, wrong = parse_workgroup(_document(written), "g.toml")
    assert wrong == [
        f'g.toml:supervisor.health_address: {written!r} must be "host:port" with a port from 1 to 65535, as in '
        '"0.0.0.0:8081"'
    ]


def _document(address: object) -> dict[str, object]:
    return {"actors": "a:b", "supervisor": {"health_address": address}, "workers": [{"name": "io"}]}
