"""What the peers run: the same imports, and a line in a file when a process can work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import benchmarks.application  # noqa: F401 - its weight


def begin(_worker: object = None) -> None:
    """Tell that this process can work, and let SIGUSR2 block its main thread."""
    signal.signal(signal.SIGUSR2, lambda _number, _frame: time.sleep(1000))
    with open(os.environ["READY"], "a") as file:
        file.write(f"{os.getpid()} {time.time()}\n")


post_worker_init = begin
"""What gunicorn calls in each of its workers."""


def wsgi(_environ: object, start_response: Callable[..., object]) -> Iterable[bytes]:
    """Answer nothing."""
    start_response("204 No Content", [])
    return []


async def asgi(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
    """Tell that this process can work when the server starts its application."""
    if scope["type"] != "lifespan":
        return
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            begin()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def main() -> None:
    """Be a program of a supervisor that knows nothing of Python."""
    begin()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
