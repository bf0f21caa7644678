"""A new credential for a running group: every process takes it in place, none is restarted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from taskqd.supervisor.child import Child
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.slot import State

ANSWER_TIMEOUT = 90.0
"""Seconds that one process may take: 40 until it is its turn, 30 to read the credential and open, 5 to drain, and some
to spare."""

_TAKES_PART = frozenset({State.READY, State.STALLED})
"""One that boots reads the credential by itself; one that stops needs none."""


async def rotate(children: Sequence[Child], journal: Journal) -> dict[str, Any]:
    """Have each process replace its pools and connections, one process after the other.

    One at a time, because for a moment each holds both its old and its new sessions. A resource that cannot be
    replaced stays as it was, and so does the process. Returns ``{ok, ms, children}``; each child has ``name``, ``ok``,
    ``ms``, ``error`` (or None), and ``results``: ``{resource, ok, ms, error}`` for every pool and connection.
    """
    began = time.monotonic()
    reports = []
    for child in list(children):
        if child.reloads and child.slot.state in _TAKES_PART:
            reports.append(await _ask(child))
    report = {"ok": all(each["ok"] for each in reports), "ms": _ms_since(began), "children": reports}
    failed = {each["name"]: each["error"] for each in reports if not each["ok"]}
    level = "warning" if failed else "info"
    journal.tell("credentials-reloaded", level, children=len(reports), ms=report["ms"], failed=failed or None)
    return report


async def _ask(child: Child) -> dict[str, Any]:
    began = time.monotonic()
    answer = await child.ask("reload", ANSWER_TIMEOUT, what="credentials", source=child.spec.source)
    results: list[dict[str, Any]] = []
    if answer is None:
        error: str | None = "it ended" if child.slot.pid is None else "no answer in time"
    else:
        found = answer.get("results")
        results = found if isinstance(found, list) else []
        error = answer.get("error") or _failures(results)
    return {"name": child.name, "ok": error is None, "ms": _ms_since(began), "error": error, "results": results}


def _failures(results: list[dict[str, Any]]) -> str | None:
    failed = [f"{result.get('resource')}: {result.get('error')}" for result in results if not result.get("ok")]
    return "; ".join(failed) or None


def _ms_since(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 1)
