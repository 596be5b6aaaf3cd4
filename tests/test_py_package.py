"""The package as users get it: `pip install .`, the wheel of `python -m build`, other CPUs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import make

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))
from ds4._build import exact_flags, version  # noqa: E402

PROGRAM = """
import importlib.resources, ds4
pair = importlib.resources.files("ds4") / "models"
with ds4.Engine(pair / "small.gguf", pair / "small-mtp.gguf", speculative_depth=2, margin=0, threads=1) as engine:
    text = engine.generate("And the LORD said", max_tokens=12, logprobs=1)
    print(engine.info.isa, ds4.__version__, text.tokens, [p.logprob.hex() for p in text.logprobs], repr(text))
"""


def run(*command: object, **env: str) -> str:
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, env={**os.environ, **env}, cwd="/", check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tree(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout's files, elsewhere, so that building leaves nothing in it."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "Makefile", "LICENSE", "README.md", "ds4.c", "ds4.h"):
        shutil.copy(root / name, tree)
    for path in root.glob("*.inc"):
        shutil.copy(path, tree)
    shutil.copytree(root / "models", tree / "models")
    shutil.copytree(root / "python", tree / "python", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    return tree


@pytest.fixture(scope="module")
def dist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m build` makes: the archive of the source, and from it the wheel. With little optimisation, unlike the extension
    of `make extension`, whose bits are the same."""
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", dist, tree, CFLAGS="-O1")
    return dist


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as z:
        z.extractall(place)
    return place


@pytest.fixture(scope="module")
def expected(unpacked: Path) -> list[str]:
    """The program's words with the wheel on this CPU: kernels, version, and what must be the same everywhere."""
    return run(sys.executable, "-c", PROGRAM, PYTHONPATH=str(unpacked)).split(maxsplit=2)


def test_contents(dist: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"ds4/_ds4.abi3.so", "ds4/py.typed", "ds4/_ds4.pyi", "ds4/engine.py"} <= names
    assert {"ds4/models/small.gguf", "ds4/models/small-mtp.gguf", "ds4/models/tokenizer.json"} <= names
    assert wheel.name.startswith(f"ds4-{version()}-cp310-abi3-linux_")
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as t:
        held = {name.partition("/")[2] for name in t.getnames()}
    assert {"ds4.c", "ds4.h", "ds4_tables.inc", "ds4_unicode.inc", "Makefile", "LICENSE", "README.md", "setup.py"} <= held
    assert not any(name.startswith("tests/") for name in held)


def test_manylinux(wheel: Path) -> None:
    """auditwheel finds nothing but the C library, of a version that a manylinux tag names."""
    out = run(sys.executable, "-m", "auditwheel", "show", wheel)
    assert "manylinux_2_" in out.replace("\n", " ").split("platform tag:")[1][:40], out


def test_abi3(wheel: Path) -> None:
    """Nothing but the stable ABI of Python 3.10."""
    out = run(sys.executable, "-m", "abi3audit", "--strict", "--report", wheel)
    assert '"is_abi3": true' in out and '"computed": "3.10"' in out, out


def test_flags(root: Path) -> None:
    """The flags that bits depend on come from the Makefile."""
    assert {"-ffp-contract=off", "-fno-fast-math", "-std=c11"} <= set(exact_flags(root))


def test_pip_install(tree: Path, expected: list[str], tmp_path: Path) -> None:
    """In a fresh virtual environment: the same bits as the wheel's; the commands are there."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    run(python, "-m", "pip", "install", "--disable-pip-version-check", tree, CFLAGS="-O1")
    assert run(python, "-c", PROGRAM).split(maxsplit=2) == expected
    assert expected[1] == version()


@pytest.mark.skipif(not shutil.which("qemu-x86_64") or platform.machine() != "x86_64", reason="qemu-x86_64 is not installed")
@pytest.mark.parametrize(("cpu", "isa"), [("Haswell", "avx2"), ("Nehalem", "scalar")])
def test_other_cpus(unpacked: Path, expected: list[str], cpu: str, isa: str) -> None:
    """The wheel on a CPU with AVX2 only, and on one without: its kernels, the same bits. NumPy's BLAS, which is not used, is told the CPU:
    some versions take one without AVX for one with it."""
    env = {"PYTHONPATH": str(unpacked), "OPENBLAS_CORETYPE": cpu}
    out = run("qemu-x86_64", "-cpu", cpu, sys.executable, "-c", PROGRAM, **env)
    assert out.split(maxsplit=2) == [isa, *expected[1:]]


def test_in_place(expected: list[str], root: Path) -> None:
    """The extension of `make extension`, which the other tests use, with all optimisation: the same bits as the wheel's."""
    make("extension")
    program = PROGRAM.replace(
        'importlib.resources.files("ds4") / "models"', f'__import__("pathlib").Path({str(root / "models")!r})'
    )
    assert run(sys.executable, "-c", program, PYTHONPATH=str(root / "python")).split(maxsplit=2) == expected
