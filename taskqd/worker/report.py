"""What a worker tells of itself: to probes, to its supervisor, to a scraper."""

from __future__ import annotations

import time
from uuid import UUID

from taskqd.health.server import Report
from taskqd.observe.logs import dropped
from taskqd.worker.engine import Engine

STALE_BEATS = 3
"""Heartbeat intervals without a good beat after which a worker is not ready."""


def live(phase: str) -> Report:
    """Alive: the event loop answers. The database has no say in it."""
    return Report(True, {"live": True, "phase": phase})


def ready(engine: Engine | None, phase: str, heartbeat_interval: float) -> Report:
    """Ready: running, in touch with the database, no consumer lost."""
    if engine is None or phase != "running":
        return Report(False, {"ready": False, "reason": f"the worker is {phase}", "phase": phase})
    reasons = list(engine.consumers.crashed)
    if engine.consumers.all_given_up:
        reasons.append("every slot is held by a handler that has outrun its time")
    if engine.isolation is not None and engine.isolation.lost:
        reasons.append("the process that isolated actors are forked from has ended")
    if engine.isolated:
        reasons.append("the database does not answer; running jobs were stopped")
    elif engine.heartbeat.age > STALE_BEATS * heartbeat_interval:
        reasons.append(f"the last good heartbeat is {engine.heartbeat.age:.0f} s old")
    if engine.transactions is not None and engine.transactions.trouble:
        reasons.append(f"a job got no connection of its slot: {engine.transactions.trouble}")
    return Report(
        not reasons,
        {
            "ready": not reasons,
            "reason": "; ".join(reasons),
            "phase": phase,
            "active_jobs": engine.slots.busy,
            "listening": engine.listener is not None and engine.listener.connected,
        },
    )


def beat(engine: Engine | None, phase: str, slots: int, worker_id: UUID) -> dict[str, object]:
    """The fields of a beat to the supervisor."""
    if engine is None:
        return {"worker_id": str(worker_id), "phase": phase, "inflight": 0, "slots": slots}
    return {
        "worker_id": str(worker_id),
        "phase": phase,
        "inflight": engine.slots.busy,
        "slots": slots,
        "db_ok_age_ms": round(engine.heartbeat.age * 1000),
        "claims": engine.producer.claimed,
        "polls": engine.producer.polls,
        "poll_s": engine.producer.poll_interval,
        "paused": engine.producer.paused,
        "oldest_ms": _oldest(engine),
        "done": engine.completer.succeeded,
        "failed": engine.completer.failed,
        "pool_in_use": sum(pool.in_use for pool in engine.pools),
        "pool_size": sum(pool.size for pool in engine.pools),
        **({} if engine.isolation is None else {"zygote": engine.isolation.pid}),
        **engine.credentials.beat(),
    }


def _oldest(engine: Engine) -> int | None:
    """For how many milliseconds the job has run that began first, or None when none runs."""
    began = [attempt.started_at for attempt in engine.consumers.running if attempt.started_at is not None]
    return round((time.monotonic() - min(began)) * 1000) if began else None


def metrics(engine: Engine | None) -> str:
    """The process's counters in the Prometheus text format."""
    if engine is None:
        return ""
    values = {
        "taskq_active_jobs": engine.slots.busy,
        "taskq_worker_max_concurrency": engine.slots.size,
        "taskq_worker_waiting_jobs": engine.slots.waiting,
        "taskq_worker_jobs_claimed_total": engine.producer.claimed,
        "taskq_worker_jobs_succeeded_total": engine.completer.succeeded,
        "taskq_worker_jobs_failed_total": engine.completer.failed,
        "taskq_worker_leases_lost_total": engine.completer.lost,
        "taskq_worker_outcomes_disowned_total": engine.completer.disowned,
        "taskq_log_lines_dropped_total": dropped(),
    }
    if engine.transactions is not None:
        values["taskq_worker_slot_pool_acquire_failures_total"] = engine.transactions.acquire_failures
        values["taskq_worker_slot_pool_connections_in_use"] = engine.transactions.pool.in_use
    lines = []
    for name, value in values.items():
        lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
        lines.append(f"{name} {value}")
    if engine.reports is not None:
        lines.append("# TYPE taskq_error_reporter_failures_total counter")
        lines.append(
            f'taskq_error_reporter_failures_total{{reporter_type="{engine.reports.kind}"}} {engine.reports.failures}'
        )
    return "\n".join(lines) + "\n"
