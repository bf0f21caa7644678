"""Named SQL statements, and the schema name that is filled into them."""

from __future__ import annotations

import hashlib
from importlib.resources import files

import pytest

from taskqd.domain.errors import ConfigError
from taskqd.domain.names import SCHEMA_RULE
from taskqd.storage.schema_name import check_schema_name, quote, render, wake_channel
from taskqd.storage.statements import load, parse

TWO = """
-- About the file.

-- name: first
-- What it is for. Served by an index.
select '{}'::text[], '-- not a comment';

-- name: second
select *
-- a comment inside
from jobs
-- a remark after it
"""


def test_a_block_is_a_name_comments_and_one_statement() -> None:
    found = parse("sample", TWO)
    assert found.first == found["first"] == "select '{}'::text[], '-- not a comment'"
    assert found.second == "select *\n-- a comment inside\nfrom jobs"
    assert list(found) == ["first", "second"]
    assert len(found) == 2
    assert "third" not in found


def test_an_unknown_statement_names_the_nearest() -> None:
    found = parse("sample", TWO)
    with pytest.raises(AttributeError, match=r"sample\.sql has no statement 'secnd' \(did you mean 'second'\?\)"):
        _ = found.secnd
    with pytest.raises(KeyError):
        found["keys"]


def test_statements_cannot_be_changed() -> None:
    found = parse("sample", TWO)
    with pytest.raises(AttributeError, match="immutable"):
        found.first = "drop table jobs"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-- name: a\nselect 1\n-- name: a\nselect 2", "statement 'a' is defined twice"),
        ("select 1\n-- name: a\nselect 2", "SQL before the first"),
        ("-- name: a\n-- only a comment\n-- name: b\nselect 1", "statement 'a' is empty"),
        ("-- name: a\n;", "statement 'a' is empty"),
        ("-- name: items\nselect 1", "'items' cannot name a statement"),
        ("-- name: a-b\nselect 1", "'a-b' cannot name a statement"),
        ("-- name:\nselect 1", "'' cannot name a statement"),
    ],
)
def test_a_malformed_file_is_refused_when_loaded(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"bad\.sql: ") as caught:
        parse("bad", text)
    assert message in str(caught.value)


def test_every_shipped_file_loads_for_its_schema_and_is_cached() -> None:
    names = [entry.name for entry in files("taskqd.storage").joinpath("sql").iterdir()]
    assert "migrate.sql" in names
    for name in names:
        file = name.removesuffix(".sql")
        found = load(file, "one")
        assert load(file, "one") is found
        assert load(file, "other") is not found
        assert not any("{schema" in sql for sql in found.values())


def test_an_unknown_file_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        load("no_such_file", "taskq")


def test_a_schema_is_filled_in_quoted() -> None:
    sql = "select {schema_literal}, '{a}' from {schema}.jobs"
    assert render(sql, "Mixed_1") == "select 'Mixed_1', '{a}' from \"Mixed_1\".jobs"


@pytest.mark.parametrize("name", ["taskq", "_x", "Taskq", "t1", "a" * 63, "pgx"])
def test_a_schema_name_of_letters_digits_and_underscores_is_accepted(name: str) -> None:
    assert check_schema_name(name) == name
    assert quote(name) == f'"{name}"'


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("my-jobs", "my_jobs"),
        ("1st", "_1st"),
        ("a" * 64, "a" * 63),
        ("pg_jobs", "jobs"),
        ("PG_jobs", "jobs"),
        ("jobs\n", "jobs"),
        ('x"; drop', "x_drop"),
        ("pg_pg_x", "x"),
        ("pg_1", "_1"),
        ("", None),
        ("information_schema", None),
        ("größe", "gr_e"),
    ],
)
def test_another_schema_name_is_refused_with_one_that_would_do(name: str, suggestion: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        check_schema_name(name)
    message = str(caught.value)
    assert f"schema name {name!r} is invalid: allowed are {SCHEMA_RULE}" in message
    if suggestion is None:
        assert "did you mean" not in message
    else:
        assert message.endswith(f"(did you mean {suggestion!r}?)")
        assert check_schema_name(suggestion) == suggestion


def test_the_wake_channel_is_a_hash_of_the_schema() -> None:
    assert wake_channel("taskq") == "taskq_wake_" + hashlib.sha256(b"taskq").hexdigest()[:10]
    long = "s" * 62
    assert wake_channel(long + "a") != wake_channel(long + "b")
    with pytest.raises(ConfigError):
        wake_channel("a-b")
