"""Takes one guard after the other out of the SQL and runs the test that must notice: ``scripts/mutate``.

One pytest session and one server for all: the SQL is changed as it is read, before each test makes its schema. Waits
for locks are short there, so that a statement that waits where it should pass by fails at once.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import asyncpg
import pytest
from _pytest.runner import runtestprotocol

from taskqd.storage import migrate, statements
from tests.mutation.guards import Guard, read
from tests.postgres import Server

SETTINGS = {"lock_timeout": "'1s'", "statement_timeout": "'20s'", "fsync": "off"}
TEST_SECONDS = 60
FENCES = "--fences"
"""Only the guards that keep a job from being run, or written for, by two; their tests are taken for sound."""
FENCE = re.compile(r"epoch|lock_expires_at|skip locked|status = |cap\b|held_gates = null|dead_at")


def mutated(text: str, guard: Guard) -> str:
    """Return the text of an SQL file without the guard; a file that does not hold the guard's block as it is."""
    start = text.find(guard.head)
    if start < 0:
        return text
    end = text.find(guard.tail, start + len(guard.head))
    block = text[start:] if end < 0 else text[start:end]
    if block.count(guard.text) != 1:
        raise ValueError(f"{guard}: {guard.text!r} stands {block.count(guard.text)} times in {guard.block}")
    return text[:start] + block.replace(guard.text, guard.instead) + text[start + len(block) :]


@contextmanager
def applied(guard: Guard) -> Iterator[None]:
    """Let statements and migrations be read without the guard."""
    original = statements.render

    def render(text: str, schema: str) -> str:
        return original(mutated(text, guard), schema)

    patch = pytest.MonkeyPatch()
    statements.load.cache_clear()
    patch.setattr(statements, "render", render)
    patch.setattr(migrate, "render", render)
    try:
        yield
    finally:
        patch.undo()
        statements.load.cache_clear()


class Run:
    """A plugin that runs the tests of each guard instead of all tests, with the guard and without it."""

    def __init__(self, guards: Sequence[Guard], *, are_sound: bool) -> None:
        self.guards = guards
        self.are_sound = are_sound
        self.survivors: list[Guard] = []
        self.problems: list[str] = []
        self._error: BaseException | None = None

    @pytest.fixture(scope="session", autouse=True)
    def impatient(self, server: Server) -> None:
        """A server whose sessions do not wait long, and that need not survive a power cut."""

        async def configure() -> None:
            conn = await asyncpg.connect(server.dsn(), timeout=30)
            for name, value in SETTINGS.items():
                await conn.execute(f"alter system set {name} = {value}")
            await conn.execute("select pg_reload_conf()")
            await conn.close(timeout=10)

        asyncio.run(configure())

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Remember what a test failed with."""
        if call.excinfo is not None and self._error is None:
            self._error = call.excinfo.value

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run each guard's test as it is, then without the guard."""
        items = {item.nodeid: item for item in session.items}
        sound: dict[str, bool] = {}
        for guard in self.guards:
            item = items.get(guard.test)
            if item is None:
                self.problems.append(f"{guard}: there is no test {guard.test}")
                continue
            if guard.test not in sound:
                sound[guard.test] = self.are_sound or self._outcome(item, session) == "passed"
                if not sound[guard.test]:
                    self.problems.append(f"{guard.test} fails with every guard in place: {self._error!r}")
            if not sound[guard.test]:
                continue
            begun = time.monotonic()
            with applied(guard):
                outcome = self._outcome(item, session)
            took = time.monotonic() - begun
            print(f"{outcome:8} {took:5.2f}s {guard}", flush=True)
            if outcome == "passed":
                self.survivors.append(guard)
            elif outcome == "broken":
                self.problems.append(f"{guard}: what remains is no SQL: {self._error!r}")
        return True

    def _outcome(self, item: pytest.Item, session: pytest.Session) -> str:
        """Run a test once: passed, failed, or broken when it did not come to fail by itself."""
        item._initrequest()  # type: ignore[attr-defined]  # as every plugin that runs a test again
        self._error = None
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(TEST_SECONDS)
        try:
            reports = runtestprotocol(item, log=False, nextitem=session)
        finally:
            signal.alarm(0)
        if any(report.failed and report.when == "setup" for report in reports):
            return "broken"
        error = self._error
        while error is not None:
            if isinstance(error, asyncpg.exceptions.SyntaxOrAccessError):
                return "broken"
            error = error.__cause__ or error.__context__
        return "failed" if any(report.failed and report.when == "call" for report in reports) else "passed"


def _too_long(number: int, frame: object) -> None:
    pytest.fail(f"not over within {TEST_SECONDS} s")


def main(words: Sequence[str]) -> int:
    """Try the guards whose names contain one of these words, all without any; return 1 when one is not missed."""
    guards = read()
    fences = list(words) == [FENCES]
    if fences:
        guards = [guard for guard in guards if FENCE.search(guard.text)]
    elif words:
        guards = [guard for guard in guards if any(word in str(guard) for word in words)]
    if not guards:
        print(f"no guard is called like {' or '.join(words)}", file=sys.stderr)
        return 2
    run = Run(guards, are_sound=fences)
    files = sorted({guard.test.partition("::")[0] for guard in guards})
    code = pytest.main(["-q", "-q", "--tb=native", "--no-summary", "-p", "no:cacheprovider", *files], plugins=[run])
    for problem in run.problems:
        print(problem)
    for guard in run.survivors:
        print(f"nobody misses {guard} ({guard.why})")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(code)
    return 1 if run.problems or run.survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
