"""Every error that taskqd raises on purpose, each with the exit code a command ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from taskqd.domain.exit_codes import ExitCode

if TYPE_CHECKING:
    from uuid import UUID


class TaskQError(Exception):
    """The base of all taskqd errors. ``exit_code`` is what a command that meets it returns."""

    exit_code: ExitCode = ExitCode.ERROR


# -- configuration and start-up -------------------------------------------------------------------


class ConfigError(TaskQError):
    """The configuration is refused for good; a restart cannot help."""

    exit_code = ExitCode.REFUSED


class RegistryError(ConfigError):
    """The actor registry does not import or holds something that is not an actor."""


class ActorDefinitionError(ConfigError, TypeError):
    """An ``@actor`` declaration is wrong; raised at import time and names the fix."""


class ScheduleDefinitionError(ConfigError, ValueError):
    """A schedule is declared wrongly: its expression, time zone, payload or options. Names what is allowed."""


class DIError(ConfigError):
    """What actors depend on cannot be provided as it is declared."""


class MissingProvider(DIError):
    """Something is asked for that no provider makes."""


class ScopeViolation(DIError):
    """Something that lives long depends on something that lives shorter."""


class DependencyCycle(DIError):
    """Providers need each other."""


class ProviderFailed(TaskQError):
    """A provider did not make what was asked for."""

    exit_code = ExitCode.UNAVAILABLE


class BudgetExceededError(TaskQError):
    """The fleet's connections do not fit the server.

    ``exit_code`` is REFUSED when the configuration can never fit, TRY_AGAIN when only other sessions fill it.
    """

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DatabaseUnavailableError(TaskQError):
    """The database could not be reached within the bounded time."""

    exit_code = ExitCode.UNAVAILABLE


class DatabaseAuthError(ConfigError):
    """The database refused the credentials or the database name; trying again cannot help."""


class TargetMismatchError(ConfigError):
    """The schema is bound to another environment, or is another installation, than the one configured."""


class SchemaNotMigratedError(TaskQError):
    """The schema holds no taskqd tables yet. Run ``taskqd migrate up``."""

    exit_code = ExitCode.TRY_AGAIN


class SchemaOutOfRangeError(TaskQError):
    """The schema is older or newer than this code supports; a rolling deploy passes through it."""

    exit_code = ExitCode.TRY_AGAIN


class MigrationLockTimeoutError(TaskQError):
    """A migration waited ``lock_timeout`` for a lock that another session holds, and was rolled back."""

    exit_code = ExitCode.TRY_AGAIN


class MigrationChecksumError(ConfigError):
    """An applied migration's file no longer has the text that was applied."""


# -- enqueue --------------------------------------------------------------------------------------


class IdempotencyKeyActorMismatchError(TaskQError):
    """The idempotency key is held by a job of another actor."""

    def __init__(self, key: str, scope: str, actor: str, holder: str) -> None:
        super().__init__(
            f"idempotency key {key!r} (scope {scope!r}) asked for actor {actor!r} is held by a job of actor {holder!r}"
        )
        self.key, self.scope, self.actor, self.holder = key, scope, actor, holder


class IdempotencyKeyTakenError(TaskQError):
    """An ended job gave its idempotency key up and another job holds it now, so that it cannot be retried."""

    def __init__(self, job_id: UUID) -> None:
        super().__init__(f"job {job_id} cannot be retried: another job took its idempotency key meanwhile")
        self.job_id = job_id


class DuplicateIdempotencyKeyError(TaskQError):
    """An idempotency key of ``enqueue_batch_fast`` is there twice, or a stored job holds it; nothing was enqueued.

    ``holder`` is the job that holds it, None when another item does.
    """

    def __init__(self, key: str, scope: str, holder: UUID | None) -> None:
        where = "is given twice" if holder is None else f"is held by job {holder}"
        super().__init__(f"idempotency key {key!r} (scope {scope!r}) {where}; nothing was enqueued")
        self.key, self.scope, self.holder = key, scope, holder


class BackpressureError(TaskQError):
    """There are jobs enough of this kind for now; try again later."""


class SingletonCollisionError(BackpressureError):
    """Another job of a ``singleton`` actor has not ended. ``retry_after`` are seconds worth waiting, a guess."""

    def __init__(self, actor: str, blocking_job_id: UUID, retry_after: float) -> None:
        super().__init__(f"actor {actor!r} is a singleton and its job {blocking_job_id} has not ended")
        self.actor, self.blocking_job_id, self.retry_after = actor, blocking_job_id, retry_after


class MaxPendingExceededError(BackpressureError):
    """The actor has as many queued jobs as its ``max_pending`` allows."""

    def __init__(self, actor: str, current_count: int, max_pending: int) -> None:
        super().__init__(f"actor {actor!r} has {current_count} queued jobs, its max_pending is {max_pending}")
        self.actor, self.current_count, self.max_pending = actor, current_count, max_pending


class BatchMaxPendingExceededError(BackpressureError):
    """Actors of a batch had no room for their items, which were refused; the items of all others are enqueued.

    ``refused`` maps each such actor to the indices of its items; try those again, not the whole batch. ``actor``,
    ``indices``, ``current_count`` and ``max_pending`` are those of the first. ``batch`` is the handle of what was
    enqueued, None when nothing was, or where a count is the answer.
    """

    def __init__(
        self, refused: Mapping[str, Sequence[int]], current_count: int, max_pending: int, batch: Any = None
    ) -> None:
        self.refused = {actor: list(indices) for actor, indices in refused.items()}
        self.actor, self.indices = next(iter(self.refused.items()))
        number = sum(map(len, self.refused.values()))
        super().__init__(
            f"actor {self.actor!r} has {current_count} queued jobs, its max_pending is {max_pending}: {number} items "
            f"of {', '.join(map(repr, self.refused))} refused, all others enqueued"
        )
        self.current_count, self.max_pending, self.batch = current_count, max_pending, batch


