"""A resolver that sees nothing of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taskqd.settings import Resolved, resolve_settings


@pytest.fixture
def resolve(tmp_path: Path) -> Callable[..., Resolved]:
    """Resolve with an empty environment and an empty directory, unless a test says otherwise."""

    def run(flags: dict[str, Any] | None = None, **sources: Any) -> Resolved:
        return resolve_settings(flags, **{"environ": {}, "directory": tmp_path} | sources)

    return run
