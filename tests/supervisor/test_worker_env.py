"""What a worker has in its environment for itself: what its table and its file may hold."""

from __future__ import annotations

import os
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqd.settings import ALIASES, SETTING_NAMES
from taskqd.supervisor.worker_env import LARGEST, EnvFileError, digest, is_secret, read_env_file
from taskqd.supervisor.workgroup import load_workgroup, parse_workgroup

LEAST = 'actors = "app:actors"\n[[workers]]\nname = "io"\n'
KNOWN = [*SETTING_NAMES, *ALIASES]


def problems(text: str) -> list[str]:
    return parse_workgroup(tomllib.loads(LEAST + text), "group.toml", KNOWN)[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("env = 3", "workers.io.env: must be a table: write [workers.env]"),
        ("[workers.env]\nREGION = 3", "workers.io.env.REGION: must be text: put it in quotes"),
        ("[workers.env]\nREGION = {}", "workers.io.env.REGION: must be text: put it in quotes"),
        ('[workers.env]\nREGION = "a\\u0000b"', "workers.io.env.REGION: holds a NUL"),
        ('[workers.env]\n"MY-REGION" = "x"', "workers.io.env.MY-REGION: the name must be letters, digits and '_'"),
        ('[workers.env]\nTASKQD_NAME = "x"', "workers.io.env.TASKQD_NAME: must not stand here: the supervisor sets it"),
        ('[workers.env]\nNOTIFY_SOCKET = "x"', "the supervisor sets it, or keeps it for itself"),
        ('[workers.env]\nWATCHDOG_USEC = "x"', "the supervisor sets it, or keeps it for itself"),
        ('[workers.env]\nLISTEN_FDS = "x"', "the supervisor sets it, or keeps it for itself"),
        ('[workers.env]\nTASKQ_METRICS_PORT = "9000"', "the group serves metrics on its own socket; its processes"),
        ('[workers.env]\nTASKQ_TERMINATION_GRACE_PERIOD = "9"', "set it in [supervisor]"),
        ('[workers.env]\nTASKQ_SCHEMA_NAME = "x"', "one group uses one database; set it in [defaults]"),
        ('[workers.env]\nDB_PASSWORD = "hunter2"', "workers.io.env.DB_PASSWORD: holds a secret"),
        ('[workers.env]\nURL = "redis://:hunter2@cache/0"', "write it into the file that env_file names"),
        ('[workers.env]\nTASKQ_PG_DSN = "postgresql://a:hunter2@h/d"', "or let [workers.credentials] fetch it"),
        (f'[workers.env]\nA = "{"x" * 40_000}"\nB = "{"x" * 40_000}"', f"hold more than {LARGEST} characters"),
        ("env_file = 3", "workers.io.env_file: 3 must be non-empty text"),
        ('env_fil = "x"', "workers.io.env_fil: unknown key (did you mean 'env_file'?)"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_once_and_without_the_value(text: str, expected: str) -> None:
    found = problems(text)
    assert len(found) == 1, found
    assert expected in found[0]
    assert "hunter2" not in found[0]


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("PASSWORD", "x", True),
        ("pgpassword", "x", True),
        ("GITHUB_TOKEN", "x", True),
        ("MYSQL_PWD", "x", True),
        ("STRIPE_API_KEY", "x", True),
        ("AWS_SECRET_ACCESS_KEY", "x", True),
        ("CONN", "host=h password=x", True),
        ("URL", "https://h/?user=a&password=x", True),
        ("URL", "amqp://u:p@h//", True),
        ("URL", "postgresql://[u:p@h", True),
        ("PASSWORD", "", False),
        ("PASSWORD_FILE", "/run/secrets/x", False),
        ("AWS_ACCESS_KEY_ID", "x", False),
        ("MAX_TOKENS", "4096", False),
        ("PWD", "/srv", False),
        ("URL", "postgresql://app@h/d", False),
        ("RESET_PASSWORD_URL", "https://h/reset", False),
    ],
)
def test_what_counts_as_a_secret(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) == secret


def read(directory: Path, text: str | bytes) -> dict[str, str]:
    path = directory / "env"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return dict(read_env_file(str(path)).values)


