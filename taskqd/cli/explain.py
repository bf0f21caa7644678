"""``taskqd explain exit CODE``: what the end of a process says."""

from __future__ import annotations

import ast
import inspect
import signal
from enum import Enum

import click

from taskqd.domain.exit_codes import ExitCode
from taskqd.domain.names import nearest
from taskqd.supervisor.exits import Exit, ExitClass, classify, signal_name

_FOLLOWS = {
    ExitClass.CLEAN: "A supervisor starts it again: nobody had asked it to end.",
    ExitClass.PERMANENT: "A supervisor gives it up at once: a restart would meet the same configuration.",
    ExitClass.ENVIRONMENT: "A supervisor starts it again with a growing delay, and never calls it degraded for this.",
    ExitClass.RECYCLE: "A supervisor starts it again: at once when it had been ready, with a growing delay when not.",
    ExitClass.INTERNAL: "A supervisor starts it again; the stacks that the watchdog printed are in its log.",
    ExitClass.OOM: "A supervisor starts it again. Give the group more memory, or lower max_concurrency or "
    "[workers.recycle] max_private_mb.",
    ExitClass.HUNG: "A supervisor starts it again; the stacks are in the events 'stacks' and 'child-exit'.",
    ExitClass.CRASH: "A supervisor starts it again: at once after a stable run, else with a growing delay.",
}
_OURS = {
    signal.SIGABRT: "The supervisor sends it to a process that hangs, so that it shows its stacks before it ends.",
    signal.SIGKILL: "The supervisor sends it when a deadline has passed, and the kernel when memory runs out: the "
    "event 'child-exit' says which; its class is hung for the one, and oom for the other, where the control group has "
    "counted a kill for want of memory. It is also how a process ends whose supervisor has gone.",
    signal.SIGTERM: "A request to end that came while the process could not handle it: before it was up, or after it "
    "had stopped.",
}


@click.group()
def command() -> None:
    """Explain what taskqd says."""


@command.command(context_settings={"ignore_unknown_options": True})
@click.argument("code", metavar="CODE")
def exit(code: str) -> int:
    """Explain an exit code: a number as in the log (negative for a signal), as a shell shows it (137), or SIGKILL."""
    click.echo(explain_exit(read_code(code)))
    return 0


def read_code(text: str) -> int:
    """Return the exit code that ``text`` means, negative for a signal. Raises ``click.UsageError``."""
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    if name in signal.Signals.__members__:
        return -signal.Signals[name]
    try:
        number = int(text)
    except ValueError:
        hint = nearest(name, list(signal.Signals.__members__))
        wanted = "write a number from -64 to 255, or a signal's name"
        raise click.UsageError(f"{text!r} is no exit code: {wanted}{hint}") from None
    if not -64 <= number <= 255:
        raise click.UsageError(f"{number} is no exit code: it must be from -64 to 255")
    return number


def explain_exit(code: int) -> str:
    """Return the meaning of an exit code in a few lines."""
    if code > 128 and code - 128 in set(signal.Signals):
        code = 128 - code  # as shells show a signal
    end = classify(code)
    if code < 0:
        lines = [f"{signal_name(-code)} ({code}; a shell shows {128 - code}): the process was ended by this signal."]
        lines += [_OURS[signal.Signals(-code)]] if -code in set(_OURS) else []
    elif code in set(ExitCode):
        lines = [f"{code} {ExitCode(code).name}: {meanings(ExitCode)[ExitCode(code).name]}"]
    else:
        lines = [f"{code}: no exit code of taskqd; the program or the interpreter itself ended with it."]
    return "\n".join([*lines, _what_follows(end)])


def _what_follows(end: Exit) -> str:
    return f"As the end of a group's process its class is {end.kind}. {_FOLLOWS[end.kind]}"


def meanings(of: type[Enum]) -> dict[str, str]:
    """Return what is written below each member of an enumeration: the one place where it is explained."""
    body = ast.parse(inspect.getsource(of)).body[0]
    assert isinstance(body, ast.ClassDef)  # noqa: S101 - it is the source of a class
    found: dict[str, str] = {}
    for member, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(member, ast.Assign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            name = member.targets[0]
            assert isinstance(name, ast.Name)  # noqa: S101 - members of an enumeration are plain names
            found[name.id] = str(text.value.value)
    return found
