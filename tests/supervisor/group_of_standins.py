"""Run a real supervisor on a real file, with stand-ins for its children.

``python group_of_standins.py FILE NAME=MODE,MODE…``: what each kind of child does. Prints the imported
modules at the end. ``STANDIN_CGROUP`` is a directory with the files of a control group.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from taskqd.domain.errors import TaskQError
from taskqd.supervisor import cgroup, renewal
from taskqd.supervisor.cgroup import Cgroup
from taskqd.supervisor.group import run_group
from taskqd.supervisor.plan import ChildSpec, Plan
from taskqd.supervisor.spawn import child_command

ZYGOTE = str(Path(__file__).with_name("standin_zygote.py"))
STANDIN = str(Path(__file__).with_name("standin.py"))


def sample_often() -> None:
    renewal.SAMPLE_INTERVAL = 0.2


def count_in_file() -> None:
    Cgroup.oom_kills = lambda _self: cgroup._field("memory.events", "oom_kill")  # type: ignore[method-assign]


def be_stale_soon() -> None:
    whole = Plan.from_json

    def read(data: Any) -> Plan:
        plan = whole(data)
        return replace(plan, children=tuple(replace(spec, database_stale_after=3.0) for spec in plan.children))

    Plan.from_json = read  # type: ignore[method-assign]


ADJUSTMENTS = {"samples-often": sample_often, "counts-in-file": count_in_file, "stale-soon": be_stale_soon}
"""What a test may change of the supervisor itself: what would take minutes, or needs what a machine may lack."""


def main() -> int:
    file, *words = sys.argv[1:]
    modes = {name: mode.split(",") for name, _, mode in (word.partition("=") for word in words)}

    for mode in modes.get("supervisor", []):
        ADJUSTMENTS[mode]()

    def command(spec: ChildSpec) -> list[str]:
        wanted = modes.get(spec.name, [])
        if wanted == ["real"]:
            return child_command(spec)
        if wanted == ["missing-program"]:
            return ["/nonexistent/program"]
        if wanted == ["no-memory"]:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return [sys.executable, "-P", STANDIN, *wanted]

    try:
        return asyncio.run(
            run_group(
                file,
                command=command,
                zygote=lambda _: [sys.executable, "-P", ZYGOTE, *words],
                cgroup=_cgroup(os.environ.get("STANDIN_CGROUP")),
            )
        )
    except TaskQError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        print("modules:", *sorted(sys.modules))


def _cgroup(directory: str | None) -> Cgroup | None:
    """The control group that a test has written."""
    return None if directory is None else Cgroup(f"{directory}/fs", f"{directory}/own")


if __name__ == "__main__":
    sys.exit(main())
