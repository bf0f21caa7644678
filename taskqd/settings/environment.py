"""The ``TASKQ_*`` names of the process environment and of the ``.env`` cascade."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dotenv import dotenv_values
from dotenv.parser import parse_stream

ENVIRONMENT = "environment"
_PREFIX = "TASKQ_"
_CHOOSER = "TASKQ_ENVIRONMENT"

_LINK_NAME = re.compile(r"TASKQ_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True)
class Names:
    """The ``TASKQ_*`` variables of one source. ``links`` are those that Kubernetes made for a service."""

    source: str
    values: dict[str, str] = field(default_factory=dict)
    links: tuple[str, ...] = ()


def is_supervised(environ: Mapping[str, str]) -> bool:
    """True in a child of a supervisor."""
    return "TASKQD_CONTROL_FD" in environ


def read_process(environ: Mapping[str, str]) -> Names:
    """Return the names of the process environment."""
    return _names(ENVIRONMENT, environ)


def read_cascade(
    directory: Path, chosen: str | None, process: Names, override: bool, problems: list[str]
) -> list[Names]:
    """Return the ``.env`` files there are in ``directory``, the most specific first.

    The files are ``.env``, ``.env.local``, ``.env.{env}``, ``.env.{env}.local``. ``env`` is ``chosen`` (by a
    flag or the workgroup file), else ``TASKQ_ENVIRONMENT`` of the process and of the first two files, in the
    order that ``override`` gives them. A line that cannot be read is added to ``problems``.
    """
    found = [_read(directory / name, problems) for name in (".env.local", ".env")]
    by_precedence = [*found, process] if override else [process, *found]
    named = chosen or next(filter(None, (names.values.get(_CHOOSER) for names in by_precedence)), None)
    if named and named != "local" and "/" not in named and "\0" not in named:
        found = [_read(directory / f".env.{named}{tail}", problems) for tail in (".local", "")] + found
    return [names for names in found if names.values or names.links]


def link_warning(names: Names) -> str:
    """Say once which names of a source were ignored."""
    return (
        f"ignored {', '.join(names.links)} ({names.source}): they look like what Kubernetes sets for a "
        "service named taskq; enableServiceLinks: false in the pod keeps them out"
    )


def _read(path: Path, problems: list[str]) -> Names:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Names(path.name)
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return Names(path.name)
    wrong = [line.original.line for line in parse_stream(io.StringIO(text)) if line.error]
    if wrong:
        problems.extend(f"{path}, line {number}: must be NAME=value" for number in wrong)
        return Names(path.name)
    pairs = dotenv_values(stream=io.StringIO(text))
    return _names(path.name, {name: value for name, value in pairs.items() if value is not None})


def _names(source: str, pairs: Mapping[str, str]) -> Names:
    ours = {name: value for name, value in pairs.items() if name.upper().startswith(_PREFIX)}
    links = sorted(name for name, value in ours.items() if _is_link(name, value))
    return Names(source, {name: value for name, value in ours.items() if name not in links}, tuple(links))


def _is_link(name: str, value: str) -> bool:
    return bool(_LINK_NAME.fullmatch(name) or (name.endswith("PORT") and _LINK_VALUE.match(value)))
