"""The short-lived child that does what the supervisor must not: settings, actors, database, budget.

``python -P -m taskqd.supervisor.preflight FILE --for run|check|budget|release|declare``. Messages go over the control
link: ``step`` (what happens next, and how long it may take), ``warning``, and at the end ``plan``, ``released``,
``declared`` or ``error``. Whatever the application's modules print goes to standard error.
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
        elif options.purpose == "declare":
            link.send({"op": "declared", **_declare(options, link)})
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
    parser.add_argument(
        "--for", dest="purpose", choices=("run", "check", "budget", "release", "declare"), required=True
    )
    parser.add_argument("--release", default="", metavar="ID,ID", help="the workers that are dead")
    parser.add_argument("--held", type=int, default=0, help="with run: connections that the group holds already")
    parser.add_argument("--largest", type=int, default=0, help="with run: those of the largest process of it")
    parser.add_argument("--declare", default="", metavar="JSON", help="with declare: what the group holds and wants")
    parser.add_argument("--fleet", type=int, default=1, metavar="N", help="with budget: supervisors of this file")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--max-connections", type=int)
    parser.add_argument("--time", action="store_true", help="with budget: the time of a stop too, and who exceeds it")
    parser.add_argument("--show", action="store_true", help="with check: every effective value")
    return parser.parse_args(argv)


def _answer(options: argparse.Namespace, link: _Link) -> dict[str, object]:
    from dataclasses import replace

    from taskqd.domain.errors import ConfigError, RegistryError
    from taskqd.supervisor.imports import IMPORT_TIMEOUT, import_all
    from taskqd.supervisor.resolve import resolve

    found = resolve(options.file)
    for warning in found.warnings:
        link.warn(warning)
    imported: Imports = {}
    try:
        imported = import_all(
            found.workgroup,
            lambda actors: link.step(f"importing {actors}", IMPORT_TIMEOUT + _SHORTLY, silence=RegistryError.exit_code),
        )
    except ConfigError as error:
        if options.purpose != "budget" or options.time:
            raise
        link.warn(f"connections of transactional actors are not counted: {error}")
    unfit = _judge_forks(found, imported) if options.purpose in ("run", "check") else {}
    report = _report(found, imported, options.show) if options.purpose == "check" or options.time else {}
    if options.purpose == "check":
        for why in dict.fromkeys(unfit.values()):
            link.warn(f"workers will be started by exec: {why}")
        workers = found.workgroup.workers
        report["forked"] = [w.name for w in workers if w.preload != "off" and w.name not in unfit]

    budget = _budget(found, imported, options, link)
    return {"plan": replace(found.plan, budget=budget, report=report).to_json()}


def _budget(found: Resolution, imported: Imports, options: argparse.Namespace, link: _Link) -> dict[str, object]:
    """Return the connection budget, compared with the server where that is asked. Raises when it refuses a run."""
    from dataclasses import replace

    from taskqd.domain.errors import BudgetExceededError
    from taskqd.domain.exit_codes import ExitCode
    from taskqd.storage.connect import describe_dsn
    from taskqd.supervisor.budget import describe_fleet, describe_pooler, explain_misfit, explain_peak
    from taskqd.supervisor.logins import check_login, own_logins
    from taskqd.supervisor.reserve import Found, look, reserve
    from taskqd.supervisor.room import Fit, Limits, judge_fleet

    settings, group, enforce = found.settings, found.plan.group, found.workgroup.budget.enforce
    logins = own_logins(settings, _worker_settings(found))
    elsewhere = [name for own in logins for name in own.workers]
    transactional = {worker.name for worker in found.workgroup.workers if _is_transactional(imported, worker)}
    crews = [replace(crew, per_slot=crew.name in transactional) for crew in found.fleet.crews]
    fleet = replace(found.fleet, supervisors=options.fleet).with_crews(*crews)
    if options.purpose == "run" or (options.purpose == "budget" and not options.offline):
        runs = options.purpose == "run"
        boots = runs and not options.held
        for own in logins:
            asyncio.run(check_login(own, group, fleet, boots=boots, enforce=runs and enforce, link=link))
    if options.max_connections is not None:
        seen = Found(fleet, Limits(options.max_connections))
    elif options.purpose == "run":
        held = (options.held, options.largest)
        seen = asyncio.run(reserve(settings, group, fleet, elsewhere=elsewhere, enforce=enforce, held=held, link=link))
    elif options.purpose == "budget" and not options.offline:
        seen = asyncio.run(look(settings, group, fleet, link, elsewhere=elsewhere))
    else:
        seen = Found(fleet, None)

    fleet, limits = seen.fleet, seen.limits
    verdict = judge_fleet(fleet, limits)
    if limits is not None and verdict.fit in (Fit.NEVER, Fit.CROWDED):
        message = explain_misfit(fleet, limits, verdict)
        if options.purpose == "run" and enforce:
            code = ExitCode.REFUSED if verdict.fit is Fit.NEVER else ExitCode.TRY_AGAIN
            raise BudgetExceededError(f'{message} ([budget] enforce = "warn" runs anyway)', code)
        link.warn(message)
    elif limits is not None and verdict.peak_over:
        link.warn(explain_peak(fleet, limits, verdict))
    return {
        "group": group,
        "schema": settings.schema_name,
        "database": describe_dsn(settings.direct_dsn()),
        "pooled_database": describe_dsn(settings.pooled_dsn()),
        "enforce": "enforce" if enforce else "warn",
        "auto_replicas": {w.name: w.replicas_from for w in found.workgroup.workers if w.replicas_from},
        **describe_fleet(fleet, limits, verdict),
        **describe_pooler(fleet, seen.pooler),
    }


def _is_transactional(imported: Imports, worker: WorkerEntry) -> bool:
    return worker.zygote in imported and imported[worker.zygote].transactional


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


def _declare(options: argparse.Namespace, link: _Link) -> dict[str, object]:
    """Declare what a running group asks for: its own plan counts, whatever the file says by now."""
    import json

    from taskqd.settings import load_settings
    from taskqd.supervisor.budget import describe_limits
    from taskqd.supervisor.reserve import reserve_more

    asked = json.loads(options.declare)
    outside = asked["outside"]
    limits, elsewhere = asyncio.run(
        reserve_more(
            load_settings(),
            asked["group"],
            asked["wanted"],
            asked["extra"],
            elsewhere=asked["elsewhere"],
            outside=outside,
            enforce=asked["enforce"],
            link=link,
        )
    )
    return describe_limits(limits, outside, elsewhere=elsewhere)


def _release(options: argparse.Namespace, link: _Link) -> int:
    """Settle what dead workers held; return the rows taken."""
    from uuid import UUID

    from taskqd.supervisor.logins import own_logins, release_as_anybody
    from taskqd.supervisor.resolve import resolve

    found = resolve(options.file)
    workers = [UUID(text) for text in options.release.split(",")]
    logins = [found.settings, *(own.settings for own in own_logins(found.settings, _worker_settings(found)))]
    return asyncio.run(release_as_anybody(logins, found.plan.group, workers, link))


def _worker_settings(found: Resolution) -> dict[str, Settings]:
    return {worker.name: found.resolved[worker.name].settings for worker in found.workgroup.workers}


TYPE_CHECKING = False  # as type checkers read it: what is imported above must stay light
if TYPE_CHECKING:
    from taskqd.settings import Settings
    from taskqd.supervisor.imports import Imports
    from taskqd.supervisor.resolve import Resolution
    from taskqd.supervisor.worker_entry import WorkerEntry


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Not by returning: threads that an application's modules started must not hold the start up.
    os._exit(code)
