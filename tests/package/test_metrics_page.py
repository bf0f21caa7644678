"""The page of metrics lists what processes expose: each name with its type and its labels, and no other."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fleet import ask, events
from tests.support import Command, wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/metrics.md").read_text()
SOURCES = (
    "worker/report.py",
    "worker/stall.py",
    "maintenance/core.py",
    "supervisor/exposition.py",
    "supervisor/tally.py",
)
RARE = {
    "taskq_error_reporter_failures_total",
    "taskq_worker_loop_stall_attributions_total",
    "taskq_worker_slot_pool_acquire_failures_total",
    "taskq_worker_slot_pool_connections_in_use",
    "taskqd_child_claim_age_seconds",
    "taskqd_child_credentials_ttl_seconds",
    "taskqd_child_ready_seconds_since_crash",
    "taskqd_child_spawn_failures_total",
    "taskqd_child_stalls_total",
    "taskqd_cpu_throttled_ratio",
    "taskqd_drain_seconds",
    "taskqd_memory_bytes",
    "taskqd_preload_ready",
    "taskqd_preload_restarts_total",
    "taskqd_workers_started_total",
}
"""What a healthy group without special actors need not show, on every machine."""
_ROW = re.compile(r"\| `(taskqd?_\w+)` \| (\w+) \| ([^|]*)\| [^|]+ \| [^|]+ \|")
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? \S+")

FILE = """\
actors = "tests.apps.basic:actors"
[supervisor]
runtime_dir = "run"
[[workers]]
name = "io"
"""


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """The type and the labels of each metric of the page."""
    rows = _ROW.findall(PAGE)
    found = {name: (kind, frozenset(re.findall(r"\w+", labels))) for name, kind, labels in rows}
    assert len(found) == len(rows), "a name stands twice"
    return found


def exposed(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """The type and the labels of each metric in the text format, without the label of the scrape."""
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            continue
        name, labels = sample[1], frozenset(re.findall(r'(\w+)="', sample[2] or "")) - {"worker", "le"}
        family = name if name in kinds else re.sub(r"_(bucket|sum|count)$", "", name)
        assert found.setdefault(family, (kinds[family], labels)) == (kinds[family], labels), line
    return found


def test_every_name_in_the_code_is_on_the_page_and_no_other() -> None:
    names: set[str] = set()
    for source in SOURCES:
        text = (ROOT / "taskqd" / source).read_text()
        names.update(re.findall(r"""["'](taskqd?_[a-z_]+)(?="|{{)""", text))
        if source.endswith("exposition.py"):
            names.update(f"taskqd_child_{name}" for name in re.findall(r'^ {8}"(\w+)": \(', text, re.MULTILINE))
    assert names == documented().keys()


def test_no_other_file_exposes_metrics() -> None:
    exposing = {
        str(path.relative_to(ROOT / "taskqd"))
        for path in (ROOT / "taskqd").rglob("*.py")
        if "# TYPE " in path.read_text()
    }
    assert exposing <= set(SOURCES)


@pytest.fixture
def group(start: Callable[..., Command], short_dir: Path, child_env: dict[str, str]) -> Iterator[Command]:
    """A group of a worker and a scheduler."""
    (short_dir / "group.toml").write_text(FILE)
    command = start("run", "group.toml", env=child_env)
    wait_until(lambda: len(list(events(command, "ready"))) == 2, 60, command.stderr)
    yield command
    command.signal(signal.SIGTERM)
    assert command.wait() == 0, command.stderr


def test_a_group_exposes_what_the_page_says(group: Command, short_dir: Path) -> None:
    page = documented()
    usual = page.keys() - RARE

    def scrape() -> dict[str, tuple[str, frozenset[str]]]:
        return exposed(ask(short_dir / "run" / "group.sock", "/metrics").partition("\r\n\r\n")[2])

    wait_until(lambda: usual <= scrape().keys(), 60, f"not exposed: {sorted(usual - scrape().keys())}")
    for name, found in scrape().items():
        assert page.get(name) == found, name
