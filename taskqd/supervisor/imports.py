"""Importing the actors of a group before it starts, each registry as its workers will.

Those of workers without an environment of their own are imported by the check itself, each other registry by
a process that has that environment: ``python -P -m taskqd.supervisor.imports MODULE:ATTR FD``, whose answer is a JSON
object on the descriptor.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from taskqd.actors.registry import load_registry
from taskqd.domain.errors import DIError, RegistryError
from taskqd.health.child import arm
from taskqd.health.fork_safety import hazards, one_thread_each, open_sockets
from taskqd.supervisor.exits import signal_name
from taskqd.supervisor.spawn import base_environment
from taskqd.supervisor.survey import ActorFacts
from taskqd.supervisor.worker_entry import WorkerEntry
from taskqd.supervisor.workgroup import Workgroup

IMPORT_TIMEOUT = 120.0
"""Seconds that the import of one registry may take."""

Key = tuple[str, str]
"""See :attr:`WorkerEntry.zygote`."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of one import."""

    actors: dict[str, ActorFacts]
    hazards: tuple[str, ...]
    """What makes a fork of a process that has imported it unsafe, in words."""
    transactional: bool = False
    """Whether its workers hold a connection for each slot: some actor works in a transaction."""


Imports = dict[Key, Imported]


def import_all(workgroup: Workgroup, step: Callable[[str], None]) -> Imports:
    """Import the actors of every worker, once for each environment; call ``step(actors)`` before each.

    Raises ``RegistryError``, or ``DIError``; an error inside a module is shown with its traceback, once.
    """
    if workgroup.app_dir is not None and workgroup.app_dir not in sys.path:
        sys.path.insert(0, workgroup.app_dir)
    found: Imports = {}
    inherited, known = open_sockets(), list[str]()
    for worker in _shared_first(workgroup.workers):
        if worker.zygote in found:
            continue
        step(worker.actors)
        if worker.environment:
            found[worker.zygote] = _import_elsewhere(worker, workgroup.app_dir)
            continue
        found[worker.zygote] = new = _import_here(worker.actors, inherited, known)
        known += new.hazards
    return found


def _shared_first(workers: Iterable[WorkerEntry]) -> list[WorkerEntry]:
    return sorted(workers, key=lambda worker: (bool(worker.environment), worker.preload == "off"))


def _import_here(reference: str, inherited: Mapping[int, int], known: Sequence[str] = ()) -> Imported:
    with one_thread_each():
        try:
            registry = load_registry(reference)
        except RegistryError as error:
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            raise
    actors = {name: ActorFacts.of(ref) for name, ref in sorted(registry.items())}
    new = tuple(hazard for hazard in hazards(inherited) if hazard not in known)
    return Imported(actors, new, registry.is_transactional)


def _import_elsewhere(worker: WorkerEntry, app_dir: str | None) -> Imported:
    reader, writer = os.pipe()
    with open(reader, "rb") as answers:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "taskqd.supervisor.imports", worker.actors, str(writer)],
                stdin=subprocess.DEVNULL,
                pass_fds=[writer],
                env=base_environment({**os.environ, **worker.environment}, app_dir),
            )
        finally:
            os.close(writer)
        try:
            text = _read_all(answers.fileno(), time.monotonic() + IMPORT_TIMEOUT)
            code = process.wait(5.0)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise RegistryError(f"the import of {worker.actors} took longer than {IMPORT_TIMEOUT:g} s") from None
        finally:
            process.kill()
            process.wait()
    if not text:
        how = signal_name(-code) if code < 0 else f"exit code {code}"
        raise RegistryError(f"the check before the start got no answer while importing {worker.actors}: {how}")
    found = json.loads(text)
    if "error" in found:
        raise RegistryError(f"{found['error']} (in the environment of {worker.name})")
    actors = {name: ActorFacts(**facts) for name, facts in found["actors"].items()}
    return Imported(actors, tuple(found["hazards"]), found["transactional"])


def _read_all(pipe: int, deadline: float) -> bytes:
    content = b""
    while True:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(pipe, 65536)
        if not part:
            return content
        content += part


def _answer(reference: str) -> dict[str, Any]:
    try:
        return asdict(_import_here(reference, open_sockets()))
    except (RegistryError, DIError) as error:
        return {"error": str(error)}


def main(reference: str, descriptor: str) -> None:
    """Answer on the descriptor and end, whatever threads the application's modules have started."""
    arm()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.set_inheritable(int(descriptor), False)
    text = json.dumps(_answer(reference)).encode()
    with open(int(descriptor), "wb") as answers:
        answers.write(text)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
