"""``python -P -m taskqd.cli.zygote MODULE:ATTR…``: imports the actors once and forks the workers of a group.

The supervisor starts it, and nothing else can use it. It is of this layer because a fork becomes the ``worker``
command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from taskqd.supervisor.fork_server import ForkServer, leave


def main(references: Sequence[str]) -> int:
    """Serve the supervisor until it ends. Returns in forked workers only, with their exit codes."""
    server = ForkServer(lambda: _import(references))
    _, _, actors = server.serve()  # worker --actors REFERENCE

    from taskqd.cli.main import report

    try:
        return _work(server, actors)
    except KeyboardInterrupt:
        return 1
    except Exception as error:
        return report(error)


def _import(references: Sequence[str]) -> None:
    """Import what a worker imports, in the same order: its own modules, then the application's."""
    import taskqd.cli.main
    import taskqd.worker.rehearsal  # noqa: F401
    from taskqd.actors.registry import load_registry

    for reference in references:
        load_registry(reference)
    _rehearse(references)
    _rehearse(references)  # now with what the first time has put by


def _rehearse(references: Sequence[str]) -> None:
    from taskqd.actors.registry import load_registry
    from taskqd.worker.rehearsal import rehearse

    for reference in references:
        rehearse(load_registry(reference))


def _work(server: ForkServer, actors: str) -> int:
    from taskqd.settings import load_settings
    from taskqd.worker.main import run_worker

    settings = load_settings()
    server.apply_changes()
    return run_worker(settings, actors=actors)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
