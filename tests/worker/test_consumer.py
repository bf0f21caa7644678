"""Consumers: what an actor does becomes an outcome, and never the end of its consumer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from taskqd.domain.ids import new_uuid
from taskqd.domain.signals import CancelOrigin
from taskqd.worker.attempt import Attempt
from taskqd.worker.consumer import Consumers
from taskqd.worker.outcome import Failed, Outcome, Released, Snoozed, Succeeded
from taskqd.worker.progress import ProgressWriter
from taskqd.worker.slots import Slots
from tests.support import eventually
from tests.worker.attempts import make_attempt


class Collector:
    """Takes outcomes in place of a completer."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def submit(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


class Harness:
    """Two consumers."""

    def __init__(self, *, default_start_to_close: float | None = None) -> None:
        self.collector = Collector()
        self.slots = Slots(2, lambda: None)
        nothing: Any = None
        completer: Any = self.collector
        self.consumers = Consumers(
            self.slots,
            completer,
            ProgressWriter(
                nothing, "s", interval=1, size_limit=1000, command_timeout=1, on_failure=lambda *failure: None
            ),
            nothing,
            worker_id=new_uuid(),
            default_start_to_close=default_start_to_close,
            cleanup_grace=0.2,
            result_max_bytes=1000,
            message_max_chars=200,
            max_backoff=60,
        )

    async def run(self, *attempts: Attempt) -> list[Outcome]:
        """Run attempts one after the other and return their outcomes."""
        for attempt in attempts:
            done = self.slots.done
            self.slots.put([attempt])
            await eventually(lambda before=done: self.slots.done > before)
        return self.collector.outcomes

    async def one(self, actor: str, payload: str = "{}", **fields: Any) -> Any:
        (outcome,) = await self.run(make_attempt(actor, payload, **fields))
        assert self.consumers.crashed == []
        return outcome


@pytest.fixture(autouse=True)
def execution_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXECUTION_LOG", str(tmp_path / "executions"))


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    harness.consumers.start()
    yield harness
    await stop(harness)


async def stop(harness: Harness) -> None:
    harness.slots.close()
    harness.consumers.cancel()
    assert await harness.consumers.wait_ended(10)


# -- outcomes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("actor", ["succeed", "plain"])
async def test_what_an_actor_returns_is_a_success(harness: Harness, actor: str) -> None:
    outcome = await harness.one(actor, '{"key": "a", "seconds": 0.05}')
    assert isinstance(outcome, Succeeded)
    assert 0.04 < outcome.seconds < 1
    assert outcome.result is not None


async def test_what_it_raises_is_a_failure_with_its_own_traceback(harness: Harness) -> None:
    outcome = await harness.one("fail", '{"key": "a", "times": 1}')
    assert isinstance(outcome, Failed)
    assert (outcome.error_class, outcome.message, outcome.retry_kind) == ("RuntimeError", "attempt 1 of a", None)
    assert outcome.traceback is not None
    assert "in fail" in outcome.traceback
    assert "/taskqd/worker/" not in outcome.traceback


async def test_a_declared_class_and_its_subclasses_are_not_retried(harness: Harness) -> None:
    outcome = await harness.one("refuses")
    assert (outcome.error_class, outcome.retry_kind) == ("KeyError", "non_retryable")


@pytest.mark.parametrize(
    ("key", "kind", "delay"),
    [
        ("hopeless", "non_retryable", None),
        ("later", None, 30),
        ("much later", None, 60),
        ("for ever", "indefinite", 0),
        ("no opinion", None, None),
        ("nonsense", None, None),
        ("broken", None, None),
    ],
)
async def test_an_actors_classifier_comes_before_its_policy(
    harness: Harness, key: str, kind: str | None, delay: float | None
) -> None:
    outcome = await harness.one("classified", json.dumps({"key": key}))
    assert (outcome.error_class, outcome.retry_kind, outcome.delay) == ("RuntimeError", kind, delay)


