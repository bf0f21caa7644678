"""The figures of the supervisor, beside its peers in the same run: ``scripts/bench supervisor``.

Each figure is the median of some rounds, and stands beside what it has to be and what it might become. Peers run
processes of an application with the same imports. ``--only fleet,probe`` measures some of it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import astuple

import asyncpg

from benchmarks.fleet import WORKERS, Fleet, measure_fleet
from benchmarks.footprint import CHILDREN, measure_footprint
from benchmarks.group import SCHEMA
from benchmarks.orphans import measure_orphans
from benchmarks.peers import COMMANDS, LEFT, WATCHED, Care, Peer, measure_care, measure_peer
from benchmarks.probe import measure_probe, measure_status
from benchmarks.recovery import measure_recovery
from benchmarks.rotation import measure_rotation
from benchmarks.silence import measure_silence
from benchmarks.table import Table
from taskqd.storage.migrate import migrate_up
from tests.postgres import PASSWORD_ROLE, Server, embedded


class Run:
    """One run on one server."""

    def __init__(self, server: Server, conn: asyncpg.Connection, rounds: int, peer_rounds: int) -> None:
        self.table = Table()
        self._server = server
        self._dsn = server.dsn()
        self._conn = conn
        self._rounds = rounds
        self._peer_rounds = peer_rounds
        self._peers: dict[str, list[Peer]] = {name: [] for name in COMMANDS}
        self._care: dict[str, Care] = {}

    async def peers(self) -> None:
        """Measure the peers. Rounds alternate between them, so that a machine that slows down slows all."""
        for number in range(self._peer_rounds):
            for name, found in self._peers.items():
                found.append(measure_peer(name))
                print(f"peers, round {number + 1}: {name} {found[-1]}", flush=True)
        for name in self._peers if self._peer_rounds else ():
            self._care[name] = measure_care(name)
            print(f"peers: {name} {self._care[name]}", flush=True)

    async def fleet(self) -> None:
        """Measure the workers."""
        found: dict[str, list[Fleet]] = {"require": [], "off": []}
        for number in range(self._rounds):
            for preload, fleets in found.items():
                fleets.append(measure_fleet(self._dsn, preload, kills=3 if preload == "require" else 1))
                print(f"workers, round {number + 1}, preload = {preload}: {fleets[-1]}", flush=True)
        self._compare(found["require"], found["off"])

    def _compare(self, forked: list[Fleet], execed: list[Fleet]) -> None:
        add, pairs = self.table.add, list(zip(forked, execed, strict=True))
        spawn = f"{WORKERS} workers: spawn to all ready, preload / exec"
        add(f"{spawn}, the import included", [a.spawn / b.spawn for a, b in pairs], ".2f", 0.35, 0.15)
        add(f"{spawn}, without the import", [a.forks / b.forks for a, b in pairs], ".3f")
        whole = self._of(lambda peer: f"{peer.whole:.1f} s")
        add("command to all ready, preload", [each.whole for each in forked], ".2f s", peers=whole)
        add("command to all ready, exec", [each.whole for each in execed], ".2f s")
        heal = self._of(lambda peer: f"{peer.heal * 1000:.0f} ms")
        add("SIGKILL of a worker to replacement ready", _ms(each.heal for each in forked), ".0f ms", 50, 10, heal)
        add("the same, exec", _ms(each.heal for each in execed), ".0f ms")
        add(
            "private memory of an idle worker, preload / exec",
            [a.memory / b.memory for a, b in pairs],
            ".3f",
            0.35,
            0.1,
        )
        private = self._of(lambda peer: f"{peer.memory:.1f} MiB")
        add("private memory of an idle worker, preload", [each.memory for each in forked], ".1f MiB", peers=private)
        stop = self._of(lambda peer: f"{peer.stop * 1000:.0f} ms")
        add("idle group: SIGTERM to exit", _ms(each.stop for each in forked), ".0f ms", 300, 100, stop)

    def _of(self, tell: Callable[[Peer], str]) -> str:
        """Return the median of each peer, as ``tell`` writes it."""
        medians = {
            name: Peer(*map(statistics.median, zip(*map(astuple, found), strict=True)))
            for name, found in self._peers.items()
            if found
        }
        return ", ".join(f"{name} {tell(peer)}" for name, peer in medians.items())

    async def recovery(self) -> None:
        """Measure what becomes of the jobs of a killed worker."""
        found = [await measure_recovery(self._dsn, self._conn) for _ in range(self._rounds)]
        settled, again = (_ms(times) for times in zip(*found, strict=True))
        self.table.add("SIGKILL of a worker to its jobs settled as crashed", settled, ".0f ms", 200, 50)
        self.table.add("SIGKILL of a worker to its jobs running again", again, ".0f ms", 300, 100)

    async def footprint(self) -> None:
        """Measure the supervisor itself."""
        own, bare, shares = measure_footprint(self._dsn, self._rounds)
        peers = ", ".join(f"{name} {care.memory / bare:.2f}" for name, care in self._care.items())
        self.table.add("memory of the supervisor / bare process", [own / bare], ".2f", 1.3, 1.1, peers)
        peers = ", ".join(f"{name} {care.share:.2%}" for name, care in self._care.items())
        percent = [share * 100 for share in shares]
        self.table.add(f"CPU of the supervisor at {CHILDREN} children", percent, ".2f %", 0.5, 0.3, peers)

    async def orphans(self) -> None:
        """Measure how long processes outlive their supervisor."""
        found = [await measure_orphans(self._dsn) for _ in range(self._rounds)]
        left = f"of {WORKERS} left after {LEFT:g} s"
        peers = ", ".join(f"{name} {care.orphans} {left}" for name, care in self._care.items())
        self.table.add("SIGKILL of the supervisor to last child gone", _ms(found), ".0f ms", 100, 30, peers)

    async def silence(self) -> None:
        """Measure how soon a blocked event loop is noticed."""
        found = await measure_silence(self._dsn, self._rounds)
        never = f"not within {WATCHED:g} s"
        how = {name: never if care.silence is None else f"{care.silence:.1f} s" for name, care in self._care.items()}
        peers = ", ".join(f"{name} {noticed}" for name, noticed in how.items())
        self.table.add("blocked loop noticed, with the guilty line", found, ".1f s", 4, 3, peers)

    async def probe(self) -> None:
        """Measure a probe."""
        found = measure_probe(self._dsn, self._rounds)
        ratios = [ours / bare for ours, bare in found]
        self.table.add("CPU of `taskqd health live` / `python3 -c pass`", ratios, ".2f", 1.6, 1.2)
        found = measure_status(self._dsn, self._rounds)
        bare = f"python3 -c pass {statistics.median(bare for _, bare in found) * 1000:.0f} ms"
        self.table.add("`taskqd status` of eight workers", _ms(ours for ours, _ in found), ".0f ms", 150, peers=bare)

    async def rotation(self) -> None:
        """Measure a rotation."""
        dsn = self._server.dsn(PASSWORD_ROLE)
        found = await measure_rotation(self._dsn, dsn, self._conn, self._rounds)
        self.table.add(f"rotation of {WORKERS} workers under load, none restarted, no job failed", found, ".2f s", 2, 1)


PARTS: dict[str, Callable[[Run], Awaitable[None]]] = {
    "peers": Run.peers,
    "fleet": Run.fleet,
    "recovery": Run.recovery,
    "footprint": Run.footprint,
    "orphans": Run.orphans,
    "silence": Run.silence,
    "probe": Run.probe,
    "rotation": Run.rotation,
}


def _ms(seconds: Iterable[float]) -> list[float]:
    return [each * 1000 for each in seconds]


async def measure(server: Server, parts: list[str], rounds: int, peer_rounds: int) -> Table:
    """Measure ``parts`` on a fresh schema."""
    conn = await asyncpg.connect(server.dsn())
    try:
        await migrate_up(conn, SCHEMA)
        run = Run(server, conn, rounds, peer_rounds)
        for part in parts:
            await PARTS[part](run)
        return run.table
    finally:
        await conn.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench supervisor", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-rounds", type=int, default=2, help="of each peer; 0 leaves them out")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    options = parser.parse_args()
    parts = options.only.split(",")
    if not set(parts) <= PARTS.keys():
        parser.error(f"--only: there are {', '.join(PARTS)}")
    server = embedded(18)
    try:
        table = asyncio.run(measure(server, parts, options.rounds, options.peer_rounds))
    finally:
        server.remove()
    print(f"\nmedians of {options.rounds} rounds (peers: {options.peer_rounds}) on {os.cpu_count()} CPUs")
    table.show()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
