"""Asking a preflight child that answers, lies, hangs or dies."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import psutil
import pytest

from taskqd.domain.exit_codes import ExitCode
from taskqd.supervisor import consult as module
from taskqd.supervisor.consult import PreflightError, consult_alone
from taskqd.supervisor.plan import ChildSpec, Plan
from taskqd.supervisor.recycle import RecycleLimits
from taskqd.supervisor.stopping import Graces

PLAN = Plan(
    group="g",
    children=(
        ChildSpec(
            "io",
            "worker",
            ("worker", "--actors", "a:b"),
            2,
            settings={"x": 1},
            graces=Graces(1, 2),
            queues=("mail", "io"),
            recycle=RecycleLimits(max_jobs=5),
        ),
    ),
    budget={"required": 3},
)
TALK = """
import json, os, socket, sys, time
link = socket.socket(fileno=int(os.environ["TASKQD_CONTROL_FD"]))
def say(**message):
    link.sendall(json.dumps(message).encode() + b"\\n")
"""


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the preflight child run the first argument as its program."""

    def command(arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", TALK + arguments[0]]

    monkeypatch.setattr(module, "preflight_command", command)


async def refusal(program: str) -> PreflightError:
    with pytest.raises(PreflightError) as caught:
        await consult_alone([program])
    assert not psutil.Process(os.getpid()).children()
    return caught.value


async def test_a_plan_comes_back_as_it_was_sent(answer: None) -> None:
    program = f"say(op='warning', text='look'); say(op='plan', plan={PLAN.to_json()!r})"
    plan, warnings = await consult_alone([program])
    assert plan == PLAN
    assert warnings == ["look"]


async def test_an_answer_counts_even_when_the_child_does_not_end(answer: None) -> None:
    program = f"say(op='plan', plan={PLAN.to_json()!r}); time.sleep(1000)"
    began = time.monotonic()
    plan, _ = await consult_alone([program])
    assert plan == PLAN
    assert time.monotonic() - began < 20


async def test_a_refusal_keeps_its_message_and_its_code(answer: None) -> None:
    error = await refusal("say(op='error', message='no such file', exit_code=78)")
    assert (str(error), error.exit_code) == ("no such file", ExitCode.REFUSED)


async def test_a_step_that_takes_too_long_is_ended(answer: None) -> None:
    error = await refusal("say(op='step', text='importing x', within=0.3, silence=78); time.sleep(1000)")
    assert str(error) == "the check before the start took too long and was ended while importing x"
    assert error.exit_code == ExitCode.REFUSED


async def test_a_child_that_dies_without_an_answer(answer: None) -> None:
    error = await refusal("os._exit(9)")
    assert str(error) == "the check before the start ended without an answer while starting: exit code 9"
    assert error.exit_code == ExitCode.INTERNAL


async def test_garbage_is_no_answer(answer: None) -> None:
    error = await refusal("link.sendall(b'hello\\n'); time.sleep(1000)")
    assert "its link broke: not a message: b'hello'" in str(error)


async def test_a_program_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "preflight_command", lambda arguments: ["/nonexistent"])
    error = await refusal("")
    assert error.exit_code == ExitCode.TRY_AGAIN
    assert "No such file" in str(error)
