"""What the tests share: the built program, the engine with its insides reachable, and the fixtures' files."""

from __future__ import annotations

import ctypes
import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))


def make(target: str) -> Path:
    """Build a target of the Makefile and return its path."""
    with (ROOT / "Makefile").open() as lock:  # one make at a time, however many workers
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", target, f"PYTHON={sys.executable}"], cwd=ROOT, check=True)
    return ROOT / target


def hear_interrupts() -> None:
    """For a child that is to be interrupted: what runs the tests in the background may have made it deaf to SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def data() -> Path:
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def ds4() -> Path:
    """The built command-line program."""
    return make("ds4")


@pytest.fixture(scope="session")
def hooks() -> ctypes.CDLL:
    """ds4.c as a library with the test hooks of hooks.c."""
    return ctypes.CDLL(str(make("build/hooks.so")))


@pytest.fixture(scope="session")
def tiles(hooks: ctypes.CDLL) -> ctypes.CDLL | None:
    """The same with AMX's tiles in C (tiles.h), for a CPU that has AVX-512 and no AMX; None for any other."""
    if hooks.hook_has_kernels(b"amx") or not hooks.hook_has_kernels(b"avx512"):
        return None
    return ctypes.CDLL(str(make("build/hooks_tiles.so")))
