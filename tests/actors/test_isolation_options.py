"""What ``isolation`` and ``memory_limit`` may be, and what goes with them."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel

from taskqd import ActorDefinitionError, ProviderRegistry, Registry, RegistryError, actor


class Nothing(BaseModel):
    """No payload."""


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"isolation": "proces"}, "isolation = 'proces' must be 'none' or 'process' (did you mean 'process'?)"),
        ({"isolation": None}, "isolation = None must be 'none' or 'process'"),
        ({"isolation": []}, "isolation = [] must be 'none' or 'process'"),
        ({"memory_limit": 2**30}, "memory_limit needs isolation='process'"),
        ({"isolation": "process", "memory_limit": 512}, "memory_limit = 512 must be a whole number of bytes, at least"),
        ({"isolation": "process", "memory_limit": 2.0**30}, "memory_limit = 1073741824.0 must be a whole number"),
        ({"isolation": "process", "memory_limit": True}, "memory_limit = True must be a whole number"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ActorDefinitionError) as raised:

        @actor(**options)
        async def it(payload: Nothing) -> None: ...

    assert problem in str(raised.value)


def test_what_is_right_is_kept() -> None:
    @actor(isolation="process", memory_limit=2**30)
    def isolated(payload: Nothing) -> None: ...

    @actor
    def plain(payload: Nothing) -> None: ...

    assert (isolated.isolated, isolated.memory_limit) == (True, 2**30)
    assert (plain.isolated, plain.memory_limit) == (False, None)


def test_an_isolated_actor_works_in_no_transaction() -> None:
    providers = ProviderRegistry()
    providers.transactional()

    @actor(isolation="process")
    async def wants_none(payload: Nothing) -> None: ...

    registry = Registry([wants_none], providers=providers)
    assert registry.validate() == []
    assert not registry.is_transactional

    @actor(isolation="process")
    async def wants_one(payload: Nothing, *, connection: asyncpg.Connection) -> None: ...

    with pytest.raises(RegistryError, match=r"'test_.*wants_one' has isolation='process' and asks for the connection"):
        Registry([wants_one], providers=providers).validate()
