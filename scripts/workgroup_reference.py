"""Prints docs/workgroup.md: every key of a workgroup file, as its parser asks for them. Run it by scripts/docs."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

from taskqd.settings import describe
from taskqd.settings.rules import show
from taskqd.supervisor import workgroup as parser
from taskqd.supervisor.policy import Policy
from taskqd.supervisor.recycle import RecycleLimits
from taskqd.supervisor.table import Table
from taskqd.supervisor.worker_entry import CREDENTIAL_KEYS, WorkerEntry
from taskqd.supervisor.worker_env import GROUP_WIDE, LARGEST, RESERVED

HEAD = """\
# The workgroup file

<!-- Written by scripts/docs from the parser; change it there. -->

One TOML file says what `taskqd run FILE` starts and watches on a host. `taskqd init workgroup` writes one,
`taskqd check FILE` finds everything that is wrong with it, each as `file:line:key`, and `--show` prints every effective
value with its source. [`config/workgroup.toml`](../config/workgroup.toml) is an example.

Times are seconds, or text: `250ms`, `1.5s`, `5m`, `2h`, `1d`. Unknown keys are refused, with the nearest one there is.
A password does not belong into the file. `taskqd reload` changes a running group to what the file says; the group's
name, its directory, its address, its database and its schema need a new start, and the reload says so.
"""

SECTIONS = {
    "": ("Above the tables", "", parser.Workgroup),
    "supervisor": ("`[supervisor]`", "How the group is watched and stopped.", parser.SupervisorOptions),
    "budget": (
        "`[budget]`",
        "What else uses the database, and what to do when it does not all fit.",
        parser.BudgetOptions,
    ),
    "scheduler": (
        "`[scheduler]`",
        "The scheduler process. Any [setting](settings.md) of one process may stand here too.",
        parser.Workgroup,
    ),
    "workers.x": (
        "`[[workers]]`",
        "One table for each kind of worker. Any [setting](settings.md) of one process may stand here too, "
        "and wins over `[defaults]`. Keys that `[supervisor]` has too hold for this worker alone.",
        WorkerEntry,
    ),
    "workers.x.recycle": (
        "`[workers.recycle]`",
        "Below the `[[workers]]` it belongs to: what one process may come to before a fresh one takes its place, "
        "one at a time. The limits of each process are moved by up to a tenth.",
        RecycleLimits,
    ),
}
MEANINGS = {
    "actors": "The actors of all workers, as `module:attribute`: a list, tuple or mapping of `@actor` functions.",
    "scheduler.enabled": "Run the scheduler. Without it a worker whose `maintenance` is not `off` does its work.",
}
"""What the parser keeps in no field of its own."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key that the parser asked a table for."""

    path: str
    name: str
    kind: str
    arguments: tuple[Any, ...]


def render() -> str:
    """Return the whole page."""
    keys = list(asked())
    parts = [HEAD]
    for path, (title, about, source) in SECTIONS.items():
        rows = [_row(key, meanings(source) | meanings(Policy)) for key in keys if key.path == path]
        head = f"\n## {title}\n\n" + (f"{textwrap.fill(about, 118)}\n\n" if about else "")
        parts.append(head + "| Key | Default | Takes | Meaning |\n|---|---|---|---|\n" + "".join(rows))
    return "".join([*parts, _settings()])


def asked() -> Iterator[Key]:
    """Yield every key in the order in which the parser asks for it."""
    found: list[Key] = []
    with _recording(found):
        parser.parse_workgroup({"actors": "a:b", "workers": [{"name": "x"}]}, "x.toml")
    for key in dict.fromkeys(found):
        path = "workers.x" if key.path == "workers[0]" else key.path
        yield Key(path, key.name, key.kind, key.arguments)


@contextmanager
def _recording(found: list[Key]) -> Iterator[None]:
    def wrap(kind: str) -> Callable[..., Any]:
        original = getattr(Table, kind)

        @functools.wraps(original)
        def take(self: Table, key: str, *arguments: Any) -> Any:
            found.append(Key(self._path, key, kind, arguments))
            return original(self, key, *arguments)

        return take

    kinds = ("text", "flag", "choice", "count", "count_or_auto", "seconds", "address")
    with mock.patch.multiple(Table, **{kind: wrap(kind) for kind in kinds}):
        yield


@functools.cache
def meanings(source: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(source)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, after in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[field.target.id] = " ".join(str(after.value.value).split())  # type: ignore[union-attr]
    return found


def _row(key: Key, documented: dict[str, str]) -> str:
    own = f"{key.path}.{key.name}" if key.path else key.name
    meaning = MEANINGS.get(own) or documented[key.name]
    default = key.arguments[0] if key.arguments else None
    if key.path == "workers.x" and key.name in Policy.__dataclass_fields__:
        default, meaning = None, f"{meaning.partition(' Default:')[0]} Default: that of `[supervisor]`."
    cells = (f"`{key.name}`", _default(default, meaning), _takes(key), meaning.replace("``", "`"))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(default: Any, meaning: str) -> str:
    if default is None:
        return "see there" if "Default:" in meaning else "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{show(default)}`" if isinstance(default, float) else f"`{default}`"


def _takes(key: Key) -> str:
    match key.kind:
        case "flag":
            return "true or false"
        case "choice":
            return "one of " + ", ".join(f"`{word}`" for word in key.arguments[1])
        case "count":
            return f"a whole number from {key.arguments[1]} to {key.arguments[2]}"
        case "count_or_auto":
            return f'a whole number from {key.arguments[1]} to {key.arguments[2]}, or `"auto"`'
        case "seconds":
            return f"a duration from {show(key.arguments[1])} to {show(key.arguments[2])} seconds"
        case "address":
            return '`"host:port"`'
        case _:
            return "text"


def _settings() -> str:
    credentials = "".join(
        f"| `{key}` | {about.allowed} | {about.meaning} |\n"
        for key in CREDENTIAL_KEYS
        for about in [describe(f"pg_credential_{key}")]
    )
    reserved = "".join(f"| `{key}` | {why} |\n" for key, why in RESERVED.items())
    shared = ", ".join(f"`{name}`" for name in GROUP_WIDE)
    env = (
        'Below the `[[workers]]` it belongs to: variables of its processes alone, each `NAME = "text"`, on top of the '
        f"supervisor's environment and of `env_file`. At most {LARGEST} characters. Names that the supervisor sets or "
        "keeps for itself are refused (`TASKQD_…`, `NOTIFY_SOCKET`, `WATCHDOG_…`, `LISTEN_…`), and so is what looks "
        "like a secret: that belongs into `env_file`. A `TASKQ_…` variable is a [setting](settings.md), above "
        "`[defaults]` and below a key of the table."
    )
    own = (
        "The same keys below a `[[workers]]`, for its processes alone. With a `provider` the table stands for itself; "
        "without, it changes single keys of the group's."
    )
    return (
        f"\n## `[workers.env]`\n\n{textwrap.fill(env, 118)}\n"
        "\n## `[credentials]`\n\nWhere the password of the database comes from, for the whole group.\n\n"
        "| Key | Takes | Meaning |\n|---|---|---|\n"
        f"{credentials}"
        f"\n## `[workers.credentials]`\n\n{textwrap.fill(own, 118)}\n"
        "\n## `[defaults]`\n\n"
        "Any [setting](settings.md) of all processes. These hold for the whole group and stand nowhere else:\n"
        f"{shared}.\n\nThese stand in no table for processes:\n\n| Setting | Because |\n|---|---|\n{reserved}"
    )


if __name__ == "__main__":
    print(render(), end="")
