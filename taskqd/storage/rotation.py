"""Keeps the sessions of a process on the present credential."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import Any

from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.storage.credentials import EXPIRY_MARGIN, Credential, CredentialError, Login
from taskqd.storage.turn import Turn

_SHORTEST_LOOK = 1.0
_LONGEST_REASON = 500

Renew = Callable[[], Awaitable[None]]
"""Replaces one pool or connection by a new one. Raises, and keeps the old one, where that fails."""
Result = dict[str, Any]
"""``resource``, ``ok``, ``ms``, and ``error`` where it failed."""


class Rotation:
    """Renews every resource when asked, and by itself when the credential has changed.

    It looks each ``interval`` seconds (0: never), and half way to where a credential that expires is used no more.
    ``in_use`` is what the resources were opened with. ``on_renewed(results)`` is told what came of each time. With a
    ``turn`` the processes of a group renew one after the other: while one does it holds every session twice.
    """

    def __init__(
        self,
        login: Login | None,
        in_use: Credential | None,
        resources: Mapping[str, Renew],
        *,
        interval: float,
        on_renewed: Callable[[list[Result]], None],
        on_failure: FailureHook,
        turn: Turn | None = None,
    ) -> None:
        self._login = login
        self._in_use = in_use
        self._resources = dict(resources)
        self._interval = interval
        self._on_renewed = on_renewed
        self._renewing = asyncio.Lock()
        self._turn = turn
        self._looked = False
        self._renewed_at = time.monotonic()
        self._lives_for = _lifetime(in_use)
        self._stale: str | None = None
        self._unread: str | None = None
        self._loop = BackgroundLoop("credentials", self._step, cadence=max(interval, 1.0), on_failure=on_failure)

    def add(self, resource: str, renew: Renew) -> None:
        """Renew one more from now on."""
        self._resources[resource] = renew

    def remove(self, resource: str) -> None:
        """Renew it no more, if it was."""
        self._resources.pop(resource, None)

    def start(self) -> None:
        """Begin to look, where there is anything to look at."""
        if self._login is not None and self._interval > 0:
            self._loop.start()

    async def stop(self, timeout: float) -> None:
        """Look no more; a renewal under way is cut off after ``timeout`` seconds."""
        await self._loop.stop(timeout)

    def beat(self) -> dict[str, object]:
        """What a beat tells: the age of the sessions and how long their credential was good for, both in seconds, and
        why they could not be renewed, if so."""
        age = round(time.monotonic() - self._renewed_at, 1)
        stale = self._unread or self._stale
        return {"credential_age_s": age, "credential_ttl_s": self._lives_for, "credentials_stale": stale}

    async def renew(self) -> list[Result]:
        """Renew every resource at once and return how that went for each.

        Raises ``CredentialError``, and ``ConnectionError`` where its turn does not come.
        """
        async with self._renewing, nullcontext() if self._turn is None else self._turn.taken():
            fresh = None if self._login is None else await self._read(self._login)
            results = await asyncio.gather(*(_renew(name, renew) for name, renew in list(self._resources.items())))
            failed = [f"{result['resource']}: {result['error']}" for result in results if not result["ok"]]
            self._stale = "; ".join(failed)[:_LONGEST_REASON] or None
            if not failed:
                self._in_use, self._renewed_at = fresh, time.monotonic()
                self._lives_for = _lifetime(fresh)
            self._on_renewed(results)
            return results

    async def _read(self, login: Login, *, fresh: bool = True) -> Credential:
        try:
            found = await login.current(fresh=fresh)
        except CredentialError as error:
            self._unread = str(error)[:_LONGEST_REASON]
            raise
        self._unread = None
        return found

    async def _step(self) -> float | None:
        if self._login is None:
            return None
        fresh, self._looked = self._looked, True  # what the resources were opened with is fresh enough the first time
        found = await self._read(self._login, fresh=fresh)
        if found != self._in_use:
            await self.renew()
        if found.expires_at is None:
            return None
        left = found.expires_at - EXPIRY_MARGIN - time.time()
        return min(self._interval, max(_SHORTEST_LOOK, left / 2))


def _lifetime(credential: Credential | None) -> float | None:
    """Return for how many seconds a credential that was taken now is good, or None when that is not known."""
    if credential is None or credential.expires_at is None:
        return None
    return round(credential.expires_at - time.time(), 1)


def told(log: Any, results: list[Result]) -> None:
    """Log what came of a renewal: once, with every resource that failed."""
    failed = {result["resource"]: result["error"] for result in results if not result["ok"]}
    took = max(result["ms"] for result in results)
    if failed:
        log.warning("credentials-reloaded", failed=failed, ms=took)
    else:
        log.info("credentials-reloaded", resources=[result["resource"] for result in results], ms=took)


async def _renew(name: str, renew: Renew) -> Result:
    began = time.monotonic()
    error = None
    try:
        await renew()
    except Exception as problem:
        text = str(problem) or "no answer in time"
        error = text if isinstance(problem, OSError) else f"{type(problem).__name__}: {text}"
    took = round((time.monotonic() - began) * 1000, 1)
    return {"resource": name, "ok": error is None, "ms": took, "error": error}
