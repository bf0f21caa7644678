"""The few settings that a client shares with its workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import UUID

from pydantic import TypeAdapter, ValidationError

from taskqd.settings.errors import SettingsError
from taskqd.settings.model import Settings, variable


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What a ``TaskQ`` takes from the environment; each as in :class:`taskqd.settings.Settings`."""

    schema_name: str
    environment: str | None
    installation_id: UUID | None
    idempotency_key_max_bytes: int
    max_retry_backoff: float
    heartbeat_interval: float
    lock_lease: float

    @property
    def heartbeat_window(self) -> tuple[float, float]:
        """The seconds, from and below, that a job's ``heartbeat_timeout`` may be."""
        return 2 * self.heartbeat_interval, self.lock_lease


def client_settings(environ: Mapping[str, str] | None = None) -> ClientSettings:
    """Return them from the process environment, or raise ``SettingsError``.

    Only these are read and checked: a web application must not fail to start over a setting of its workers. ``.env``
    files are not read either; an application that uses them has loaded them itself.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    problems = []
    for name in ClientSettings.__dataclass_fields__:
        field = Settings.model_fields[name]
        given = environ.get(variable(name))
        if given is None:
            values[name] = field.get_default(call_default_factory=True)
            continue
        try:
            kind: Any = Annotated[field.annotation, *field.metadata]
            values[name] = TypeAdapter(kind).validate_python(given)
        except ValidationError as error:
            problems.append(f"{variable(name)} = {given!r}: {error.errors()[0]['msg']}")
    if problems:
        raise SettingsError(problems)
    return ClientSettings(**values)