async def test_a_declared_class_comes_before_the_classifier(harness: Harness) -> None:
    outcome = await harness.one("classified", '{"key": "declared"}')
    assert (outcome.error_class, outcome.retry_kind) == ("KeyError", "non_retryable")


@pytest.mark.parametrize(
    ("actor", "kind", "delay"),
    [("snooze", Snoozed, 7), ("retry_after_free", Snoozed, 7), ("retry_after", Failed, 7)],
)
async def test_an_actor_may_say_when_instead(harness: Harness, actor: str, kind: type, delay: float) -> None:
    outcome = await harness.one(actor, '{"seconds": 7, "times": 1}')
    assert type(outcome) is kind
    assert outcome.delay == delay


async def test_a_request_to_retry_names_what_becomes_of_the_last_attempt(harness: Harness) -> None:
    outcome = await harness.one("retry_after", '{"seconds": 7, "times": 1}')
    assert (outcome.retry_kind, outcome.exhausted_class) == (None, "MaxAttemptsExceeded")


async def test_a_payload_that_does_not_fit_fails_without_a_retry_and_without_its_values(harness: Harness) -> None:
    outcome = await harness.one("strict", '{"number": "hunter2"}')
    assert (outcome.error_class, outcome.retry_kind) == ("PayloadValidationError", "non_retryable")
    assert "number" in outcome.message
    assert "hunter2" not in outcome.message + (outcome.traceback or "")


async def test_a_result_that_is_too_large_is_not_retried(harness: Harness) -> None:
    outcome = await harness.one("big", '{"size": 1000}')
    assert (outcome.error_class, outcome.retry_kind) == ("ResultTooLarge", "non_retryable")
    assert "1002 bytes, the limit is 1000" in outcome.message


async def test_text_that_cannot_be_stored_is_escaped(harness: Harness) -> None:
    outcome = await harness.one("nul_message")
    assert outcome.message == "nul \\x00 and lone surrogate \\ud800"
    assert "\x00" not in outcome.traceback
    outcome.traceback.encode()


async def test_a_long_message_is_cut(harness: Harness) -> None:
    outcome = await harness.one("fail", f'{{"key": "{"k" * 5000}", "times": 1}}')
    assert len(outcome.message) == 201


# -- actors that misbehave --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actor", "error_class"), [("unprintable", "Unprintable"), ("exhausted", "StopIteration"), ("exits", "SystemExit")]
)
async def test_no_exception_is_too_odd_to_be_a_failure(harness: Harness, actor: str, error_class: str) -> None:
    outcome = await harness.one(actor)
    assert isinstance(outcome, Failed)
    assert outcome.error_class == error_class
    later = await harness.run(*(make_attempt("succeed") for _ in range(4)))
    assert [type(one) for one in later[1:]] == [Succeeded] * 4


async def test_a_cancellation_that_an_actor_leaves_behind_hits_nobody_else(harness: Harness) -> None:
    attempts = [make_attempt("cancels_itself") for _ in range(4)] + [make_attempt("succeed") for _ in range(4)]
    outcomes = await harness.run(*attempts)
    assert harness.consumers.crashed == []
    assert [type(outcome) for outcome in outcomes] == [Succeeded] * 8


@pytest.mark.parametrize("actor", ["leaky", "leaky_plain"])
async def test_a_context_variable_set_by_one_job_is_not_seen_by_the_next(harness: Harness, actor: str) -> None:
    outcomes = await harness.run(*(make_attempt(actor, f'{{"key": "k{n}"}}') for n in range(10)))
    assert [outcome.result for outcome in outcomes if isinstance(outcome, Succeeded)] == ['""'] * 10


# -- limits of one attempt --------------------------------------------------------------------------


async def test_an_attempt_that_takes_too_long_is_cancelled(harness: Harness) -> None:
    began = time.monotonic()
    outcome = await harness.one("slow", '{"seconds": 30}')
    assert time.monotonic() - began < 5
    assert (outcome.error_class, outcome.message, outcome.retry_kind) == ("TimeoutError", "start_to_close", None)


