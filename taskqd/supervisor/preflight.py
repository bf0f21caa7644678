"""The short-lived child that does what the supervisor must not: settings, actors, database, budget.

``python -P -m taskqd.supervisor.preflight FILE --for run|check|budget|release``. Messages go over the control link:
``step`` (what happens next, and how long it may take), ``warning``, and at the end ``plan``, ``released`` or ``error``.
Whatever the application's modules print goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence

from taskqd.health.child import arm
from taskqd.health.lines import encode

_DATABASE_MARGIN = 30.0
_QUERY_TIMEOUT = 10.0
_LOOK_TIMEOUT = 5.0
_SHORTLY = 10.0


class _Link:
    """Sends messages to the supervisor; a blocking socket, as nothing else goes on here."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)

    def send(self, message: Mapping[str, object]) -> None:
        self._socket.sendall(encode(message))

    def step(self, text: str, within: float, silence: int = 70) -> None:
        """Announce what comes next, the seconds it may take, and the exit code if nothing is heard any more."""
        self.send({"op": "step", "text": text, "within": within, "silence": silence})

    def warn(self, text: str) -> None:
        self.send({"op": "warning", "text": text})


def main(argv: Sequence[str]) -> int:
    """Answer over the link and return the exit code of the answer."""
    arm()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    link = _Link(int(os.environ.pop("TASKQD_CONTROL_FD")))
    options = _parse(argv)

    from taskqd.domain.errors import TaskQError
    from taskqd.domain.exit_codes import ExitCode

    try:
        if options.purpose == "release":
            link.send({"op": "released", "taken": _release(options, link)})
        else:
            link.send({"op": "plan", **_answer(options, link)})
    except TaskQError as error:
        link.send({"op": "error", "message": str(error), "exit_code": int(error.exit_code)})
        return error.exit_code
    except Exception as error:
        traceback.print_exception(error)
        text = f"the check before the start failed: {type(error).__name__}: {error}"
        link.send({"op": "error", "message": text, "exit_code": int(ExitCode.INTERNAL)})
        return ExitCode.INTERNAL
    return ExitCode.DONE


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="preflight")
    parser.add_argument("file")
    parser.add_argument("--for", dest="purpose", choices=("run", "check", "budget", "release"), required=True)
    parser.add_argument("--release", default="", metavar="ID,ID", help="the workers that are dead")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--max-connections", type=int)
    parser.add_argument("--time", action="store_true", help="with budget: the time of a stop too, and who exceeds it")
    parser.add_argument("--show", action="store_true", help="with check: every effective value")
    return parser.parse_args(argv)


def _answer(options: argparse.Namespace, link: _Link) -> dict[str, object]:
    from dataclasses import replace

    from taskqd.domain.errors import BudgetExceededError, RegistryError
    from taskqd.domain.exit_codes import ExitCode
    from taskqd.storage.connect import describe_dsn
    from taskqd.supervisor.budget import describe_fleet, explain_misfit
    from taskqd.supervisor.imports import IMPORT_TIMEOUT, import_all
    from taskqd.supervisor.resolve import resolve
    from taskqd.supervisor.room import Fit, Limits, judge_fleet

    found = resolve(options.file)
    for warning in found.warnings:
        link.warn(warning)
    imported: Imports = {}
    if options.purpose in ("run", "check") or options.time:
        imported = import_all(
            found.workgroup,
            lambda actors: link.step(f"importing {actors}", IMPORT_TIMEOUT + _SHORTLY, silence=RegistryError.exit_code),
        )
    unfit = _judge_forks(found, imported) if options.purpose in ("run", "check") else {}
    report = _report(found, imported, options.show) if options.purpose == "check" or options.time else {}
    if options.purpose == "check":
        for why in dict.fromkeys(unfit.values()):
            link.warn(f"workers will be started by exec: {why}")
        workers = found.workgroup.workers
        report["forked"] = [w.name for w in workers if w.preload != "off" and w.name not in unfit]

    limits = None
    if options.max_connections is not None:
        limits = Limits(options.max_connections)
    elif options.purpose == "run":
        limits = asyncio.run(_check_database(found.settings, found.plan.group, link))
    elif options.purpose == "budget" and not options.offline:
        limits = asyncio.run(_look_at_limits(found.settings, found.plan.group, link))

    verdict = judge_fleet(found.fleet, limits)
    if limits is not None and verdict.fit in (Fit.NEVER, Fit.CROWDED):
        message = explain_misfit(found.fleet, limits, verdict)
        if options.purpose == "run" and found.workgroup.budget.enforce:
            code = ExitCode.REFUSED if verdict.fit is Fit.NEVER else ExitCode.TRY_AGAIN
            raise BudgetExceededError(f'{message} ([budget] enforce = "warn" runs anyway)', code)
        link.warn(message)
    budget = {
        "group": found.plan.group,
        "schema": found.settings.schema_name,
        "database": describe_dsn(found.settings.direct_dsn()),
        "enforce": "enforce" if found.workgroup.budget.enforce else "warn",
        "auto_replicas": {w.name: w.replicas_from for w in found.workgroup.workers if w.replicas_from},
        **describe_fleet(found.fleet, limits, verdict),
    }
    return {"plan": replace(found.plan, budget=budget, report=report).to_json()}


def _judge_forks(found: Resolution, imported: Imports) -> dict[str, str]:
    """Return the workers that cannot be forked although they might be, each with the reason.

    Raises ``ConfigError`` when one requires it.
    """
    from taskqd.domain.errors import ConfigError
    from taskqd.supervisor.preload import unfit_because

    unfit: dict[str, str] = {}
    strict: dict[str, list[str]] = {}
    for worker in found.workgroup.workers:
        dangers = imported[worker.zygote].hazards
        if worker.preload != "off" and dangers:
            unfit[worker.name] = unfit_because([worker.actors], dangers)
            if worker.preload == "require":
                strict.setdefault(unfit[worker.name], []).append(worker.name)
    if strict:
        raise ConfigError("; ".join(f'preload = "require" ({", ".join(who)}): {why}' for why, who in strict.items()))
    return unfit


