"""What `make` gives: libraries that show the API and nothing else, an installation that works, clean compilers and memory checkers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import make


def api(root: Path) -> set[str]:
    """The functions that ds4.h declares."""
    text = re.sub(r"/\*.*?\*/", "", (root / "ds4.h").read_text(), flags=re.S)
    return set(re.findall(r"\b(ds4_\w+)\(", text))


def symbols(path: Path, *options: str) -> set[str]:
    out = subprocess.run(
        ["nm", "--defined-only", "--extern-only", *options, str(path)], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1] for line in out.splitlines() if len(line.split()) == 3}


def test_only_the_api_is_visible(root: Path) -> None:
    assert symbols(make("libds4.so"), "--dynamic") == api(root)
    assert symbols(make("libds4.a")) == api(root)


def test_install(root: Path, tmp_path: Path) -> None:
    """A program built against the installed library, and the installed ./ds4, which finds the bundled model."""
    subprocess.run(["make", "-s", "install", f"PREFIX={tmp_path}"], cwd=root, check=True)
    program = tmp_path / "test_api"
    subprocess.run(
        [
            "cc",
            str(root / "tests/test_api.c"),
            f"-I{tmp_path}/include",
            f"-L{tmp_path}/lib",
            "-lds4",
            f"-Wl,-rpath,{tmp_path}/lib",
            "-o",
            str(program),
        ],
        check=True,
    )
    tiny = root / "tests/data/tiny"
    subprocess.run([str(program), str(tiny / "target.gguf"), str(tiny / "head-ds4.gguf")], check=True)
    out = subprocess.run(
        [str(tmp_path / "bin/ds4"), "-p", "In the beginning", "-n", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert out.stdout


def test_compilers(root: Path) -> None:
    """No warning from any compiler that is installed, aarch64's included."""
    done = subprocess.run(["make", "-s", "check-portable"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gcc: ok" in done.stdout


@pytest.mark.skipif(
    not shutil.which("valgrind") and not shutil.which("clang-19"), reason="neither valgrind nor clang-19 is installed"
)
def test_memory(root: Path) -> None:
    """The C test under valgrind (leaks included), ASan and UBSan."""
    done = subprocess.run(["make", "-s", "check-memory"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
