"""Settings: every knob of taskqd, where its value comes from, and the rules between them.

Start with :func:`load_settings`. The names are imported when first used, so that
``taskqd.settings.durations`` can be had without pydantic.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers read it, without importing typing at run time
if TYPE_CHECKING:
    from taskqd.settings.errors import SettingsError as SettingsError
    from taskqd.settings.model import ALIASES as ALIASES
    from taskqd.settings.model import SETTING_NAMES as SETTING_NAMES
    from taskqd.settings.model import Settings as Settings
    from taskqd.settings.model import describe as describe
    from taskqd.settings.model import is_secret as is_secret
    from taskqd.settings.resolve import Resolved as Resolved
    from taskqd.settings.resolve import load_settings as load_settings
    from taskqd.settings.resolve import resolve_settings as resolve_settings

_HOME = {
    "ALIASES": "model",
    "Resolved": "resolve",
    "SETTING_NAMES": "model",
    "Settings": "model",
    "SettingsError": "errors",
    "describe": "model",
    "is_secret": "model",
    "load_settings": "resolve",
    "resolve_settings": "resolve",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'taskqd.settings' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"taskqd.settings.{module}"), name)
    globals()[name] = value
    return value