def test_a_file_holds_a_name_and_a_value_on_each_line(tmp_path: Path) -> None:
    text = (
        "\ufeff# of the mail worker\n\nREGION=eu-west-1\r\n  export MODE = fast  \nEMPTY=\nHASH=a#b #c\n"
        'PAIR=a=b\nSINGLE=\'a "b" \\n\'\nDOUBLE="a\\n\\"b\\" $HOME"\n'
    )
    assert read(tmp_path, text) == {
        "REGION": "eu-west-1",
        "MODE": "fast",
        "EMPTY": "",
        "HASH": "a#b #c",
        "PAIR": "a=b",
        "SINGLE": 'a "b" \\n',
        "DOUBLE": 'a\n"b" $HOME',
    }
    assert read_env_file(str(tmp_path / "env")).lines["MODE"] == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1\nhunter2\n", [(2, "must be NAME=value")]),
        ("hunter-2=x\n", [(1, "the name must be letters, digits and '_', and not start with a digit")]),
        ("A=1\nB=2\nA=3\n", [(3, "A: is set on line 1 already")]),
        ("A='hunter2\n", [(1, "A: must end where its quote does")]),
        ('A="hunter2" # mine\n', [(1, "A: must end where its quote does")]),
        ("A=\0\n", [(1, "A: holds a NUL")]),
        ("TASKQD_X=1\n", [(1, "TASKQD_X: must not stand here: the supervisor sets it, or keeps it for itself")]),
        (b"A=1\nB=\xff\n", [(2, "is not UTF-8 text")]),
        (b"A=" + b"x" * LARGEST, [(0, f"is larger than {LARGEST} bytes")]),
        ("x\n" * 22, [*((n, "must be NAME=value") for n in range(1, 21)), (21, "and 2 more problems from here on")]),
    ],
)
def test_what_is_wrong_with_a_file_names_the_lines_and_not_the_values(
    tmp_path: Path, text: str | bytes, expected: list[tuple[int, str]]
) -> None:
    with pytest.raises(EnvFileError) as raised:
        read(tmp_path, text)
    assert list(raised.value.problems) == expected
    assert "hunter2" not in str(raised.value)


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("pipe", "no regular file"), ("", "Is a directory"), ("gone", "No such file")):
        with pytest.raises(EnvFileError, match=why):
            read_env_file(str(tmp_path / name))


@given(values=st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), st.text()))
def test_a_mark_stands_for_what_is_there_in_any_order(values: dict[str, str]) -> None:
    backwards = dict(reversed(values.items()))
    assert digest(values) == digest(backwards)
    assert bool(digest(values)) == bool(values)
    assert digest({**values, "a": "new"}) != digest(values)


def test_all_of_a_workgroup_is_said_in_one_pass_with_lines_and_at_once(tmp_path: Path) -> None:
    (tmp_path / "io.env").write_text("A=1\nA=2\noops\n")
    (tmp_path / "group.toml").write_text(
        LEAST
        + 'replicas = "atuo"\nstall_after = 1\nburst_limit = -1\nbackoff_initial = 50\nenv_file = "io.env"\n'
        + '[workers.env]\nTOKEN = "hunter2"\n[workers.credentials]\nprovidr = "file"\n'
        + '[[workers]]\nname = "cpu"\nenv_file = "gone"\nsettle_after = "1h"\n[workers.env]\nX = 1\n'
    )
    began = time.monotonic()
    _, found = load_workgroup(str(tmp_path / "group.toml"), KNOWN)
    took = time.monotonic() - began
    assert [line.removeprefix(f"{tmp_path}/") for line in found] == [
        "group.toml:4:workers.io.replicas: 'atuo' must be a whole number from 1 to 1024, or \"auto\" "
        "(did you mean 'auto'?)",
        "group.toml:6:workers.io.burst_limit: -1 must be a whole number from 0 to 10000",
        "group.toml:5:workers.io.stall_after: 1 must be a duration from 1.5 to 600 seconds, or like '500ms', '5m', "
        "'2h'",
        "group.toml:7:workers.io.backoff_initial: 50 must be at most backoff_max = 30",
        "group.toml:10:workers.io.env.TOKEN: holds a secret, which a workgroup file must not: write it into the file "
        "that env_file names, or let [workers.credentials] fetch it if it is the database's",
        "group.toml:12:workers.io.credentials.providr: unknown key (did you mean 'provider'?)",
        "group.toml:16:workers.cpu.settle_after: '1h' must be a duration from 0 to 600 seconds, or like '500ms', "
        "'5m', '2h'",
        "group.toml:18:workers.cpu.env.X: must be text: put it in quotes",
        "io.env:2: A: is set on line 1 already",
        "io.env:3: must be NAME=value",
        f"group.toml:15:workers.cpu.env_file: '{tmp_path}/gone' cannot be read: No such file or directory",
    ]
    assert took < 1.5, "ten times the target"
