"""Whether jobs get on: who serves them, what limits them, what is late, and whether anybody maintains the schema."""

from __future__ import annotations

from typing import Any

from taskqd.storage.doctor import Finding, Patient, fail, listed, ok, span, warn
from taskqd.storage.insights import InsightKind, read_insights

WORKER_ALIVE = 60.0
"""Seconds since a worker was last seen, after which it is not counted on."""
SAMPLE = 10_000
"""Rows that are looked at of each queue, and counted of what is due."""
LATE_PROMOTION = 10.0
"""Seconds after which a due job should be claimable, and an expired lease taken back, ten times over."""
LATE_FIRE = 60.0
LONG_RUN = 86_400.0
"""Seconds after which a run is worth a word."""
FRESH = 60.0
"""Seconds within which somebody must have maintained the schema."""
HOST_ALIVE = 15.0
"""Seconds since its last beat, one of which comes each second, after which a host is not counted on."""
_HOSTS = {
    "scheduler": "",
    "worker": " of those told to maintain it",
    "runtime": " in other processes",
    "fallback": ", a worker that stands in",
}
"""What there is to say of each kind of host."""


async def check_service(patient: Patient) -> list[Finding]:
    """Look for jobs that nobody will take: no worker serves their queue, or no worker has made their actor known."""
    name, found = "service", []
    workers = await patient.rows("live_workers", WORKER_ALIVE)
    served = {queue for worker in workers for queue in worker["queues"]}
    waiting = await patient.rows("waiting", SAMPLE)
    for route in dict.fromkeys(row["route"] for row in waiting):
        rows = [row for row in waiting if row["route"] == route]
        jobs, oldest = sum(row["jobs"] for row in rows), max(row["oldest"] for row in rows)
        if route not in served and not rows[0]["paused"]:
            what = f"{_many(jobs)} wait, the oldest for {span(oldest)}, and no live worker serves it"
            do = f"start a worker with queues = [{route!r}], or cancel its jobs"
            found.append(fail(name, f"queue {route}", what, "they wait for ever", do))
    strangers: dict[str, list[Any]] = {}
    for row in waiting:
        if not row["known"]:
            strangers.setdefault(row["actor"], []).append(row)
    for actor, rows in strangers.items():
        jobs = sum(row["jobs"] for row in rows)
        what = f"{_many(jobs)} wait in {listed(row['route'] for row in rows)}, and no worker has made it known"
        do = "deploy the worker that has it; or cancel its jobs, where it was renamed or removed"
        found.append(fail(name, f"actor {actor}", what, "no worker claims what it does not know", do))
    return found or [
        ok(name, f"{len(workers)} live workers serve {listed(sorted(served)) or 'nothing'}; nothing is stranded")
    ]


async def check_caps(patient: Patient) -> list[Finding]:
    """Look for limits that contradict each other, and tell which actors have none."""
    name, found = "limits", []
    actors, queues = await patient.rows("actor_caps"), await patient.rows("queue_caps")
    uncapped = [row["actor"] for row in actors if row["max_concurrent"] is None]
    if uncapped:
        found.append(ok(name, f"{len(uncapped)} of {len(actors)} actors are uncapped: {listed(uncapped)}"))
    found += [ok(name, "paused: nobody claims from it", f"queue {row['name']}") for row in queues if row["paused"]]
    for row in actors:
        where, cap = f"actor {row['actor']}", row["max_concurrent"]
        if cap == 0:
            found.append(ok(name, "max_concurrent 0: drained, none of its jobs runs", where))
        if row["max_pending"] == 0:
            found.append(ok(name, "max_pending 0: every enqueue is refused", where))
        if cap and row["max_pending"] is not None and row["max_pending"] < cap:
            what = f"max_pending {row['max_pending']} is below max_concurrent {cap}"
            do = f"taskqd actor set {row['actor']} --max-pending N, above {cap}"
            found.append(warn(name, where, what, "enqueue refuses what there would be room to run", do))
        if cap is not None and row["queue_limit"] is not None and cap > row["queue_limit"]:
            what = f"max_concurrent {cap} is above the limit {row['queue_limit']} of its queue {row['queue']}"
            do = f"raise the queue's, or lower the actor's to {row['queue_limit']}"
            found.append(warn(name, where, what, "the actor never reaches its own limit", do))
    limits = [(f"actor {row['actor']}", row["max_concurrent"], row["gate"]) for row in actors]
    limits += [(f"queue {row['name']}", row["max_concurrent"], row["gate"]) for row in queues]
    for where, cap, gate in limits:
        if cap is not None and cap != gate:
            what = f"its limit is {cap}, its gate lets {'everybody' if gate is None else gate} through"
            do = "set the limit again: `taskqd actor set` or `taskqd queue set`"
            found.append(fail(name, where, what, "the claim goes by the gate", do))
    for row in await patient.rows("gates"):
        what = f"counts {row['held']} jobs, {row['running']} run"
        do = f'wait for the next tick, or run select "{patient.schema}".tick()'
        found.append(warn(name, f"gate {row['bucket']}", what, "it lets too few, or too many, run", do))
    return found or [ok(name, "none set")]


