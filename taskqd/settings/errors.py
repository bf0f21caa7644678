"""The one error of the settings: everything that is wrong, at once."""

from __future__ import annotations

from collections.abc import Sequence

from taskqd.domain.errors import ConfigError


class SettingsError(ConfigError):
    """The settings are refused. ``problems`` holds a line each: where it was set, its value, the bound."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            message = f"settings refused: {self.problems[0]}"
        else:
            message = "\n  ".join([f"settings refused, {len(self.problems)} problems:", *self.problems])
        super().__init__(message)
