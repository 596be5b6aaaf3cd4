"""Each fuzz target for some seconds from its corpus; for a minute when DS4_DEEP is set."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import make

pytestmark = pytest.mark.skipif(not shutil.which("clang-19"), reason="clang-19 is not installed")
SECONDS = 60 if os.environ.get("DS4_DEEP") else 3


@pytest.mark.parametrize("target", ["gguf", "tokenizer", "chat", "snapshot"])
def test_fuzz(root: Path, tmp_path: Path, target: str) -> None:
    program = make(f"build/fuzz_{target}")
    options = [f"-max_total_time={SECONDS}", "-timeout=10", "-rss_limit_mb=2048", "-malloc_limit_mb=64", "-max_len=32768", f"-artifact_prefix={tmp_path}/", "-verbosity=0"]
    done = subprocess.run([program, *options, tmp_path, f"tests/corpus/{target}"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:] + f"\n(the input is in {tmp_path})"


def test_the_corpus_is_small(root: Path) -> None:
    sizes = [path.stat().st_size for path in (root / "tests/corpus").rglob("*") if path.is_file()]
    assert len(sizes) > 50 and sum(sizes) < 1 << 20
