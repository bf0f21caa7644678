"""How far a job has come, as its actor tells it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

from taskqd.actors.faithful import encode_object
from taskqd.domain.arguments import is_text
from taskqd.domain.errors import PayloadNotStorableError, ProgressTooLarge

MAX_STEP, MAX_DETAIL = 200, 2000
_merging = threading.Lock()


class Progress:
    """The progress of one job: fields that the last word on each wins, and ``seq``, which every report raises.

    It outlives the attempt: the next begins with what this one stored. ``report`` may be called from any thread.
    """

    __slots__ = ("_on_change", "_size_limit", "_state", "_stored", "seq")

    def __init__(self, stored: str | None, seq: int, size_limit: int, on_change: Callable[[], None]) -> None:
        self._state: dict[str, Any] = {} if stored is None else json.loads(stored)
        self.seq = seq
        self._stored = seq
        self._size_limit = size_limit
        self._on_change = on_change

    @property
    def state(self) -> Mapping[str, Any]:
        """The fields as of now; empty when nothing was ever reported."""
        return dict(self._state)

    def report(
        self, step: str | None, percent: float | None, detail: str | None, data: Mapping[str, Any] | None
    ) -> None:
        """Take the fields that are not None. Errors are those of ``JobContext.progress``."""
        given: dict[str, Any] = {}
        for name, text, limit in (("step", step, MAX_STEP), ("detail", detail, MAX_DETAIL)):
            if text is not None:
                if not isinstance(text, str) or len(text) > limit:
                    raise ValueError(f"progress {name} must be text of at most {limit} characters")
                if not is_text(text):
                    raise PayloadNotStorableError(
                        f"progress {name} holds a NUL or a lone surrogate, which Postgres cannot store"
                    )
                given[name] = text
        if percent is not None:
            if isinstance(percent, bool) or not isinstance(percent, (int, float)) or not 0 <= percent <= 100:
                raise ValueError(f"progress percent = {percent!r} must be a number between 0 and 100")
            given["percent"] = percent
        if data is not None:
            encode_object("progress data", data)
            given["data"] = dict(data)
        if not given:
            raise ValueError("progress needs at least one of step, percent, detail and data")
        with _merging:
            merged = {**self._state, **given}
            size = len(encode_object("progress", merged))
            if size > self._size_limit:
                raise ProgressTooLarge(size, self._size_limit)
            self._state = merged
            self.seq += 1
        self._on_change()

    @property
    def unstored(self) -> bool:
        """True while something was reported that is not in the database."""
        return self.seq > self._stored

    def text(self) -> tuple[int, str]:
        """Return ``seq`` and the JSON to store with it."""
        with _merging:
            return self.seq, encode_object("progress", self._state)

    def stored(self, seq: int) -> None:
        """What ``text`` gave with ``seq`` is in the database."""
        self._stored = max(self._stored, seq)


class Reported:
    """What ``ctx.progress(...)`` returns: may be awaited, need not be."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield  # makes this a generator: it is done before it begins
