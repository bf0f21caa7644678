"""The environment of every kind of process that a group starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from taskqd.domain.errors import TaskQError
from taskqd.domain.exit_codes import ExitCode
from taskqd.supervisor.plan import ChildSpec
from taskqd.supervisor.spawn import base_environment
from taskqd.supervisor.worker_env import EnvFileError, digest, read_env_file


class EnvChangedError(TaskQError):
    """A file says something else than a moment ago, when it was checked."""

    exit_code = ExitCode.TRY_AGAIN


class Environments:
    """The supervisor's own environment, and what kinds of workers have for themselves on top of it.

    What an ``env_file`` says is kept, as it was when the plan was checked: a process that is started again gets what
    its siblings have, whatever the file says by then.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._own: dict[str, Mapping[str, str]] = {"": {}}

    def learn(self, specs: Iterable[ChildSpec], keep: Iterable[ChildSpec] = ()) -> None:
        """Read what ``specs`` need; what only others than these and ``keep`` had is forgotten.

        Raises ``EnvChangedError`` when a file is not what was checked; nothing is forgotten then.
        """
        wanted = {spec.env_digest: spec for spec in (*keep, *specs)}
        for mark, spec in wanted.items():
            if mark not in self._own:
                self._own[mark] = _read(spec)
        self._own = {mark: own for mark, own in self._own.items() if mark in wanted or not mark}

    def add(self, own: Mapping[str, str]) -> None:
        """Keep what was read already."""
        self._own[digest(own)] = own

    def marked(self, mark: str, app_dir: str | None) -> dict[str, str]:
        """Return what a process gets of an environment whose own part has this mark, before what is its alone."""
        return base_environment({**self._environ, **self._own[mark]}, app_dir)


def _read(spec: ChildSpec) -> dict[str, str]:
    try:
        values = {} if spec.env_file is None else read_env_file(spec.env_file).values
    except EnvFileError as error:
        raise EnvChangedError(f"{spec.env_file}: {error}: it was changed while it was read; try again") from None
    own = {**values, **spec.env}
    if digest(own) != spec.env_digest:
        raise EnvChangedError(f"{spec.env_file}: was changed while it was read; try again")
    return own
