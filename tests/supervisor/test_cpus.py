"""How many processors a group may use: affinity, and quotas of control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from taskqd.supervisor.cpus import usable_cpus

CPUS = len(os.sched_getaffinity(0))


def system(root: Path, groups: str, files: dict[str, str]) -> str:
    """A root directory whose processes are in ``groups``, with these ``files`` below ``sys/fs/cgroup``."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("groups", "files", "count", "source"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, CPUS, f"{CPUS} usable CPU"),
        ("0::/\n", {}, CPUS, "usable CPU"),
        ("", {}, CPUS, "usable CPU"),
        ("0::/\n", {"cpu.max": "nonsense\n"}, CPUS, "usable CPU"),
        ("0::/\n", {"cpu.max": "10000000 100000\n"}, CPUS, "usable CPU"),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1, "/sys/fs/cgroup/cpu.max grants 0.5 CPUs"),
        ("0::/a/b\n", {"a/cpu.max": "90000 50000\n", "a/b/cpu.max": "max 100000\n"}, 1, "/a/cpu.max grants 1.8 CPUs"),
        ("0::/pod/x\n", {"cpu.max": "100000 100000\n"}, 1, "/sys/fs/cgroup/cpu.max grants 1 CPUs"),
        (
            "3:cpu,cpuacct:/docker/x\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            1,
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us grants 1.5 CPUs",
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, CPUS, "usable CPU"),
        ("1:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "1\n", "cpu/cpu.cfs_period_us": "1\n"}, CPUS, "usable CPU"),
    ],
)
def test_the_tightest_quota_counts_with_whole_processors(
    tmp_path: Path, groups: str, files: dict[str, str], count: int, source: str
) -> None:
    found = usable_cpus(system(tmp_path, groups, files))
    assert found.count == count
    assert source in found.source


def test_without_anything_to_read_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cpus(str(tmp_path)).count == CPUS
    assert 1 <= usable_cpus().count <= CPUS
