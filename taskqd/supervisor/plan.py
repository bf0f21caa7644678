"""What a workgroup comes to once everything is resolved: the answer of the preflight to the supervisor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from taskqd.supervisor.recycle import RecycleLimits
from taskqd.supervisor.restart import RestartRule
from taskqd.supervisor.slot import Timing
from taskqd.supervisor.stopping import Graces


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One kind of process, ``replicas`` times. ``settings`` are the file's values; secrets are never among them."""

    name: str
    role: str
    arguments: tuple[str, ...]
    """What follows ``python -m taskqd``."""
    replicas: int = 1
    preload: str = "off"
    """``auto``, ``require`` or ``off``: whether it is forked from a process that has imported its actors."""
    settings: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    """Of every effective setting but the secrets: it changes too when a ``.env`` file says something else."""
    graces: Graces = field(default_factory=lambda: Graces(30.0, 10.0))
    database_stale_after: float = 60.0
    """Seconds without a good answer of the database after which the process does not count as ready."""
    queues: tuple[str, ...] = ()
    """What a worker takes its jobs from."""
    recycle: RecycleLimits = field(default_factory=RecycleLimits)
    """What it may come to before it makes room for a fresh one."""
    timing: Timing = field(default_factory=Timing)
    settle_after: float = 2.0
    """Seconds that a new process must have been ready before it counts."""
    env: dict[str, str] = field(default_factory=dict)
    """What it has in its environment for itself, as the workgroup file says."""
    env_file: str | None = None
    """The file that says more."""
    env_digest: str = ""
    """The mark of both together; see :func:`taskqd.supervisor.worker_env.digest`."""
    env_settings: tuple[str, ...] = ()
    """The variables among them that are settings."""

    source: dict[str, Any] | None = None
    """Where its credentials come from, if not from the DSN: the fields of a ``taskqd.storage.credentials.Source``."""

    @property
    def zygote(self) -> tuple[str, str]:
        """What decides from which process it is forked: its actors, and the mark of its environment."""
        return self.arguments[-1], self.env_digest


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the supervisor needs to know. ``grace`` is the platform's, in seconds."""

    group: str
    children: tuple[ChildSpec, ...]
    grace: float = 85.0
    timing: Timing = field(default_factory=Timing)
    """What holds for processes without their own."""
    max_booting: int = 2
    app_dir: str | None = None
    runtime_dir: str | None = None
    """As written in the file; None is the first usable standard directory."""
    health_address: str | None = None
    """``host:port`` that serves probes and metrics over TCP, if any."""
    logs: str = "auto"
    """As written in the file."""
    budget: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    """What ``check`` and ``budget`` tell beside the plan; empty for a run."""

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Return the plan that :meth:`to_json` wrote."""
        children = [
            ChildSpec(
                **{
                    **child,
                    "arguments": tuple(child["arguments"]),
                    "graces": Graces(**child["graces"]),
                    "queues": tuple(child["queues"]),
                    "recycle": RecycleLimits(**child["recycle"]),
                    "timing": _timing(child["timing"]),
                    "env_settings": tuple(child["env_settings"]),
                }
            )
            for child in data["children"]
        ]
        return cls(
            **{
                **data,
                "children": tuple(children),
                "timing": _timing(data["timing"]),
            }
        )


def _timing(data: dict[str, Any]) -> Timing:
    return Timing(**{**data, "restart": RestartRule(**data["restart"])})
