"""Actors for tests. Each execution leaves one line in a file outside Postgres, named by ``EXECUTION_LOG``."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import threading
import time
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from taskqd import JobContext, RetryAfter, RetryOverride, RetryPolicy, Snooze, actor
from taskqd.client.rows import JobRow

AT_ONCE = RetryPolicy(base=timedelta(0), max_attempts=3)
MANY = RetryPolicy(base=timedelta(0), max_attempts=50)

_seen: contextvars.ContextVar[str] = contextvars.ContextVar("_seen", default="")


class Work(BaseModel):
    """What the actors do: wait ``seconds``, misbehave ``times`` times, return ``size`` characters."""

    key: str = ""
    seconds: float = 0.0
    times: int = 0
    size: int = 0


class Strict(BaseModel):
    """A payload that a job planted by hand may not fit."""

    number: int


def note(event: str, ctx: JobContext[Any], key: str = "") -> None:
    """Tell the execution log of an attempt."""
    write(event, str(ctx.job_id), ctx.actor, key, ctx.attempt, ctx.fence_token)


def write(event: str, job: str, actor_name: str, key: str, attempt: int, epoch: int) -> None:
    """Append one line to the execution log: one write, so that processes do not mix their lines."""
    line = {
        "event": event,
        "job": job,
        "actor": actor_name,
        "key": key,
        "attempt": attempt,
        "epoch": epoch,
        "pid": os.getpid(),
        "at": time.time(),
    }
    file = os.open(os.environ["EXECUTION_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


@actor(name="succeed", retry=MANY)
async def succeed(payload: Work, ctx: JobContext[Work]) -> str:
    """Wait, then return the key."""
    note("start", ctx, payload.key)
    await asyncio.sleep(payload.seconds)
    note("end", ctx, payload.key)
    return payload.key


@actor(name="plain", retry=MANY)
def plain(payload: Work, ctx: JobContext[Work]) -> str:
    """The same on a thread."""
    note("start", ctx, payload.key)
    time.sleep(payload.seconds)
    note("end", ctx, payload.key)
    return threading.current_thread().name


@actor(name="polite", retry=AT_ONCE)
def polite(payload: Work, ctx: JobContext[Work]) -> str:
    """Work on a thread until told to stop."""
    note("start", ctx, payload.key)
    deadline = time.monotonic() + payload.seconds
    while time.monotonic() < deadline:
        ctx.check_cancelled()
        time.sleep(0.01)
    return "finished"


@actor(name="fail", retry=AT_ONCE)
async def fail(payload: Work, ctx: JobContext[Work]) -> str:
    """Raise in the first ``times`` attempts."""
    note("start", ctx, payload.key)
    if ctx.attempt <= payload.times:
        raise RuntimeError(f"attempt {ctx.attempt} of {payload.key}")
    return "at last"


@actor(name="backs_off", retry=RetryPolicy(base=timedelta(seconds=1.5), jitter=0, max_attempts=2))
async def backs_off(payload: Work, ctx: JobContext[Work]) -> str:
    """Raise in the first attempt; the second comes 1.5 s later."""
    note("start", ctx, payload.key)
    if ctx.attempt == 1:
        raise RuntimeError("not yet")
    return "at last"


@actor(name="refuses", retry=AT_ONCE, non_retryable_exceptions=(LookupError,))
async def refuses(payload: Work, ctx: JobContext[Work]) -> None:
    """Raise what is never retried."""
    note("start", ctx, payload.key)
    raise KeyError("gone")


@actor(name="snooze", retry=RetryPolicy(max_attempts=1))
async def snooze(payload: Work, ctx: JobContext[Work]) -> int:
    """Put itself off ``times`` times, then return its attempt's number. Each round costs two epochs."""
    note("start", ctx, payload.key)
    if ctx.fence_token <= 2 * payload.times:
        raise Snooze(payload.seconds)
    return ctx.attempt


