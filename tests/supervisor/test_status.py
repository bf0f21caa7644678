"""What a person and a scraper see of a running group."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from taskqd.cli.explain import explain_exit, read_code
from taskqd.cli.status import screen, span
from taskqd.domain.exit_codes import ExitCode
from taskqd.supervisor.board import Board
from taskqd.supervisor.child import Child
from taskqd.supervisor.exits import ExitClass
from taskqd.supervisor.exposition import own_series
from taskqd.supervisor.memory import Held
from taskqd.supervisor.plan import ChildSpec
from taskqd.supervisor.scrape import merge
from taskqd.supervisor.slot import State, Timing
from taskqd.supervisor.tally import BOUNDS, Tally
from tests.supervisor.conftest import Group, StartGroup
from tests.support import REPOSITORY, Command, child_environment, taskqd_argv, wait_until

RESULTS = ("done", "refused", "failed")
QUICK = "stable_after = 0\nbackoff_initial = 0.05\nburst_limit = 0"


def taskqd(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        taskqd_argv(*args),
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# -- status ---------------------------------------------------------------------------------------


def test_one_screen_shows_who_runs_and_how(group: StartGroup) -> None:
    g = group(tables={"supervisor": QUICK, "[workers]": 'replicas = 2\nqueues = ["mail", "io"]'})
    g.wait_for("ready", 2)
    first = int(g.events("ready")[0]["pid"])
    os.kill(first, signal.SIGKILL)
    g.wait_for("ready", 3)
    wait_until(lambda: all(child["private_bytes"] for child in g.ask("/status")[1]["children"]), 20)
    done = taskqd("status", "--socket", str(g.socket))
    assert done.returncode == 0, done.stderr
    top, _, head, *rows = done.stdout.splitlines()
    assert top.startswith("2/2 ready · group group · budget ")
    assert " · stop budget 6 s (platform 10) · " in top
    assert " · up " in top
    columns = (
        "PROCESS",
        "STATE",
        "SINCE",
        "PID",
        "GEN",
        "RESTARTS",
        "LAST EXIT",
        "BEAT",
        "LAG",
        "JOBS",
        "OLDEST",
        "POOL",
    )
    assert [head.find(column) for column in columns] == sorted(head.find(column) for column in columns)
    assert [row.split()[:2] for row in rows] == [["io.0", "ready"], ["io.1", "ready"]]
    assert sum("crash: ended by SIGKILL" in row for row in rows) == 1
    assert all(row.endswith("mail,io") for row in rows)
    assert all("0/8" in row for row in rows)
    assert len(done.stdout) < 2000


def test_it_comes_at_once(group: StartGroup) -> None:
    g = group()
    g.wait_for("ready")
    times = []
    for _ in range(5):
        began = time.monotonic()
        assert taskqd("status", "--socket", str(g.socket)).returncode == 0
        times.append(time.monotonic() - began)
    assert sorted(times)[2] < 1.5, "ten times 150 ms"


def test_json_holds_everything_there_is(group: StartGroup) -> None:
    g = group()
    g.wait_for("ready")
    done = taskqd("status", "--json", TASKQD_SOCKET=str(g.socket))
    status = json.loads(done.stdout)
    (child,) = status["children"]
    assert {
        "name",
        "state",
        "for_s",
        "pid",
        "restarts",
        "last_exit",
        "beat_age_s",
        "beat",
        "stopped",
        "verdict",
    } <= set(child)
    assert status["group"] == "group"
    assert status["stop_budget_s"] == 6.0


def test_watch_goes_on_until_it_is_interrupted(group: StartGroup, start: Callable[..., Command]) -> None:
    g = group()
    g.wait_for("ready")
    watching = start("status", "--watch", "--socket", str(g.socket))
    wait_until(lambda: watching.stdout.count("PROCESS") >= 2, 30)
    watching.signal(signal.SIGINT)
    assert watching.wait() == 0


def test_without_a_group_it_says_where_it_looked(short_dir: Path) -> None:
    done = taskqd("status", "no-such-group", RUNTIME_DIRECTORY=str(short_dir))
    assert done.returncode == ExitCode.UNAVAILABLE
    assert done.stderr.startswith(f"error: no group 'no-such-group' in {short_dir}, ")
    done = taskqd("status", "--socket", str(short_dir / "none.sock"))
    assert (done.returncode, done.stderr.count("\n")) == (ExitCode.UNAVAILABLE, 1)


def test_of_several_groups_one_has_to_be_named(short_dir: Path) -> None:
    for name in ("mail", "video"):
        (short_dir / f"{name}.sock").touch()
    done = taskqd("status", RUNTIME_DIRECTORY=str(short_dir))
    assert f"several groups in {short_dir} (mail, video): name one" in done.stderr


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (0.26, "0.3s"), (42, "42s"), (300, "5m"), (10_800, "3h"), (1_036_800, "12d")]
)
def test_times_are_short(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


@given(st.integers(20, 300), st.booleans(), st.sampled_from(["ready", "stalled", "backoff"]))
def test_no_line_is_wider_than_the_screen(width: int, stopped: bool, state: str) -> None:
    child = {
        "name": "a-worker-with-a-long-name.12",
        "role": "worker",
        "state": state,
        "for_s": 1.5,
        "pid": None,
        "restarts": 3,
        "degraded": False,
        "stopped": stopped,
        "verdict": None,
        "last_exit": {"code": -9, "class": "crash", "why": "ended by SIGKILL"},
        "beat_age_s": None,
        "beat": {},
        "queues": ["default"],
    }
    status = {"phase": "running", "group": "g", "children": [child], "why_not_ready": "x" * 400, "budget": {}}
    assert all(len(line) <= width for line in screen(status, width).splitlines())


def test_a_process_that_beats_nonsense_is_shown_and_breaks_nothing(group: StartGroup) -> None:
    g = group(modes={"io": "strange"}, tables={"supervisor": QUICK, "[workers]": "[workers.recycle]\nmax_jobs = 5"})
    pid = int(g.wait_for("ready")[0]["pid"])
    wait_until(lambda: g.ask("/status")[1]["children"][0]["beat"].get("slots") == {}, 20)
    done = taskqd("status", "--socket", str(g.socket))
    assert (done.returncode, str(pid) in done.stdout) == (0, True), done.stderr
    parse(g.ask("/metrics")[1]["text"])
    os.kill(pid, signal.SIGSTOP)
    g.wait_for("verdict")
    os.kill(pid, signal.SIGCONT)
    assert g.stop() == 0, g.command.stderr


def test_who_comes_or_goes_stands_below_and_a_change_is_named() -> None:
    child = {
        "name": "io.0",
        "role": "worker",
        "state": "ready",
        "for_s": 1.0,
        "pid": 7,
        "restarts": 0,
        "degraded": False,
        "last_exit": None,
        "beat_age_s": 0.5,
        "beat": {"inflight": 2, "slots": 8, "lag_ms": 1.0, "oldest_ms": 1500, "pool_in_use": 3, "pool_size": 16},
        "generation": 2,
        "private_bytes": 12 * 1024**2,
        "queues": ["default", "mail"],
        "credentials_age_s": 200.0,
        "credentials_stale": None,
    }
    leaver = {**child, "state": "draining", "pid": 6}
    status = {"phase": "running", "group": "g", "children": [child], "coming_or_going": [leaver], "change": "restart"}
    lines = screen(status, 200).splitlines()
    assert lines[0] == "1/1 ready · group g · credentials fresh 3m · restart under way"
    row = "io.0 ready 1.0s 7 2 0 0.5s 1ms 2/8 1.5s 3/16 12M 200s default,mail"
    assert " ".join(lines[-2].split()) == row.replace("200s", span(200.0))
    assert lines[-1].split()[:3] == ["↳", "io.0", "draining"]
    assert "maintained" not in lines[0]
    told = {**child, "beat": {**child["beat"], "maintains": True}}  # type: ignore[dict-item]
    assert " · maintained by io.0 · " in screen({**status, "children": [told]}, 200)
    child["credentials_stale"] = "pool: refused"
    assert "credentials stale" in screen(status, 200)
    status |= {"memory": {"used": 1800 * 1024**2, "limit": 2048 * 1024**2}, "cpu_throttled": 0.42}
    assert " · memory 1800/2048M · without processor 42 % of the time · " in screen(status, 200)


# -- dump -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["", "blocked", "catastrophe"])
def test_dump_shows_where_a_process_is_whatever_it_does(group: StartGroup, mode: str) -> None:
    g = group(modes={"io": mode} if mode else {}, tables={"supervisor": "hang_kill_after = 100"})
    g.wait_for("ready")
    wait_until(lambda: g.ask("/status")[1]["children"][0]["beat_age_s"] is not None, 20)
    shown = ""

    def shows_the_place() -> bool:  # it has said that it is ready a moment before it gets there
        nonlocal shown
        done = taskqd("dump", "io.0", "--socket", str(g.socket))
        assert done.returncode == 0, done.stderr
        shown = done.stdout
        return ("after_ready" if mode else "run_until_complete") in shown

    wait_until(shows_the_place, 20)
    assert "Thread" in shown
    assert g.ask("/live")[0] == 200


def test_dump_says_why_there_is_nothing_to_show(group: StartGroup) -> None:
    g = group()
    pid = int(g.wait_for("ready")[0]["pid"])
    done = taskqd("dump", "oi.0", "--socket", str(g.socket))
    assert (done.returncode, done.stderr) == (1, "error: no process 'oi.0' (did you mean 'io.0'?)\n")
    os.kill(pid, signal.SIGSTOP)
    g.wait_for("stopped")
    done = taskqd("dump", "io.0", "--socket", str(g.socket))
    assert (done.returncode, done.stderr) == (1, "error: io.0 showed nothing within 2 s: a signal has stopped it\n")


# -- explain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(ExitCode))
def test_every_exit_code_is_explained(code: ExitCode) -> None:
    text = explain_exit(code)
    assert text.startswith(f"{int(code)} {code.name}: ")
    assert "its class is " in text


@pytest.mark.parametrize(
    ("text", "code"), [("78", 78), ("-9", -9), ("SIGKILL", -9), ("kill", -9), ("sigterm", -15), ("137", 137)]
)
def test_codes_are_read_in_every_form(text: str, code: int) -> None:
    assert read_code(text) == code


def test_explain_as_a_command() -> None:
    for form in ("-9", "137", "SIGKILL"):
        done = taskqd("explain", "exit", form)
        assert done.stdout.startswith("SIGKILL (-9; a shell shows 137): "), (done.stdout, done.stderr)
    assert "no exit code of taskqd" in taskqd("explain", "exit", "42").stdout
    done = taskqd("explain", "exit", "SIGKIL")
    assert done.returncode == 2
    assert "did you mean 'SIGKILL'" in done.stderr
    assert taskqd("explain", "exit", "256").returncode == 2


def test_every_class_of_ends_has_its_consequence() -> None:
    from taskqd.cli.explain import _FOLLOWS

    assert set(_FOLLOWS) == set(ExitClass)


# -- metrics --------------------------------------------------------------------------------------

ONE = """\
# HELP jobs_total Jobs.
# TYPE jobs_total counter
jobs_total{queue="a b",kind="x}y"} 3
# TYPE seconds histogram
seconds_bucket{le="1"} 1
seconds_bucket{le="+Inf"} 2
seconds_sum 3.5
seconds_count 2
"""


def parse(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def test_the_series_of_two_processes_stand_together_and_keep_their_labels() -> None:
    text = "\n".join(merge({"io.0": ONE, "io.1": ONE})) + "\n"
    assert text.count("# TYPE jobs_total counter") == 1
    assert text.count("# TYPE seconds histogram") == 1
    found = parse(text)
    assert len(found) == 10
    labels = frozenset({"worker": "io.1", "queue": "a b", "kind": "x}y"}.items())
    assert found["jobs_total", labels] == 3
    families = [family.name for family in text_string_to_metric_families(text)]
    assert families == ["jobs", "seconds"], "each in one piece"


@given(st.dictionaries(st.sampled_from(["io.0", "io.1", "cpu.0"]), st.text(max_size=200)))
def test_whatever_processes_answer_the_scrape_can_be_read(texts: dict[str, str]) -> None:
    parse("\n".join(merge(texts)) + "\n")


def test_the_supervisors_counts_are_valid_and_add_up() -> None:
    tally = Tally()
    for seconds in (0.01, 0.3, 100.0):
        tally.told("io", 0, "ready", {"boot_s": seconds})
    tally.told("io", 0, "kill", {"signal": "SIGABRT", "cause": "stall"})
    tally.told("io", 0, "child-exit", {"class": "oom"})
    tally.told("io", 0, "child-exit", {"class": "oom"})
    tally.told("io", 1, "verdict", {"verdict": "blocked: its event loop"})
    tally.told("io", 1, "recovered", {"judged": True})
    tally.told("io", 1, "recovered", {"judged": False})
    tally.told("io", 1, "something else", {})
    for outcome, inflight in (("well", 3), ("killed", 2), ("killed", 0)):
        tally.told("io", 0, "child-exit", {"drain_s": 2.0, "drained": outcome}, inflight=inflight)
    for code in (0, 0, 78, 69):
        tally.reloaded(code)
    found = parse("\n".join(tally.lines()) + "\n")
    exits = frozenset({"name": "io", "index": "0", "class": "oom"}.items())
    assert found["taskqd_child_exits_total", exits] == 2
    for kind in ("blocked", "brief"):
        stall = frozenset({"name": "io", "index": "1", "kind": kind}.items())
        assert found["taskqd_child_stalls_total", stall] == 1
    assert found["taskqd_jobs_killed_at_shutdown_total", frozenset({("name", "io")})] == 2
    drained = frozenset({"name": "io", "outcome": "killed"}.items())
    assert found["taskqd_drain_seconds_count", drained] == 2
    results = [
        found["taskqd_reload_total", frozenset({("result", result)})] for result in ("done", "refused", "failed")
    ]
    assert results == [2, 1, 1]
    bucket = "taskqd_child_boot_seconds_bucket"
    counts = [found[bucket, frozenset({"name": "io", "le": str(bound)}.items())] for bound in (*BOUNDS, "+Inf")]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 3)


def test_one_scrape_holds_the_group_and_its_processes(
    start: Callable[..., Command], short_dir: Path, child_env: dict[str, str]
) -> None:
    (short_dir / "group_actors.py").write_text(
        "from pydantic import BaseModel\nfrom taskqd import actor\nclass Nothing(BaseModel): pass\n"
        "@actor\nasync def nothing(payload: Nothing) -> None: pass\nregistry = [nothing]\n"
    )
    (short_dir / "group.toml").write_text(
        'actors = "group_actors:registry"\n[supervisor]\nruntime_dir = "run"\n[[workers]]\nname = "io"\nreplicas = 2\n'
    )
    command = start("run", "group.toml", env=child_env)
    wait_until(lambda: command.stderr.count('"event": "ready"') >= 3, 60, command.stderr)
    group_socket = short_dir / "run" / "group.sock"
    wait_until(lambda: scrape(group_socket).count("taskqd_child_credentials_age_seconds{") >= 2, 30)
    found = parse(scrape(group_socket))
    for worker in ("io.0", "io.1"):
        assert found["taskq_worker_max_concurrency", frozenset({"worker": worker}.items())] > 0
        index = frozenset({"name": "io", "index": worker[-1]}.items())
        assert found["taskqd_child_up", index] == 1
    assert ("taskq_scheduler_jobs_reaped_total", frozenset({("worker", "scheduler.0")})) in found
    alerts_can_be_seen(found)
    assert found["taskqd_group_ready", frozenset()] == 1
    ready = [json.loads(line) for line in command.stderr.splitlines() if '"event": "ready"' in line]
    pid = next(int(event["pid"]) for event in ready if event["child"] == "io.0")
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    text = scrape(short_dir / "run" / "group.sock")
    assert time.monotonic() - began < 5, "a silent process is left out"
    assert len([line for line in text.splitlines() if line.startswith("taskq_worker_max_concurrency{")]) == 1
    os.kill(pid, signal.SIGCONT)
    command.process.terminate()
    assert command.wait() == 0, command.stderr


def alerts_can_be_seen(found: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> None:
    """Every series that a shipped alert looks at is in a scrape, from the first on, or is only sometimes known."""
    rules = yaml.safe_load((REPOSITORY / "config" / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 6
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "description"}
        looked_at = re.findall(r"\b(taskqd?_\w+)(?:\{([^}]*)\})?", rule["expr"])
        assert looked_at, rule
        for name, matchers in looked_at:
            wanted = set(re.findall(r'(\w+)="([^"]*)"', matchers))
            some = [labels for of, labels in found if of == name and wanted <= labels]
            assert some or name == "taskqd_child_credentials_ttl_seconds", f"{name}{wanted} is in no scrape"


LISTED = """
    child_state child_restarts_total child_boot_seconds child_ready_seconds_since_crash child_beat_age_seconds
    child_loop_lag_seconds child_claim_age_seconds child_private_bytes child_stalls_total child_kills_total
    drain_seconds jobs_killed_at_shutdown_total reload_total child_credentials_age_seconds child_degraded
    child_credentials_ttl_seconds connections_budget supervisor_tick_gap_seconds unknown_reaped_total
    log_dropped_total generation build_info
