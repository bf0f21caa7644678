"""Payloads: what is stored comes back as it was, and what could not is refused before it is stored."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel, ConfigDict, Field, Json, SecretStr, computed_field, field_serializer

from taskqd import PayloadNotStorableError, PayloadValidationError, actor
from taskqd.actors import actor as module


class Colour(Enum):
    RED = "red"


class Inner(BaseModel):
    source: str = Field(alias="from")


class Rich(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: UUID
    at: datetime
    day: date
    price: Decimal
    wait: timedelta
    colour: Colour
    words: set[str]
    inner: Inner
    parsed: Json[dict[str, int]]
    ratio: float | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def label(self) -> str:
        return f"{self.day}"


class Free(BaseModel):
    value: Any


@actor(name="rich")
async def rich(payload: Rich) -> None: ...


@actor(name="free")
async def free(payload: Free) -> None: ...


def test_a_model_comes_back_equal_with_aliases_computed_and_json_fields() -> None:
    payload = Rich(
        id=uuid4(),
        at=datetime(2026, 7, 1, 12, tzinfo=UTC),
        day=date(2026, 7, 1),
        price=Decimal("0.10"),
        wait=timedelta(hours=36),
        colour=Colour.RED,
        words={"a", "ü", "日本"},
        inner=Inner(**{"from": "here"}),
        parsed='{"n": 1}',
    )
    assert rich.decode_payload(rich.encode_payload(payload)) == payload


def test_a_mapping_that_fits_is_a_payload_too() -> None:
    assert free.decode_payload(free.encode_payload({"value": [1, "two"]})) == Free(value=[1, "two"])


def test_stored_json_may_use_names_or_aliases() -> None:
    @actor(name="inner")
    async def inner(payload: Inner) -> None: ...

    assert inner.decode_payload('{"source": "a"}') == inner.decode_payload('{"from": "a"}')


@pytest.mark.parametrize(
    "text",
    [
        "\\u0000",  # a backslash and five characters, not a NUL
        "\\\\u0000",
        "u0000",
        "C:\\users\\u0000",
        "\\",
        "\x01",
        "\U0001f600",
        "\uffff",
    ],
)
def test_text_that_only_looks_odd_is_kept(text: str) -> None:
    assert free.decode_payload(free.encode_payload(Free(value=text))).value == text


@pytest.mark.parametrize(
    "value",
    ["a\x00b", "\x00", "\\\x00", "\\\\\x00", "\\u0000\x00", {"deep": ["a\x00"]}, {"a\x00": 1}],
    ids=repr,
)
def test_nul_is_refused(value: Any) -> None:
    with pytest.raises(PayloadNotStorableError, match=r"payload of actor 'free' holds a NUL character \(\\u0000\)"):
        free.encode_payload(Free(value=value))


@pytest.mark.parametrize("value", ["\ud800", "a\udfff", {"\ud800": 1}, ["\udc80"]], ids=repr)
def test_a_lone_surrogate_is_refused(value: Any) -> None:
    with pytest.raises(PayloadNotStorableError, match=r"does not encode as JSON: .*surrogates"):
        free.encode_payload(Free(value=value))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [1.0, {"x": math.nan}], (None, math.inf)], ids=repr)
def test_nan_and_infinity_are_refused_because_they_would_come_back_as_none(value: Any) -> None:
    with pytest.raises(PayloadNotStorableError, match="holds NaN or infinity, which JSON cannot carry"):
        free.encode_payload(Free(value=value))


class Words(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    x: float
    y: int | None = None


class Constants(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    x: float


def test_nan_that_a_model_writes_as_text_is_kept_and_as_a_bare_word_refused() -> None:
    @actor(name="words")
    async def words(payload: Words) -> None: ...

    @actor(name="constants")
    async def constants(payload: Constants) -> None: ...

    assert math.isnan(words.decode_payload(words.encode_payload(Words(x=math.nan))).x)
    with pytest.raises(PayloadNotStorableError, match="NaN or infinity"):
        constants.encode_payload(Constants(x=math.inf))


def test_a_whole_number_that_could_not_be_read_back_is_refused() -> None:
    longest = {"a": [10**4299, -(10**4299)], "b": "7" * 5000}
    assert free.decode_payload(free.encode_payload(Free(value=longest))).value == longest
    for value in (10**4300, -(10**4300), [{"a": 10**5000}]):
        with pytest.raises(PayloadNotStorableError, match="holds a whole number of more than 4300 digits"):
            free.encode_payload(Free(value=value))


def test_none_and_finite_numbers_beside_each_other_are_kept() -> None:
    value = {"a": None, "b": 1.5, "c": [None, 2.5], "NaN": "Infinity"}
    assert free.decode_payload(free.encode_payload(Free(value=value))).value == value


class Login(BaseModel):
    user: str
    password: SecretStr


class OpenLogin(Login):
    @field_serializer("password", when_used="json")
    def _reveal(self, value: SecretStr) -> str:
        return value.get_secret_value()


def test_a_secret_that_would_be_stored_as_asterisks_is_refused_without_being_shown() -> None:
    @actor(name="login")
    async def login(payload: Login) -> None: ...

    with pytest.raises(PayloadNotStorableError, match="holds a secret that pydantic masks in JSON") as caught:
        login.encode_payload(Login(user="**********", password=SecretStr("hunter2")))
    assert "hunter2" not in str(caught.value)


def test_a_secret_with_a_serializer_of_its_own_is_kept() -> None:
    @actor(name="login")
    async def login(payload: OpenLogin) -> None: ...

    payload = OpenLogin(user="**********", password=SecretStr("hunter2"))
    assert login.decode_payload(login.encode_payload(payload)) == payload


def test_what_json_cannot_express_is_refused() -> None:
    with pytest.raises(PayloadNotStorableError, match=r"does not encode as JSON: .*object"):
        free.encode_payload(Free(value=object()))


def test_a_payload_past_the_limit_is_refused_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAYLOAD_BYTES", 100)
    assert free.encode_payload(Free(value="x" * 80))
    with pytest.raises(PayloadNotStorableError, match="is 172 bytes, the limit is 100; store large data elsewhere"):
        free.encode_payload(Free(value="ü" * 80))


class Card(BaseModel):
    number: int
    holder: str = Field(max_length=3)
    tags: list[int] = []


def test_every_bad_field_is_named_and_no_value_is_shown() -> None:
    @actor(name="charge")
    async def charge(payload: Card) -> None: ...

    secret = "4111-1111-s3cret"
    for refused in (
        lambda: charge.encode_payload({"number": secret, "holder": secret, "tags": [1, secret]}),
        lambda: charge.decode_payload(json.dumps({"number": secret, "holder": secret, "tags": [1, secret]})),
    ):
        with pytest.raises(PayloadValidationError) as caught:
            refused()
        message = str(caught.value)
        assert message.startswith("payload of actor 'charge' is invalid: ")
        assert "number: " in message
        assert "holder: " in message
        assert "tags.1: " in message
        assert secret not in message
        assert secret not in repr(caught.value.validation_errors)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_another_model_and_no_mapping_at_all_are_refused() -> None:
    with pytest.raises(PayloadValidationError, match="payload of actor 'rich' is invalid: payload: "):
        rich.encode_payload(Free(value=1))  # type: ignore[arg-type]
    with pytest.raises(PayloadValidationError, match="payload of actor 'rich' is invalid: payload: "):
        rich.encode_payload("text")  # type: ignore[arg-type]


def test_stored_text_that_is_no_json_is_a_validation_error() -> None:
    with pytest.raises(PayloadValidationError, match="payload of actor 'free' is invalid: payload: Invalid JSON"):
        free.decode_payload("{")
