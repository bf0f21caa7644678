"""``taskqd run``: one workgroup from its file to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Mapping
from functools import partial

from taskqd.domain.exit_codes import ExitCode
from taskqd.health.server import HealthServer
from taskqd.supervisor.board import Board
from taskqd.supervisor.cgroup import Cgroup
from taskqd.supervisor.consult import consult, release_by_helper
from taskqd.supervisor.environments import Environments
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.monitor import Monitor
from taskqd.supervisor.plan import Plan
from taskqd.supervisor.preload import ZygoteCommand, zygote_command
from taskqd.supervisor.reaper import Reaper
from taskqd.supervisor.record import Record
from taskqd.supervisor.release import Releaser
from taskqd.supervisor.reload import Surroundings
from taskqd.supervisor.runtime import GroupFiles, choose_directory
from taskqd.supervisor.sdnotify import Notifier
from taskqd.supervisor.signals import Meaning, Orders, Signals
from taskqd.supervisor.spawn import RUNTIME_DIR, child_command
from taskqd.supervisor.starter import Command
from taskqd.supervisor.stopping import CLOSING
from taskqd.supervisor.upkeep import Upkeep
from taskqd.supervisor.verbs import Verbs
from taskqd.supervisor.workgroup import SCHEDULER, Workgroup, WorkgroupError, load_workgroup
from taskqd.supervisor.zygotes import Zygotes

PUBLIC_PATHS = ("/startup", "/live", "/ready", "/metrics")
"""What ``health_address`` serves: nothing that changes the group, and nothing that names its processes' errors."""

_RELEASE_TIME = 1.5
"""Seconds at the end for the jobs of workers that had to be killed; what is not released then a successor releases."""

_SPARE = 4.0
"""Seconds more, where the processes have ended before their time: a helper may be slow to start on a busy machine."""


async def run_group(
    file: str,
    *,
    environ: Mapping[str, str] | None = None,
    command: Command = child_command,
    zygote: ZygoteCommand = zygote_command,
    journal: Journal | None = None,
    cgroup: Cgroup | None = None,
) -> int:
    """Run the workgroup of ``file`` until it is told to stop, and return the exit code.

    ``command`` makes a child's command line, ``zygote`` that of the process which workers are forked from. ``cgroup``
    is the control group that is watched, by default that of this process.
    Raises ``TaskQError`` when the group cannot start: the file is refused (78), it runs already (75), the
    database is away (69) or not migrated (75), or the budget does not fit (78, 75).
    """
    environ = os.environ if environ is None else environ
    reaper, signals, notifier = Reaper(), Signals(), Notifier.from_environ(environ)
    signals.install()
    reaper.start()
    try:
        workgroup, problems = load_workgroup(file)
        if problems:
            # The preflight knows the settings too: it finds these problems and any other in one pass.
            await consult([file, "--for", "check"], reaper=reaper, environ=environ, on_warning=_warn)
            raise WorkgroupError(problems)
        group = workgroup.supervisor.name
        files = GroupFiles(choose_directory(workgroup.supervisor.runtime_dir), group)
        files.check_paths(_slots(workgroup))
        files.acquire()
        environ = {**environ, RUNTIME_DIR: files.directory}
        try:
            board = Board(group)
            log = (journal or Journal()).bind(group=group)
            verbs = Verbs(Surroundings(file, environ, reaper, files, log, notifier))
            signals.listen(Meaning.RELOAD, lambda _name: verbs.hang_up())
            record = Record(files.record)
            upkeep = Upkeep(files, record, log)
            server = HealthServer(
                files.socket,
                live=board.live,
                ready=board.ready,
                metrics=board.metrics,
                routes=board.routes(),
                verbs={**verbs.routes(), **board.verbs()},
                on_place=upkeep.told,
            )
            await server.start()
            releaser = Releaser(record, log, lambda workers: release_by_helper(file, workers, reaper, environ))
            releaser.start()
            upkeep.start()
            preload = Zygotes(reaper=reaper, journal=log, command=zygote)
            board.preload, board.lines_dropped = preload.status, lambda: log.dropped
            try:
                if workgroup.supervisor.health_address is not None:
                    await server.listen_on_port(*workgroup.supervisor.health_address, only=PUBLIC_PATHS)
                notifier.round(board.headline(), ready=False)
                # They import beside the check before the start: whoever is ready first waits for the other.
                environments = Environments(environ)
                for worker in workgroup.workers:
                    environments.add(worker.environment)
                environment = partial(environments.marked, app_dir=workgroup.app_dir)
                preload.start(workgroup.workers, environment)
                plan = await _preflight(file, reaper, environ, signals, log, notifier)
                if plan is None:
                    return ExitCode.DONE
                environments.learn(plan.children)
                preload.start(plan.children, environment)  # nothing new, unless a file has changed since it was read
                monitor = Monitor(
                    plan,
                    files=files,
                    board=board,
                    journal=log,
                    reaper=reaper,
                    environments=environments,
                    command=command,
                    notifier=notifier,
                    releaser=releaser,
                    preload=preload,
                    capture=_captures(workgroup.supervisor.logs, log),
                    cgroup=cgroup,
                )
                verbs.attach(monitor, board)
                Orders(monitor, verbs, board, log).follow(signals)
                return await monitor.run()
            finally:
                # At the same time and bounded as a whole: by little, and a little more where the processes left some.
                spare = min(_SPARE, max(0.0, (board.stops_by or 0.0) - time.monotonic()))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSING + spare):
                        releasing = releaser.finish(_RELEASE_TIME + spare)
                        await asyncio.gather(verbs.close(CLOSING), preload.stop(), releasing)
                await upkeep.stop()
                await server.stop()
        finally:
            files.release()
    finally:
        signals.close()
        reaper.stop()
        notifier.close()


def _captures(wanted: str, log: Journal) -> bool:
    return wanted == "capture" or (wanted == "auto" and log.human)


async def _preflight(
    file: str,
    reaper: Reaper,
    environ: Mapping[str, str],
    signals: Signals,
    log: Journal,
    notifier: Notifier,
) -> Plan | None:
    """Return the plan, or None when the group was told to stop before there was one."""
    log.tell("preflight")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as scope:
            for meaning in (Meaning.STOP, Meaning.QUIT):
                signals.listen(meaning, lambda _reason: scope.reschedule(loop.time()))
            return await consult(
                [file, "--for", "run"],
                reaper=reaper,
                environ=environ,
                on_warning=lambda text: log.tell("preflight-warning", "warning", why=text),
                on_step=lambda within: notifier.boot_until(time.monotonic() + within),
            )
    except TimeoutError:
        log.tell("shutdown-complete", exit_code=int(ExitCode.DONE), why="told to stop before the start")
        return None


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _slots(workgroup: Workgroup) -> list[tuple[str, int]]:
    workers = [(worker.name, index) for worker in workgroup.workers for index in range(worker.replicas)]
    return [(SCHEDULER, 0), *workers]
