"""Where the benchmarks of the engine run: a server, a fresh schema with rows in it, and workers on it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.work import PUT_OFF, QUEUE
from taskqd.storage.migrate import migrate_up
from tests.postgres import Server, embedded

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "bench"
PATIENCE = 300.0
SETTINGS = (
    "shared_buffers = '1GB'",
    "max_wal_size = '16GB'",
    "min_wal_size = '4GB'",
    "checkpoint_timeout = '30min'",
)
"""Of the server: rows and their indexes fit into memory; a checkpoint falls into no drain by chance; WAL goes to files
that are there already, as on a server that has run for a while. To make one holds every commit up for 30 ms."""
WAL_FILES = 192
"""Of 16 MB, that are made before anything is measured."""
_ROW = {
    "id": "{schema}.uuid7()",
    "actor": "'bench.plain'",
    "queue": f"'{QUEUE}'",
    "payload": "jsonb_build_object('n', n, 'blob', repeat('x', 230))",
    "retry_base": str(PUT_OFF),
    "retry_jitter": "0",
}
_PER_STATEMENT = 100_000


@dataclass(frozen=True, slots=True)
class Drained:
    """What one drain was."""

    jobs: int
    rate: float
    """Jobs per second, from the first settled row to the last."""
    cpu: float
    """Seconds of processor time of the worker per job, from the first handler to the last."""


@dataclass(slots=True)
class Ground:
    """One server, and how to measure on it."""

    server: Server
    rounds: int
    quick: bool
    deployed: bool
    concurrency: int
    directory: Path = field(default_factory=Path)

    def jobs(self, full: int) -> int:
        """How many rows stand for ``full``."""
        return full // 10 if self.quick else full

    async def make_wal_files(self) -> None:
        """Make the files that WAL will go to."""
        conn = await asyncpg.connect(self.server.dsn())
        try:
            for _ in range(WAL_FILES):
                await conn.execute("select pg_logical_emit_message(true, 'benchmark', ''); select pg_switch_wal()")
            await conn.execute("checkpoint")
        finally:
            await conn.close()

    @asynccontextmanager
    async def schema(self) -> AsyncIterator[asyncpg.Connection]:
        """Make a fresh schema and yield a session."""
        conn = await asyncpg.connect(self.server.dsn())
        try:
            await conn.execute(f"drop schema if exists {SCHEMA} cascade")
            await conn.execute("checkpoint")
            await migrate_up(conn, SCHEMA)
            yield conn
        finally:
            await conn.close()

    @asynccontextmanager
    async def workers(self, count: int = 1, **environment: object) -> AsyncIterator[list[subprocess.Popen[bytes]]]:
        """Run workers until the end of the block, then stop them and wait for their ends."""
        processes = []
        with tempfile.TemporaryDirectory(prefix="tq", dir="/tmp") as directory:
            self.directory = Path(directory)
            try:
                for number in range(count):
                    command = ["worker", "--actors", "benchmarks.work:actors"]
                    processes.append(self._start(command, self.directory / f"{number}.sock", environment))
                if self.deployed:
                    processes.append(self._start(["scheduler", "run"], self.directory / "scheduler.sock", {}))
                yield processes[:count]
                await self._stop(processes)
            finally:
                for process in processes:
                    if process.poll() is None:
                        process.kill()
                        process.wait()

    @contextmanager
    def scheduler(self, **environment: object) -> Iterator[subprocess.Popen[bytes]]:
        """Run a scheduler until the end of the block."""
        with tempfile.TemporaryDirectory(prefix="tq", dir="/tmp") as directory:
            process = self._start(["scheduler", "run"], Path(directory) / "scheduler.sock", environment)
            try:
                yield process
                if process.poll() is not None:
                    raise SystemExit(f"the scheduler ended:\n{(Path(directory) / 'log').read_text()[-3000:]}")
                process.terminate()
                process.wait(60)
            finally:
                process.kill()
                process.wait()

    def _start(self, command: list[str], path: Path, environment: dict[str, object]) -> subprocess.Popen[bytes]:
        settings: dict[str, object] = {
            "TASKQ_PG_DSN": self.server.dsn(),
            "TASKQ_SCHEMA_NAME": SCHEMA,
            "TASKQ_QUEUES": QUEUE,
            "TASKQ_MAX_CONCURRENCY": self.concurrency,
            "TASKQ_LOG_LEVEL": "WARNING",
            "TASKQ_HEALTH_SOCKET_PATH": path,
            "BENCH_DIRECTORY": self.directory,
        }
        if self.deployed:
            settings |= {
                "TASKQ_DEFAULT_START_TO_CLOSE": "5m",
                "TASKQ_LOG_LEVEL": "INFO",
                "TASKQ_LOG_FORMAT": "json",
                "BENCH_TROUBLE": "",
            }
        settings |= environment
        with (path.parent / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "taskqd", *command],
                env=os.environ | {key: str(value) for key, value in settings.items()},
                cwd=ROOT,
                stderr=log,
            )

    async def _stop(self, processes: list[subprocess.Popen[bytes]]) -> None:
        running = [process for process in processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            await asyncio.to_thread(process.wait, 60)
        if any(process.returncode for process in processes):
            raise SystemExit(f"a worker failed:\n{(self.directory / 'log').read_text()[-3000:]}")

    async def finish(self, processes: list[subprocess.Popen[bytes]]) -> list[Any]:
        """Stop workers and return what each has seen."""
        await self._stop(processes)
        return self._files("all")

    async def seen_all(self, process: subprocess.Popen[bytes]) -> Any:
        """Wait until a worker has seen as many jobs as it should, and return what it tells of that."""
        deadline = time.monotonic() + PATIENCE
        while not (files := self._files("total")):
            if process.poll() is not None or time.monotonic() > deadline:
                log = (self.directory / "log").read_text()[-3000:]
                raise SystemExit(f"the worker did not finish in {PATIENCE:g} s, or ended:\n{log}")
            if self.deployed:
                scrape(self.directory / "0.sock")
            await asyncio.sleep(0.05)
        return files[0]

    def _files(self, name: str) -> list[Any]:
        return [json.loads(file.read_text()) for file in self.directory.glob(f"*.{name}")]

    async def drain(self, conn: asyncpg.Connection, jobs: int, **environment: object) -> Drained:
        """Run one worker until it has seen ``jobs`` succeed, stop it, and check what its handlers saw."""
        async with self.workers(BENCH_TOTAL=jobs, **environment) as processes:
            seen = await self.seen_all(processes[0])
            (whole,) = await self.finish(processes)
        succeeded = f"from {SCHEMA}.jobs where status = 'succeeded' and worker_id is not null"
        count, total, seconds = await conn.fetchrow(
            "select count(*), sum((payload ->> 'n')::bigint), "
            f"extract(epoch from max(finished_at) - min(finished_at))::float8 {succeeded}"
        )
        if (count, total) != (whole["count"], whole["sum"]):
            raise SystemExit(
                f"wrong result: {count} jobs of the sum {total} succeeded, "
                f"handlers saw {whole['count']} of the sum {whole['sum']}"
            )
        return Drained(count, (count - 1) / seconds, seen["cpu"] / jobs)


async def fill(conn: asyncpg.Connection, jobs: int, *, first: int = 0, schema: str = SCHEMA, **columns: str) -> None:
    """Insert ``jobs`` rows as enqueue writes them. Their columns are SQL expressions, over ``n`` from ``first`` on."""
    row = {name: value.replace("{schema}", schema) for name, value in (_ROW | columns).items()}
    row.setdefault("route", row["queue"])
    for start in range(first, first + jobs, _PER_STATEMENT):
        end = min(start + _PER_STATEMENT, first + jobs) - 1
        await conn.execute(
            f"insert into {schema}.jobs ({', '.join(row)}) "
            f"select {', '.join(row.values())} from generate_series({start}, {end}) n"
        )


def lane(actor: str) -> str:
    """Return the lane of an actor that is limited, as an expression."""
    return f"{{schema}}.lane_of('{actor}', null, null, true, false)"


_scraped = 0.0


def scrape(path: Path) -> None:
    """Read the metrics of a worker, once a second."""
    global _scraped
    if time.monotonic() < _scraped + 1 or not path.exists():
        return
    _scraped = time.monotonic()
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(path))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n\r\n")
        while client.recv(65536):
            pass


@contextmanager
def serving(rounds: int, *, quick: bool, deployed: bool, concurrency: int) -> Iterator[Ground]:
    """Start a server of its own."""
    server = embedded(18)
    try:
        with (server.data / "postgresql.conf").open("a") as file:
            file.write("".join(f"{setting}\n" for setting in SETTINGS))
        server.restart()
        ground = Ground(server, rounds, quick, deployed, concurrency)
        asyncio.run(ground.make_wal_files())
        yield ground
    finally:
        server.remove()
