"""Results: encoded by the declared type, bounded, and decoded to what the actor returned."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel, Field, SecretStr, ValidationError, computed_field

from taskqd import ResultTooLarge, actor
from taskqd.actors.actor import ActorRef

LIMIT = 65_536


class Item(BaseModel):
    n: int


class Report(BaseModel):
    path: str = Field(alias="file")
    at: datetime
    items: list[Item] = []

    @computed_field  # type: ignore[prop-decorator]
    @property
    def size(self) -> int:
        return len(self.items)


def returning(result: Any) -> ActorRef[Item, Any]:
    async def compute(payload: Item) -> None: ...

    compute.__annotations__["return"] = result
    return actor(name="compute")(compute)


def round_trip(declared: Any, value: Any) -> Any:
    ref = returning(declared)
    return ref.decode_result(ref.encode_result(value, LIMIT))


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (Item, Item(n=1)),
        (Report, Report(file="a", at=datetime(2026, 1, 1, tzinfo=UTC), items=[Item(n=1)])),
        (list[Item], [Item(n=1), Item(n=2)]),
        (Item | None, None),
        (Item | None, Item(n=1)),
        (dict[str, int], {"a": 1}),
        (tuple[int, str], (1, "a")),
        (UUID, uuid4()),
        (float, 0.1),
        (bytes, b"abc"),
        (None, None),
    ],
)
def test_a_result_comes_back_as_its_declared_type(declared: Any, value: Any) -> None:
    back = round_trip(declared, value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("declared", [str, Any, dict[str, Any], list[str], UUID | str])
def test_text_that_looks_like_something_else_stays_text(declared: Any) -> None:
    words = ["0192f0c1-2345-7000-8000-0123456789ab", "2026-01-01T00:00:00Z", "1", "null", "NaN", "**********"]
    for word in words[1:] if declared == UUID | str else words:
        value = {str: word, Any: word, dict[str, Any]: {"id": word}, list[str]: [word]}.get(declared, word)
        assert round_trip(declared, value) == value


def test_a_mapping_is_made_into_the_declared_model() -> None:
    assert returning(Item).encode_result({"n": 3}, LIMIT) == '{"n":3}'


def test_a_result_of_another_type_is_refused() -> None:
    with pytest.raises(ValidationError):
        returning(Item).encode_result("three", LIMIT)
    with pytest.raises(ValidationError):
        returning(Item).encode_result(None, LIMIT)
    with pytest.raises(TypeError, match="actor 'compute' is declared to return None but returned int"):
        returning(None).encode_result(3, LIMIT)


def test_no_result_is_stored_as_none() -> None:
    assert returning(None).encode_result(None, LIMIT) is None
    assert returning(Item).decode_result(None) is None


def test_a_result_past_the_limit_is_refused_by_its_bytes() -> None:
    ref = returning(str)
    assert ref.encode_result("x" * 98, 100) == '"' + "x" * 98 + '"'
    with pytest.raises(ResultTooLarge, match="result of actor 'compute' is 102 bytes, the limit is 100") as caught:
        ref.encode_result("ü" * 50, 100)
    assert (caught.value.size, caught.value.limit) == (102, 100)
    assert "TASKQ_RESULT_MAX_BYTES" in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "value"),
    [(float, math.nan), (list[float], [1.0, math.inf]), (dict[str, Any], {"a": None, "b": -math.inf})],
)
def test_nan_and_infinity_are_refused_because_they_would_come_back_as_none(declared: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="result of actor 'compute' holds NaN or infinity"):
        returning(declared).encode_result(value, LIMIT)


def test_a_masked_secret_is_refused_without_being_shown() -> None:
    class Token(BaseModel):
        value: SecretStr

    with pytest.raises(ValueError, match="result of actor 'compute' holds a secret") as caught:
        returning(Token).encode_result(Token(value=SecretStr("hunter2")), LIMIT)
    assert "hunter2" not in str(caught.value)
