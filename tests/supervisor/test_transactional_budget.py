"""Workers whose actors work in transactions hold a connection more for each slot, and are counted so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import Command, child_environment

GROUP = """\
actors = "tests.apps.consume:registry"
[[workers]]
name = "io"
replicas = 10
max_concurrency = 16
"""


@pytest.mark.parametrize("own", ["", '[workers.env]\nKIND = "own"\n'], ids=["shared", "own-environment"])
def test_the_worked_example_of_the_per_slot_path(start: Callable[..., Command], short_dir: Path, own: str) -> None:
    (short_dir / "group.toml").write_text(GROUP + own)
    command = start("budget", "group.toml", "--json", "--offline")
    assert command.wait() == 0, command.stderr
    budget = json.loads(command.stdout)
    assert (budget["direct"], budget["pooled"], budget["total"]) == (272, 240, 512)
    (io,) = budget["workers"]
    assert {"role": "slot", "pooled": False, "each": 17, "idle": 17} in io["sessions"]
    check = start("check", "group.toml", "--json", env=child_environment(TASKQ_PG_DSN="postgresql://x@127.0.0.1:9/x"))
    assert check.wait() == 0, check.stderr
    assert json.loads(check.stdout)["connections"] == budget["required"]


def test_a_budget_of_actors_that_do_not_import_says_what_is_not_counted(
    start: Callable[..., Command], short_dir: Path
) -> None:
    (short_dir / "group.toml").write_text(GROUP.replace("tests.apps.consume", "nowhere"))
    command = start("budget", "group.toml", "--json", "--offline")
    assert command.wait() == 0, command.stderr
    assert json.loads(command.stdout)["total"] == 342
    assert "connections of transactional actors are not counted: actors = 'nowhere:registry'" in command.stderr
