"""How one kind of process is watched and started again: the group's rule, or a worker's own."""

from __future__ import annotations

from dataclasses import dataclass

from taskqd.supervisor.restart import RestartRule
from taskqd.supervisor.slot import Timing
from taskqd.supervisor.table import Table

BOOT_MARGIN = 30.0
"""Seconds that a boot may take beside the wait for its database, where no ``boot_timeout`` is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The keys of ``[supervisor]`` that a ``[[workers]]`` table may have for itself. Every time is in seconds."""

    backoff_initial: float = 0.5
    """The delay after the first unstable exit; it doubles from there."""
    backoff_max: float = 30.0
    """The longest delay before a restart."""
    stable_after: float = 10.0
    """How long a process must have been ready for its next exit to be restarted at once."""
    burst_limit: int = 10
    """Restarts within ``burst_window`` after which a process is given up, however stable; 0 is no limit."""
    burst_window: float = 60.0
    """The window of ``burst_limit``."""
    boot_timeout: float | None = None
    """How long a process may take to become ready. Default: ``database_boot_timeout`` and 30 more."""
    stall_after: float = 3.0
    """How long a process may send no beat (it sends one each second) before it counts as stalled."""
    hang_kill_after: float = 30.0
    """How long a process may be stalled before it is killed."""
    settle_after: float = 2.0
    """How long a new process must have been ready before a reload or restart drains the one it replaces."""

    def timing(self, database_boot_timeout: float) -> Timing:
        """Return the limits of a process that waits so many seconds for its database."""
        boot = self.boot_timeout or database_boot_timeout + BOOT_MARGIN
        return Timing(
            boot_timeout=boot,
            boot_limit=5 * boot,
            stall_after=self.stall_after,
            hang_kill_after=self.hang_kill_after,
            restart=RestartRule(
                backoff_initial=self.backoff_initial,
                backoff_max=self.backoff_max,
                stable_after=self.stable_after,
                burst_limit=self.burst_limit,
                burst_window=self.burst_window,
            ),
        )


GROUP = Policy()
"""What holds where nothing is written."""


def take_policy(table: Table, default: Policy = GROUP) -> Policy:
    """Take the keys of a policy; what is not there is as in ``default``."""
    policy = Policy(
        backoff_initial=table.seconds("backoff_initial", default.backoff_initial, 0.01, 60),
        backoff_max=table.seconds("backoff_max", default.backoff_max, 0.01, 3600),
        stable_after=table.seconds("stable_after", default.stable_after, 0, 3600),
        burst_limit=table.count("burst_limit", default.burst_limit, 0, 10_000),
        burst_window=table.seconds("burst_window", default.burst_window, 1, 86400),
        boot_timeout=table.seconds("boot_timeout", default.boot_timeout, 1, 3600),
        stall_after=table.seconds("stall_after", default.stall_after, 1.5, 600),
        hang_kill_after=table.seconds("hang_kill_after", default.hang_kill_after, 0.5, 3600),
        settle_after=table.seconds("settle_after", default.settle_after, 0, 600),
    )
    first, longest = policy.backoff_initial, policy.backoff_max
    if longest < first and "backoff_max" in table.written:
        table.problem("backoff_max", f"{longest:g} must be at least backoff_initial = {first:g}")
    elif longest < first and "backoff_initial" in table.written:
        table.problem("backoff_initial", f"{first:g} must be at most backoff_max = {longest:g}")
    return policy
