"""The actor of ``scripts/bench consume``: it writes one row in the transaction of its job."""

from __future__ import annotations

import os

import asyncpg

from benchmarks.noop import Payload
from taskqd import ProviderRegistry, Registry, actor

INSERT = f'insert into "{os.environ.get("TASKQ_SCHEMA_NAME", "bench")}".ledger (n) values ($1)'


@actor(name="bench.write", queue="bench")
async def write(payload: Payload, *, connection: asyncpg.Connection) -> None:
    await connection.execute(INSERT, payload.n)


providers = ProviderRegistry()
providers.transactional()
registry = Registry([write], providers=providers)
