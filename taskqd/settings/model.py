"""All settings: their meaning, unit, default and bounds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args, get_origin
from uuid import UUID

from annotated_types import Ge, Le
from pydantic import Field, SecretStr, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUndefined
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from taskqd.settings import values as v
from taskqd.settings.rules import show, violations

PREFIX = "TASKQ_"
TINY = 0.001
"""The least of what must be above zero, in seconds: an interval below a millisecond is a busy loop."""
DEFAULT_DSN = "postgresql://taskq:taskq@localhost:5432/taskq"
DAY = 86400.0
YEAR = 365 * DAY


def _setting(
    default: Any,
    meaning: str,
    *,
    unit: str | None = None,
    low: float | None = None,
    high: float | None = None,
    alias: str | None = None,
    **extra: Any,
) -> Any:
    return Field(
        default,
        description=meaning,
        ge=low,
        le=high,
        json_schema_extra={"unit": unit, "alias": alias},
        **extra,
    )


def _count(default: int | None, low: int, high: int, meaning: str) -> Any:
    return _setting(default, meaning, low=low, high=high)


def _seconds(default: float | None, low: float, high: float, meaning: str, alias: str | None = None) -> Any:
    return _setting(default, meaning, unit="seconds", low=low, high=high, alias=alias)


def _bytes(default: int, low: int, high: int, meaning: str) -> Any:
    return _setting(default, meaning, unit="bytes", low=low, high=high)


class Settings(BaseSettings):
    """Every setting of a worker, a scheduler and a client, frozen.

    Build it with :func:`taskqd.settings.load_settings`, which gathers the values from flags, the workgroup
    file, the environment and the ``.env`` cascade. The constructor reads nothing: it takes values and checks
    them. In the environment a setting is ``TASKQ_`` and its name in capitals, in the workgroup file its name.
    Every duration is in seconds and may be written ``250ms``, ``1.5s``, ``5m``, ``2h`` or ``1d``.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        validate_default=True,
        hide_input_in_errors=True,
    )

    # -- database ---------------------------------------------------------------------------------
    pg_dsn: v.Dsn = _setting(
        SecretStr(DEFAULT_DSN),
        "Where the database is, as a Postgres URL.",
    )
    pg_dsn_direct: v.OptionalDsn = _setting(
        None,
        "The server itself, past any pooler: LISTEN, advisory locks, heartbeat and sweeps. None: pg_dsn.",
    )
    pg_dsn_pooled: v.OptionalDsn = _setting(
        None, "Where the worker's statement pool connects; may be a transaction pooler. None: pg_dsn."
    )
    pg_is_pooled: bool = _setting(
        False,
        "The pooled DSN is a transaction pooler: no statement cache anywhere, lost statements are retried.",
    )
    pg_credential_provider: Annotated[Literal["env", "file", "exec"], v.LowerCase] = _setting(
        "env",
        "Where user and password come from: 'env', the DSN; 'file', pg_credential_path; 'exec', pg_credential_command.",
    )
    pg_credential_path: v.OptionalPath = _setting(
        None, "The file that holds the password, or a JSON object with 'password' and maybe 'username'."
    )
    pg_credential_command: v.OptionalCommand = _setting(
        None,
        "The command, run without a shell, that prints a JSON object: 'password', maybe 'username', 'expires_at'.",
    )
    pg_credential_timeout: v.Seconds = _seconds(10.0, 0.1, 30, "How long that command may take.")
    pg_credential_refresh_interval: v.Seconds = _seconds(
        30.0, 0, DAY, "Time between two looks at the file, or runs of the command, for a new credential; 0 is never."
    )
    schema_name: v.SchemaName = _setting("taskq", "The database schema that holds this installation.")
    environment: v.EnvironmentName = _setting(
        None,
        "Name of the deployment, such as 'production'; selects the .env.{environment} files. "
        "A database that is bound to another one turns the process away.",
    )
    installation_id: v.OptionalUuid = _setting(
        None, "The installation that the schema must be, as 'taskqd target show --json' has it. None: any."
    )
    statement_cache_size: v.Whole = _count(512, 0, 100_000, "Prepared statements that each connection keeps; 0 is off.")
    max_cached_statement_lifetime: v.Seconds = _seconds(
        3600.0, 0, 7 * DAY, "How long a prepared statement is kept; 0 is for ever."
    )
    database_boot_timeout: v.Seconds = _seconds(
        30.0, 0, 600, "How long a starting process tries again while the database is down; then it exits 69."
    )
    idempotency_key_max_bytes: v.Whole = _bytes(1024, 1, 1024, "The longest idempotency key, and the longest scope.")

    # -- pools ------------------------------------------------------------------------------------
    dispatcher_pool_size: v.Whole = _count(4, 1, 1000, "Direct connections for claims and leader work.")
    heartbeat_pool_size: v.Whole = _count(4, 1, 1000, "Direct connections for renewals.")
    pool_max_inactive_lifetime: v.Seconds = _seconds(
        300.0, 0, DAY, "How long an idle pool connection is kept; 0 is for ever."
    )
    dispatcher_command_timeout: v.Seconds = _seconds(5.0, 1, 300, "The longest a claim or leader statement may take.")

    # -- jobs in a worker -------------------------------------------------------------------------
    max_concurrency: v.Whole = _count(8, 1, 10_000, "Jobs that one worker runs at once.")
    queues: v.Queues = _setting(("default",), "The queues that a worker serves, separated by commas.")
    poll_interval: v.Seconds = _seconds(1.0, TINY, 3600, "Time between polls when notifications are off.")
    max_retry_backoff: v.Seconds = _seconds(
        DAY, TINY, YEAR, "The longest delay before a retry, whatever the actor's policy says."
    )
    default_start_to_close: v.OptionalSeconds = _seconds(
        None,
        TINY,
        YEAR,
        "The longest an attempt may run, for actors that set none. None: as long as it likes.",
    )
    result_max_bytes: v.Whole = _bytes(65_536, 1024, 1_048_576, "The largest encoded result.")
    progress_coalesce_interval: v.Seconds = _seconds(
        0.5, 0.1, 60, "Time between two writes of what actors report of their progress."
    )
    progress_data_max_bytes: v.Whole = _bytes(16_384, 1024, 1_048_576, "The largest encoded progress of a job.")
    exception_message_max_chars: v.Whole = _setting(
        2000, "Where a stored exception message is cut.", unit="characters", low=100, high=1_000_000
    )

    # -- leases -----------------------------------------------------------------------------------
    heartbeat_interval: v.Seconds = _seconds(10.0, 0.5, 300, "Time between two beats of a worker.")
    heartbeat_command_timeout: v.Seconds = _seconds(2.0, TINY, 60, "Time for all statements of one beat.")
    lock_lease: v.Seconds = _seconds(
        60.0, 1, DAY, "How long a claim holds a job without renewal, before another worker may run it."
    )
    max_heartbeat_failures: v.Whole = _count(3, 1, 100, "Failed beats in a row after which a worker gives up its jobs.")
    prune_retention_succeeded: v.Seconds = _seconds(
        30 * DAY, 0, 100 * YEAR, "How long a job that succeeded is kept before it moves to the archive."
    )
    prune_retention_failed: v.Seconds = _seconds(90 * DAY, 0, 100 * YEAR, "The same of one that failed.")
    prune_retention_cancelled: v.Seconds = _seconds(30 * DAY, 0, 100 * YEAR, "The same of one that was cancelled.")
    prune_retention_abandoned: v.Seconds = _seconds(
        90 * DAY, 0, 100 * YEAR, "The same of one that crashed or was abandoned."
    )
    archive_retention_period: v.Seconds = _seconds(
        365 * DAY, 0, 100 * YEAR, "How long a job stays in the archive; then it is deleted."
    )
    event_retention_period: v.Seconds = _seconds(
        7 * DAY, 0, 100 * YEAR, "How long a row of job_events is kept; 0 is for ever."
    )
    prune_batch_size: v.Whole = _count(2000, 50, 10_000, "Rows that one batch of retention looks at.")
    sweep_interval: v.Seconds = _seconds(
        5.0, 0.5, 3600, "Time between two ticks: expired leases are taken back, lapsed deadlines end their jobs."
    )

    maintenance: Annotated[Literal["auto", "off", "on"], v.LowerCase] = _setting(
        "auto",
        "Whether a worker maintains the schema and fires schedules as a scheduler does: 'auto', one worker, while no "
        "scheduler lives; 'on', always; 'off', never.",
    )

    # -- stopping ---------------------------------------------------------------------------------
    termination_grace_period: v.Seconds = _seconds(
        85.0, 5, DAY, "What the platform grants between SIGTERM and SIGKILL; the watchdog enforces it."
    )
    cancellation_grace_period: v.Seconds = _seconds(
        30.0,
        0,
        DAY,
        "How long handlers may finish after SIGTERM before their tasks are cancelled.",
        alias="soft_stop_timeout",
    )
    cleanup_grace_period: v.Seconds = _seconds(
        10.0, 0, DAY, "How long a cancelled task may clean up before its job is released."
    )

    # -- watchdog ---------------------------------------------------------------------------------
    watchdog_enabled: bool = _setting(True, "Watch the event loop and end the process when it is stuck.")
    watchdog_loop_lag_budget: v.Seconds = _seconds(
        30.0, TINY, 3600, "How long the event loop may stand still before the process ends with 70."
    )
    watchdog_loop_lag_warn_budget: v.Seconds = _seconds(
        5.0, TINY, 3600, "How long the event loop may stand still before the stacks are logged."
    )
    watchdog_check_interval: v.Seconds = _seconds(1.0, TINY, 60, "Time between two looks of the watchdog.")

    # -- notifications ----------------------------------------------------------------------------
    notify_enabled: bool = _setting(
        True, "Wake workers by LISTEN; without it they poll each poll_interval.", alias="listen"
    )
    notify_poll_interval: v.Seconds = _seconds(5.0, 0.5, 3600, "Time between polls while LISTEN works.")
    notify_health_check_interval: v.Seconds = _seconds(
        5.0, TINY, 3600, "Time between two probes of the LISTEN connection."
    )
    notify_reconnect_backoff_initial: v.Seconds = _seconds(
        1.0, TINY, 30, "First delay before a lost LISTEN connection is opened again; doubles up to 30."
    )
    notify_listener_setup_timeout: v.Seconds = _seconds(10.0, TINY, 300, "Time to open the LISTEN connection.")

    # -- health and metrics -----------------------------------------------------------------------
    health_enabled: bool = _setting(True, "Serve /live, /ready and /metrics on the health socket.")
    health_socket_path: v.SocketPath = _setting(
        PydanticUndefined,
        "The unix socket of the health server; the default is /tmp/taskq_health_<pid>.sock.",
        default_factory=lambda: f"/tmp/taskq_health_{os.getpid()}.sock",  # noqa: S108 - holds no secret
    )
    metrics_port: v.OptionalWhole = _count(
        None,
        1,
        65_535,
        "TCP port for Prometheus. None: no port. Children of a supervisor ignore it: the group serves.",
    )
    metrics_host: v.Label = _setting("0.0.0.0", "Address that metrics_port listens on.")  # noqa: S104

    # -- names and logs ---------------------------------------------------------------------------
    worker_label: v.OptionalLabel = _setting(None, "A name for this worker in lists and logs.")
    worker_group: v.Label = _setting("default", "The group that this worker belongs to; a label only.")
    workgroup_instance: v.OptionalUuid = _setting(None, "Id of the running workgroup, a UUID; set by the supervisor.")
    log_format: Annotated[Literal["json", "console"], v.LowerCase] = _setting("json", "How log lines are written.")
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], v.UpperCase] = _setting(
        "INFO", "The least severe line that is logged."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take values from the resolver alone: it knows each one's source and refuses unknown names."""
        return (init_settings,)

    @model_validator(mode="after")
    def _check_rules(self) -> Settings:
        broken = violations(self)
        if broken:
            text = "; ".join(f"{rule.field} must be {rule.bound}" for rule in broken)
            raise PydanticCustomError("rules", "{text}", {"text": text, "violations": broken})
        return self

    def direct_dsn(self) -> str:
        """Return the DSN for sessions that no pooler may stand between. Holds the password."""
        return (self.pg_dsn_direct or self.pg_dsn).get_secret_value()

    def pooled_dsn(self) -> str:
        """Return the DSN for plain statements, which a transaction pooler may serve. Holds the password."""
        return (self.pg_dsn_pooled or self.pg_dsn).get_secret_value()

    def statement_cache(self) -> tuple[int, float]:
        """Return (size, lifetime in seconds) of each connection's statement cache: (0, 0.0) with a pooler."""
        if self.pg_is_pooled:
            return 0, 0.0
        return self.statement_cache_size, self.max_cached_statement_lifetime


SETTING_NAMES: tuple[str, ...] = tuple(Settings.model_fields)
"""Every setting, as the workgroup file writes it."""


@dataclass(frozen=True, slots=True)
class Description:
    """What there is to know about one setting. ``allowed`` says in words what it takes.

    ``default`` is None also where the default is computed. ``bounded`` is true for numbers and durations.
    """

    name: str
    variable: str
    alias: str | None
    meaning: str
    unit: str | None
    default: object
    allowed: str
    bounded: bool
    secret: bool


def describe(name: str) -> Description:
    """Return the description of the setting ``name``; ``KeyError`` when there is none."""
    field = Settings.model_fields[name]
    extra = field.json_schema_extra
    assert isinstance(extra, dict) and field.description is not None  # noqa: S101, PT018 - by _setting
    unit, alias = extra["unit"], extra["alias"]
    default = None if field.default_factory else field.default
    return Description(
        name=name,
        variable=variable(name),
        alias=str(alias) if alias else None,
        meaning=field.description,
        unit=str(unit) if unit else None,
        default=default,
        allowed=_allowed(field, str(unit) if unit else None),
        bounded=any(isinstance(rule, Ge) for rule in field.metadata),
        secret=is_secret(name),
    )


def variable(name: str) -> str:
    """Return the environment variable of the setting ``name``."""
    return PREFIX + name.upper()


def is_secret(name: str) -> bool:
    """True for a setting whose value must never be shown."""
    annotation = Settings.model_fields[name].annotation
    return SecretStr in (annotation, *get_args(annotation))


def _allowed(field: FieldInfo, unit: str | None) -> str:
    """Say what a field takes, for messages: ``must be <this>``."""
    optional = type(None) in get_args(field.annotation)
    kinds = {field.annotation, *get_args(field.annotation)}
    low = next((cast(float, rule.ge) for rule in field.metadata if isinstance(rule, Ge)), None)
    high = next((cast(float, rule.le) for rule in field.metadata if isinstance(rule, Le)), None)
    if bool in kinds:
        text = "true or false"
    elif low is not None and high is not None:
        kind = "a duration" if unit == "seconds" else "a whole number"
        text = f"{kind} from {show(low)} to {show(high)}{f' {unit}' if unit else ''}"
    elif kinds & {"json", "INFO", "env", "auto"}:
        text = "one of " + ", ".join(map(str, get_args(field.annotation)))
    elif SecretStr in kinds:
        text = "a Postgres URL"
    elif UUID in kinds:
        text = "a UUID"
    elif get_origin(field.annotation) is tuple:
        text = "queue names, separated by commas"
    else:
        text = "text"
    return f"{text}, or empty for none" if optional else text


ALIASES: dict[str, str] = {alias: name for name in SETTING_NAMES if (alias := describe(name).alias)}
"""Second names of settings, in the file and, as ``TASKQ_<NAME>``, in the environment."""
