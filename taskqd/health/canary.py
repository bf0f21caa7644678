"""A thread that tells a blocked event loop from an interpreter in which nothing runs."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

PATIENCE = 1.25
"""Seconds without a beat after which the thread speaks. A beat is due each second."""

_WORD = "[beat {number} is the last; other threads run]\n"
_SPOKEN = re.compile(r"\[beat (\d+) is the last; other threads run\]\n?")


class Canary:
    """Says through ``leave_word``, once a silence, that the loop is silent while this thread still gets to run.

    What it cannot say is as telling: when the supervisor misses beats and this word too, the interpreter lock
    is held, or the process gets no processor.
    """

    def __init__(self, leave_word: Callable[[str], None]) -> None:
        self._leave_word = leave_word
        self._beat = (0, time.monotonic())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="taskqd-canary", daemon=True)

    def start(self) -> None:
        """Start to listen for beats."""
        self._thread.start()

    def stop(self) -> None:
        """Say nothing more."""
        self._over.set()

    def heard(self, number: int) -> None:
        """The event loop made beat ``number``."""
        self._beat = number, time.monotonic()

    def _watch(self) -> None:
        spoken = -1
        while True:
            number, at = self._beat
            wait = at + PATIENCE - time.monotonic()
            if wait <= 0:
                if number != spoken:
                    self._leave_word(_WORD.format(number=number))
                    spoken = number
                wait = PATIENCE
            if self._over.wait(wait):
                return


def split_words(text: str) -> tuple[str, dict[int, bool]]:
    """Return ``text`` without the canary's words, and those words: the beat's number, and whether nothing came before.

    A word that follows a stack may have been said only because asking for the stack interrupted what had held
    the interpreter lock.
    """
    words: dict[int, bool] = {}
    for found in _SPOKEN.finditer(text):
        words[int(found[1])] = not _SPOKEN.sub("", text[: found.start()]).strip()
    return _SPOKEN.sub("", text), words
