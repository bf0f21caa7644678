"""The rules between settings: pure arithmetic over values that are each valid alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskqd.domain.leases import lease_floor

if TYPE_CHECKING:
    from taskqd.settings.model import Settings

STOP_TAIL = 5.0
"""Seconds of the termination grace that must remain after both grace periods, to close and exit."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: the first setting in ``values`` must be ``bound``, which the others are part of."""

    bound: str
    values: dict[str, object]

    @property
    def field(self) -> str:
        """The setting that breaks the rule."""
        return next(iter(self.values))


def show(number: float) -> str:
    """Return ``number`` as a person would write it: no trailing zeros, enough digits to tell two apart."""
    return f"{number:.12g}"


def violations(settings: Settings) -> list[Violation]:
    """Return every rule that ``settings`` breaks."""
    return [*_lease(settings), *_shutdown(settings), *_watchdog(settings), *_pooler(settings), *_credentials(settings)]


def _lease(s: Settings) -> list[Violation]:
    interval, timeout, failures = s.heartbeat_interval, s.heartbeat_command_timeout, s.max_heartbeat_failures
    floor = lease_floor(interval, timeout, failures)
    if s.lock_lease >= floor:
        return []
    terms = f"max({show(interval)}, {show(timeout)}) + ({failures} + 1) × ({show(interval)} + {show(timeout)})"
    names = ("heartbeat_interval", "heartbeat_command_timeout", "max_heartbeat_failures")
    return [_broken(s, "lock_lease", f"at least {show(floor)} = {terms}", *names)]


def _shutdown(s: Settings) -> list[Violation]:
    found = []
    cancel, cleanup = s.cancellation_grace_period, s.cleanup_grace_period
    graces = ("cancellation_grace_period", "cleanup_grace_period")
    if not cancel + cleanup < s.termination_grace_period - STOP_TAIL:
        terms = f"{show(cancel)} + {show(cleanup)} + {show(STOP_TAIL)} to close and exit"
        bound = f"above {show(cancel + cleanup + STOP_TAIL)} = {terms}"
        found.append(_broken(s, "termination_grace_period", bound, *graces))
    if not cancel + cleanup < s.lock_lease:
        bound = f"above {show(cancel + cleanup)} = {show(cancel)} + {show(cleanup)}"
        found.append(_broken(s, "lock_lease", bound, *graces))
    return found


def _watchdog(s: Settings) -> list[Violation]:
    if not s.watchdog_enabled:
        return []
    found = []
    budget, interval = s.watchdog_loop_lag_budget, s.heartbeat_interval
    if not budget + interval < s.lock_lease:
        bound = f"above {show(budget + interval)} = {show(budget)} + {show(interval)}"
        found.append(_broken(s, "lock_lease", bound, "watchdog_loop_lag_budget", "heartbeat_interval"))
    if not budget > s.watchdog_check_interval:
        bound = f"above {show(s.watchdog_check_interval)}"
        found.append(_broken(s, "watchdog_loop_lag_budget", bound, "watchdog_check_interval"))
    if not s.watchdog_loop_lag_warn_budget < budget:
        bound = f"below {show(budget)}"
        found.append(_broken(s, "watchdog_loop_lag_warn_budget", bound, "watchdog_loop_lag_budget"))
    return found


def _pooler(s: Settings) -> list[Violation]:
    if not s.pg_is_pooled or s.direct_dsn() != s.pooled_dsn():
        return []
    bound = (
        "false while one DSN serves everything, as LISTEN and advisory locks need sessions that a pooler "
        "cannot give; set TASKQ_PG_DSN_DIRECT to the server itself"
    )
    return [_broken(s, "pg_is_pooled", bound, "pg_dsn_direct", "pg_dsn_pooled")]


def _credentials(s: Settings) -> list[Violation]:
    found = []
    for kind, field in (("file", "pg_credential_path"), ("exec", "pg_credential_command")):
        given, wanted = getattr(s, field) is not None, s.pg_credential_provider == kind
        if given and not wanted:
            found.append(_broken(s, field, f"empty unless the provider is '{kind}'", "pg_credential_provider"))
        elif wanted and not given:
            found.append(_broken(s, "pg_credential_provider", f"accompanied by {field}", field))
    return found


def _broken(settings: Settings, field: str, bound: str, *others: str) -> Violation:
    return Violation(bound, {name: getattr(settings, name) for name in (field, *others)})
