"""Who blocks the event loop is named, and how; a worker whose slots are all lost makes room for a fresh one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from taskqd import ActorRef, TaskQ
from tests.apps import stalls
from tests.apps.basic import Work
from tests.fleet import Fleet, ask, events, wait_for_event
from tests.support import wait_until

ACTORS = "tests.apps.stalls:actors"
WAIT = 60
WATCHED = {
    "TASKQ_WATCHDOG_ENABLED": "true",
    "TASKQ_WATCHDOG_LOOP_LAG_BUDGET": "60",
    "TASKQ_WATCHDOG_LOOP_LAG_WARN_BUDGET": "0.8",
    "TASKQ_WATCHDOG_CHECK_INTERVAL": "0.2",
    "TASKQ_LOCK_LEASE": "90",
}


@pytest.mark.parametrize(
    ("actor", "kind", "lines"),
    [(stalls.waits, "blocking_call", "time.sleep"), (stalls.computes, "gil_held", "while |rounds ")],
    ids=["a call", "Python code"],
)
async def test_a_stall_names_its_actor_and_its_kind(
    fleet: Fleet, tq: TaskQ, short_dir: Path, actor: ActorRef[Work, Any], kind: str, lines: str
) -> None:
    socket = short_dir / "w.sock"
    worker = fleet.worker(actors=ACTORS, env=WATCHED | {"TASKQ_HEALTH_SOCKET_PATH": str(socket)})
    beside = await tq.enqueue(stalls.slow_plain, Work(seconds=4))
    await fleet.wait_for_executions(1)
    handle = await tq.enqueue(actor, Work(seconds=4))
    await handle.wait(WAIT)
    await beside.wait(WAIT)
    told = wait_for_event(worker, "event-loop-stall-attributed")
    assert (told["actor"], told["job_id"], told["kind"]) == (actor.name, str(handle.job_id), kind)
    file, _, place = told["line"].partition(":")
    number, _, function = place.partition(" in ")
    assert file == stalls.__file__
    assert function == actor.name
    assert re.search(lines, Path(file).read_text().splitlines()[int(number) - 1])
    sample = f'taskq_worker_loop_stall_attributions_total{{actor="{actor.name}",kind="{kind}"}} '
    assert sample in ask(socket, "/metrics")
    assert "Thread 0x" in worker.stderr, "the stacks of all threads"
    assert worker.process.poll() is None


async def test_what_is_quick_is_not_blamed(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker(actors=ACTORS, env=WATCHED | {"TASKQ_WATCHDOG_LOOP_LAG_WARN_BUDGET": "30"})
    assert await (await tq.enqueue(stalls.waits, Work(seconds=1.0))).wait(WAIT) == "waited"
    assert list(events(worker, "event-loop-stall-attributed")) == []


async def test_a_worker_full_of_threads_that_do_not_end_makes_room_for_a_fresh_one(
    fleet: Fleet, tq: TaskQ, short_dir: Path
) -> None:
    socket = short_dir / "w.sock"
    env = {
        "TASKQ_HEALTH_SOCKET_PATH": str(socket),
        "TASKQ_CLEANUP_GRACE_PERIOD": "4",
        "TASKQ_CANCELLATION_GRACE_PERIOD": "20",
        "TASKQ_LOCK_LEASE": "60",
        "TASKQ_TERMINATION_GRACE_PERIOD": "60",
    }
    worker = fleet.worker(actors=ACTORS, concurrency=2, env=env)
    handles = [await tq.enqueue(stalls.endless, Work(seconds=300)) for _ in range(2)]
    left = await tq.enqueue(stalls.succeed, Work(key="left"))

    def why() -> str:
        body = json.loads(ask(socket, "/ready").partition("\r\n\r\n")[2])
        return "" if body["ready"] else str(body["reason"])

    wait_until(lambda: "every slot is held" in why(), 30)
    assert worker.wait() == 75
    assert next(events(worker, "worker-stuck"))["actors"] == ["endless"]
    for handle in handles:
        row = await handle.row()
        assert (row.status, row.error_class) == ("failed", "TimeoutError")
    assert (await left.row()).attempt == 0
    fleet.worker(actors=ACTORS)
    assert await left.wait(WAIT) == "left"