@actor(name="naps", retry=MANY)
async def naps(payload: Work, ctx: JobContext[Work]) -> None:
    """Put itself off twice for ``seconds``, however often it is interrupted."""
    note("start", ctx, payload.key)
    if ctx.fence_token <= 4:
        raise Snooze(payload.seconds)


@actor(name="retry_after", retry=RetryPolicy(max_attempts=2, base=timedelta(hours=1)))
async def retry_after(payload: Work, ctx: JobContext[Work]) -> int:
    """Ask for a retry in ``seconds`` in the first ``times`` executions, spending an attempt each time."""
    note("start", ctx, payload.key)
    if ctx.fence_token <= 2 * payload.times:
        raise RetryAfter(payload.seconds)
    return ctx.attempt


@actor(name="retry_after_free", retry=RetryPolicy(max_attempts=1))
async def retry_after_free(payload: Work, ctx: JobContext[Work]) -> int:
    """The same, spending nothing."""
    note("start", ctx, payload.key)
    if ctx.fence_token <= 2 * payload.times:
        raise RetryAfter(payload.seconds, consume_budget=False)
    return ctx.attempt


@actor(name="slow", start_to_close=timedelta(seconds=0.2), retry=RetryPolicy(max_attempts=1))
async def slow(payload: Work, ctx: JobContext[Work]) -> None:
    """Take longer than allowed, and say how it ended."""
    note("start", ctx, payload.key)
    try:
        await asyncio.sleep(payload.seconds)
    except asyncio.CancelledError:
        note("cancelled", ctx, payload.key)
        raise
    note("end", ctx, payload.key)


@actor(name="slow_plain", start_to_close=timedelta(seconds=0.2), retry=RetryPolicy(max_attempts=1))
def slow_plain(payload: Work, ctx: JobContext[Work]) -> None:
    """The same on a thread, which nothing can cancel."""
    note("start", ctx, payload.key)
    time.sleep(payload.seconds)
    note("told" if ctx.should_abort() else "end", ctx, payload.key)


@actor(name="tidy", retry=AT_ONCE)
async def tidy(payload: Work, ctx: JobContext[Work]) -> None:
    """Wait; on cancellation clean up and end."""
    note("start", ctx, payload.key)
    try:
        await asyncio.sleep(payload.seconds)
    except asyncio.CancelledError:
        note(f"cancelled {ctx.cancel_origin}", ctx, payload.key)
        raise


@actor(name="listens", retry=AT_ONCE)
async def listens(payload: Work, ctx: JobContext[Work]) -> str:
    """Wait for the cancel event and return at once when it comes."""
    note("start", ctx, payload.key)
    await asyncio.wait_for(ctx.cancel_event.wait(), payload.seconds)
    return str(ctx.cancel_origin)


@actor(name="stubborn", retry=AT_ONCE)
async def stubborn(payload: Work, ctx: JobContext[Work]) -> None:
    """Swallow every cancellation."""
    note("start", ctx, payload.key)
    deadline = time.monotonic() + payload.seconds
    while time.monotonic() < deadline:
        try:
            await asyncio.sleep(deadline - time.monotonic())
        except asyncio.CancelledError:
            note("swallowed", ctx, payload.key)


@actor(name="cancels_everything", retry=AT_ONCE)
async def cancels_everything(payload: Work, ctx: JobContext[Work]) -> None:
    """Cancel every task of the event loop."""
    note("start", ctx, payload.key)
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)


@actor(name="stops_the_loop", retry=AT_ONCE)
async def stops_the_loop(payload: Work, ctx: JobContext[Work]) -> None:
    """Stop the event loop."""
    note("start", ctx, payload.key)
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


@actor(name="leaves_a_thread", retry=AT_ONCE)
async def leaves_a_thread(payload: Work, ctx: JobContext[Work]) -> None:
    """Wait for a thread that nobody can stop."""
    note("start", ctx, payload.key)
    await asyncio.to_thread(time.sleep, payload.seconds)


