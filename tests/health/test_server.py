"""The health socket of a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from taskqd.domain.errors import ConfigError
from taskqd.health import probe as probe_module
from taskqd.health.server import MAX_PATH_BYTES, HealthServer, Report
from tests.support import eventually


@contextlib.asynccontextmanager
async def serving(path: Path, **overrides: Any) -> AsyncIterator[HealthServer]:
    options: dict[str, Any] = {"live": lambda: Report(True), "ready": lambda: Report(True, {"reason": "8/8"})}
    server = HealthServer(str(path), **{**options, **overrides})
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def ask(path: Path, request: bytes) -> tuple[int, str, bytes]:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(request)
        answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    _, code, reason = head.split(b"\r\n")[0].decode().split(" ", 2)
    return int(code), reason, body


async def get(path: Path, target: str) -> tuple[int, str, bytes]:
    return await ask(path, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


async def test_answers_checks_and_metrics(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    not_ready = Report(False, {"reason": "io.1 is booting", "slots": 2})
    async with serving(path, ready=lambda: not_ready, metrics=lambda: "up 1\n"):
        assert (await get(path, "/live"))[:2] == (200, "ok")
        code, reason, body = await get(path, "/ready?verbose=1")
        assert (code, reason) == (503, "io.1 is booting")
        assert json.loads(body) == {"ok": False, "reason": "io.1 is booting", "slots": 2}
        assert (await get(path, "/metrics"))[2] == b"up 1\n"


async def test_names_the_paths_that_exist(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with serving(path, routes={"/status": lambda: Report(True)}):
        code, reason, _ = await get(path, "/stats")
        assert code == 404
        assert reason == "no /stats; there are /live, /ready, /status"


async def test_a_check_that_raises_is_a_500_and_the_server_lives(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"

    def broken() -> Report:
        raise RuntimeError("two\nlines")

    async with serving(path, ready=broken):
        code, reason, _ = await get(path, "/ready")
        assert (code, reason) == (500, "the check itself failed: RuntimeError: two lines")
        assert (await get(path, "/live"))[0] == 200


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"POST /live HTTP/1.1\r\n\r\n", 405),
        (b"GET /live HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (b"\xff\xfe\r\n\r\n", 404),
    ],
)
async def test_bad_requests_are_refused(tmp_path: Path, request_bytes: bytes, code: int) -> None:
    path = tmp_path / "a.sock"
    async with serving(path):
        assert (await ask(path, request_bytes))[0] == code


async def test_an_asker_that_says_nothing_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with serving(path), asyncio.timeout(20):
        reader, writer = await asyncio.open_unix_connection(str(path))
        assert await reader.read() == b""
        writer.close()


async def test_the_socket_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with serving(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


async def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serving(path):
        with pytest.raises(ConfigError, match="another process listens"):
            await HealthServer(str(path), live=lambda: Report(True), ready=lambda: Report(True)).start()
        assert (await get(path, "/live"))[0] == 200


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"):
        await HealthServer(str(path), live=lambda: Report(True), ready=lambda: Report(True)).start()
    assert path.read_text() == "mine"


async def test_stop_leaves_the_socket_of_a_successor(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with serving(path):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as successor:
            successor.bind(str(path))
    assert path.exists()


async def test_a_socket_that_was_moved_is_followed_and_one_that_was_removed_is_made_again(tmp_path: Path) -> None:
    path, moved = tmp_path / "a.next.sock", tmp_path / "a.sock"
    told: list[str] = []
    async with serving(path, on_place=told.append) as server:
        path.rename(moved)
        await eventually(lambda: server.path == str(moved), 20)
        assert not told
        moved.unlink()
        await eventually(moved.exists, 20)
        assert (await get(moved, "/live"))[0] == 200
        assert told == [""]
    assert list(tmp_path.iterdir()) == []


def test_a_long_path_is_refused_with_the_limit(tmp_path: Path) -> None:
    path = str(tmp_path / ("x" * MAX_PATH_BYTES))
    with pytest.raises(ConfigError, match=rf"{len(path)} bytes long, the limit is {MAX_PATH_BYTES}"):
        HealthServer(path, live=lambda: Report(True), ready=lambda: Report(True))


async def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "gone" / "a.sock")
    with pytest.raises(ConfigError, match=r"cannot create the socket .*gone.*: No such file"):
        await HealthServer(path, live=lambda: Report(True), ready=lambda: Report(True)).start()


# -- verbs ----------------------------------------------------------------------------------------


async def post(path: Path, target: str, body: bytes = b"{}") -> tuple[int, str, bytes]:
    return await ask(path, f"POST {target} HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


async def test_a_verb_answers_line_by_line_as_it_goes(tmp_path: Path) -> None:
    path, go_on = tmp_path / "a.sock", asyncio.Event()

    async def roll(arguments: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"op": "accepted", **arguments}
        await go_on.wait()
        yield {"op": "done"}

    async with serving(path, verbs={"/roll": roll}), asyncio.timeout(20):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b'POST /roll HTTP/1.1\r\nContent-Length: 13\r\n\r\n{"name":"io"}')
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson"
        )
        assert json.loads(await reader.readline()) == {"op": "accepted", "name": "io"}
        assert (await get(path, "/live"))[0] == 200
        go_on.set()
        assert json.loads(await reader.readline()) == {"op": "done"}
        assert await reader.read() == b""
        writer.close()


async def test_many_who_wait_for_a_change_crowd_out_no_probe(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"

    async def endless(_arguments: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {"op": "accepted"}
        await asyncio.Event().wait()

    async with serving(path, verbs={"/wait": endless}), asyncio.timeout(30):
        waiting = []
        for _ in range(32):
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(b"POST /wait HTTP/1.1\r\n\r\n")
            await reader.readuntil(b'"accepted"}\n')
            waiting.append(writer)
        assert (await post(path, "/wait"))[:2] == (503, "too many requests are being answered")
        assert (await get(path, "/live"))[0] == 200
        for writer in waiting:
            writer.close()


@pytest.mark.parametrize(
    ("body", "code"), [(b"[1]", 400), (b"{", 400), (b'{"a": "' + b"x" * 20_000 + b'"}', 413), (b"\xff", 400)]
)
async def test_what_is_no_object_reaches_no_verb(tmp_path: Path, body: bytes, code: int) -> None:
    path = tmp_path / "a.sock"

    async def never(_arguments: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        raise AssertionError
        yield {}

    async with serving(path, verbs={"/never": never}):
        assert (await post(path, "/never", body))[0] == code
        assert (await get(path, "/never"))[:2] == (405, "only POST")


async def test_no_verb_is_taken_over_tcp(tmp_path: Path, unused_tcp_port: int) -> None:
    async def never(_arguments: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        raise AssertionError
        yield {}

    async with serving(tmp_path / "a.sock", verbs={"/never": never}) as server, asyncio.timeout(20):
        await server.listen_on_port("127.0.0.1", unused_tcp_port)
        reader, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
        writer.write(b"POST /never HTTP/1.1\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 403 ")
        writer.close()


# -- the probe ------------------------------------------------------------------------------------


async def probe(*argv: str, **environ: str) -> tuple[int, str]:
    script = "import sys; from taskqd.health.probe import main; sys.exit(main(sys.argv[1:]))"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        *argv,
        stdout=subprocess.PIPE,
        env={**{k: v for k, v in os.environ.items() if k != "TASKQD_SOCKET"}, **environ},
    )
    async with asyncio.timeout(30):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode().strip()


async def test_the_probe_says_yes_no_or_why_it_cannot(tmp_path: Path) -> None:
    path = tmp_path / "g.sock"
    async with serving(path, ready=lambda: Report(False, {"reason": "io.1 is booting"})):
        assert await probe("live", "--socket", str(path)) == (0, "live: ok")
        assert await probe("ready", TASKQD_SOCKET=str(path)) == (1, "ready: io.1 is booting")
        assert (await probe("startup", "--socket", str(path)))[0] == 1
        assert await probe("live", RUNTIME_DIRECTORY=str(tmp_path)) == (0, "live: ok")
    code, output = await probe("live", "--socket", str(path))
    assert code == 1
    assert "no answer" in output


async def test_the_probe_does_not_guess_between_two_groups(tmp_path: Path) -> None:
    async with serving(tmp_path / "a.sock"), serving(tmp_path / "b.sock"):
        code, output = await probe("live", RUNTIME_DIRECTORY=str(tmp_path))
    assert code == 1
    assert "2 groups" in output


async def test_the_probe_passes_over_a_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listdir = os.listdir

    def refuse(path: str) -> list[str]:
        if path == "/run/taskqd":
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(probe_module, "runtime_directories", lambda: ["/run/taskqd", str(tmp_path)])
    monkeypatch.delenv("TASKQD_SOCKET", raising=False)
    async with serving(tmp_path / "g.sock"):
        assert await asyncio.to_thread(probe_module.main, ["live"]) == 0
    assert capsys.readouterr().out == "live: ok\n"


async def test_the_probe_gives_up_on_a_process_that_does_not_answer(tmp_path: Path) -> None:
    path = tmp_path / "g.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        started = asyncio.get_running_loop().time()
        code, _ = await probe("live", "--socket", str(path))
        assert code == 1
        assert asyncio.get_running_loop().time() - started < 20


async def test_wrong_usage_is_2(tmp_path: Path) -> None:
    assert (await probe())[0] == 2
    assert (await probe("alive"))[0] == 2
    assert (await probe("live", "--sock", "x"))[0] == 2
    assert (await probe("live", "--socket"))[0] == 2
    assert (await probe("live", "--wait", "1", "--wait", "1"))[0] == 2


@pytest.mark.parametrize("wait", ["", "-1", "1.5", "soon", "3601", "99999", "٣"])
def test_a_wait_out_of_range_is_refused(wait: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe_module.main(["ready", "--wait", wait]) == 2
    assert capsys.readouterr().err == f"error: --wait {wait}: it is a whole number of seconds from 0 to 3600\n"


async def test_the_probe_waits_until_the_answer_is_yes(tmp_path: Path) -> None:
    path = tmp_path / "g.sock"
    waiting = asyncio.create_task(probe("ready", "--socket", str(path), "--wait", "60"))
    await asyncio.sleep(0.5)  # it asks a few times before anybody listens
    assert not waiting.done()
    async with serving(path):
        assert await waiting == (0, "ready: 8/8")


async def test_a_wait_ends(tmp_path: Path) -> None:
    code, output = await probe("ready", "--socket", str(tmp_path / "g.sock"), "--wait", "1")
    assert code == 1
    assert output.startswith("ready: no answer: ")


def test_the_probe_imports_next_to_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import taskqd.health.probe; print(*sorted(set(sys.modules) - before))"
    )
    output = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, timeout=30)
    allowed = {"taskqd", "taskqd.health", "taskqd.health.probe", "_socket", "os", "stat", "_stat", "time"}
    allowed |= {"os.path", "posixpath", "genericpath", "_collections_abc", "abc", "_abc", "__future__"}
    assert set(output.stdout.split()) <= allowed
