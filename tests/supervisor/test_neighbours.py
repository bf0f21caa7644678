"""Groups that share a server: each counts what the others have declared."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import uuid
from pathlib import Path
from typing import Any

import asyncpg

from tests.postgres import Server
from tests.supervisor.asking import SOON, taskqd
from tests.supervisor.conftest import StartGroup
from tests.support import eventually, taskqd_argv

LARGE = "max_concurrency = 100"
"""160 connections of the 297 that the server grants; 163 with the leader's and the preflight's."""
NEEDS, EACH = 163, 160


def large(name: str, more: str = "") -> dict[str, str]:
    return {
        "supervisor": f'name = "{name}"\nsettle_after = 0.2',
        "[workers]": LARGE,
        **({"budget": more} if more else {}),
    }


def budget(directory: Path, env: dict[str, str], *args: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*taskqd_argv("budget", "group.toml", "--json", *args)],
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


async def rows(conn: asyncpg.Connection, schema: str) -> dict[str, int]:
    found = await conn.fetch(f'select name, connections from "{schema}".groups where expires_at > clock_timestamp()')
    return {row["name"]: row["connections"] for row in found}


async def plant(conn: asyncpg.Connection, schema: str, connections: int) -> None:
    """A neighbour that has declared so many."""
    await conn.execute(
        f'insert into "{schema}".groups (name, place, db_role, connections, expires_at)'
        " values ('big', 'elsewhere', 'postgres', $1, clock_timestamp() + interval '1 hour')"
        " on conflict (name, place) do update set connections = excluded.connections",
        connections,
    )


async def free(conn: asyncpg.Connection) -> int:
    """Connections of the server that nobody holds, but for the one that asks."""
    held = await conn.fetchval("select count(*) from pg_stat_activity where backend_type = 'client backend'")
    return 297 - int(held)


async def test_two_that_start_at_the_same_moment_do_not_both_take_the_last_connections(
    group: StartGroup, conn: asyncpg.Connection, schema: str
) -> None:
    groups = {name: group(tables=large(name)) for name in ("one", "two")}
    ended = await eventually(lambda: [name for name, g in groups.items() if g.command.process.poll() is not None], 60)
    assert len(ended) == 1
    refused, runs = groups.pop(ended[0]), groups.popitem()
    assert refused.command.wait() == 75
    assert f"{NEEDS} of group {runs[0]!r}" in refused.command.stderr
    assert "what would fit: io.max_concurrency 100→" in refused.command.stderr
    runs[1].wait_for("ready")
    assert await rows(conn, schema) == {runs[0]: NEEDS}
    # Who may hold more than fits says so, and is counted by others just the same.
    warned = group(tables=large("third", 'enforce = "warn"'))
    warned.wait_for("ready")
    assert f"{NEEDS} of group {runs[0]!r}" in str(warned.events("preflight-warning"))
    assert await rows(conn, schema) == {runs[0]: NEEDS, "third": NEEDS}
    assert runs[1].stop() == 0
    assert warned.stop() == 0


async def test_two_of_one_name_on_one_host_are_neighbours(
    group: StartGroup, conn: asyncpg.Connection, schema: str
) -> None:
    first = group(tables=large("one"))
    first.wait_for("ready")
    refused = group(tables=large("one"))
    assert refused.command.wait() == 75
    assert f"{NEEDS} of group 'one'" in refused.command.stderr
    second = group(tables={"supervisor": 'name = "one"'})
    second.wait_for("ready")
    places = f'select place, connections from "{schema}".groups'
    held = {place.partition(":")[2]: connections for place, connections in await conn.fetch(places)}
    assert held == {str(first.runtime): NEEDS, str(second.runtime): 25}
    assert second.stop() == 0
    assert first.stop() == 0


async def test_a_successor_takes_the_place_of_a_killed_supervisor(
    group: StartGroup, conn: asyncpg.Connection, schema: str
) -> None:
    g = group(tables=large("one"))
    g.wait_for("ready")
    g.command.signal(signal.SIGKILL)
    g.command.wait()
    g.command = g.run_again()
    g.wait_for("ready")
    assert await rows(conn, schema) == {"one": NEEDS}
    assert g.stop() == 0


async def test_a_scale_is_declared_and_refused_where_a_neighbour_has_the_rest(
    group: StartGroup, conn: asyncpg.Connection, schema: str
) -> None:
    g = group(tables=SOON)
    g.wait_for("ready")
    own = 22 + 2 + 1
    assert await rows(conn, schema) == {"group": own}
    await plant(conn, schema, await free(conn) - own - 50)  # room for two more, and a little
    await asyncio.to_thread(lambda: taskqd(g, "scale", "io", "2"))
    await eventually(lambda: _are(conn, schema, own + 22))
    refused = await asyncio.to_thread(lambda: taskqd(g, "scale", "io", "9"))
    assert refused.returncode == 78
    assert "3 would fit" in refused.stderr
    await eventually(lambda: _are(conn, schema, own + 22))
    assert (await asyncio.to_thread(lambda: taskqd(g, "scale", "io", "1"))).returncode == 0
    await eventually(lambda: _are(conn, schema, own))
    assert g.stop() == 0, g.command.stderr
    assert g.left_over() == []


async def _are(conn: asyncpg.Connection, schema: str, connections: int) -> bool:
    return (await rows(conn, schema))["group"] == connections


async def test_a_roll_surges_only_where_the_neighbours_leave_room_at_that_time(
    group: StartGroup, conn: asyncpg.Connection, schema: str
) -> None:
    g = group(tables=SOON)
    g.wait_for("ready")
    own = 22 + 2 + 1

    async def restart() -> list[str]:
        seen = len(g.events())
        done = await asyncio.to_thread(lambda: taskqd(g, "restart", "io"))
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{g.command.stderr}"
        return [e["event"] for e in g.events()[seen:] if e["event"] in ("spawn", "child-exit")]

    assert await restart() == ["spawn", "child-exit"]
    await plant(conn, schema, await free(conn) - own - 10)  # room for this group, and for no second worker
    assert await restart() == ["child-exit", "spawn"]
    await conn.execute(f"delete from \"{schema}\".groups where name = 'big'")
    assert await restart() == ["spawn", "child-exit"]
    await eventually(lambda: _are(conn, schema, own))
    assert g.stop() == 0, g.command.stderr


async def test_the_limit_of_a_role_refuses_for_good_and_names_it(
    group: StartGroup, server: Server, conn: asyncpg.Connection
) -> None:
    role = f"narrow_{uuid.uuid4().hex[:8]}"
    await conn.execute(f"create role {role} login connection limit 20")
    await conn.execute(f"grant pg_read_all_data to {role}")
    try:
        g = group(TASKQ_PG_DSN=server.dsn(role))
        assert g.command.wait() == 78
        assert f"needs 25 connections and can have 20, the connection limit of role {role}" in g.command.stderr
    finally:
        await conn.execute(f"drop role {role}")


async def test_the_budget_of_several_supervisors_beside_their_neighbours(
    group: StartGroup, child_env: dict[str, str], conn: asyncpg.Connection, schema: str
) -> None:
    g = group(tables={"supervisor": 'name = "one"'})
    g.wait_for("ready")
    await plant(conn, schema, 40)
    code, alone = await asyncio.to_thread(budget, g.directory, child_env)
    assert (code, alone["verdict"], alone["required"], alone["peak"]) == (0, "fits", 25, 69)
    assert alone["limits"]["groups"] == [{"name": "big", "declared": 40, "live": 0}]
    assert alone["taken"] == 40 + alone["limits"]["others"]
    code, ten = await asyncio.to_thread(budget, g.directory, child_env, "--fleet", "10")
    # One leader, however many supervisors; their sessions and rows are not those of others, wherever they run.
    assert (code, ten["required"], ten["peak"], ten["supervisors"]) == (0, 10 * 23 + 2, 10 * 67 + 2, 10)
    assert [group["name"] for group in ten["limits"]["groups"]] == ["big"]
    code, many = await asyncio.to_thread(budget, g.directory, child_env, "--fleet", "12")
    assert (code, many["verdict"]) == (75, "crowded")
    assert g.stop() == 0


async def test_a_role_that_may_not_declare_is_told_so(
    group: StartGroup, server: Server, conn: asyncpg.Connection
) -> None:
    role = f"reader_{uuid.uuid4().hex[:8]}"
    await conn.execute(f"create role {role} login")
    await conn.execute(f"grant pg_read_all_data to {role}")
    try:
        g = group(TASKQ_PG_DSN=server.dsn(role))
        assert g.command.wait() == 78
        assert "permission denied for table groups" in g.command.stderr
    finally:
        await conn.execute(f"drop role {role}")


async def test_where_nobody_can_be_told_the_last_known_room_counts(
    group: StartGroup, conn: asyncpg.Connection, schema: str
) -> None:
    g = group(tables=SOON)
    g.wait_for("ready")
    await conn.execute(f'alter table "{schema}".groups rename to gone')
    done = await asyncio.to_thread(lambda: taskqd(g, "restart", "io"))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert "connections could not be declared: " in done.stdout
    assert [e["event"] for e in g.events() if e["event"] in ("spawn", "child-exit")] == ["spawn", "spawn", "child-exit"]
    (told, *_) = g.events("not-declared")
    assert "groups" in told["why"]
    assert g.stop() == 0, g.command.stderr
