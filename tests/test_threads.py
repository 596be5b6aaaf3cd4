"""Sessions and engines on several threads (test_threads.c), plainly and under the thread sanitizer; how many there are by default."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import make
from engine import lib


def run(program: Path, tiny: Path) -> None:
    done = subprocess.run([program, tiny / "target.gguf", tiny / "head-ds4.gguf"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "test_threads: ok" in done.stdout and not done.stderr, done.stdout + done.stderr


def test_threads(data: Path) -> None:
    run(make("build/test_threads"), data / "tiny")


@pytest.mark.skipif(not shutil.which("clang-19"), reason="clang-19 is not installed")
def test_no_data_race(data: Path) -> None:
    run(make("build/test_threads_tsan"), data / "tiny")


@pytest.mark.parametrize(
    ("groups", "files", "processors"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000", "cpu.max": "900000 100000"}, 2.5),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "250000 100000\n"}, 0.5),
        ("0::/outside/of/it\n", {"cpu.max": "300000 200000"}, 1.5),
        ("0::/\n", {"cpu.max": "100000 100000"}, 1),
        ("0::/a\n", {"a/cpu.max": "max 100000"}, math.inf),
        ("4:cpuacct,cpu:/d/e\n2:cpuset:/\n0::/\n", {"cpu/d/e/cpu.cfs_quota_us": "400000", "cpu/d/e/cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu,cpuacct:/d\n", {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ("4:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1", "cpu/d/cpu.cfs_period_us": "100000"}, math.inf),
        ("2:cpuset:/d\n3:cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "1000", "cpu/d/cpu.cfs_period_us": "100000"}, math.inf),
        ("nonsense\n\n:\n::\n", {"cpu.max": "much 0"}, math.inf),
        ("0::" + "/a" * 4000, {"cpu.max": "0 0"}, math.inf),
    ],
)  # fmt: skip
def test_a_containers_quota(groups: str, files: dict[str, str], processors: float, tmp_path: Path) -> None:
    """The least of the group's own and its parents', of both versions of control groups; what cannot be read limits nothing."""
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert lib.hook_cpu_quota(bytes(tmp_path / "groups"), bytes(tmp_path / "root")) == processors


def test_threads_by_default(ds4: Path, data: Path) -> None:
    """Affinity and quota, one at least."""
    quota = lib.hook_cpu_quota(b"/proc/self/cgroup", b"/sys/fs/cgroup")
    for processors in ({max(os.sched_getaffinity(0))}, os.sched_getaffinity(0)):
        text = subprocess.run(
            [ds4, "-m", data / "tiny/target.gguf", "--inspect"], capture_output=True, text=True, check=True,
            preexec_fn=lambda p=processors: os.sched_setaffinity(0, p),
        ).stdout  # fmt: skip
        assert f", {max(1, int(min(len(processors), quota, 256)))} threads," in text
