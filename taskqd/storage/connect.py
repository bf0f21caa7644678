"""Connections and pools: named, kept alive, pinned where plans must not flip, clear about a failure."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg

from taskqd.domain.errors import ConfigError, DatabaseAuthError, DatabaseUnavailableError, TaskQError
from taskqd.settings.model import DEFAULT_DSN
from taskqd.storage.dsn import describe_dsn, parse_dsn

if TYPE_CHECKING:
    from taskqd.storage.credentials import Login

__all__ = [
    "CONNECT_ERRORS",
    "SESSION_LOST",
    "application_name",
    "close",
    "connect",
    "connect_with_retry",
    "create_pool",
    "describe_dsn",
    "explain",
    "require_writable",
    "with_retry",
]

_Opened = TypeVar("_Opened")

CONNECT_ERRORS = (
    OSError,
    ValueError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
"""What a failed attempt to connect may raise; :func:`explain` turns each into an error of ours."""
SESSION_LOST = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
)
"""What a statement may raise when its connection is gone; :func:`explain` takes these too."""

_REFUSALS = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)
_KEEPALIVE = {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}
_ISOLATION = {"default_transaction_isolation": "read committed"}
"""What our statements are written for: they look again at a row once they have locked it."""
_PINS = ("enable_sort", "enable_bitmapscan", "enable_seqscan", "enable_hashjoin", "enable_mergejoin")
_PLACE_BYTES = 53
"""Of the 63 that Postgres keeps of a name; ten are for a slash and the longest role."""
_STATEMENT_CACHE_SIZE = 512
_STATEMENT_LIFETIME = 3600
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_SHORTEST_ATTEMPT = 1.0


def application_name(schema: str, group: str, role: str) -> str:
    """Return ``taskqd/<schema>/<group>/<role>``; what would not fit the 63 bytes that Postgres keeps is cut.

    The role is always whole, and two long names stay two: a hash stands for what was cut off of schema and group.
    """
    place = f"taskqd/{schema}/{group}"
    if len(place.encode()) > _PLACE_BYTES:
        digest = hashlib.blake2b(place.encode(), digest_size=4).hexdigest()
        place = f"{place.encode()[: _PLACE_BYTES - 9].decode(errors='ignore')}~{digest}"
    return f"{place}/{role}"


async def connect(
    dsn: str,
    *,
    role: str,
    schema: str,
    group: str = "",
    timeout: float = 10.0,
    pinned: bool = False,
    command_timeout: float | None = None,
    statement_cache_size: int = _STATEMENT_CACHE_SIZE,
    max_cached_statement_lifetime: float = _STATEMENT_LIFETIME,
    login: Login | None = None,
) -> asyncpg.Connection:
    """Open one direct connection within ``timeout`` seconds, as ``login`` says, else as the DSN does.

    ``pinned`` switches off, for the session, the planner choices that a hot statement must never be given.
    ``command_timeout`` (seconds, None for none) bounds each command. Raises ``DatabaseAuthError`` when the
    database refuses who we are or what we ask for, ``ConfigError`` for an unusable DSN, else
    ``DatabaseUnavailableError``.
    """
    parse_dsn(dsn)
    try:
        return await _open(
            login,
            dsn,
            timeout=timeout,
            command_timeout=command_timeout,
            statement_cache_size=statement_cache_size,
            max_cached_statement_lifetime=math.ceil(max_cached_statement_lifetime),
            server_settings=_settings(application_name(schema, group, role), pinned=pinned),
        )
    except CONNECT_ERRORS as error:
        raise explain(error, dsn) from None


async def connect_with_retry(
    dsn: str,
    *,
    role: str,
    schema: str,
    boot_timeout: float,
    group: str = "",
    timeout: float = 10.0,
    pinned: bool = False,
    command_timeout: float | None = None,
    on_retry: Callable[[str, float], None] | None = None,
    login: Login | None = None,
    writable: bool = True,
) -> asyncpg.Connection:
    """Like :func:`connect`, but try a database that is down or full again for ``boot_timeout`` seconds.

    Unless ``writable`` is false, one that is read-only, as a standby is, counts as down.

    With a ``login`` one that refuses us is tried again too: a rotation may be half done. The pauses double from 0.1
    to 2 s, jittered; ``on_retry(why, pause)`` is called before each. With 0 there is one attempt. Raises
    ``DatabaseUnavailableError`` at most ``timeout`` after that; an error that another attempt cannot help is raised
    at once.
    """

    async def attempt(timeout: float) -> asyncpg.Connection:
        conn = await connect(
            dsn,
            role=role,
            schema=schema,
            group=group,
            timeout=timeout,
            pinned=pinned,
            command_timeout=command_timeout,
            login=login,
        )
        if writable:
            try:
                await require_writable(conn, dsn, timeout)
            except BaseException:
                await close(conn)
                raise
        return conn

    return await with_retry(attempt, boot_timeout=boot_timeout, timeout=timeout, on_retry=on_retry, login=login)


async def with_retry(
    attempt: Callable[[float], Awaitable[_Opened]],
    *,
    boot_timeout: float,
    timeout: float = 10.0,
    on_retry: Callable[[str, float], None] | None = None,
    login: Login | None = None,
) -> _Opened:
    """Return what ``attempt(timeout)`` does, tried again as :func:`connect_with_retry` says."""
    started = time.monotonic()
    attempts = 0
    while True:
        left = boot_timeout - (time.monotonic() - started)
        try:
            return await attempt(min(timeout, max(left, _SHORTEST_ATTEMPT)) if attempts else timeout)
        except (DatabaseUnavailableError, DatabaseAuthError) as error:
            if login is None and isinstance(error, DatabaseAuthError):
                raise
            attempts += 1
            waited = time.monotonic() - started
            if waited >= boot_timeout:
                times = "once" if attempts == 1 else f"{attempts} times"
                raise DatabaseUnavailableError(f"{error} (tried {times} in {waited:.1f} s)") from None
            backoff = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempts - 1, 10)) * random.uniform(0.75, 1.25)
            pause = min(backoff, boot_timeout - waited)
            if on_retry is not None:
                on_retry(str(error), pause)
            await asyncio.sleep(pause)


async def require_writable(database: asyncpg.Connection | asyncpg.Pool, dsn: str, timeout: float) -> None:
    """Raise ``DatabaseUnavailableError`` when nothing can be written through ``database``."""
    try:
        if await _is_writable(database, timeout):
            return
    except CONNECT_ERRORS as error:
        raise explain(error, dsn) from None
    raise DatabaseUnavailableError(
        f"database {describe_dsn(dsn)} is read-only: a standby, or default_transaction_read_only is on"
    )


async def _is_writable(
    database: asyncpg.Connection | asyncpg.pool.PoolConnectionProxy | asyncpg.Pool, timeout: float
) -> bool:
    if isinstance(database, asyncpg.Pool):
        async with database.acquire(timeout=timeout) as conn:
            return await _is_writable(conn, timeout)
    said = database.get_settings()  # by the server, unasked, but not by every pooler
    if [getattr(said, name, None) for name in ("in_hot_standby", "default_transaction_read_only")] == ["off", "off"]:
        return True
    return bool(await database.fetchval("show transaction_read_only", timeout=timeout) == "off")


async def create_pool(
    dsn: str,
    *,
    role: str,
    schema: str,
    group: str,
    min_size: int,
    max_size: int,
    command_timeout: float | None,
    statement_cache_size: int = _STATEMENT_CACHE_SIZE,
    max_cached_statement_lifetime: float = _STATEMENT_LIFETIME,
    is_pooled: bool = False,
    pinned: bool = False,
    planned_once: bool = False,
    max_inactive: float = 300.0,
    timeout: float = 10.0,
    login: Login | None = None,
    transactions_only: bool = False,
) -> asyncpg.Pool:
    """Open a pool of ``min_size`` to ``max_size`` connections; each attempt to connect is bounded by
    ``timeout`` s.

    ``is_pooled`` says that a pooler such as PgBouncer stands in between: statements are then not cached, and
    no session setting but the application name is sent, because it would be refused. ``pinned`` has no effect
    behind one; pin there with ``SET LOCAL``. ``planned_once`` is for sessions whose statements have one plan, which the
    planner would make anew each time that it expects fewer rows than usual. ``max_inactive`` (s) closes idle
    connections above the minimum; 0 never does. ``transactions_only`` is for sessions that do nothing outside of
    transactions: what earlier users left in the session is reset with the next ``begin``. Each connection asks
    ``login`` anew. Errors are those of :func:`connect`.
    """
    parse_dsn(dsn)
    name = application_name(schema, group, role)
    planning = {"plan_cache_mode": "force_generic_plan"} if planned_once else {}
    try:
        return await asyncpg.create_pool(
            dsn,
            min_size=min_size,
            max_size=max_size,
            max_inactive_connection_lifetime=max_inactive,
            timeout=timeout,
            command_timeout=command_timeout,
            statement_cache_size=0 if is_pooled else statement_cache_size,
            max_cached_statement_lifetime=0 if is_pooled else math.ceil(max_cached_statement_lifetime),
            server_settings={"application_name": name} if is_pooled else _settings(name, pinned=pinned) | planning,
            reset=_keep_session,
            connection_class=_ResetAtBegin if transactions_only else asyncpg.Connection,
            connect=None if login is None else partial(_open, login),
        )
    except CONNECT_ERRORS as error:
        raise explain(error, dsn) from None


async def _open(login: Login | None, dsn: str, **options: Any) -> asyncpg.Connection:
    """Connect with what ``login`` says, and where that is refused once more with what it says then."""
    if login is None:
        return await asyncpg.connect(dsn, **options)
    async with asyncio.timeout(options["timeout"]):
        credential = await login.current()
        try:
            return await asyncpg.connect(dsn, **{**options, **credential.arguments()})
        except asyncpg.InvalidAuthorizationSpecificationError:
            newer = await login.current(fresh=True)
            if newer == credential:
                raise
        return await asyncpg.connect(dsn, **{**options, **newer.arguments()})


async def _keep_session(_conn: object) -> None:
    """Reset nothing on release: our own statements leave no session state, and a reset costs a round trip."""


class _ResetAtBegin(asyncpg.Connection):
    """A connection that resets its session in one message with the begin of each outer transaction.

    What a transaction that is rolled back has set is gone with it, and what it has reset comes back, until the next.
    """

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        """See ``asyncpg.Connection.execute``."""
        if query == _BEGIN:
            query = f"{self.get_reset_query()}\n{_BEGIN}"
        return str(await super().execute(query, *args, timeout=timeout))


_BEGIN = "BEGIN;"
"""What asyncpg sends at the begin of an outer transaction with no options."""


async def close(conn: asyncpg.Connection, timeout: float = 5.0) -> None:
    """Close ``conn`` politely, or drop it where that fails or takes longer than ``timeout`` seconds."""
    try:
        await conn.close(timeout=timeout)
    except SESSION_LOST:
        conn.terminate()


def explain(error: BaseException, dsn: str) -> TaskQError:
    """Return our error for what a connection to ``dsn`` died of: one clear message, without the password."""
    target = describe_dsn(dsn)
    reason = _reason(error)
    if isinstance(error, _REFUSALS):
        return DatabaseAuthError(f"database {target} refused the connection: {reason}")
    if isinstance(error, asyncpg.PostgresError) and "startup parameter" in reason:
        return ConfigError(
            f"database {target} is behind a pooler that refuses session settings ({reason}): give its own "
            "address as TASKQ_PG_DSN_DIRECT, or set TASKQ_PG_IS_POOLED=true where the pooled one is meant"
        )
    if isinstance(error, FileNotFoundError) and not _uses_socket(dsn):
        return ConfigError(f"the DSN of database {target} names a certificate file that does not exist")
    if isinstance(error, asyncpg.ClientConfigurationError):
        return ConfigError(f"the DSN of database {target} is not usable: {reason}")
    if isinstance(error, ValueError):
        return ConfigError(f"the DSN of database {target} is not usable: check its host and parameters")
    unset = "; TASKQ_PG_DSN is not set, and this is its default" if dsn == DEFAULT_DSN else ""
    return DatabaseUnavailableError(f"database {target} is not reachable: {reason}{unset}")


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, FileNotFoundError):
        return "no server listens on that socket"
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    if isinstance(error, asyncpg.PostgresError):
        text = str(error.args[0]) if error.args else type(error).__name__
        return " ".join(text.split())
    return " ".join(str(error).split()) or type(error).__name__


def _uses_socket(dsn: str) -> bool:
    return any(host.startswith("/") for host, _ in parse_dsn(dsn).hosts)


def _settings(name: str, *, pinned: bool) -> dict[str, str]:
    pins = dict.fromkeys(_PINS, "off") if pinned else {}
    return {"application_name": name, "jit": "off", **_ISOLATION, **_KEEPALIVE, **pins}
