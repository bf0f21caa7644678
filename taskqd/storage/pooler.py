"""What a PgBouncer allows, asked of its own console."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

from taskqd.storage.connect import CONNECT_ERRORS, explain

if TYPE_CHECKING:
    from taskqd.storage.credentials import Login

_CONSOLE = "pgbouncer"
"""The name of the database that is PgBouncer's console."""
_LONGEST_ANSWER = 1 << 20


@dataclass(frozen=True, slots=True)
class PoolerLimits:
    """What its configuration says. ``pool_size`` is of sessions at the server for one user and database."""

    max_client_conn: int
    pool_size: int


async def ask_pooler(dsn: str, *, login: Login | None, timeout: float) -> PoolerLimits | str:
    """Return what the PgBouncer behind ``dsn`` allows, or why it does not say so, within ``timeout`` seconds.

    It says so to users in its ``admin_users`` or ``stats_users``.
    """
    try:
        async with asyncio.timeout(timeout):
            arguments: dict[str, Any] = {} if login is None else {**(await login.current()).arguments()}
            conn = await asyncpg.connect(dsn, **arguments, database=_CONSOLE, timeout=timeout)
            try:
                found = await _show_config(conn)
            finally:
                conn.terminate()
        default, reserve = int(found["default_pool_size"]), int(found["reserve_pool_size"])
        return PoolerLimits(int(found["max_client_conn"]), default + reserve)
    except CONNECT_ERRORS as error:
        return str(explain(error, dsn))
    except (KeyError, struct.error):
        return "its console gives an answer that cannot be read"


async def _show_config(conn: Any) -> dict[str, str]:
    """The console knows the simple query protocol alone, in which asyncpg returns no rows: speak it here."""
    transport = conn._transport
    console = Console()
    transport.set_protocol(console)
    query = b"SHOW CONFIG\x00"
    transport.write(b"Q" + struct.pack("!I", len(query) + 4) + query)
    return dict(await console.rows)


class Console(asyncio.Protocol):
    """Reads the rows of one simple query, the first two columns of each."""

    def __init__(self) -> None:
        self.rows: asyncio.Future[list[tuple[str, str]]] = asyncio.get_running_loop().create_future()
        self._buffer = b""
        self._found: list[tuple[str, str]] = []

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while not self.rows.done() and len(self._buffer) >= 5:
            (length,) = struct.unpack_from("!I", self._buffer, 1)
            if not 4 <= length <= _LONGEST_ANSWER:
                self._fail("an answer that cannot be read")
                return
            if len(self._buffer) <= length:
                return
            kind, body = self._buffer[:1], self._buffer[5 : length + 1]
            self._buffer = self._buffer[length + 1 :]
            self._message(kind, body)

    def connection_lost(self, _error: Exception | None) -> None:
        self._fail("the connection was closed")

    def _message(self, kind: bytes, body: bytes) -> None:
        if kind == b"D":
            self._found.append((_column(body, 0), _column(body, 1)))
        elif kind == b"E":
            self._fail("it refuses SHOW CONFIG")
        elif kind == b"Z":
            self.rows.set_result(self._found)

    def _fail(self, why: str) -> None:
        if not self.rows.done():
            self.rows.set_exception(ConnectionError(why))


def _column(row: bytes, wanted: int) -> str:
    """Return one column of a data row; a missing value is an empty text."""
    offset = 2
    for _ in range(wanted):
        (length,) = struct.unpack_from("!i", row, offset)
        offset += 4 + max(length, 0)
    (length,) = struct.unpack_from("!i", row, offset)
    return row[offset + 4 : offset + 4 + max(length, 0)].decode("utf-8", "replace")
