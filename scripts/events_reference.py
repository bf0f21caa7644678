"""Prints docs/events.md: every event that the supervisor logs. Run it by scripts/docs."""

from __future__ import annotations

from taskqd.supervisor.vocabulary import EVENTS

HEAD = """\
# What the supervisor logs

<!-- Written by scripts/docs from taskqd/supervisor/vocabulary.py; change it there. -->

One JSON object a line to standard error, or plain lines on a terminal. Each has `event`, `level`, `timestamp` and
`group`, and `child` where it is about one process. Nothing else is logged: names are not changed in passing, and may be
searched for. What its processes log is beside it, each with their own fields.

| Event | Meaning |
|---|---|
"""


def render() -> str:
    """Return the page."""
    return HEAD + "".join(f"| `{name}` | {meaning} |\n" for name, meaning in EVENTS.items())


if __name__ == "__main__":
    print(render(), end="")
