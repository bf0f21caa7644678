"""The guards of the hot SQL are each missed by a test: the fences in every run, all of them in the long tier."""

from __future__ import annotations

import subprocess
import sys

import pytest

from taskqd.storage.statements import files
from tests.mutation.guards import read
from tests.mutation.mutate import FENCES, mutated
from tests.support import REPOSITORY, child_environment


def test_every_guard_stands_where_it_is_said_to_stand() -> None:
    sources = [path.read_text() for path in (REPOSITORY / "migrations").glob("*.sql")]
    sources += [path.read_text() for path in files("taskqd.storage").joinpath("sql").iterdir()]
    guards = read()
    assert len({(guard.block, guard.text, guard.instead) for guard in guards}) == len(guards)
    for guard in guards:
        assert sum(mutated(text, guard) != text for text in sources) == 1, guard


@pytest.mark.timeout(900)
def test_the_fences_are_each_missed_by_a_test() -> None:
    run(FENCES)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_all_guards_are_each_missed_by_a_test() -> None:
    run()


def run(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutation.mutate", *words],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=child_environment(),
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout + done.stderr
