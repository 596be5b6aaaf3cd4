"""The Python code under ruff and mypy, and what a user's type checker sees of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import ROOT

USER = """
import ds4

with ds4.Engine("target.gguf", threads=1) as engine:
    text: str = engine.generate("In", max_tokens=3, stop=["a", 5])
    tokens: list[int] = engine.generate("In").tokens
    for piece in engine.stream([1, 2], temperature=0.5):
        print(piece.upper())
    logits = ds4.Session(engine).logits()
    print(logits.dtype, ds4.__version__, ds4.LoadError)
"""
WRONG = [
    'engine.generate("In", max_tokens="3")',
    'engine.generate("In", max_token=3)',
    "engine.generate(5)",
    "ds4.Sesion(engine)",
]


def check(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)


def test_ruff() -> None:
    done = check("ruff", "check", "python", "tests", "setup.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy() -> None:
    done = check("mypy", "--strict", "python/ds4", "tests/measure", "setup.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_for_users(tmp_path: Path) -> None:
    """A correct program passes under --strict; each mistake is found."""
    program = tmp_path / "program.py"
    program.write_text(USER + "".join(f"    {line}\n" for line in WRONG))
    done = check("mypy", "--strict", "--no-error-summary", program)
    first = USER.count("\n") + 1
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert found == set(range(first, first + len(WRONG))), done.stdout
