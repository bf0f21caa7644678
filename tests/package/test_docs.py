"""Documentation that can be checked is checked: generated pages are up to date, tables are complete."""

from __future__ import annotations

import re

import pytest

from scripts import life_reference
from scripts.settings_reference import render
from scripts.state_diagram import explore
from scripts.state_diagram import render as render_states
from taskqd.domain.exit_codes import ExitCode
from taskqd.domain.status import JobStatus
from taskqd.settings import ALIASES, SETTING_NAMES
from taskqd.supervisor.slot import State
from taskqd.supervisor.state import TABLE
from tests.support import REPOSITORY

DOCS = REPOSITORY / "docs"
ARCHITECTURE = (DOCS / "architecture.md").read_text()


def test_the_settings_page_is_what_the_model_says() -> None:
    assert (DOCS / "settings.md").read_text() == render(), "run scripts/docs"


def test_the_settings_page_holds_every_setting_and_no_secret_of_this_machine() -> None:
    page = render()
    for name in (*SETTING_NAMES, *ALIASES):
        assert f"`{name}`" in page
    assert "**********" not in page


def test_the_states_page_is_what_the_table_says() -> None:
    assert (DOCS / "states.md").read_text() == render_states(), "run scripts/docs"


def test_the_states_page_draws_everything_in_the_table() -> None:
    edges = explore()
    assert edges.keys() == TABLE.keys()
    reached = {state for targets in edges.values() for state in targets}
    assert reached == set(State)


def test_every_exit_code_is_explained() -> None:
    table = ARCHITECTURE.partition("## Exit codes")[2].partition("## ")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == sorted(ExitCode)


def test_every_status_is_in_the_life_of_a_job() -> None:
    life = life_reference.render()
    assert (DOCS / "life.md").read_text() == life, "run scripts/docs"
    for status in JobStatus:
        assert f"`{status}`" in life


def test_the_founding_decisions_are_whole() -> None:
    text = (DOCS / "adr" / "0001-founding.md").read_text()
    decisions = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [decision.split()[0] for decision in decisions] == [f"1.{number}" for number in range(1, 12)]
    for decision in decisions:
        assert [word in decision for word in ("Context:", "Decision:", "Consequence:")] == [True] * 3, decision


@pytest.mark.parametrize("name", re.findall(r"`(\w+)`(?: \(\d)", ARCHITECTURE.partition("## Watching")[2]))
def test_the_names_under_watching_are_keys_or_settings(name: str) -> None:
    from taskqd.supervisor.workgroup import SupervisorOptions

    assert name in SupervisorOptions.__dataclass_fields__ or name in SETTING_NAMES
