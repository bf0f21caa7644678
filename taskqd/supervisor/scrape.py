"""Collecting the metrics of a group's processes into one answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping

SCRAPE_TIME = 1.0
"""Seconds in which a process must have given its metrics; one that has not is left out."""

_LARGEST = 4 * 1024 * 1024
"""Bytes that are taken from one process."""

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?( .+)")
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")


async def scrape(sockets: Mapping[str, str]) -> dict[str, str]:
    """Return the metrics text of each process by its name, asking all ``sockets`` at once; the silent are left out."""
    answers = await asyncio.gather(*(_get(path) for path in sockets.values()))
    return {name: text for name, text in zip(sockets, answers, strict=True) if text is not None}


def merge(texts: Mapping[str, str]) -> list[str]:
    """Return the series of all processes, each sample with a label ``worker``, the samples of a metric together.

    A line that is not of the text format is left out, not passed on: it would spoil the whole scrape.
    """
    heads: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for worker, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                kind, _, rest = line[2:].partition(" ")
                family = rest.partition(" ")[0]
                if kind in ("HELP", "TYPE"):
                    heads.setdefault(family, {}).setdefault(kind, line)
                continue
            found = _SAMPLE.fullmatch(line)
            if found is None or not _is_number(found[3].split()[0]):
                continue
            owner = family if _belongs(found[1], family) else found[1]
            labels = ",".join(filter(None, [f'worker="{worker}"', (found[2] or "").strip(",")]))
            samples.setdefault(owner, []).append(f"{found[1]}{{{labels}}}{found[3]}")
    return [line for family, found_lines in samples.items() for line in (*_head(heads.get(family, {})), *found_lines)]


async def _get(path: str) -> str | None:
    """Return what a process answers to ``GET /metrics``, or None when it gives no good answer in time."""
    try:
        async with asyncio.timeout(SCRAPE_TIME):
            reader, writer = await asyncio.open_unix_connection(path, limit=_LARGEST)
            try:
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: taskqd\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.read(_LARGEST)
                while part := await reader.read(_LARGEST):
                    body += part
                    if len(body) > _LARGEST:
                        return None
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None
    return body.decode("utf-8", "replace") if head.split(b" ")[1:2] == [b"200"] else None


def _head(lines: Mapping[str, str]) -> Iterable[str]:
    return [lines[kind] for kind in ("HELP", "TYPE") if kind in lines]


def _belongs(name: str, family: str) -> bool:
    return bool(family) and (name == family or any(name == family + suffix for suffix in _SUFFIXES))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
