"""Isolated actors for tests, and one that is not."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Annotated
from uuid import UUID, uuid5

from taskqd import (
    EnqueueItem,
    IdempotencyKeyActorMismatchError,
    JobContext,
    ProviderRegistry,
    Registry,
    RetryAfter,
    RetryPolicy,
    Scope,
    Snooze,
    actor,
)
from taskqd.client.rows import JobRow
from tests.apps.basic import AT_ONCE, MANY, Work, hooked, note, succeed, write

ONCE = RetryPolicy(max_attempts=1)
MIB = 1024 * 1024


@actor(name="iso_echo", isolation="process", retry=MANY)
async def echo(payload: Work, ctx: JobContext[Work]) -> str:
    """Wait, then return the key."""
    note("start", ctx, payload.key)
    await asyncio.sleep(payload.seconds)
    ctx.log.info("echoed", key=payload.key)
    return payload.key


@actor(name="iso_plain", isolation="process", retry=MANY)
def plain(payload: Work, ctx: JobContext[Work]) -> str:
    """The same as a plain function."""
    note("start", ctx, payload.key)
    time.sleep(payload.seconds)
    return payload.key


@actor(name="iso_sleeps_in_c", isolation="process", retry=ONCE)
def sleeps_in_c(payload: Work, ctx: JobContext[Work]) -> None:
    """Sleep in C and keep the interpreter lock."""
    note("start", ctx, payload.key)
    ctypes.PyDLL(None).sleep(int(payload.seconds))


@actor(name="iso_blocks", isolation="process", retry=ONCE)
async def blocks(payload: Work, ctx: JobContext[Work]) -> None:
    """Block its own event loop."""
    note("start", ctx, payload.key)
    time.sleep(payload.seconds)


@actor(name="iso_tidy", isolation="process", retry=AT_ONCE)
async def tidy(payload: Work, ctx: JobContext[Work]) -> None:
    """Wait; when cancelled say why, and take ``times`` seconds for that."""
    note("start", ctx, payload.key)
    try:
        await asyncio.sleep(payload.seconds)
    except asyncio.CancelledError:
        await asyncio.sleep(payload.times)
        note(f"cancelled {ctx.cancel_origin}", ctx, payload.key)
        raise


@actor(name="iso_polite", isolation="process", retry=AT_ONCE)
def polite(payload: Work, ctx: JobContext[Work]) -> str:
    """Work until told to stop, and say who said so."""
    note("start", ctx, payload.key)
    while not ctx.should_abort():
        time.sleep(0.01)
    return str(ctx.cancel_origin)


@actor(name="iso_stubborn", isolation="process", retry=AT_ONCE)
def stubborn(payload: Work, ctx: JobContext[Work]) -> None:
    """Ignore SIGTERM and everything else."""
    ctypes.CDLL(None).signal(signal.SIGTERM, 1)
    note("start", ctx, payload.key)
    deadline = time.monotonic() + payload.seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)


def started_by(job_id: UUID, log: str) -> list[int]:
    """Return what the attempts of a job have started so far."""
    with open(log) as file:
        lines = [json.loads(line) for line in file]
    return [
        int(pid)
        for line in lines
        if (line["event"], line["job"]) == ("started", str(job_id))
        for pid in line["key"].split()
    ]


def is_alive(pid: int) -> bool:
    """False for a zombie too."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@actor(name="iso_forks", isolation="process", retry=AT_ONCE)
def forks(payload: Work, ctx: JobContext[Work]) -> str:
    """Start a program, and one in a session of its own that its parent has left; neither answers to TERM."""
    for pid in started_by(ctx.job_id, os.environ["EXECUTION_LOG"]) if ctx.fence_token > 1 else ():
        if is_alive(pid):
            note("alive", ctx, str(pid))
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    own = subprocess.Popen([sys.executable, "-c", sleeper])
    popen = f"subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True, stdout=subprocess.DEVNULL)"
    leaver = [sys.executable, "-c", f"import subprocess, sys; print({popen}.pid)"]
    left = subprocess.run(leaver, stdout=subprocess.PIPE, check=True, start_new_session=True)
    note("started", ctx, f"{own.pid} {int(left.stdout)} {os.getpid()}")
    note("start", ctx, payload.key)
    if payload.key == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(payload.seconds)
    return payload.key


@actor(name="iso_eats", isolation="process", memory_limit=96 * MIB, retry=ONCE)
def eats(payload: Work, ctx: JobContext[Work]) -> int:
    """Hold ``size`` MiB, itself or in a program that it starts, for ``seconds``."""
    note("start", ctx, payload.key)
    if payload.key == "program":
        code = f"import time; held = bytearray(b'x') * ({payload.size} << 20); time.sleep({payload.seconds})"
        return subprocess.run([sys.executable, "-c", code], check=False).returncode
    held = bytearray(b"x") * (payload.size * MIB)
    time.sleep(payload.seconds)
    return len(held)


@actor(name="iso_segfaults", isolation="process", retry=RetryPolicy(max_attempts=2, base=timedelta(0)))
async def segfaults(payload: Work, ctx: JobContext[Work]) -> str:
    """Read what is not there, in the first attempt."""
    note("start", ctx, payload.key)
    if ctx.attempt <= payload.times:
        ctypes.string_at(0)
    return "alive"


def on_retry_exhausted(row: JobRow, error: BaseException) -> None:
    """Log the error."""
    hooked("on_retry_exhausted", f"{type(error).__name__}: {error}", row)


def on_success(row: JobRow, result: str) -> None:
    """Log the result."""
    hooked("on_success", result, row)


