"""What a client takes from the environment."""

from __future__ import annotations

import pytest

from taskqd import SettingsError, TaskQ
from taskqd.settings.client import client_settings


def test_the_defaults_are_those_of_the_workers() -> None:
    found = client_settings({})
    assert (found.schema_name, found.idempotency_key_max_bytes, found.max_retry_backoff) == ("taskq", 1024, 86_400)


def test_they_are_read_as_the_workers_read_them() -> None:
    found = client_settings(
        {"TASKQ_SCHEMA_NAME": "app", "TASKQ_IDEMPOTENCY_KEY_MAX_BYTES": "64", "TASKQ_MAX_RETRY_BACKOFF": "5m"}
    )
    assert (found.schema_name, found.idempotency_key_max_bytes, found.max_retry_backoff) == ("app", 64, 300)


def test_settings_of_workers_are_none_of_a_clients_business() -> None:
    assert client_settings({"TASKQ_POLL_INTERVAL": "nonsense", "TASKQ_WORKER_LABEL": ""}).schema_name == "taskq"


def test_a_bad_value_is_named_with_its_variable() -> None:
    with pytest.raises(SettingsError, match="TASKQ_SCHEMA_NAME = 'no-dash'"):
        client_settings({"TASKQ_SCHEMA_NAME": "no-dash"})


def test_a_client_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKQ_SCHEMA_NAME", "elsewhere")
    assert TaskQ(dsn="postgresql://localhost/x").schema == "elsewhere"
    assert TaskQ(dsn="postgresql://localhost/x", schema="given").schema == "given"
