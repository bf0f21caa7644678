"""What a running group has declared that it may hold, and more of that while it is changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from taskqd.domain.errors import TaskQError
from taskqd.supervisor.changes import Costs
from taskqd.supervisor.consult import ask_preflight
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.line import Change
from taskqd.supervisor.plan import Plan
from taskqd.supervisor.reaper import Reaper
from taskqd.supervisor.spawn import given_settings


class Declaration:
    """Asks helper processes to write the group's row; ``plan`` returns what it runs by, ``take_over`` changes that."""

    def __init__(
        self,
        file: str,
        environ: Mapping[str, str],
        reaper: Reaper,
        journal: Journal,
        plan: Callable[[], Plan],
        take_over: Callable[[Plan], None],
    ) -> None:
        self._file = file
        self._environ = environ
        self._reaper = reaper
        self._journal = journal
        self._plan = plan
        self._take_over = take_over
        self._lowering: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def held(self) -> list[str]:
        """What the group may hold now, and its largest process, as arguments of the check before a reload."""
        costs = Costs(self._plan())
        return [f"--held={costs.own}", f"--largest={max(costs.unit.values(), default=0)}"]

    @asynccontextmanager
    async def raised(self, change: Change, more: int) -> AsyncIterator[None]:
        """Declare up to ``more`` connections beside what is held, while a change is made.

        What the server grants stands in the plan's budget then; where it cannot be asked, what it did the last time.
        """
        async with self.lowered_after():
            await self.settled()
            await self._declare(more, change.tell)
            yield

    @asynccontextmanager
    async def lowered_after(self) -> AsyncIterator[None]:
        """When the change is over, declare in the background what is held then."""
        try:
            yield
        finally:
            if not self._closed:
                self._lowering = asyncio.get_running_loop().create_task(self._declare(0, _nobody), name="declaration")

    async def settled(self) -> None:
        """Wait until nothing is declared in the background."""
        if self._lowering is not None:
            await asyncio.wait([self._lowering])

    def close(self) -> None:
        """Declare nothing more: the group stops, and its processes take the row away."""
        self._closed = True
        if self._lowering is not None:
            self._lowering.cancel()

    async def wait_closed(self, timeout: float) -> None:
        """Wait until a helper that was cut off is gone."""
        if self._lowering is not None:
            await asyncio.wait([self._lowering], timeout=timeout)

    async def _declare(self, more: int, tell: Callable[[str], None]) -> None:
        plan = self._plan()
        budget = plan.budget
        asked = {
            "group": plan.group,
            "wanted": Costs(plan).own,
            "extra": more + budget["unasked"],
            "outside": budget["web_connections"] + budget["app_connections"],
            "elsewhere": budget["elsewhere"],
            "enforce": budget["enforce"] == "enforce",
        }
        as_the_group = [spec for spec in plan.children if not (spec.env or spec.env_file)]  # the scheduler always does
        spec = (as_the_group or plan.children)[0]
        try:
            answer = await ask_preflight(
                [self._file, "--for", "declare", "--declare", json.dumps(asked)],
                reaper=self._reaper,
                environ=self._environ,
                settings=given_settings(spec),
                on_warning=lambda _text: None,
                on_step=lambda _within: None,
            )
        except (TaskQError, OSError, LookupError, ValueError) as error:
            # Whatever it says, or does not say: a change does not depend on it.
            why = str(error) or type(error).__name__
            self._journal.tell("not-declared", "warning", why=why)
            tell(f"connections could not be declared: {why}")
            return
        plan = self._plan()
        granted = {key: answer[key] for key in ("limits", "available", "taken", "elsewhere")}
        self._take_over(replace(plan, budget={**plan.budget, **granted}))


def _nobody(_text: str) -> None:
    """The change is over; a row that is too large is put right by the next one."""
