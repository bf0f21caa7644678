"""Changing the file of a group under test, and asking the group by commands."""

from __future__ import annotations

import subprocess

from tests.supervisor.conftest import Group
from tests.support import child_environment, taskqd_argv

SOON = {"supervisor": "settle_after = 0.2"}
TWO = {"[workers]": 'replicas = 2\n[[workers]]\nname = "cpu"\nmax_concurrency = 2', **SOON}


def taskqd(g: Group, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command against the group to its end."""
    return subprocess.run(
        [*taskqd_argv(*args), "--socket", str(g.socket)],
        cwd=g.directory,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def edit(g: Group, *changes: tuple[str, str]) -> None:
    """Replace text of the group's file."""
    file = g.directory / "group.toml"
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


def pids(g: Group) -> dict[str, int]:
    """Who has which place now."""
    return {child["name"]: child["pid"] for child in g.ask("/status")[1]["children"]}
