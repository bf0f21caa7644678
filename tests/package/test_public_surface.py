"""What users import is a promise: a name leaves or joins this list on purpose only."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import taskqd
from taskqd.domain import errors
from taskqd.domain.errors import TaskQError
from tests.support import child_environment

SURFACE = [
    "ActorDefinitionError",
    "ActorProcessDied",
    "ActorRef",
    "BackpressureError",
    "BatchAbortedError",
    "BatchMaxPendingExceededError",
    "BudgetExceededError",
    "CancelOrigin",
    "CancelResult",
    "ConcurrencyReservation",
    "ConfigError",
    "DIError",
    "DatabaseAuthError",
    "DatabaseUnavailableError",
    "DependencyCycle",
    "DuplicateIdempotencyKeyError",
    "EmptyBatchError",
    "EmptyFilterError",
    "EnqueueItem",
    "ErrorReporter",
    "IdempotencyKeyActorMismatchError",
    "IdempotencyKeyTakenError",
    "IllegalStateTransition",
    "JobContext",
    "JobFailed",
    "JobFilter",
    "JobHandle",
    "JobNotFoundError",
    "JobOrder",
    "JobProgress",
    "JobRow",
    "JobStatus",
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
    "ProviderRegistry",
    "RecordedError",
    "Registry",
    "RegistryError",
    "ResultTooLarge",
    "ResultUnavailable",
    "RetryAfter",
    "RetryOverride",
    "RetryPolicy",
    "ScheduleChangedError",
    "ScheduleDefinitionError",
    "ScheduleHandle",
    "SchemaNotMigratedError",
    "SchemaOutOfRangeError",
    "Scope",
    "ScopeViolation",
    "SettingsError",
    "SingletonCollisionError",
    "Snooze",
    "SubEnqueueError",
    "TargetMismatchError",
    "TaskQ",
    "TaskQError",
    "TaskqRuntime",
    "UniqueForLockTimeoutError",
    "actor",
    "cron",
    "every",
    "new_uuid",
    "taskq_lifespan",
    "wait_for_batch",
]


def test_the_public_names() -> None:
    assert taskqd.__all__ == SURFACE
    assert dir(taskqd) == sorted([*SURFACE, "__version__"])


@pytest.mark.parametrize("name", SURFACE)
def test_each_name_is_there_and_documented(name: str) -> None:
    value = getattr(taskqd, name)
    assert getattr(value, "__name__", name) == name
    assert value.__doc__


def test_every_error_of_the_domain_is_public() -> None:
    ours = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, TaskQError)}
    assert ours <= set(SURFACE)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'taskqd' has no attribute 'enqueue'"):
        _ = taskqd.enqueue  # type: ignore[attr-defined]


def test_the_batch_module() -> None:
    batch = importlib.import_module("taskqd.batch")
    assert batch.__all__ == [
        "MAX_BATCH",
        "AbortBatchAfter",
        "BatchFilter",
        "BatchHandle",
        "BatchStatus",
        "BatchSummary",
        "EnqueueItem",
        "wait_for_batch",
    ]
    assert batch.EnqueueItem is taskqd.EnqueueItem
    assert batch.wait_for_batch is taskqd.wait_for_batch


def test_the_insights_module() -> None:
    insights = importlib.import_module("taskqd.insights")
    assert insights.__all__ == [
        "Insight",
        "InsightKind",
        "Insights",
        "QueueFigures",
        "ScheduleFigures",
        "insights_sql",
        "read_insights",
    ]


def _modules_after(statement: str) -> set[str]:
    """Return the modules that ``statement`` imports in a fresh interpreter."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_import_taskqd_loads_nothing_else() -> None:
    assert _modules_after("import taskqd") <= {"taskqd", "__future__"}


def test_durations_come_without_pydantic() -> None:
    loaded = _modules_after("from taskqd.settings.durations import parse_duration")
    assert {name for name in loaded if name.startswith(("pydantic", "dotenv"))} == set()


def test_a_probe_loads_neither_the_framework_nor_the_event_loop() -> None:
    loaded = _modules_after("from taskqd.cli.main import main; main(['health', 'nonsense'])")
    heavy = {"asyncio", "argparse", "click", "pydantic", "asyncpg", "structlog", "typing", "logging"}
    assert loaded & heavy == set()


def test_help_loads_no_command() -> None:
    loaded = _modules_after(
        "import io, contextlib; from taskqd.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(['--help'])\n"
        "pass"
    )
    assert loaded & {"pydantic", "asyncpg", "structlog", "asyncio"} == set()
