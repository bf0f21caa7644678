"""Workers that log in otherwise than their group: who they are, and whose login settles jobs when one is refused."""

from __future__ import annotations

import uuid

import pytest

from taskqd.domain.errors import DatabaseAuthError
from taskqd.settings import Settings
from taskqd.supervisor.fleet import Crew, Fleet
from taskqd.supervisor.logins import own_logins, release_as_anybody
from tests.postgres import Server


class Silence:
    """A link that nobody reads."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, text: str, within: float, silence: int = 70) -> None:
        self.steps.append(text)

    def warn(self, text: str) -> None:
        raise AssertionError(text)


def by_file(path: str, dsn: str = "postgresql://app@db/app") -> Settings:
    return Settings(pg_dsn=dsn, pg_credential_provider="file", pg_credential_path=path)


def test_workers_with_a_login_in_common_are_one_way_in() -> None:
    workers = {
        "plain": by_file("/group"),
        "a": by_file("/own"),
        "b": by_file("/own"),
        "c": by_file("/group", "postgresql://other@db/app"),
        "d": Settings(pg_dsn="postgresql://app@db/app"),
    }
    found = own_logins(by_file("/group"), workers)
    assert [own.workers for own in found] == [("a", "b"), ("c",), ("d",)]
    fleet = Fleet(tuple(Crew(name, 1, 8) for name in workers), web_pods=3, app_connections=9)
    part = found[0].part_of(fleet)
    assert [crew.name for crew in part.crews] == ["a", "b"]
    assert (part.scheduler, part.outside) == (False, 0)
    assert own_logins(by_file("/group"), {"plain": by_file("/group")}) == []


async def test_jobs_are_settled_as_the_first_that_is_let_in(server: Server, schema: str) -> None:
    stranger = Settings(pg_dsn=server.dsn("nobody_at_all"), schema_name=schema)
    known = Settings(pg_dsn=server.dsn(), schema_name=schema)
    link = Silence()
    assert await release_as_anybody([stranger, known], "g", [uuid.uuid4()], link) == 0
    assert len(link.steps) == 2
    with pytest.raises(DatabaseAuthError, match="nobody_at_all"):
        await release_as_anybody([stranger], "g", [uuid.uuid4()], link)
