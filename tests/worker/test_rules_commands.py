"""``taskqd queue`` and ``taskqd actor``: what they store, print and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.jobs import JobTable
from tests.support import Command

Call = Callable[..., Command]


@pytest.fixture
def call(start: Callable[..., Command], child_env: dict[str, str]) -> Call:
    """Run a command of taskqd to its end."""

    def run(*arguments: str) -> Command:
        command = start(*arguments, env=child_env)
        command.wait(60)
        return command

    return run


async def known(jobs: JobTable, actor: str = "succeed") -> None:
    """Make an actor known as a worker does."""
    arguments = (actor, "default", 3, "transient", "fixed", 0.0, 0.0, 0.0, None, 0, False, 500, None, None, ["db"])
    await jobs.conn.fetchval(jobs.worker_sql.sync_actor, *arguments)


async def test_a_queue_is_limited_paused_and_listed(jobs: JobTable, call: Call) -> None:
    await jobs.plant(3)
    await jobs.plant(2, route="'mail'")
    ran = call("queue", "set", "mail", "--max-concurrent", "5", "--mode", "round_robin")
    assert (ran.process.returncode, ran.stdout) == (0, "mail: round_robin, limit 5, open\n")
    assert call("queue", "pause", "mail").stdout == "mail: round_robin, limit 5, paused\n"
    listed = call("queue", "list").stdout.splitlines()
    assert listed[0].split() == ["queue", "mode", "limit", "state", "waiting", "running"]
    assert [line.split() for line in listed[1:]] == [
        ["default", "strict_fifo", "none", "open", "3", "0"],
        ["mail", "round_robin", "5", "paused", "2", "0"],
    ]
    assert call("queue", "resume", "mail").stdout == "mail: round_robin, limit 5, open\n"
    assert call("queue", "set", "mail", "--max-concurrent", "none").stdout == "mail: round_robin, limit none, open\n"
    (mail,) = [one for one in json.loads(call("queue", "list", "--json").stdout) if one["name"] == "mail"]
    assert mail == {
        "name": "mail",
        "mode": "round_robin",
        "max_concurrent": None,
        "paused_at": None,
        "waiting": 2,
        "running": 0,
    }
    audit = await jobs.conn.fetch(f'select action, target_type, target_id from "{jobs.schema}".admin_audit')
    assert [tuple(row) for row in audit] == [("set", "queue", "mail")] * 4
    created = call("queue", "set", "new", "--max-concurrent", "1", "--create")
    assert created.stdout == "new: strict_fifo, limit 1, open\n"


async def test_an_actor_is_limited_and_listed(jobs: JobTable, call: Call) -> None:
    await known(jobs)
    ran = call("actor", "set", "succeed", "--max-concurrent", "0", "--queue", "slow")
    assert (ran.process.returncode, ran.stdout) == (0, "succeed: queue slow, limit 0, max pending 500\n")
    assert call("actor", "set", "succeed", "--max-pending", "none").stdout.endswith("max pending none\n")
    assert call("actor", "list").stdout.splitlines()[1].split() == ["succeed", "slow", "0", "none", "0", "db"]
    assert json.loads(call("actor", "list", "--json").stdout)[0]["reservations"] == ["db"]
    await known(jobs)  # a worker that boots leaves what the operator has set
    assert call("actor", "list").stdout.splitlines()[1].split() == ["succeed", "slow", "0", "none", "0", "db"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("queue", "set", "mail"), 2, "give --max-concurrent, --mode or both"),
        (("queue", "set", "mail", "--max-concurrent", "0"), 2, "'0' must be a whole number, 1 to 1000000, or none"),
        (("queue", "set", "mail", "--max-concurrent", "-1"), 2, "'-1' must be a whole number, 1 to 1000000, or none"),
        (("queue", "set", "mail", "--mode", "fair"), 2, "'fair' is not one of 'strict_fifo', 'round_robin'"),
        (("queue", "pause", "a b"), 78, "queue = 'a b' must be"),
        (("queue", "pause", "defalt"), 78, "no worker, actor or job knows a queue 'defalt' (did you mean 'default'"),
        (("queue", "resume", "nosuch"), 78, "no worker, actor or job knows a queue 'nosuch'"),
        (("queue", "set", "defalt", "--mode", "round_robin"), 78, "knows a queue 'defalt' (did you mean 'default'"),
        (("actor", "set", "succeed"), 2, "give --max-concurrent, --max-pending or --queue"),
        (("actor", "set", "succeed", "--max-concurrent", "1000001"), 2, "0 to 1000000, or none"),
        (
            ("actor", "set", "sucsed", "--max-concurrent", "1"),
            78,
            "no worker has made an actor 'sucsed' known (did",
        ),
        (("actor", "set", "succeed", "--queue", ""), 78, "queue = '' must be"),
    ],
)
async def test_what_is_refused_is_refused_in_one_clear_message(
    jobs: JobTable, call: Call, arguments: tuple[str, ...], code: int, message: str
) -> None:
    await known(jobs)
    ran = call(*arguments)
    assert ran.process.returncode == code, ran.stderr
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr
    assert await jobs.conn.fetchval(f'select count(*) from "{jobs.schema}".admin_audit') == 0