async def test_the_jobs_own_limit_comes_before_the_actors(harness: Harness) -> None:
    outcome = await harness.one("slow", '{"seconds": 0.5}', start_to_close=30.0)
    assert isinstance(outcome, Succeeded)


async def test_the_workers_default_holds_where_nothing_else_does() -> None:
    harness = Harness(default_start_to_close=0.1)
    harness.consumers.start()
    outcome = await harness.one("succeed", '{"seconds": 30}')
    assert outcome.message == "start_to_close"
    await stop(harness)


async def test_a_thread_past_its_limit_is_recorded_at_once_and_keeps_its_slot(harness: Harness) -> None:
    attempt = make_attempt("slow_plain", '{"seconds": 1.0}')
    harness.slots.put([attempt])
    await eventually(lambda: harness.collector.outcomes)
    (outcome,) = harness.collector.outcomes
    assert isinstance(outcome, Failed)
    assert (outcome.message, outcome.seconds) == ("start_to_close", 0.2)
    assert harness.slots.busy == 1
    assert harness.consumers.running == [attempt]
    assert attempt.cancellation.origin is CancelOrigin.TIMEOUT
    await eventually(lambda: harness.slots.busy == 0)
    assert harness.collector.outcomes == [outcome], "what the thread returns later is not an outcome"


async def test_an_actor_that_ignores_its_cancellation_is_recorded_and_keeps_its_slot(harness: Harness) -> None:
    attempt = make_attempt("stubborn", '{"key": "a", "seconds": 1.5}', start_to_close=0.1)
    harness.slots.put([attempt])
    await eventually(lambda: harness.collector.outcomes)
    (outcome,) = harness.collector.outcomes
    assert (outcome.error_class, outcome.message, outcome.retry_kind) == ("TimeoutError", "start_to_close", None)
    assert harness.slots.busy == 1
    assert harness.consumers.running == [attempt]
    assert attempt.cancellation.origin is CancelOrigin.TIMEOUT
    await eventually(lambda: harness.slots.busy == 0)
    assert harness.collector.outcomes == [outcome], "what it returns later is not an outcome"


async def test_plain_functions_run_on_as_many_threads_as_there_are_slots(harness: Harness) -> None:
    harness.slots.put([make_attempt("plain", '{"seconds": 0.2}') for _ in range(4)])
    await eventually(lambda: harness.slots.done == 4)
    names = {outcome.result for outcome in harness.collector.outcomes if isinstance(outcome, Succeeded)}
    assert len(names) == 2
    assert all("taskqd-actor" in (name or "") for name in names)


# -- stopping ---------------------------------------------------------------------------------------


async def test_a_handler_hears_of_the_stop_and_what_it_returns_is_recorded(harness: Harness) -> None:
    harness.slots.put([make_attempt("listens", '{"seconds": 30}')])
    await eventually(lambda: harness.consumers.running)
    harness.consumers.request_stop(CancelOrigin.SHUTDOWN)
    await eventually(lambda: harness.collector.outcomes)
    (outcome,) = harness.collector.outcomes
    assert isinstance(outcome, Succeeded)
    assert outcome.result == '"shutdown"'


async def test_a_thread_hears_of_it_too_and_is_an_interrupt(harness: Harness) -> None:
    harness.slots.put([make_attempt("polite", '{"seconds": 30}')])
    await eventually(lambda: harness.consumers.running)
    harness.consumers.request_stop(CancelOrigin.SHUTDOWN)
    await eventually(lambda: harness.collector.outcomes)
    assert isinstance(harness.collector.outcomes[0], Released)