def _report(found: Resolution, imported: Imports, show: bool) -> dict[str, object]:
    """Return what the actors and the settings of a group come to."""
    from taskqd.supervisor.effective import show_values
    from taskqd.supervisor.stop_time import describe_stop
    from taskqd.supervisor.survey import Crew, find_interrupted, find_unserved

    graces = {child.name: child.graces for child in found.plan.children}
    crews = [
        Crew(
            name=worker.name,
            actors=imported[worker.zygote].actors,
            queues=found.resolved[worker.name].settings.queues,
            drain=graces[worker.name].cancellation,
            default_start_to_close=found.resolved[worker.name].settings.default_start_to_close,
        )
        for worker in found.workgroup.workers
    ]
    return {
        "stop": describe_stop(found.plan.grace, found.plan.children),
        "interrupted": find_interrupted(crews),
        "unserved": find_unserved(crews),
        "values": show_values(found.workgroup, found.plan, found.resolved) if show else [],
    }


async def _check_database(settings: Settings, group: str, link: _Link) -> Limits:
    """Wait for the database, check its schema, and return what it grants."""
    from taskqd.domain.errors import DatabaseUnavailableError
    from taskqd.storage.connect import connect_with_retry
    from taskqd.storage.credentials import login_of
    from taskqd.storage.migrate import check_schema

    timeout = settings.database_boot_timeout
    link.step("connecting to the database", timeout + _DATABASE_MARGIN)
    told: list[str] = []

    def tell(why: str, _pause: float) -> None:
        if why not in told[-1:]:
            told.append(why)
            link.warn(f"waiting up to {timeout:g} s: {why}")

    try:
        conn = await connect_with_retry(
            settings.direct_dsn(),
            login=login_of(settings),
            role="preflight",
            schema=settings.schema_name,
            group=group,
            boot_timeout=timeout,
            command_timeout=_QUERY_TIMEOUT,
            on_retry=tell,
        )
    except DatabaseUnavailableError as error:
        _raise_if_full(error)
        raise
    try:
        await check_schema(conn, settings.schema_name)
        return await _limits(conn, settings, group)
    finally:
        await conn.close(timeout=_LOOK_TIMEOUT)


def _release(options: argparse.Namespace, link: _Link) -> int:
    """Settle what dead workers held; return the rows taken."""
    from uuid import UUID

    from taskqd.supervisor.resolve import resolve

    found = resolve(options.file)
    workers = [UUID(text) for text in options.release.split(",")]
    return asyncio.run(_release_through(found.settings, found.plan.group, workers, link))


async def _release_through(settings: Settings, group: str, workers: Sequence[UUID], link: _Link) -> int:
    from taskqd.storage.connect import close, connect
    from taskqd.storage.credentials import login_of
    from taskqd.storage.release import release_workers

    link.step("settling the jobs of dead workers", _LOOK_TIMEOUT + _DATABASE_MARGIN)
    conn = await connect(
        settings.direct_dsn(),
        login=login_of(settings),
        role="preflight",
        schema=settings.schema_name,
        group=group,
        timeout=_LOOK_TIMEOUT,
    )
    try:
        return await release_workers(conn, settings.schema_name, workers, timeout=_LOOK_TIMEOUT)
    finally:
        await close(conn)


async def _look_at_limits(settings: Settings, group: str, link: _Link) -> Limits | None:
    """Return what the database grants, or None with a warning when it cannot be reached."""
    from taskqd.domain.errors import DatabaseUnavailableError
    from taskqd.storage.connect import connect
    from taskqd.storage.credentials import login_of

    link.step("asking the database for its limits", _LOOK_TIMEOUT + _DATABASE_MARGIN)
    try:
        conn = await connect(
            settings.direct_dsn(),
            login=login_of(settings),
            role="preflight",
            schema=settings.schema_name,
            group=group,
            timeout=_LOOK_TIMEOUT,
            command_timeout=_QUERY_TIMEOUT,
        )
    except DatabaseUnavailableError as error:
        link.warn(f"not compared with the server: {error}")
        return None
    try:
        return await _limits(conn, settings, group)
    finally:
        await conn.close(timeout=_LOOK_TIMEOUT)


async def _limits(conn: asyncpg.Connection, settings: Settings, group: str) -> Limits:
    from taskqd.storage.limits import read_connection_limits
    from taskqd.supervisor.room import Limits

    found = await read_connection_limits(conn, settings.schema_name, group)
    return Limits(
        found.max_connections, found.superuser_reserved, found.reserved, found.others, limited_by=found.limited_by
    )


def _raise_if_full(error: BaseException) -> None:
    """Raise the error of a crowded server when that is what kept us from connecting."""
    import asyncpg

    from taskqd.domain.errors import BudgetExceededError
    from taskqd.domain.exit_codes import ExitCode

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, asyncpg.TooManyConnectionsError):
            raise BudgetExceededError(f"every connection of the server is taken: {error}", ExitCode.TRY_AGAIN) from None
        cause = cause.__context__


TYPE_CHECKING = False  # as type checkers read it: what is imported above must stay light
if TYPE_CHECKING:
    from uuid import UUID

    import asyncpg

    from taskqd.settings import Settings
    from taskqd.supervisor.imports import Imports
    from taskqd.supervisor.resolve import Resolution
    from taskqd.supervisor.room import Limits


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Not by returning: threads that an application's modules started must not hold the start up.
    os._exit(code)
