"""How far a start or a stop has come, in the last line of a terminal."""

from __future__ import annotations

import os
import sys
import time

from taskqd.supervisor.board import Board
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.slot import ALIVE, State

WIDTH = 24
"""Characters of the bar."""


class Progress:
    """Keeps the line up to date while a group comes up and while it ends; shows nothing when not ``on``."""

    def __init__(self, board: Board, journal: Journal, *, on: bool) -> None:
        self._board = board
        self._journal = journal
        self._on = on and os.environ.get("TERM") not in (None, "", "dumb")
        self._colour = "NO_COLOR" not in os.environ
        self._mark = "━" if "utf" in (getattr(sys.stderr, "encoding", None) or "").lower() else "#"

    def round(self) -> None:
        """Show how far it has come by now."""
        if not self._on:
            return
        board = self._board
        if board.stops_by is not None:
            self._journal.show(self._line("stopping", *self._gone()))
        elif not board.came_up:
            self._journal.show(self._line("starting", *self._ready()))
        else:
            self._journal.show("")

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self._on:
            self._journal.show("")

    def _ready(self) -> tuple[int, int, str]:
        children = self._board.children
        ready = sum(child.slot.state is State.READY for child in children)
        return ready, len(children), f"{ready}/{len(children)} ready, {time.monotonic() - self._board.born:.0f} s"

    def _gone(self) -> tuple[int, int, str]:
        children = self._board.children
        gone = sum(child.slot.state not in ALIVE for child in children)
        return gone, len(children), self._board.headline().removeprefix("stopping: ")

    def _line(self, what: str, done: int, of: int, text: str) -> str:
        filled = WIDTH * done // max(of, 1)
        full, rest = self._mark * filled, self._mark * (WIDTH - filled)
        if self._colour:
            full, rest = f"\x1b[32m{full}\x1b[0m", f"\x1b[2m{rest}\x1b[0m"
        elif self._mark == "#":
            rest = "." * (WIDTH - filled)
        return f"{what} {full}{rest} {text[: _columns() - len(what) - WIDTH - 3]}"


def _columns() -> int:
    try:
        return max(os.get_terminal_size(2).columns or 80, 40)  # some do not say
    except OSError:
        return 80
