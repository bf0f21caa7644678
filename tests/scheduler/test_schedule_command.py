"""``taskqd schedule``: what it prints, changes and refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from taskqd.scheduler.manifest import SchedulePlan, plan_schedules, read_manifest
from tests.jobs import JobTable
from tests.scheduler.schedules import ScheduleTable, fire
from tests.support import Command

TOML = """
[[schedules]]
name = "nightly"
actor = "report"
cron = "0 3 * * *"
timezone = "Europe/Berlin"
catch_up_window = "2h"
payload = { kind = "daily" }
priority = 3
start_to_close = "5m"

[[schedules]]
name = "pulse"
actor = "succeed"
every = "90s"
overlap = "allow"
"""
YAML = """
schedules:
  - name: nightly
    actor: report
    cron: "0 3 * * *"
    timezone: Europe/Berlin
    catch_up_window: 2h
    payload: {kind: daily}
    priority: 3
    start_to_close: 5m
  - {name: pulse, actor: succeed, every: 90, overlap: allow}
"""

Call = Callable[..., Command]


@pytest.fixture
def call(start: Callable[..., Command], child_env: dict[str, str]) -> Call:
    """Run ``taskqd schedule`` to its end."""

    def run(*arguments: str) -> Command:
        command = start("schedule", *arguments, env=child_env)
        command.wait(60)
        return command

    return run


def text(command: Command, code: int = 0) -> str:
    """Return what it printed; it ended well."""
    assert command.process.returncode == code, command.stderr
    return command.stdout


async def test_a_manifest_is_planned_applied_and_then_unchanged(
    call: Call, schedules: ScheduleTable, tmp_path: Path
) -> None:
    file = tmp_path / "schedules.toml"
    file.write_text(TOML)
    planned = text(call("plan", str(file)))
    digest = re.search(r"plan ([0-9a-f]{12}): 2 create", planned)
    assert digest is not None, planned
    assert await schedules.conn.fetchval(f'select count(*) from "{schedules.schema}".schedules') == 0
    assert "applied: 2 create" in text(call("apply", str(file), "--plan", digest[1]))
    stored = await schedules.stored("nightly")
    assert stored.definition is not None
    assert stored.definition.options == {"priority": 3, "start_to_close": 300.0}
    assert (stored.source, stored.definition.overlap, stored.definition.catch_up_window) == (
        "manifest",
        "forbid",
        7200.0,
    )
    assert json.loads(stored.definition.payload or "") == {"kind": "daily"}
    (tmp_path / "same.yaml").write_text(YAML)
    assert "2 unchanged" in text(call("plan", str(tmp_path / "same.yaml")))
    # What has no slot yet keeps its way to one; what has begun is found anew only where its recurrence changed.
    await schedules.update("nightly", next_fire_at="'2040-01-01'")
    await schedules.update("pulse", next_fire_at="'2040-01-01'", enabled="false", disabled_by="'auto'")
    file.write_text(
        TOML.replace("0 3", "0 4").replace(
            '[[schedules]]\nname = "pulse"', '[[schedules]]\npriority = 1\nname = "pulse"'
        )
    )
    assert "expression: '0 3 * * *' -> '0 4 * * *'" in text(call("plan", str(file)))
    stale = call("apply", str(file), "--plan", digest[1])
    assert stale.process.returncode == 75
    assert "look at it again" in stale.stderr
    text(call("apply", str(file)))
    nightly, pulse = await schedules.stored("nightly"), await schedules.stored("pulse")
    assert (nightly.expression, nightly.version, nightly.next_fire_at) == ("0 4 * * *", 2, None)
    assert pulse.next_fire_at is not None
    assert (pulse.version, pulse.next_fire_at.year, pulse.state) == (2, 2040, "active")
    assert [one["action"] for one in await schedules.decisions("nightly")] == ["changed"]


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ('actor = "succeed"', 'actor = "report"'),
        ('kind = "daily"', 'kind = "weekly"'),
        ("priority = 3", "priority = 4"),
        ('start_to_close = "5m"', 'start_to_close = "6m"'),
        ('catch_up_window = "2h"', 'catch_up_window = "3h"'),
        ('overlap = "allow"', 'overlap = "allow"\nenabled = false'),
    ],
)
def test_a_plan_is_of_all_that_would_be_created(was: str, becomes: str, tmp_path: Path) -> None:
    def planned(content: str) -> SchedulePlan:
        (tmp_path / "schedules.toml").write_text(content)
        return plan_schedules([], read_manifest(tmp_path / "schedules.toml"), "manifest")

    assert was in TOML
    assert planned(TOML).digest == planned(TOML).digest
    assert planned(TOML).digest != planned(TOML.replace(was, becomes)).digest


async def test_what_was_not_planned_is_not_created(call: Call, schedules: ScheduleTable, tmp_path: Path) -> None:
    file = tmp_path / "schedules.toml"
    file.write_text(TOML)
    planned = text(call("plan", str(file)))
    assert re.search(
        r"^nightly +create +actor report, 0 3 \* \* \* Europe/Berlin, with a payload$", planned, re.MULTILINE
    ), planned
    assert re.search(r"^pulse +create +actor succeed, every 90 s$", planned, re.MULTILINE), planned
    digest = re.search(r"plan ([0-9a-f]{12}): 2 create", planned)
    assert digest is not None, planned
    file.write_text(TOML.replace('kind = "daily"', 'kind = "all"'))
    other = call("apply", str(file), "--plan", digest[1])
    assert other.process.returncode == 75
    assert "look at it again" in other.stderr
    assert await _all(schedules) == []


async def test_actors_that_nobody_knows_are_warned_of(
    call: Call, schedules: ScheduleTable, jobs: JobTable, tmp_path: Path
) -> None:
    await jobs.store_actor()
    file = tmp_path / "schedules.toml"
    file.write_text('schedules = [{name="a", actor="succed", every=60}, {name="b", actor="succeed", every=60}]')
    for verb, told in (("plan", "2 create"), ("apply", "applied: 2 create")):
        command = call(verb, str(file))
        assert told in text(command)
        assert command.stderr == (
            "warning: schedule 'a': no worker has made actor 'succed' known (did you mean 'succeed'?); "
            "its jobs wait until one does\n"
        )


async def test_what_comes_from_elsewhere_is_refused(call: Call, schedules: ScheduleTable, tmp_path: Path) -> None:
    await schedules.plant("pulse")
    file = tmp_path / "schedules.toml"
    file.write_text(TOML)
    assert "it comes from the API" in text(call("plan", str(file)), 1)
    refused = call("apply", str(file))
    assert refused.process.returncode == 78
    assert "schedule 'pulse' is refused: it comes from the API; change it there" in refused.stderr
    assert [one.name for one in await _all(schedules)] == ["pulse"]


async def test_what_actors_declare(call: Call, schedules: ScheduleTable) -> None:
    actors = ("--actors", "tests.apps.scheduled:actors")
    assert "6 create" in text(call("apply", *actors))
    await schedules.update("nightly", expression="'0 5 * * *'")
    await schedules.update("later", name="'gone'")
    planned = text(call("plan", *actors))
    assert "expression: '0 5 * * *' -> '0 3 * * *'" in planned
    assert "gone is declared no more; it stays until `taskqd schedule retire gone`" in planned
    text(call("apply", *actors))
    assert (await schedules.stored("nightly")).expression == "0 3 * * *"


async def test_one_is_steered(call: Call, schedules: ScheduleTable) -> None:
    await schedules.plant()
    await schedules.update("report", next_fire_at="'2020-01-01'")
    assert text(call("pause", "report", "--reason", "too loud")) == "report is paused\n"
    row = await schedules.row()
    assert (row["enabled"], row["disabled_by"], row["version"]) == (False, "operator", 2)
    assert text(call("pause", "report")) == "report was paused already\n"
    other = call("resume", "report", "--version", "1")
    assert other.process.returncode == 75
    assert "has version 2, not 1" in other.stderr
    assert text(call("resume", "report", "--version", "2")) == "report is resumed\n"
    assert (await schedules.stored()).next_fire_at is None
    assert text(call("retire", "report", "--yes")) == "report is retired\n"
    assert (await schedules.stored()).state == "retired"
    again = call("resume", "report")
    assert again.process.returncode == 78
    assert "retired for good" in again.stderr
    assert [(one["action"], one["reason"]) for one in await schedules.decisions()] == [
        ("paused", "too loud"),
        ("resumed", None),
        ("retired", None),
    ]
    assert text(call("list")) == "no schedules\n"
    assert "retired" in text(call("list", "--all"))


async def test_one_is_run_now_and_not_at_once_again(call: Call, schedules: ScheduleTable, jobs: JobTable) -> None:
    await schedules.plant(enabled=False, options={"singleton": True})
    cursor = (await schedules.row())["next_fire_at"]
    assert text(call("run-now", "report")) == "report: fired\n"
    (job,) = await schedules.jobs()
    assert job["meta"]["taskq_schedule"]["action"] == "run_now"
    assert (await schedules.row())["next_fire_at"] == cursor
    again = call("run-now", "report")
    assert again.process.returncode == 1
    assert "was run by hand just now; wait" in again.stderr
    await schedules.update("report", ran_now_at="clock_timestamp() - interval '11 seconds'")
    assert text(call("run-now", "report"), 1) == "report: suppressed\n"
    assert [one["action"] for one in await schedules.decisions()] == ["run_now", "run_now"]


async def test_the_past_is_filled_once(call: Call, schedules: ScheduleTable, firing: object) -> None:
    await schedules.plant("hourly", kind="cron", expression="0 * * * *")
    await schedules.plant("each", expression="1800")
    await fire(firing)  # type: ignore[arg-type]
    span = ("--from", "2026-03-01T00:30Z", "--to", "2026-03-01T05:00Z")
    assert text(call("backfill", "hourly", *span, "--dry-run")).splitlines()[0] == "2026-03-01T01:00:00+00:00"
    assert text(call("backfill", "hourly", *span)) == "hourly: 5 slots, 5 fired\n"
    assert text(call("backfill", "hourly", *span)) == "hourly: 5 slots, 0 fired, 5 decided before\n"
    assert text(call("backfill", "each", *span)) == "each: 9 slots, 9 fired\n"
    assert len(await schedules.jobs()) == 14
    slots = await schedules.slots("each")
    cursor = (await schedules.row("each"))["next_fire_at"]
    assert {(cursor - slot).total_seconds() % 1800 for slot in slots} == {0.0}
    naive = call("backfill", "hourly", "--from", "2026-03-01T00:30")
    assert naive.process.returncode == 2
    assert "has no time zone; append Z or an offset" in naive.stderr
    far = call("backfill", "hourly", "--from", "2020-01-01T00:00Z", "--to", "2026-01-01T00:00Z")
    assert far.process.returncode == 78
    assert "more than 10000 slots" in far.stderr


async def test_a_backfill_tells_what_overlap_keeps_out(call: Call, schedules: ScheduleTable) -> None:
    await schedules.plant("hourly", kind="cron", expression="0 * * * *", overlap="forbid")
    span = ("--from", "2026-03-01T00:30Z", "--to", "2026-03-01T05:00Z")
    assert text(call("backfill", "hourly", *span)) == "hourly: 5 slots, 1 fired, 4 suppressed\n"
    assert [slot.hour for slot in await schedules.slots("hourly")] == [1, 2, 3, 4, 5]
    (job,) = await schedules.jobs()
    assert job["meta"]["taskq_schedule"]["due_at"].startswith("2026-03-01T01:00:00")
    assert text(call("backfill", "hourly", *span)) == "hourly: 5 slots, 0 fired, 5 decided before\n"


def test_slots_are_previewed(call: Call) -> None:
    lines = text(call("preview", "--cron", "30 2 * * *", "--timezone", "Europe/Berlin", "-n", "3")).splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:30:00Z  \w{3} [-\d]{10} 0[23]:\d0:00 CES?T", line) for line in lines)
    bad = call("preview", "--cron", "61 * * * *")
    assert bad.process.returncode == 78
    assert bad.stderr == "error: cron expression '61 * * * *': minute = 61 must be 0 to 59 (nearest: 59)\n"
    assert call("preview").process.returncode == 2


async def test_lists_and_shows(call: Call, schedules: ScheduleTable) -> None:
    await schedules.plant("a", payload='{"key": "x"}')
    await schedules.plant("b", kind="cron", expression="@daily")
    await schedules.update("b", next_fire_at="'2040-01-01'", last_error="'no'", consecutive_failures="2")
    listed = text(call("list"))
    assert re.search(r"^a +active +every 60 s +UTC +succeed +api +- +- +0$", listed, re.MULTILINE), listed
    assert re.search(r"^b +active +@daily +UTC +succeed +api +2040-01-01 00:00:00Z +- +2$", listed, re.MULTILINE), (
        listed
    )
    (first, _) = json.loads(text(call("list", "--json")))
    assert (first["name"], first["payload"]) == ("a", {"key": "x"})
    shown = text(call("show", "b"))
    assert re.search(r"^last_error +no$", shown, re.MULTILINE)
    assert "created" in shown
    unknown = call("show", "aa")
    assert unknown.process.returncode == 1
    assert unknown.stderr == "error: no schedule 'aa' (did you mean 'a'?)\n"
    assert call("preview", "aa").stderr == unknown.stderr
    assert json.loads(text(call("show", "a", "--json")))["decisions"][0]["action"] == "created"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "schedules = [", "is not TOML"),
        ("a.yaml", "schedules: [", "is not YAML"),
        ("a.yaml", "schedules:\n - {name: a, name: b}", "key 'name' stands twice"),
        ("a.toml", "x = 1", "must hold a list 'schedules'"),
        ("a.toml", "versio = 1\nschedules = [{}]", "unknown key 'versio' (did you mean 'version'?)"),
        ("a.toml", "version = 2\nschedules = [{}]", "version = 2 must be 1"),
        ("a.toml", "schedules = []", "holds 0 schedules; it must be 1 to 500"),
        ("a.toml", "schedules = [1]", "schedule 1 must be a table of keys"),
        ("a.toml", "schedules = [{name='a'}]", "schedule 'a' has no 'actor'"),
        ("a.toml", "schedules = [{name='a', actor='b', crn='x'}]", "unknown key 'crn' (did you mean 'cron'?)"),
        ("a.toml", "schedules = [{name='a', actor='b'}]", "exactly one of 'cron' and 'every'"),
        ("a.toml", "schedules = [{name='a', actor='b', every='often'}]", "every = 'often' must be a duration"),
        ("a.toml", "schedules = [{name='a', actor='b', cron='* * *'}]", "3 fields; it must have five"),
        ("a.toml", "schedules = [{name='a', actor='b', cron=5}]", "must be text of five or six fields, not 5"),
        ("a.toml", "schedules = [{name='a', actor='b', every=60, payload=1}]", "payload = 1 must be a table"),
        ("a.toml", "schedules = [{name='a', actor='b', every=60, payload={at=2026-01-01}}]", "write dates as text"),
        ("a.toml", "schedules = [{name='a', actor='b', every=60, tags='x'}]", "tags = 'x' must be 1 to 50 words"),
        (
            "a.toml",
            "schedules = [{name='a', actor='b', every=60}, {name='a', actor='b', every=60}]",
            "two schedules are named 'a'",
        ),
    ],
)
def test_a_bad_manifest_is_told_in_one_message(name: str, content: str, message: str, tmp_path: Path) -> None:
    from taskqd.domain.errors import ConfigError
    from taskqd.scheduler.manifest import read_manifest

    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_manifest(tmp_path / name)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)


async def _all(schedules: ScheduleTable) -> list[object]:
    from taskqd.storage.schedules import read_schedules

    return await read_schedules(schedules.conn, schedules.schema)  # type: ignore[return-value]
