"""Prints docs/settings.md: the reference of all settings, from the settings model itself. Run it by scripts/docs."""

from __future__ import annotations

from pydantic import SecretStr

from taskqd.settings import SETTING_NAMES, describe
from taskqd.settings.rules import show

HEAD = """\
# Settings

<!-- Written by scripts/docs from the settings model; change it there. -->

The more specific source wins: command-line flag, `[[workers]]` key, a worker's own environment (`[workers.env]`, then
its `env_file`), `[defaults]` key, process environment, `.env` files (`.env`, `.env.local`, `.env.{environment}`,
`.env.{environment}.local`, the later wins), built-in default. With `DOTENV_OVERRIDE=true` the `.env` files win over the
process environment.

In the workgroup file a setting has the name below; in the environment it is `TASKQ_` and the name in capitals, so
`lock_lease` is `TASKQ_LOCK_LEASE`. Durations are seconds, or text: `250ms`, `1.5s`, `5m`, `2h`, `1d`. A name that is
not in this table is refused, with the nearest one that is. All settings are checked together at start, and all problems
are said at once: each names the setting, its value, where it was set and what it may be. `taskqd check FILE` does that
without starting anything. Settings are read at boot.

| Setting | Default | Takes | Meaning |
|---|---|---|---|
"""


def render() -> str:
    """Return the whole page."""
    return HEAD + "".join(f"{_row(name)}\n" for name in SETTING_NAMES)


def _row(name: str) -> str:
    about = describe(name)
    setting = f"`{name}`" + (f", also `{about.alias}`" if about.alias else "")
    default = "computed" if about.default is None and "none" not in about.allowed else _default(about.default)
    cells = (setting, default, about.allowed, about.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{show(value)}`"
    if isinstance(value, tuple):
        return f"`{','.join(value)}`"
    if isinstance(value, SecretStr):  # the built-in default of a DSN is public
        return f"`{value.get_secret_value()}`"
    return f"`{value}`"


if __name__ == "__main__":
    print(render(), end="")
