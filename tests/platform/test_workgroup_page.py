"""docs/workgroup.md is what the parser asks for."""

from __future__ import annotations

import re
import tomllib

from scripts.workgroup_reference import SECTIONS, asked, render
from taskqd.settings import ALIASES, SETTING_NAMES
from taskqd.supervisor.workgroup import parse_workgroup
from tests.support import REPOSITORY


def test_the_page_is_up_to_date() -> None:
    assert (REPOSITORY / "docs" / "workgroup.md").read_text() == render(), "run scripts/docs"


def test_every_key_has_a_section_and_a_meaning() -> None:
    keys = list(asked())
    assert {key.path for key in keys} <= set(SECTIONS)
    page = render()
    for key in keys:
        assert re.search(rf"^\| `{key.name}` \| .+ \| .+ \| .+ \|$", page, re.MULTILINE), key


def test_the_example_is_valid_with_every_comment_taken_away() -> None:
    text = (REPOSITORY / "config" / "workgroup.toml").read_text()
    known = [*SETTING_NAMES, *ALIASES]
    bare = re.sub(r"^# ([A-Za-z_]+ = .+)$", r"\1", text, flags=re.MULTILINE)
    assert bare != text
    for each in (text, bare):
        _, problems = parse_workgroup(tomllib.loads(each), "workgroup.toml", known)
        assert problems == []
