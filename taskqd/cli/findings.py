"""What a comparison with a platform's own file came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taskqd.domain.errors import ConfigError
from taskqd.supervisor.plan import Plan

PROBE_TIMEOUT = 3
"""The least timeout of an exec probe, in seconds: ``taskqd health`` takes up to 2 to be answered, and must start."""

LEAST_WATCHDOG = 5.0
"""The shortest watchdog, in seconds, that a busy machine does not trip."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to change in ``file``. ``fatal``: the group would be killed early, or would not work at all."""

    file: str
    line: int
    key: str
    message: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.key}: {self.message}"


class PlatformError(ConfigError):
    """The platform's file does not fit the workgroup. Names every finding, the fatal ones first."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(sorted(findings, key=lambda finding: not finding.fatal))
        lines = [f"{'' if each.fatal else 'warning: '}{each}" for each in self.findings]
        if len(lines) == 1:
            super().__init__(lines[0])
        else:
            super().__init__("\n  ".join([f"{len(lines)} problems:", *lines]))


def start_time(plan: Plan) -> float:
    """Return how long the start of a group may take, in seconds: the checks before it, then its slowest process."""
    return 2 * max(timing.boot_timeout for timing in (plan.timing, *(child.timing for child in plan.children)))
