"""taskqd: a Postgres-backed job system for Python services, delivered as a daemon.

The public names below are imported when they are first used, so that ``import taskqd`` itself loads nothing.
"""

TYPE_CHECKING = False  # as type checkers read it, without importing typing at run time
if TYPE_CHECKING:
    from taskqd.actors.actor import ActorRef as ActorRef
    from taskqd.actors.context import JobContext as JobContext
    from taskqd.actors.decorator import actor as actor
    from taskqd.actors.di.dependency import Scope as Scope
    from taskqd.actors.di.providers import ProviderRegistry as ProviderRegistry
    from taskqd.actors.registry import Registry as Registry
    from taskqd.actors.reporter import ErrorReporter as ErrorReporter
    from taskqd.actors.schedules import cron as cron
    from taskqd.actors.schedules import every as every
    from taskqd.client.batch import wait_for_batch as wait_for_batch
    from taskqd.client.control import CancelResult as CancelResult
    from taskqd.client.filter import JobFilter as JobFilter
    from taskqd.client.filter import JobOrder as JobOrder
    from taskqd.client.handle import JobHandle as JobHandle
    from taskqd.client.item import EnqueueItem as EnqueueItem
    from taskqd.client.rows import JobProgress as JobProgress
    from taskqd.client.rows import JobRow as JobRow
    from taskqd.client.schedules import ScheduleHandle as ScheduleHandle
    from taskqd.client.taskq import TaskQ as TaskQ
    from taskqd.domain.errors import ActorDefinitionError as ActorDefinitionError
    from taskqd.domain.errors import ActorProcessDied as ActorProcessDied
    from taskqd.domain.errors import BackpressureError as BackpressureError
    from taskqd.domain.errors import BatchAbortedError as BatchAbortedError
    from taskqd.domain.errors import BatchMaxPendingExceededError as BatchMaxPendingExceededError
    from taskqd.domain.errors import BudgetExceededError as BudgetExceededError
    from taskqd.domain.errors import ConfigError as ConfigError
    from taskqd.domain.errors import DatabaseAuthError as DatabaseAuthError
    from taskqd.domain.errors import DatabaseUnavailableError as DatabaseUnavailableError
    from taskqd.domain.errors import DependencyCycle as DependencyCycle
    from taskqd.domain.errors import DIError as DIError
    from taskqd.domain.errors import DuplicateIdempotencyKeyError as DuplicateIdempotencyKeyError
    from taskqd.domain.errors import EmptyBatchError as EmptyBatchError
    from taskqd.domain.errors import EmptyFilterError as EmptyFilterError
    from taskqd.domain.errors import IdempotencyKeyActorMismatchError as IdempotencyKeyActorMismatchError
    from taskqd.domain.errors import IdempotencyKeyTakenError as IdempotencyKeyTakenError
    from taskqd.domain.errors import IllegalStateTransition as IllegalStateTransition
    from taskqd.domain.errors import JobFailed as JobFailed
    from taskqd.domain.errors import JobNotFoundError as JobNotFoundError
    from taskqd.domain.errors import MaxPendingExceededError as MaxPendingExceededError
    from taskqd.domain.errors import MaxPendingLockTimeoutError as MaxPendingLockTimeoutError
    from taskqd.domain.errors import MemoryLimitExceeded as MemoryLimitExceeded
    from taskqd.domain.errors import MigrationChecksumError as MigrationChecksumError
    from taskqd.domain.errors import MigrationLockTimeoutError as MigrationLockTimeoutError
    from taskqd.domain.errors import MissingProvider as MissingProvider
    from taskqd.domain.errors import PayloadFactoryError as PayloadFactoryError
    from taskqd.domain.errors import PayloadNotStorableError as PayloadNotStorableError
    from taskqd.domain.errors import PayloadValidationError as PayloadValidationError
    from taskqd.domain.errors import ProgressTooLarge as ProgressTooLarge
    from taskqd.domain.errors import ProviderFailed as ProviderFailed
    from taskqd.domain.errors import RecordedError as RecordedError
    from taskqd.domain.errors import RegistryError as RegistryError
    from taskqd.domain.errors import ResultTooLarge as ResultTooLarge
    from taskqd.domain.errors import ResultUnavailable as ResultUnavailable
    from taskqd.domain.errors import ScheduleChangedError as ScheduleChangedError
    from taskqd.domain.errors import ScheduleDefinitionError as ScheduleDefinitionError
    from taskqd.domain.errors import SchemaNotMigratedError as SchemaNotMigratedError
    from taskqd.domain.errors import SchemaOutOfRangeError as SchemaOutOfRangeError
    from taskqd.domain.errors import ScopeViolation as ScopeViolation
    from taskqd.domain.errors import SingletonCollisionError as SingletonCollisionError
    from taskqd.domain.errors import SubEnqueueError as SubEnqueueError
    from taskqd.domain.errors import TargetMismatchError as TargetMismatchError
    from taskqd.domain.errors import TaskQError as TaskQError
    from taskqd.domain.errors import UniqueForLockTimeoutError as UniqueForLockTimeoutError
    from taskqd.domain.ids import new_uuid as new_uuid
    from taskqd.domain.reservation import ConcurrencyReservation as ConcurrencyReservation
    from taskqd.domain.retry import RetryOverride as RetryOverride
    from taskqd.domain.retry import RetryPolicy as RetryPolicy
    from taskqd.domain.signals import CancelOrigin as CancelOrigin
    from taskqd.domain.signals import RetryAfter as RetryAfter
    from taskqd.domain.signals import Snooze as Snooze
    from taskqd.domain.status import JobStatus as JobStatus
    from taskqd.maintenance.runtime import TaskqRuntime as TaskqRuntime
    from taskqd.maintenance.runtime import taskq_lifespan as taskq_lifespan
    from taskqd.settings.errors import SettingsError as SettingsError

