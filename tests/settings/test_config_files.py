"""The examples in config/ stay true, also what they show commented out."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from taskqd.settings import SETTING_NAMES, resolve_settings
from tests.support import REPOSITORY

CONFIG = REPOSITORY / "config"


def test_the_example_environment_is_accepted_with_every_line_active(tmp_path: Path) -> None:
    text = (CONFIG / "taskqd.env").read_text()
    (tmp_path / ".env").write_text(re.sub(r"^#(?=TASKQ_)", "", text, flags=re.MULTILINE))
    resolved = resolve_settings(environ={}, directory=tmp_path)
    assert {name for name, source in resolved.sources.items() if source == ".env"} >= {"pg_dsn", "pg_dsn_direct"}


def test_the_example_workgroup_is_accepted_with_every_line_active(tmp_path: Path) -> None:
    text = (CONFIG / "workgroup.toml").read_text()
    active = tomllib.loads(re.sub(r"^# (?=\w+ = \S)", "", text, flags=re.MULTILINE))
    assert active["defaults"].keys() <= set(SETTING_NAMES)
    assert len(active["defaults"]) > 8
    for worker in active["workers"]:
        keys = {key: value for key, value in worker.items() if key in SETTING_NAMES}
        own = worker.keys() - keys.keys()
        assert {"name", "replicas"} <= own
        assert own <= {"name", "replicas", "stall_after", "env_file", "env", "credentials", "recycle"}
        resolve_settings(worker_keys=keys, default_keys=active["defaults"], environ={}, directory=tmp_path)
