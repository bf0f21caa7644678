"""An application's error reporter is told of each job that has failed for good, and can do no harm."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from taskqd import ErrorReporter, JobFailed, ProviderRegistry, RecordedError, Registry, Scope, ScopeViolation, TaskQ
from taskqd.worker import report, reporter
from tests.apps import basic
from tests.apps.basic import Work
from tests.fleet import Fleet
from tests.support import eventually
from tests.worker.running import running

WAIT = 60


class Collecting:
    """Keeps what it is told, and then does ``what``."""

    def __init__(self, what: str = "") -> None:
        self.what = what
        self.told: list[tuple[Any, BaseException]] = []

    async def report(self, job: Any, exception: BaseException) -> None:
        self.told.append((job, exception))
        if self.what == "raises":
            raise OSError("nobody listens")
        if self.what == "hangs":
            await asyncio.sleep(600)


@pytest.fixture(autouse=True)
def here(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXECUTION_LOG", fleet.env["EXECUTION_LOG"])


def registry(told: Collecting, scope: Scope = Scope.PROCESS) -> Registry:
    providers = ProviderRegistry()
    providers.register_value(ErrorReporter, scope, told)
    return Registry(basic.actors, providers=providers)


async def test_a_failure_for_good_is_told_once_with_its_row_and_its_error(dsn: str, schema: str, tq: TaskQ) -> None:
    told = Collecting()
    async with running(registry(told), dsn, schema):
        handle = await tq.enqueue(basic.fail, Work(key="a", times=9))
        await (await tq.enqueue(basic.succeed, Work(key="b"))).wait(WAIT)
        with pytest.raises(JobFailed):
            await handle.wait(WAIT)
        await eventually(lambda: told.told, WAIT)
    ((row, error),) = told.told
    assert (row.id, row.status, row.attempt) == (handle.job_id, "failed", 3)
    assert (type(error), str(error)) == (RuntimeError, "attempt 3 of a")


async def test_an_end_without_an_exception_is_told_as_it_is_recorded(dsn: str, schema: str, tq: TaskQ) -> None:
    told = Collecting()
    async with running(registry(told), dsn, schema):
        await tq.enqueue(basic.backs_off, Work(), schedule_to_close=timedelta(seconds=0.5))
        await eventually(lambda: told.told, WAIT)
    ((row, error),) = told.told
    assert row.error_class == "DeadlineExceeded"
    assert not isinstance(error, RecordedError)  # the attempt had one of its own


@pytest.mark.parametrize("what", ["raises", "hangs"])
async def test_a_reporter_that_fails_is_counted_and_holds_nothing_up(
    dsn: str, schema: str, tq: TaskQ, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(reporter, "TIMEOUT", 0.5)
    told = Collecting(what)
    async with running(registry(told, Scope.LOOP), dsn, schema) as engine:
        await tq.enqueue(basic.fail, Work(key="a", times=9))
        await eventually(lambda: engine.reports.failures, WAIT)
        assert len(told.told) == 1
        await (await tq.enqueue(basic.succeed, Work(key="b"))).wait(WAIT)
        assert 'taskq_error_reporter_failures_total{reporter_type="Collecting"} 1' in report.metrics(engine)


async def test_a_stop_tells_what_waits(dsn: str, schema: str, tq: TaskQ) -> None:
    told = Collecting()
    async with running(registry(told), dsn, schema) as engine:
        handles = [await tq.enqueue(basic.fail, Work(key=str(n), times=9)) for n in range(12)]
        await eventually(lambda: engine.completer.failed == len(handles), WAIT)
    assert {row.id for row, _ in told.told} == {handle.job_id for handle in handles}


def test_its_scope_is_that_of_a_worker() -> None:
    with pytest.raises(ScopeViolation, match="an ErrorReporter lives as long as its worker"):
        registry(Collecting(), Scope.TRANSIENT).validate()