@actor(
    name="iso_exits",
    isolation="process",
    retry=ONCE,
    on_retry_exhausted=on_retry_exhausted,
    on_success=on_success,
)
async def exits(payload: Work, ctx: JobContext[Work]) -> str:
    """End the process, unless it is to return."""
    note("start", ctx, payload.key)
    if payload.times:
        os._exit(payload.times)
    return payload.key


@actor(name="iso_garbage", isolation="process", retry=ONCE)
def garbage(payload: Work, ctx: JobContext[Work]) -> None:
    """Write what is no message to every socket that there is."""
    note("start", ctx, payload.key)
    text = {"length": b"\xff" * 8, "json": b"\0\0\0\3{{{", "op": b"\0\0\0\x0d" + b'{"op":"what"}', "shape": _SHAPE}
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                copy.sendall(text[payload.key])
        except OSError:
            continue
    time.sleep(60)


_BODY = b'{"op":"outcome","kind":"Failed","error_class":"X","message":"y","retry_kind":"often"}'
_SHAPE = len(_BODY).to_bytes(4, "big") + _BODY


@actor(name="iso_fails", isolation="process", retry=AT_ONCE, non_retryable_exceptions=(KeyError,))
async def fails(payload: Work, ctx: JobContext[Work]) -> str:
    """Raise what the key says."""
    note("start", ctx, payload.key)
    if ctx.attempt > 1:
        return "recovered"
    raise {
        "runtime": RuntimeError("first attempt"),
        "key": KeyError("not again"),
        "snooze": Snooze(3600),
        "retry": RetryAfter(3600),
    }[payload.key]


@actor(name="iso_large", isolation="process", retry=ONCE)
async def large(payload: Work) -> str:
    """Return ``size`` characters."""
    return "x" * payload.size


@actor(name="iso_parent", isolation="process", retry=AT_ONCE)
async def parent(payload: Work, ctx: JobContext[Work]) -> list[int]:
    """Enqueue a child, a batch, and many children at once; return how many jobs the batch counts."""
    handle = await ctx.jobs.enqueue(succeed, Work(key="child"), idempotency_key=f"child of {ctx.job_id}")
    again = await ctx.jobs.enqueue(succeed, Work(key="child"), idempotency_key=f"child of {ctx.job_id}")
    assert again.job_id == handle.job_id
    batch = uuid5(ctx.job_id, "batch")
    await ctx.jobs.enqueue_batch(
        [EnqueueItem(actor_ref=succeed, payload=Work(key=str(n))) for n in range(5)], batch_id=batch
    )
    handles = await asyncio.gather(*(ctx.jobs.enqueue(succeed, Work(key=f"g{n}")) for n in range(10)))
    copied = [EnqueueItem(actor_ref=succeed, payload=Work(key=f"copied\t{n} ü")) for n in range(3)]
    assert await ctx.jobs.enqueue_batch_fast(copied) == 3
    try:
        await ctx.jobs.enqueue(echo, Work(), idempotency_key=f"child of {ctx.job_id}")
    except IdempotencyKeyActorMismatchError:
        pass
    else:
        raise AssertionError("the key is another actor's")
    assert await handle.wait(20) == "child"
    return [sum((await ctx.jobs.batch_counts(batch)).values()), len(handles)]


@actor(name="iso_reports", isolation="process", retry=AT_ONCE)
async def reports(payload: Work, ctx: JobContext[Work]) -> str:
    """Report ``times`` steps, die half-way in the first attempt, go on from there."""
    note("start", ctx, payload.key)
    done = ctx.progress_state.get("data", {}).get("done", 0)
    for number in range(done, payload.times):
        await ctx.progress(step=f"step {number}", data={"done": number + 1})
        if number == payload.times // 2 and ctx.attempt == 1:
            await asyncio.sleep(2.0)
            os._exit(1)
    return f"from {done}"


@actor(name="iso_none")
async def not_isolated(payload: Work, ctx: JobContext[Work]) -> str:
    """Run a program from inside the worker, with the event loop's own means and with the library's."""
    note("start", ctx, payload.key)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(7)")
    code = await process.wait()
    return (
        f"{code} {subprocess.run([sys.executable, '-c', 'raise SystemExit(8)'], check=False).returncode} {os.getpid()}"
    )


class Tally:
    """Something that an actor depends on, and that tells of its end."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def close(self) -> None:
        write("closed", "", "", "", 0, 0)


class Broken:
    """What cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no such thing")


@actor(name="iso_depends", isolation="process", retry=ONCE)
async def depends(payload: Work, ctx: JobContext[Work], *, tally: Annotated[Tally, Scope.LOOP]) -> bool:
    """Tell whether what it depends on was made in its own process."""
    note("start", ctx, payload.key)
    return tally.pid == os.getpid()


@actor(name="iso_depends_plain", isolation="process", retry=ONCE)
def depends_plain(payload: Work, *, tally: Tally) -> bool:
    """The same as a plain function."""
    return tally.pid == os.getpid()


@actor(name="iso_broken", isolation="process", retry=ONCE)
async def depends_on_nothing_that_works(payload: Work, *, broken: Annotated[Broken, Scope.LOOP]) -> None:
    """Never called."""


providers = ProviderRegistry()
providers.register_class(Tally, Scope.TRANSIENT)
providers.register_class(Broken, Scope.LOOP)

_ALL = [
    echo,
    plain,
    sleeps_in_c,
    blocks,
    tidy,
    polite,
    stubborn,
    forks,
    eats,
    segfaults,
    exits,
    garbage,
    fails,
    large,
    parent,
    reports,
    not_isolated,
    succeed,
    depends,
    depends_plain,
    depends_on_nothing_that_works,
]
actors = Registry(_ALL, providers=providers)
