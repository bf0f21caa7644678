"""Registries: from what they are built, and how a wrong one is explained."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from taskqd import RegistryError, actor
from taskqd.actors.registry import Registry, build_registry, load_registry


class Item(BaseModel):
    n: int


@actor(name="one")
async def one(payload: Item) -> None: ...


@actor(name="two")
async def two(payload: Item) -> None: ...


@actor(name="one")
async def another_one(payload: Item) -> None: ...


async def undecorated(payload: Item) -> None: ...


@pytest.mark.parametrize(
    "value",
    [[one, two], (one, two), {one, two}, frozenset({one, two}), {"one": one, "two": two}],
    ids=lambda value: type(value).__name__,
)
def test_a_reusable_collection_is_a_registry(value: Any) -> None:
    assert build_registry(value) == {"one": one, "two": two}


def test_the_same_actor_may_be_listed_twice() -> None:
    assert build_registry([one, one]) == {"one": one}


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (
            (ref for ref in [one]),
            "jobs is a generator, which can be read only once; make it a list, a tuple or a mapping",
        ),
        (iter([one]), "which can be read only once"),
        (filter(None, [one]), "jobs is a filter, which can be read only once"),
        (one, r"jobs is a single actor; put it into a list: \[one\]"),
        (undecorated, "jobs is a function; it must be a list, a tuple or a mapping of actors"),
        ("one", "jobs is a str; it must be a list, a tuple or a mapping of actors"),
        (None, "jobs is a NoneType; it must be a list"),
        ([], "jobs holds no actors"),
        ({}, "jobs holds no actors"),
        ([undecorated], "jobs holds .*undecorated.*, which is not an actor; decorate it with @actor"),
        ([7], "jobs holds 7, which is not an actor$"),
        ({"one": undecorated}, "which is not an actor; decorate it with @actor"),
        ({"uno": one}, "jobs: key 'uno' does not match its actor's name 'one'"),
        ([one, another_one], r"jobs: two actors are named 'one'; give one @actor\(name=...\)"),
    ],
)
def test_anything_else_is_refused_with_its_fix(value: Any, fix: str) -> None:
    with pytest.raises(RegistryError, match=fix) as caught:
        build_registry(value, "jobs")
    assert caught.value.exit_code == 78


# -- module:attribute -------------------------------------------------------------------------------

MODULE = """
from pydantic import BaseModel
from taskqd import actor

class Item(BaseModel):
    n: int

@actor(name="stored")
async def stored(payload: Item) -> None: ...

registry = [stored]
single = stored
def make():
    yield stored
made = make()
"""


@pytest.fixture
def module(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Write a module under a name of its own into the working directory; returns the name."""
    monkeypatch.chdir(short_dir)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    names: list[str] = []

    def write(text: str = MODULE, *, name: str | None = None) -> str:
        name = name or f"actors_{uuid.uuid4().hex}"
        path = short_dir.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_a_module_of_the_working_directory_is_found(module: Callable[..., str]) -> None:
    assert list(load_registry(f"{module()}:registry")) == ["stored"]


@pytest.mark.parametrize("reference", ["myapp.actors", "myapp.actors:", ":registry", "", "myapp/actors.py"])
def test_a_reference_without_both_parts_is_explained(reference: str) -> None:
    with pytest.raises(RegistryError, match=r"must be written 'module:attribute', as in 'myapp.actors:registry'"):
        load_registry(reference)


def test_a_missing_module_is_named_with_the_nearest(module: Callable[..., str]) -> None:
    module(name="invoices")
    with pytest.raises(RegistryError, match=r"no module named 'invoicse' \(did you mean 'invoices'\?\)") as caught:
        load_registry("invoicse:registry")
    assert "working directory (app_dir)" in str(caught.value)
    assert "invoicse:registry" in str(caught.value)


def test_a_missing_submodule_is_named_with_the_nearest(module: Callable[..., str]) -> None:
    package = f"pkg_{uuid.uuid4().hex}"
    module(name=f"{package}.actors")
    module("", name=f"{package}.__init__")
    with pytest.raises(RegistryError, match=rf"no module named '{package}.actor' \(did you mean 'actors'\?\)"):
        load_registry(f"{package}.actor:registry")


def test_a_missing_module_inside_the_module_is_not_blamed_on_the_reference(module: Callable[..., str]) -> None:
    name = module("import a_library_nobody_has\n")
    with pytest.raises(RegistryError, match="does not import: No module named 'a_library_nobody_has'") as caught:
        load_registry(f"{name}:registry")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_missing_attribute_is_named_with_the_nearest(module: Callable[..., str]) -> None:
    name = module()
    with pytest.raises(
        RegistryError, match=rf"module '{name}' has no attribute 'registy' \(did you mean 'registry'\?\)"
    ):
        load_registry(f"{name}:registy")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 / 0", "does not import: ZeroDivisionError: division by zero"),
        ("def broken(:", "does not import: SyntaxError"),
        ("import sys; sys.exit(3)", r"it ends the process \(sys.exit\(3\)\); put what it runs under if __name__"),
        ("from taskqd import actor\n@actor\ndef f(): ...", "does not import: ActorDefinitionError: actor 'f'"),
        (
            "from taskqd import RetryPolicy\nRetryPolicy(max_attempts=0)",
            "does not import: ValueError: retry max_attempts = 0 must be between 1 and",
        ),
    ],
)
def test_a_module_that_fails_keeps_its_own_error_as_the_cause(
    module: Callable[..., str], text: str, reason: str
) -> None:
    name = module(text)
    with pytest.raises(RegistryError, match=reason) as caught:
        load_registry(f"{name}:registry")
    assert caught.value.__cause__ is not None


def test_what_the_attribute_holds_is_checked_under_its_full_name(module: Callable[..., str]) -> None:
    name = module()
    with pytest.raises(RegistryError, match=f"{name}:made is a generator"):
        load_registry(f"{name}:made")
    with pytest.raises(RegistryError, match=rf"{name}:single is a single actor; put it into a list: \[stored\]"):
        load_registry(f"{name}:single")


def test_providers_must_be_a_registry_of_them() -> None:
    with pytest.raises(RegistryError, match=r"providers = \[\] must be a ProviderRegistry"):
        Registry([], providers=[])  # type: ignore[arg-type]