async def check_progress(patient: Patient) -> list[Finding]:
    """Look at what is due and not claimable, and at what runs."""
    name, found = "progress", []
    due = await patient.row("overdue", SAMPLE)
    if due["jobs"] and due["oldest"] > LATE_PROMOTION:
        what = f"{_many(due['jobs'])} are due and not claimable, the first for {span(due['oldest'])}"
        do = "see that a scheduler or a worker runs, and what its log says of `promotion`"
        found.append(fail(name, "scheduled jobs", what, "they start late", do))
    running = await patient.row("running", LATE_PROMOTION)
    if running["expired"]:
        what = f"{running['expired']} of {running['jobs']} running have leases that have expired"
        do = f'see that a scheduler runs; select "{patient.schema}".tick() takes them back at once'
        found.append(fail(name, "running jobs", what, "what dead workers held does not come back", do))
    if running["jobs"] and running["oldest"] is not None and running["oldest"] > LONG_RUN:
        what = f"job {running['oldest_id']} of {running['oldest_actor']} has run for {span(running['oldest'])}"
        do = f"cancel it: await tq.cancel(UUID({running['oldest_id']!r})); give the actor a start_to_close"
        found.append(warn(name, "running jobs", what, "it holds a slot", do))
    if found:
        return found
    oldest = f", the oldest for {span(running['oldest'])}" if running["oldest"] is not None else ""
    return [ok(name, f"{running['jobs']} jobs run{oldest}; {_many(due['jobs'])} due and about to be claimable")]


async def check_schedules(patient: Patient) -> list[Finding]:
    """Look for schedules that do not fire."""
    name, found = "schedules", []
    schedules = await patient.rows("schedules")
    for row in schedules:
        where = f"schedule {row['name']}"
        if row["disabled_by"] == "auto":
            what = f"paused after {row['consecutive_failures']} failures: {row['last_error']}"
            do = f"correct it, then taskqd schedule resume {row['name']}"
            found.append(fail(name, where, what, "it does not fire", do))
        elif not row["enabled"]:
            found.append(ok(name, "paused by an operator", where))
        elif row["last_error"] is not None and row["consecutive_failures"]:
            what = f"{row['consecutive_failures']} failures in a row: {row['last_error']}"
            found.append(warn(name, where, what, "after three it is paused", f"see taskqd schedule show {row['name']}"))
        elif row["late"] > LATE_FIRE:
            do = "see that a scheduler runs, and what its log says"
            found.append(fail(name, where, f"was due {span(row['late'])} ago", "it does not fire", do))
        if row["enabled"] and not row["known"]:
            do = "deploy a worker that has it, or taskqd schedule retire"
            found.append(warn(name, where, f"no worker has made its actor {row['actor']} known", "its jobs wait", do))
    return found or [ok(name, f"{len(schedules)} fire as they should")]


async def check_insights(patient: Patient) -> list[Finding]:
    """Look at what has ended lately, and what it says of what waits."""
    name = "insights"
    why = {
        InsightKind.RUNAWAY: "it never catches up",
        InsightKind.STARVED: "its jobs start late",
        InsightKind.SLOW_DRAIN: "it will not be empty tomorrow",
    }
    found = []
    for each in (await read_insights(patient.conn, patient.schema)).found:
        schedule = each.kind is InsightKind.RUNAWAY
        where, what = f"{'schedule' if schedule else 'queue'} {each.subject}", f"{each.kind.value}: {each.what}"
        if each.kind in why:
            found.append(warn(name, where, what, why[each.kind], f"{each.do}; see taskqd insights"))
        else:
            found.append(ok(name, what, where))
    return found or [ok(name, "nothing is starved, drains slowly, idles or runs away")]


async def check_maintenance(patient: Patient) -> list[Finding]:
    """Look whether anybody reaps, promotes and fires, and what went wrong in it."""
    name, found = "maintenance", []
    duties = {row["duty"]: row for row in await patient.rows("duties")}
    hosts = await patient.rows("hosts")
    alive = [row for row in hosts if row["beat_ago"] <= HOST_ALIVE]
    workers = await patient.rows("live_workers", WORKER_ALIVE)
    tick = duties["tick"]["finished_ago"] if "tick" in duties else None
    if tick is None or tick > FRESH:
        when = "never" if tick is None else f"{span(tick)} ago"
        do = (
            "run a scheduler: a workgroup has one unless [scheduler] enabled = false; or taskqd scheduler run; "
            'or workers whose maintenance is not "off"'
        )
        why = "what dead workers held comes back late, deadlines pass, schedules do not fire"
        if workers or await _has_work(patient):
            found.append(fail(name, "tick", f"last ran {when}", why, do))
        else:
            found.append(ok(name, f"last ran {when}; nothing runs here and nothing waits", "tick"))
    else:
        found.append(ok(name, f"last ran {span(tick)} ago", "tick"))
    for kind, note in _HOSTS.items():
        if rows := [row for row in alive if row["kind"] == kind]:
            told = f"{len(rows)} alive{note}" + ("" if all(row["complete"] for row in rows) else ", without schedules")
            where = listed(f"{row['hostname']}:{row['pid']}" for row in rows)
            found.append(ok(name, f"{told}, the newest beat {span(rows[0]['beat_ago'])} ago: {where}", kind))
    last = next((row for row in hosts if row["kind"] == "scheduler"), None)
    if last is not None and last not in alive:
        what = f"the last beat, of {last['hostname']}:{last['pid']}, is {span(last['beat_ago'])} old"
        why = "others stand in" if any(row["complete"] for row in alive) else "nobody fires schedules"
        found.append(warn(name, "scheduler", what, why, "see why it ended, start it again"))
    for row in duties.values():
        if row["last_error"] is not None:
            ago = span(row["error_ago"] or 0.0)
            what = f"failed {ago} ago: {row['last_error']}"
            found.append(warn(name, row["duty"], what, "what it does is left undone", "see the log of the scheduler"))
    return found


async def _has_work(patient: Patient) -> bool:
    enabled = any(row["enabled"] for row in await patient.rows("schedules"))
    due, running = await patient.row("overdue", 1), await patient.row("running", 0.0)
    return bool(enabled or due["jobs"] or running["jobs"] or await patient.rows("waiting", 1))


def _many(jobs: int) -> str:
    return f"{jobs} jobs" if jobs < SAMPLE else f"{SAMPLE} jobs or more"
