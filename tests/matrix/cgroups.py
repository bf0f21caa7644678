"""Control groups of a test's own: to freeze processes, and to let them have next to no processor."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.matrix.oracle import needs
from tests.support import wait_until

_ROOT = Path("/sys/fs/cgroup")


def _controls(kind: str, v2_file: str) -> Path | None:
    """Where groups with that controller are made: of version 1 or 2, or nowhere."""
    if (_ROOT / kind).is_dir() and os.access(_ROOT / kind, os.W_OK):
        return _ROOT / kind
    controllers = _ROOT / "cgroup.subtree_control"
    available = v2_file.startswith("cgroup.") or (
        controllers.exists() and v2_file.partition(".")[0] in controllers.read_text().split()
    )
    return _ROOT if available and (_ROOT / "cgroup.procs").exists() and os.access(_ROOT, os.W_OK) else None


@contextlib.contextmanager
def _group(parent: Path, pids: Iterable[int]) -> Iterator[Path]:
    path = parent / f"taskqd-test-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    homes = {pid: _home(parent, pid) for pid in pids}
    try:
        for pid in homes:
            (path / "cgroup.procs").write_text(str(pid))
        yield path
    finally:
        for pid, home in homes.items():
            with contextlib.suppress(OSError):  # it has ended
                (home / "cgroup.procs").write_text(str(pid))
        wait_until(lambda: _removed(path), 10, "its processes have left the control group")


def _home(parent: Path, pid: int) -> Path:
    """The group that a process is in now, below the same root."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == ("" if parent == _ROOT else parent.name):
            return parent / path.lstrip("/")
    return parent


def _removed(path: Path) -> bool:
    with contextlib.suppress(OSError):
        for pid in (path / "cgroup.procs").read_text().split():
            (path.parent / "cgroup.procs").write_text(pid)
        path.rmdir()
    return not path.exists()


@contextlib.contextmanager
def frozen(pids: Iterable[int]) -> Iterator[None]:
    """Freeze processes, as a host does that is suspended or moved; they go on at the end."""
    parent = _controls("freezer", "cgroup.freeze")
    needs(parent is not None, "a writable control group freezer")
    assert parent is not None
    with _group(parent, pids) as path:
        switch, on, off = (
            (path / "freezer.state", "FROZEN", "THAWED")
            if (path / "freezer.state").exists()
            else (path / "cgroup.freeze", "1", "0")
        )
        switch.write_text(on)
        try:
            yield
        finally:
            switch.write_text(off)


@contextlib.contextmanager
def throttled(pids: Iterable[int], percent: int) -> Iterator[None]:
    """Let processes together have so much of one processor and no more."""
    parent = _controls("cpu", "cpu.max")
    needs(parent is not None, "a writable control group for the processor")
    assert parent is not None
    with _group(parent, pids) as path:
        period = 100_000
        quota = period * percent // 100
        if (path / "cpu.cfs_quota_us").exists():
            (path / "cpu.cfs_period_us").write_text(str(period))
            (path / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (path / "cpu.max").write_text(f"{quota} {period}")
        yield