async def test_a_cancelled_handler_is_an_interrupt_when_the_worker_stops(harness: Harness) -> None:
    harness.slots.put([make_attempt("tidy", '{"seconds": 30}')])
    await eventually(lambda: harness.consumers.running)
    harness.consumers.request_stop(CancelOrigin.SHUTDOWN)
    harness.consumers.cancel()
    await eventually(lambda: harness.collector.outcomes)
    (outcome,) = harness.collector.outcomes
    assert isinstance(outcome, Released)
    assert (outcome.cause, outcome.seconds is not None) == ("worker_shutdown", True)


async def test_a_cancel_names_its_attempt(harness: Harness) -> None:
    one, other = (make_attempt("tidy", '{"seconds": 30}') for _ in range(2))
    harness.slots.put([one, other])
    await eventually(lambda: len(harness.consumers.running) == 2)
    one.cancellation.request(CancelOrigin.SHUTDOWN)
    harness.consumers.cancel(one)
    await eventually(lambda: harness.collector.outcomes)
    assert [outcome.attempt for outcome in harness.collector.outcomes] == [one]
    assert harness.consumers.running == [other]
    harness.consumers.cancel(one)  # it is gone: this hits nobody
    await asyncio.sleep(0.05)
    assert harness.consumers.running == [other]


async def test_a_cancelled_consumer_takes_the_next_attempt_unharmed(harness: Harness) -> None:
    for _ in range(4):
        attempt = make_attempt("tidy", '{"seconds": 30}')
        harness.slots.put([attempt])
        await eventually(lambda: harness.consumers.running)
        attempt.cancellation.request(CancelOrigin.SHUTDOWN)
        harness.consumers.cancel(attempt)
        await eventually(lambda: not harness.consumers.running)
    outcomes = await harness.run(make_attempt("slow", '{"seconds": 30}'), make_attempt("succeed"))
    assert isinstance(outcomes[-2], Failed), "its own time limit still tells its own cancellation from ours"
    assert isinstance(outcomes[-1], Succeeded)


async def test_an_attempt_that_lost_its_lease_has_no_outcome(harness: Harness) -> None:
    attempt = make_attempt("tidy", '{"seconds": 30}')
    harness.slots.put([attempt])
    await eventually(lambda: harness.consumers.running)
    attempt.cancellation.request(CancelOrigin.LEASE_LOST)
    harness.consumers.cancel(attempt)
    await eventually(lambda: harness.slots.busy == 0)
    assert harness.collector.outcomes == []


async def test_consumers_end_when_the_slots_close(harness: Harness) -> None:
    harness.slots.put([make_attempt("succeed", '{"seconds": 0.2}')])
    await eventually(lambda: harness.consumers.running)
    harness.slots.close()
    assert not await harness.consumers.wait_ended(0.0)
    assert await harness.consumers.wait_ended(10)
    assert len(harness.collector.outcomes) == 1


# -- back-pressure ----------------------------------------------------------------------------------


async def test_while_outcomes_pile_up_only_what_is_limited_begins(harness: Harness) -> None:
    plain, limited, later = (make_attempt("succeed") for _ in range(3))
    harness.slots.hold(True, False)
    assert harness.slots.room() == 0, "claiming more would only pile up rows"
    harness.slots.put([plain])
    harness.slots.put([limited], first=True)
    await eventually(lambda: [one.attempt for one in harness.collector.outcomes] == [limited])
    harness.slots.hold(False, True)
    harness.slots.put([later], first=True)
    assert harness.slots.room() == 0
    await asyncio.sleep(0)
    assert harness.slots.waiting == 2
    harness.slots.hold(False, False)
    await eventually(lambda: [one.attempt for one in harness.collector.outcomes] == [limited, later, plain])
    assert harness.slots.room() > 0


async def test_the_loop_gets_its_turn_between_handlers_that_never_wait(harness: Harness) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.ensure_future(count())
    harness.slots.put([make_attempt("leaky") for _ in range(300)])
    await eventually(lambda: harness.slots.done == 300)
    counter.cancel()
    assert turns >= 3