__version__ = "0.1.0"

_EXPORTS: dict[str, tuple[str, ...]] = {
    "taskqd.actors.actor": ("ActorRef",),
    "taskqd.actors.context": ("JobContext",),
    "taskqd.actors.decorator": ("actor",),
    "taskqd.actors.di.dependency": ("Scope",),
    "taskqd.actors.di.providers": ("ProviderRegistry",),
    "taskqd.actors.registry": ("Registry",),
    "taskqd.actors.reporter": ("ErrorReporter",),
    "taskqd.actors.schedules": ("cron", "every"),
    "taskqd.client.batch": ("wait_for_batch",),
    "taskqd.client.control": ("CancelResult",),
    "taskqd.client.filter": ("JobFilter", "JobOrder"),
    "taskqd.client.handle": ("JobHandle",),
    "taskqd.client.item": ("EnqueueItem",),
    "taskqd.client.rows": ("JobProgress", "JobRow"),
    "taskqd.client.schedules": ("ScheduleHandle",),
    "taskqd.client.taskq": ("TaskQ",),
    "taskqd.domain.errors": (
        "ActorDefinitionError",
        "ActorProcessDied",
        "BackpressureError",
        "BatchAbortedError",
        "BatchMaxPendingExceededError",
        "BudgetExceededError",
        "ConfigError",
        "DIError",
        "DatabaseAuthError",
        "DatabaseUnavailableError",
        "DependencyCycle",
        "DuplicateIdempotencyKeyError",
        "EmptyBatchError",
        "EmptyFilterError",
        "IdempotencyKeyActorMismatchError",
        "IdempotencyKeyTakenError",
        "IllegalStateTransition",
        "JobFailed",
        "JobNotFoundError",
        "MaxPendingExceededError",
        "MaxPendingLockTimeoutError",
        "MemoryLimitExceeded",
        "MigrationChecksumError",
        "MigrationLockTimeoutError",
        "MissingProvider",
        "PayloadFactoryError",
        "PayloadNotStorableError",
        "PayloadValidationError",
        "ProgressTooLarge",
        "ProviderFailed",
        "RecordedError",
        "RegistryError",
        "ResultTooLarge",
        "ScheduleChangedError",
        "ScheduleDefinitionError",
        "ResultUnavailable",
        "SchemaNotMigratedError",
        "SchemaOutOfRangeError",
        "ScopeViolation",
        "SingletonCollisionError",
        "SubEnqueueError",
        "TargetMismatchError",
        "TaskQError",
        "UniqueForLockTimeoutError",
    ),
    "taskqd.domain.ids": ("new_uuid",),
    "taskqd.domain.reservation": ("ConcurrencyReservation",),
    "taskqd.domain.retry": ("RetryOverride", "RetryPolicy"),
    "taskqd.domain.signals": ("CancelOrigin", "RetryAfter", "Snooze"),
    "taskqd.domain.status": ("JobStatus",),
    "taskqd.maintenance.runtime": ("TaskqRuntime", "taskq_lifespan"),
    "taskqd.settings.errors": ("SettingsError",),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'taskqd' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