@actor(name="blocks", retry=MANY)
async def blocks(payload: Work, ctx: JobContext[Work]) -> None:
    """Block the event loop, as an actor must not."""
    note("start", ctx, payload.key)
    time.sleep(payload.seconds)
    note("end", ctx, payload.key)


@actor(name="blocks_when_cancelled", retry=AT_ONCE)
async def blocks_when_cancelled(payload: Work, ctx: JobContext[Work]) -> None:
    """Wait; on cancellation block the event loop."""
    note("start", ctx, payload.key)
    try:
        await asyncio.sleep(payload.seconds)
    except asyncio.CancelledError:
        time.sleep(payload.seconds)
        raise


@actor(name="big", retry=AT_ONCE)
async def big(payload: Work, ctx: JobContext[Work]) -> str:
    """Return ``size`` characters."""
    note("start", ctx, payload.key)
    return "x" * payload.size


@actor(name="nul_message", retry=RetryPolicy(max_attempts=1))
async def nul_message(payload: Work, ctx: JobContext[Work]) -> None:
    """Raise with text that Postgres cannot store."""
    note("start", ctx, payload.key)
    raise RuntimeError("nul \x00 and lone surrogate \ud800")


@actor(name="nul_result", retry=AT_ONCE)
async def nul_result(payload: Work, ctx: JobContext[Work]) -> str:
    """Return text that Postgres cannot store."""
    note("start", ctx, payload.key)
    return "nul \x00"


@actor(name="leaky")
async def leaky(payload: Work, ctx: JobContext[Work]) -> str:
    """Return what an earlier job left in the context variable, and set it."""
    before = _seen.get()
    _seen.set(payload.key)
    await asyncio.sleep(0)
    assert _seen.get() == payload.key
    return before


@actor(name="leaky_plain")
def leaky_plain(payload: Work, ctx: JobContext[Work]) -> str:
    """The same on a thread."""
    before = _seen.get()
    _seen.set(payload.key)
    return before


@actor(name="parent", retry=AT_ONCE)
async def parent(payload: Work, ctx: JobContext[Work]) -> str:
    """Enqueue a child."""
    handle = await ctx.jobs.enqueue(succeed, Work(key=f"child of {payload.key}"))
    return str(handle.job_id)


@actor(name="strict", retry=AT_ONCE)
async def strict(payload: Strict, ctx: JobContext[Strict]) -> int:
    """Return the number."""
    note("start", ctx)
    return payload.number