"""


def test_every_series_is_there_is_valid_and_has_bounded_labels() -> None:
    board = Board("group")
    board.phase, board.budget = "running", {"required": 24, "available": 97}
    child = Child(ChildSpec("io", "worker", ()), 0, Timing(), lambda *_: None)
    child.beat = {"lag_ms": 2, "inflight": 1, "slots": 8, "credential_age_s": 5.0, "credential_ttl_s": 900.0}
    child.beat |= {"pool_in_use": True, "pool_size": "many"}
    child.beat_at, child.held = time.monotonic(), Held(5, 3)
    board.children, board.claim_age = [child], lambda _child, _now: 1.5
    tally = board.tally
    tally.expect("io", 0)
    for event, fields in (
        ("ready", {"boot_s": 0.1, "after_crash_s": 0.2}),
        ("verdict", {"verdict": "blocked: x"}),
        ("child-exit", {"drain_s": 1.0, "drained": "well"}),
    ):
        tally.told("io", 0, event, fields)
    tally.round(0.5)
    text = own_series(board, time.monotonic())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in LISTED.split():
        family = families[f"taskqd_{name}".removesuffix("_total")]
        assert family.documentation
        labels = {label for sample in family.samples for label in sample.labels}
        assert labels <= {
            "name", "index", "state", "reason", "kind", "signal", "why", "outcome", "result", "version", "python", "le"
        }  # fmt: skip
    states = {sample.labels["state"]: sample.value for sample in families["taskqd_child_state"].samples}
    assert states == {str(state): float(state is State.DOWN) for state in State}
    assert "taskqd_child_pool_size" not in families, "what a broken process says is left out"


def scrape(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(path))
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        answer = b""
        while part := sock.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"text/plain; version=0.0.4" in head
    return body.decode()


def test_restarts_and_starts_are_counted_in_a_real_group(group: StartGroup) -> None:
    g: Group = group(tables={"supervisor": QUICK})
    os.kill(int(g.wait_for("ready")[0]["pid"]), signal.SIGKILL)
    g.wait_for("ready", 2)
    found = parse(g.ask("/metrics")[1]["text"])
    crash = frozenset({"name": "io", "index": "0", "class": "crash"}.items())
    assert found["taskqd_child_exits_total", crash] == 1
    assert found["taskqd_child_boot_seconds_count", frozenset({("name", "io")})] == 2
    assert found["taskqd_child_restarts_total", frozenset({"name": "io", "index": "0", "reason": "crash"}.items())] == 1
    assert found["taskqd_child_ready_seconds_since_crash_count", frozenset({("name", "io")})] == 1