class MaxPendingLockTimeoutError(BackpressureError):
    """Too many enqueue jobs of an actor with ``max_pending`` at once, or one transaction that does stays open."""


class UniqueForLockTimeoutError(TaskQError):
    """Somebody who enqueues under the same ``identity_key`` of an actor with ``unique_for`` does not commit."""


class PayloadValidationError(TaskQError):
    """The payload does not fit the actor's model. Holds no input values, so it is safe to log."""

    def __init__(self, actor: str, validation_errors: Sequence[dict[str, Any]]) -> None:
        self.actor = actor
        self.validation_errors = list(validation_errors)
        details = "; ".join(
            f"{'.'.join(str(part) for part in error['loc']) or 'payload'}: {error['msg']}"
            for error in self.validation_errors
        )
        super().__init__(f"payload of actor {actor!r} is invalid: {details}")


class PayloadNotStorableError(TaskQError, ValueError):
    """The payload holds text that Postgres cannot store (NUL or a lone surrogate) or is too large."""


class SubEnqueueError(TaskQError):
    """A job could not be enqueued from inside an actor."""


class ScheduleChangedError(TaskQError):
    """Somebody changed the schedule, or is firing it, between the look at it and the change."""

    exit_code = ExitCode.TRY_AGAIN


class PayloadFactoryError(TaskQError):
    """The payload of a fired job could not be made; the job fails and is not retried, its schedule has a strike."""


# -- running --------------------------------------------------------------------------------------


class ResultTooLarge(TaskQError):
    """The encoded result exceeds ``TASKQ_RESULT_MAX_BYTES``; the job fails and is not retried."""

    def __init__(self, actor: str, size: int, limit: int) -> None:
        super().__init__(f"result of actor {actor!r} is {size} bytes, the limit is {limit} (TASKQ_RESULT_MAX_BYTES)")
        self.actor, self.size, self.limit = actor, size, limit


class ActorProcessDied(TaskQError):
    """The process of an isolated actor ended before its actor did: killed by a signal, or by an exit of its own."""


class MemoryLimitExceeded(TaskQError):
    """An isolated actor held more memory than its ``memory_limit``, and was killed."""

    def __init__(self, actor: str, used: int, limit: int) -> None:
        super().__init__(f"actor {actor!r} held {used >> 20} MiB of memory of its own, the limit is {limit >> 20} MiB")
        self.actor, self.used, self.limit = actor, used, limit


class ProgressTooLarge(TaskQError):
    """The encoded progress of a job exceeds ``TASKQ_PROGRESS_DATA_MAX_BYTES``; what it had reported before stays."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the progress is {size} bytes, the limit is {limit} (TASKQ_PROGRESS_DATA_MAX_BYTES)")
        self.size, self.limit = size, limit


class RecordedError(TaskQError):
    """The error of an attempt as it was stored, for who was not there when it was raised."""

    def __init__(self, error_class: str, message: str) -> None:
        super().__init__(f"{error_class}: {message}" if message else error_class)
        self.error_class, self.message = error_class, message


class JobFailed(TaskQError):
    """A waited-for job ended other than succeeded. ``row`` is the job's row."""

    def __init__(self, row: Any) -> None:
        super().__init__(
            f"job {row.id} of actor {row.actor!r} ended {row.status}"
            + (f": {row.error_class}: {row.error_message}" if row.error_class else "")
        )
        self.row = row


class ResultUnavailable(TaskQError):
    """A job succeeded, and its result was kept no longer than its actor's ``result_ttl``. ``row`` is the job's row."""

    def __init__(self, row: Any) -> None:
        super().__init__(f"the result of job {row.id} of actor {row.actor!r} is no longer kept")
        self.row = row


class IllegalStateTransition(TaskQError):
    """The job's status does not allow what was asked, such as to retry a job that has not ended."""

    def __init__(self, job_id: UUID, status: str, wanted: str) -> None:
        super().__init__(f"job {job_id} is {status}: {wanted}")
        self.job_id, self.status = job_id, status


class JobNotFoundError(TaskQError, KeyError):
    """No job has this id; it may have been pruned."""

    def __init__(self, job_id: UUID) -> None:
        super().__init__(f"no job {job_id}")
        self.job_id = job_id

    def __str__(self) -> str:
        return str(self.args[0])


class EmptyFilterError(TaskQError, ValueError):
    """All jobs fit what is to be cancelled; that takes ``allow_empty_filter=True``."""

    def __init__(self) -> None:
        super().__init__("all jobs fit this filter; pass allow_empty_filter=True to cancel all of them")


class EmptyBatchError(TaskQError):
    """A waited-for batch holds fewer jobs than expected and none is in flight."""


class BatchAbortedError(TaskQError):
    """The batch was aborted, by its ``AbortBatchAfter`` policy, and none of its jobs is in flight."""

    def __init__(self, batch_id: UUID) -> None:
        super().__init__(f"batch {batch_id} was aborted")
        self.batch_id = batch_id
