"""Sessions and engines on several threads (test_threads.c), plainly and under the thread sanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import make


def run(program: Path, tiny: Path) -> None:
    done = subprocess.run([program, tiny / "target.gguf", tiny / "head-ds4.gguf"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "test_threads: ok" in done.stdout and not done.stderr, done.stdout + done.stderr


def test_threads(data: Path) -> None:
    run(make("build/test_threads"), data / "tiny")


@pytest.mark.skipif(not shutil.which("clang-19"), reason="clang-19 is not installed")
def test_no_data_race(data: Path) -> None:
    run(make("build/test_threads_tsan"), data / "tiny")
