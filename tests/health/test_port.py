"""A process's metrics and health on a TCP port."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from taskqd.domain.errors import ConfigError
from taskqd.health.server import HealthServer, Report


def _server(path: Path) -> HealthServer:
    up = Report(True, {})
    return HealthServer(str(path / "s.sock"), live=lambda: up, ready=lambda: up, metrics=lambda: "taskq_up 1\n")


async def test_metrics_are_served_on_a_port_until_the_server_stops(short_dir: Path) -> None:
    server = _server(short_dir)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    await server.start()
    await server.listen_on_port("127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"taskq_up 1" in answer
    await server.stop()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_taken_port_is_refused_with_its_address(short_dir: Path) -> None:
    server = _server(short_dir)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await server.listen_on_port("127.0.0.1", port)