class Unprintable(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


@actor(name="unprintable", retry=RetryPolicy(max_attempts=1))
async def unprintable(payload: Work) -> None:
    """Raise an error that cannot be turned into text."""
    raise Unprintable


@actor(name="exhausted", retry=RetryPolicy(max_attempts=1))
def exhausted(payload: Work) -> None:
    """Let a StopIteration out of a thread."""
    next(iter(()))


@actor(name="exits", retry=RetryPolicy(max_attempts=1))
async def exits(payload: Work) -> None:
    """Call for the end of the interpreter, as scripts do."""
    raise SystemExit(3)


@actor(name="cancels_itself", retry=RetryPolicy(max_attempts=1))
async def cancels_itself(payload: Work) -> str:
    """Ask for a cancellation that it does not wait for."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return "returned"


@actor(name="reports", retry=AT_ONCE)
async def reports(payload: Work, ctx: JobContext[Work]) -> str:
    """Report ``times`` steps, fail once half-way, and go on from there."""
    note("start", ctx, payload.key)
    done = ctx.progress_state.get("data", {}).get("done", 0)
    for number in range(done, payload.times):
        if number == payload.times // 2 and ctx.attempt == 1:
            raise RuntimeError("half-way")
        await ctx.progress(step=f"step {number}", percent=100 * (number + 1) / payload.times, data={"done": number + 1})
        await asyncio.sleep(payload.seconds)
    return f"from {done}"


@actor(name="reports_plain", retry=AT_ONCE)
def reports_plain(payload: Work, ctx: JobContext[Work]) -> str:
    """Report from a thread."""
    note("start", ctx, payload.key)
    for number in range(payload.times):
        ctx.progress(detail=f"number {number}")
    return "done"


def classify(error: BaseException, attempt: int) -> RetryOverride | None:
    """Say what the payload's key asked for."""
    if str(error) == "broken":
        raise ZeroDivisionError
    answers: dict[str, Any] = {
        "hopeless": RetryOverride(kind="non_retryable"),
        "later": RetryOverride(delay=timedelta(seconds=30)),
        "much later": RetryOverride(delay=timedelta(days=30)),
        "for ever": RetryOverride(kind="indefinite", delay=timedelta(0)),
        "nonsense": 5,
    }
    answer: RetryOverride | None = answers.get(str(error))
    return answer


@actor(
    name="classified",
    retry=RetryPolicy(max_attempts=1),
    non_retryable_exceptions=(KeyError,),
    retry_classifier=classify,
)
async def classified(payload: Work, ctx: JobContext[Work]) -> str:
    """Raise what the classifier has an opinion of; the job's third attempt succeeds."""
    note("start", ctx, payload.key)
    if ctx.attempt == 3:
        return "at last"
    raise KeyError(payload.key) if payload.key == "declared" else RuntimeError(payload.key)


def hooked(name: str, what: str, row: JobRow) -> None:
    """Tell the execution log of a hook."""
    write(name, str(row.id), row.actor, what, row.attempt, row.epoch)


async def on_success(row: JobRow, result: str) -> None:
    """Log the result; misbehave as the payload asks."""
    if row.payload["key"] == "hook hangs":
        write("hanging", str(row.id), row.actor, "", row.attempt, row.epoch)
        await asyncio.sleep(60)
    hooked("on_success", result, row)
    if row.payload["key"] == "hook raises":
        raise RuntimeError("from the hook")


def on_retry_exhausted(row: JobRow, error: BaseException) -> None:
    """Log the error, on a thread."""
    hooked("on_retry_exhausted", f"{type(error).__name__} {error} {threading.current_thread() is not _main}", row)


async def on_cancel(row: JobRow) -> None:
    """Log how it ended."""
    hooked("on_cancel", row.status, row)


_main = threading.main_thread()


@actor(
    name="tells",
    retry=RetryPolicy(max_attempts=2, base=timedelta(0)),
    on_success=on_success,
    on_success_timeout=2.0,
    on_retry_exhausted=on_retry_exhausted,
    on_cancel=on_cancel,
)
async def tells(payload: Work, ctx: JobContext[Work]) -> str:
    """Fail in the first ``times`` attempts; wait; return the key."""
    note("start", ctx, payload.key)
    if ctx.attempt <= payload.times:
        raise LookupError(payload.key)
    await asyncio.sleep(payload.seconds)
    return payload.key


@actor(name="tells_at_length", on_success=on_success, on_success_timeout=60)
async def tells_at_length(payload: Work) -> str:
    """Return the key; its hook may take a minute."""
    return payload.key


actors = [
    tells,
    tells_at_length,
    classified,
    reports,
    reports_plain,
    succeed,
    plain,
    polite,
    fail,
    backs_off,
    refuses,
    snooze,
    naps,
    retry_after,
    retry_after_free,
    slow,
    slow_plain,
    tidy,
    listens,
    stubborn,
    cancels_everything,
    stops_the_loop,
    leaves_a_thread,
    blocks,
    blocks_when_cancelled,
    big,
    nul_message,
    nul_result,
    leaky,
    leaky_plain,
    parent,
    strict,
    unprintable,
    exhausted,
    exits,
    cancels_itself,
]
few = [succeed]
"""A registry that knows one actor."""
