"""A network between a client and Postgres that a test can cut, freeze or make lossy."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from tests.postgres import Server

_SOCKET = ".s.PGSQL.5432"


class Proxy:
    """Forwards a unix socket in ``directory`` to the server's, on a thread of its own."""

    def __init__(self, server: Server, directory: Path) -> None:
        self._target = str(server.root / _SOCKET)
        self._path = directory / _SOCKET
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._pairs: set[_Pair] = set()
        self._refusing = False
        self._losing = False
        self._awaited: tuple[bytes, ...] = ()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._listening = threading.Event()

    def dsn(self, user: str = "postgres", database: str = "postgres") -> str:
        """The DSN of the server by way of this proxy."""
        return f"postgresql://{user}@/{database}?host={self._directory}"

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        assert self._listening.wait(10)

    def stop(self) -> None:
        """Close everything and end the thread."""
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def cut(self) -> None:
        """Close every connection and every new one, as when the server is down."""
        self._do(lambda: setattr(self, "_refusing", True))
        self._do(self._close_all)

    def drop(self) -> None:
        """Close every connection; new ones work."""
        self._do(self._close_all)

    def freeze(self) -> None:
        """Let nothing through and close nothing, as when a network or a machine hangs."""
        self._do(self._flowing.clear)

    def lose_next_answer(self) -> None:
        """Deliver what a client sends next, lose the server's answer to it, and close that connection."""
        self._do(lambda: setattr(self, "_losing", True))

    def lose_answer_to(self, *words: bytes) -> None:
        """The same for the next message of any client that holds all of these words."""
        self._do(lambda: setattr(self, "_awaited", words))

    def restore(self) -> None:
        """Work again. What was frozen goes on."""
        self._do(lambda: setattr(self, "_refusing", False))
        self._do(self._flowing.set)

    def _do(self, action: Callable[[], object]) -> None:
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._loop.call_soon_threadsafe(act)
        assert done.wait(10)

    def _close_all(self) -> None:
        for pair in list(self._pairs):
            pair.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listener = self._loop.run_until_complete(asyncio.start_unix_server(self._accept, str(self._path)))
        self._listening.set()
        self._loop.run_forever()
        listener.close()
        self._loop.run_until_complete(asyncio.sleep(0.01))  # what was just accepted is refused
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.close()
            return
        server_reader, server_writer = await asyncio.open_unix_connection(self._target)
        pair = _Pair(writer, server_writer)
        self._pairs.add(pair)
        try:
            await asyncio.gather(
                self._pump(reader, server_writer, pair, from_server=False),
                self._pump(server_reader, writer, pair, from_server=True),
            )
        finally:
            self._pairs.discard(pair)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: _Pair, *, from_server: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                if not from_server and self._awaited and all(word in data for word in self._awaited):
                    self._awaited = ()
                    pair.is_losing = True
                if from_server and (self._losing or pair.is_losing):
                    self._losing = False
                    break
                writer.write(data)
                await writer.drain()
        pair.close()


class _Pair:
    """The two ends of one connection."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self._writers = writers
        self.is_losing = False

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
