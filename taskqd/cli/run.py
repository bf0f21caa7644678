"""``taskqd run FILE``: the supervisor. Stays resident, so it loads neither click nor the settings model."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run the workgroup of a file until it is told to stop, and return the exit code."""
    if len(argv) == 1 and not argv[0].startswith("-"):
        file = argv[0]  # so that a parser need not stay in memory
    else:
        try:
            file = _parse(argv)
        except SystemExit as stop:  # argparse has explained itself: 0 after --help, 2 for wrong usage
            return int(stop.code or 0)

    _import_asyncio_without_tls()
    import asyncio

    from taskqd.supervisor.group import run_group

    return asyncio.run(run_group(file))


def _import_asyncio_without_tls() -> None:
    """Spare this process OpenSSL, which asyncio loads where it is, and which is a tenth of all that it would hold."""
    if "ssl" in sys.modules:
        return
    sys.modules["ssl"] = None  # type: ignore[assignment]  # as good as not installed
    try:
        import asyncio  # noqa: F401
    finally:
        del sys.modules["ssl"]


def _parse(argv: Sequence[str]) -> str:
    import argparse

    parser = argparse.ArgumentParser(
        prog="taskqd run",
        description="Run the workgroup of a TOML file: workers and a scheduler, watched and restarted.",
        epilog="Ends with 0 when everything stopped by itself, 3 when something had to be killed, 69 when the "
        "database is away, 70 when a process never comes up, 75 when it runs already, the schema does not fit, or "
        "others hold the connections, 78 when the file or the settings are refused.",
    )
    parser.add_argument("file", metavar="FILE", help="the workgroup file")
    return str(parser.parse_args(argv).file)
