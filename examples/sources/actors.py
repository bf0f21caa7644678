"""Counts what is in the sources of a Python library: one job per package, one per module, one report."""

from __future__ import annotations

import ast
import json
import os
from datetime import timedelta
from pathlib import Path
from uuid import UUID

from pydantic import BaseModel

from taskqd import EnqueueItem, JobContext, RetryPolicy, actor, wait_for_batch
from taskqd.batch import MAX_BATCH

UNTIL_DONE = RetryPolicy(kind="indefinite", base=timedelta(seconds=0.5), cap=timedelta(seconds=5))
QUICK_RETRY = RetryPolicy(max_attempts=10, base=timedelta(seconds=0.2), cap=timedelta(seconds=2))


class Package(BaseModel):
    """A directory of modules, relative to ``root``; ``run`` is the run's directory."""

    run: Path
    root: Path
    path: str


class Module(BaseModel):
    """One source file, relative to ``root``."""

    run: Path
    root: Path
    path: str


class Counts(BaseModel):
    """What one module holds; ``error`` is set, and the rest is zero, when it is not valid Python."""

    module: str
    lines: int = 0
    functions: int = 0
    classes: int = 0
    longest_function: str | None = None
    longest_lines: int = 0
    error: str | None = None


class Report(BaseModel):
    """Asks for the summary of a batch."""

    run: Path
    batch: UUID
    packages: int


class Summary(BaseModel):
    """The totals of a run."""

    modules: int
    lines: int
    functions: int
    classes: int
    refused: int
    longest: list[Counts]


def modules_of(directory: Path) -> list[str]:
    """The names of the modules that lie directly in ``directory``."""
    return sorted(entry.name for entry in os.scandir(directory) if entry.name.endswith(".py") and entry.is_file())


@actor(name="sources.package", queue="packages", retry=QUICK_RETRY)
async def package(payload: Package, ctx: JobContext[Package]) -> None:
    """Enqueue one job for each module. A second run of this job finds the keys taken and adds nothing."""
    items = []
    for name in modules_of(payload.root / payload.path):
        path = str(Path(payload.path) / name)
        items.append(
            EnqueueItem(
                actor_ref=module,
                payload=Module(run=payload.run, root=payload.root, path=path),
                idempotency_scope=str(payload.run),
                idempotency_key=f"module:{path}",
            )
        )
    for start in range(0, len(items), MAX_BATCH):
        await ctx.jobs.enqueue_batch(items[start : start + MAX_BATCH], batch_id=ctx.batch_id)


@actor(name="sources.module", queue="modules", retry=QUICK_RETRY)
def module(payload: Module) -> Counts:
    """Parse one file and count what is in it."""
    log_execution(payload.run, payload.path)
    source = (payload.root / payload.path).read_bytes()
    try:
        tree = ast.parse(source, filename=payload.path)
    except (SyntaxError, ValueError) as error:
        return Counts(module=payload.path, error=f"{type(error).__name__}: {error}")
    counts = Counts(module=payload.path, lines=source.count(b"\n"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            counts.classes += 1
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            counts.functions += 1
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > counts.longest_lines:
                counts.longest_function, counts.longest_lines = node.name, lines
    return counts


def log_execution(run: Path, path: str) -> None:
    """Append one line to a log outside Postgres, in one write: the witness of what really ran."""
    log = os.open(run / "executions.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(log, f"{path}\n".encode())
    finally:
        os.close(log)


@actor(name="sources.report", queue="packages", retry=UNTIL_DONE)
async def report(payload: Report, ctx: JobContext[Report]) -> Summary:
    """Wait for all packages and modules without holding a slot, then write ``report.json``."""
    await wait_for_batch(ctx.jobs, payload.batch, snooze_interval=1.0, expect_at_least=payload.packages)
    found: list[Counts] = []
    after = None
    while page := await ctx.jobs.batch_jobs(payload.batch, after=after):
        found.extend(Counts.model_validate(job.result) for job in page if job.result is not None)
        after = page[-1].id
    summary = Summary(
        modules=len(found),
        lines=sum(counts.lines for counts in found),
        functions=sum(counts.functions for counts in found),
        classes=sum(counts.classes for counts in found),
        refused=sum(counts.error is not None for counts in found),
        longest=sorted(found, key=lambda counts: -counts.longest_lines)[:10],
    )
    write_atomically(
        payload.run / "report.json",
        {"summary": summary.model_dump(), "modules": [counts.model_dump() for counts in found]},
    )
    return summary


def write_atomically(path: Path, content: object) -> None:
    """Write JSON so that a reader sees all of it or none."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=1))
    draft.replace(path)


registry = [package, module, report]
