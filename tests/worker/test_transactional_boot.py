"""Workers that cannot give their actors what they ask for do not start, and say why in one message."""

from __future__ import annotations

from typing import Any

import pytest

from taskqd.domain.errors import DatabaseUnavailableError
from taskqd.settings import load_settings
from taskqd.worker.slot_pool import open_slot_pool
from tests.fleet import Fleet, events

WAIT = 60
MODULE = """\
import time
from pydantic import BaseModel
from taskqd import JobContext, ProviderRegistry, Registry, Scope, actor

class Nothing(BaseModel):
    pass

class Model:
    pass

@actor
async def predict(payload: Nothing, ctx: JobContext[Nothing], *, model: Model) -> None: ...

@actor
def share(payload: Nothing, *, model: Model) -> None: ...

def load() -> Model:
    time.sleep(600)

bare = Registry([predict])
hanging = Registry([predict], providers=ProviderRegistry())
hanging.providers.register_factory(Model, Scope.PROCESS, load, timeout=0.2)
sharing = Registry([predict, share], providers=ProviderRegistry())
sharing.providers.register_class(Model, Scope.LOOP)
"""


def worker(fleet: Fleet, registry: str, *, ready: bool = False) -> Any:
    (fleet.directory / "models.py").write_text(MODULE)
    return fleet.worker(actors=f"models:{registry}", ready=ready)


async def test_what_nobody_provides_refuses_the_start(fleet: Fleet) -> None:
    command = worker(fleet, "bare")
    assert command.wait(WAIT) == 78
    (line,) = [line for line in command.stderr.splitlines() if line.startswith("error: ")]
    assert "actor 'predict': parameter 'model' asks for models.Model, for which no provider is registered" in line


async def test_what_cannot_be_made_in_time_ends_the_start_although_it_hangs(fleet: Fleet) -> None:
    command = worker(fleet, "hanging")
    assert command.wait(WAIT) == 69
    assert "error: the provider of models.Model took longer than 0.2 s" in command.stderr


async def test_a_worker_tells_at_its_start_how_children_are_committed_and_what_threads_share(fleet: Fleet) -> None:
    command = worker(fleet, "sharing", ready=True)
    assert [entry["actor"] for entry in events(command, "sync_actor_loop_scoped_dependency")] == ["share"]
    assert len(list(events(command, "sub_enqueue_autonomous_fallback"))) == 1


async def test_a_slot_pool_that_does_not_open_is_named_with_the_database() -> None:
    settings = load_settings(
        {"database_boot_timeout": 0, "max_concurrency": 4},
        environ={"TASKQ_PG_DSN": "postgresql://app:secret@127.0.0.1:9/shop"},
    )
    with pytest.raises(DatabaseUnavailableError) as caught:
        await open_slot_pool(settings, "", on_retry=lambda why, pause: None)
    text = str(caught.value)
    assert text.startswith("the slot pool of 5 connections did not open: database app@127.0.0.1:9/shop")
    assert "secret" not in text
