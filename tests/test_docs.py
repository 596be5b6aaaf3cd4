"""The Python of README and docs: every block runs as written, in order, and prints what is shown."""

from __future__ import annotations

import contextlib
import html
import io
import re
import subprocess
import sys
from pathlib import Path

import built  # noqa: F401
import pytest
from conftest import ROOT
from ds4 import registry

PAGES = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if "```python" in p.read_text()]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def test_pages_are_found() -> None:
    assert {ROOT / "README.md", ROOT / "docs/python.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of text behind one of Python is its output. The folder has what the repository's has: the bundled pair."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS4_MODEL", str(ROOT / "models/small.gguf"))
    monkeypatch.setattr(registry, "_drafts", dict(registry._drafts))  # what a page registers is its own
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    names: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block[1] != "python":
            continue
        line = text.count("\n", 0, block.start()) + 1
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * line + block[2], str(page), "exec"), names)
        ran += 1
        if following and following[1] == "text" and not text[block.end() : following.start()].strip():
            assert out.getvalue().rstrip("\n") == following[2].rstrip("\n"), f"{page}:{line}"
    assert ran


def test_reference(tmp_path: Path) -> None:
    """`make docs`: a page for each public module, with what the classes say."""
    subprocess.run(["make", "-s", "docs", f"PYTHON={sys.executable}", f"DOCS={tmp_path}"], cwd=ROOT, check=True)
    for module in ("engine", "model", "sampling", "batch", "generation", "errors", "registry"):
        assert (tmp_path / f"ds4/{module}.html").exists(), module
    page = (tmp_path / "ds4/engine.html").read_text()
    assert "An opened model" in page and "float32 [n, V]" in html.unescape(page)
