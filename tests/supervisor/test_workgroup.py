"""The workgroup file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskqd.supervisor.workgroup import WorkgroupError, load_workgroup, parse_workgroup

KNOWN = ("max_concurrency", "heartbeat_interval", "pg_dsn", "schema_name", "queues", "soft_stop_timeout")
LEAST = 'actors = "app:actors"\n[[workers]]\nname = "io"\n'


def parse(text: str, file: str = "group.toml") -> tuple[Any, list[str]]:
    return parse_workgroup(tomllib.loads(text), file, KNOWN)


def problems(text: str, file: str = "group.toml") -> list[str]:
    return parse(text, file)[1]


def test_the_smallest_file_has_every_default() -> None:
    group, wrong = parse(LEAST)
    assert not wrong
    assert group.supervisor.name == "group"
    assert group.supervisor.termination_grace_period is None
    assert group.budget.enforce
    assert group.scheduler
    assert [(worker.name, worker.actors, worker.replicas) for worker in group.workers] == [("io", "app:actors", 1)]


def test_a_full_file() -> None:
    group, wrong = parse(
        """
        actors = "app:actors"
        app_dir = "src"
        [supervisor]
        name = "billing"
        runtime_dir = "/run/billing"
        termination_grace_period = "2m"
        stall_after = 5
        [budget]
        enforce = "warn"
        web_pods = 4
        [defaults]
        schema_name = "billing"
        [scheduler]
        enabled = false
        heartbeat_interval = "5s"
        [[workers]]
        name = "io"
        replicas = 4
        queues = ["mail", "web"]
        max_concurrency = 16
        [[workers]]
        name = "cpu"
        actors = "app.cpu:actors"
        """,
        "/etc/taskqd/group.toml",
    )
    assert not wrong
    assert (group.supervisor.name, group.supervisor.termination_grace_period) == ("billing", 120)
    assert (group.budget.enforce, group.budget.web_pods) == (False, 4)
    assert group.app_dir == "/etc/taskqd/src"
    assert (group.scheduler, group.scheduler_settings) == (False, {"heartbeat_interval": "5s"})
    assert group.workers[0].settings == {"queues": ["mail", "web"], "max_concurrency": 16}
    assert group.workers[1].actors == "app.cpu:actors"


def test_all_problems_come_in_one_pass_each_with_file_key_and_what_is_allowed() -> None:
    found = problems(
        """
        quues = 1
        [supervisr]
        [supervisor]
        stall_after = "1h"
        [budget]
        enforce = "wrn"
        [defaults]
        max_concurency = 4
        [[workers]]
        name = "io"
        replicas = 0
        [[workers]]
        name = "io"
        actors = "app"
        """
    )
    assert found == [
        "group.toml:supervisor.stall_after: '1h' must be a duration from 1.5 to 600 seconds, or like '500ms', "
        "'5m', '2h'",
        "group.toml:budget.enforce: 'wrn' must be \"enforce\" or \"warn\" (did you mean 'warn'?)",
        "group.toml:defaults.max_concurency: unknown key (did you mean 'max_concurrency'?)",
        "group.toml:workers.io.actors: missing, and there is no top-level actors: write 'module:attribute'",
        'group.toml:workers.io.replicas: 0 must be a whole number from 1 to 1024, or "auto"',
        "group.toml:workers.io.actors: 'app' must be written 'module:attribute'",
        "group.toml:workers.io.name: 'io' is taken by workers[0]; names must differ",
        "group.toml:quues: unknown key (did you mean 'queues'?)",
        "group.toml:supervisr: unknown table (did you mean 'supervisor'?)",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('actors = "a:b"', "group.toml:workers: missing: a workgroup needs at least one [[workers]] table"),
        ('actors = "a:b"\n[workers]\nname = "x"', "must be an array of tables: write [[workers]]"),
        ('actors = "a:b"\n[[workers]]\nreplicas = 2', "group.toml:workers[0].name: missing"),
        ('actors = "a:b"\n[[workers]]\nname = "a/b"', "'a/b' must be 1 to 64 letters"),
        (f'actors = "a:b"\n[[workers]]\nname = "{"x" * 65}"', "must be 1 to 64 letters"),
        ('actors = "a:b"\n[[workers]]\nname = "scheduler"', "is the name of the group's scheduler"),
        (LEAST + "metrics_port = 9000", "the group serves metrics on its own socket"),
        (LEAST + 'pg_dsn = "postgresql://h/d"', "one group uses one database; set it in [defaults]"),
        (LEAST + "termination_grace_period = 30", "set it in [supervisor]"),
        (LEAST + "replicas = true", "True must be a whole number from 1 to 1024"),
        (LEAST + "replicas = 1025", "1025 must be a whole number"),
        (LEAST + "[supervisor]\nname = '../x'", "'../x' must be 1 to 32 letters"),
        (LEAST + "[supervisor]\nmax_concurrency = 3", "is a setting: write it in [defaults] or in [[workers]]"),
        (LEAST + "[supervisor]\nbackoff_max = 0.1", "0.1 must be at least backoff_initial = 0.5"),
        (LEAST + "[supervisor]\ntermination_grace_period = 5", "from 10 to 86400 seconds"),
        (LEAST + "[scheduler]\nenabled = 'yes'", "'yes' must be true or false"),
        (LEAST + "[scheduler]\nenabeld = true", "unknown key (did you mean 'enabled'?)"),
        (LEAST + "[defaults.max_concurrency]\nx = 1", "must be a value, not a table"),
        ("supervisor = 3\n" + LEAST, "must be a table: write [supervisor]"),
    ],
)
def test_what_is_wrong_is_said_once_and_clearly(text: str, expected: str) -> None:
    found = problems(text)
    assert len(found) == 1, found
    assert expected in found[0]


def test_a_file_name_that_cannot_name_a_group_asks_for_a_name() -> None:
    assert "the file's name 'my group' cannot stand in" in problems(LEAST, "my group.toml")[0]
    assert not problems(LEAST + '[supervisor]\nname = "mine"', "my group.toml")


def test_a_missing_file_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(WorkgroupError, match=r"^/nowhere/x.toml: no such file$"):
        load_workgroup("/nowhere/x.toml")
    with pytest.raises(WorkgroupError, match="Is a directory"):
        load_workgroup(str(tmp_path))


def test_invalid_toml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "group.toml"
    path.write_text('actors = "a:b"\n[[workers]\n')
    with pytest.raises(WorkgroupError, match=r"group.toml:2: invalid TOML: "):
        load_workgroup(str(path))
    path.write_bytes(b'actors = "\xff"')
    with pytest.raises(WorkgroupError, match="is not UTF-8"):
        load_workgroup(str(path))


_values = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5) | st.datetimes()
_keys = st.sampled_from(
    [
        *("actors", "app_dir", "supervisor", "budget", "defaults", "scheduler", "workers", "credentials"),
        *("name", "replicas", "env", "env_file", "recycle", "provider", "stall_after", "backoff_initial", "x"),
    ]
)
_tables = st.dictionaries(
    _keys, _values | st.lists(_values, max_size=2) | st.dictionaries(_keys, _values, max_size=2), max_size=5
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(_keys, _values | _tables | st.lists(_tables, max_size=3), max_size=6))
def test_no_document_breaks_the_parser(document: dict[str, Any]) -> None:
    _, wrong = parse_workgroup(document, "group.toml", KNOWN)
    assert all(line.startswith("group.toml:") for line in wrong)


def test_a_file_may_begin_with_a_byte_order_mark_and_end_its_lines_with_cr_lf(tmp_path: Path) -> None:
    path = tmp_path / "group.toml"
    text = 'actors = "a:b"\r\n[[workers]]\r\nname = "io"\r\nreplica = 2\r\n'
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    _, wrong = load_workgroup(str(path), KNOWN)
    assert wrong == [f"{path}:4:workers.io.replica: unknown key (did you mean 'replicas'?)"]
