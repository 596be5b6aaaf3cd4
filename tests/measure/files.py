"""The files that are measured: random slices of Flash's shape, made when missing, and the bundled pair."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import click
from ds4 import TensorInfo

ROOT = Path(__file__).resolve().parents[2]

SLICE = ("--experts", "64")
Q4_K = ("--gate-up-type", "Q4_K", "--down-type", "Q4_K")
MXFP4 = ("--gate-up-type", "MXFP4", "--down-type", "MXFP4")
MADE: dict[str, tuple[str, ...]] = {
    "iq2": SLICE,
    "q4k": (*SLICE, *Q4_K),
    "mxfp4": (*SLICE, *MXFP4),
    "iq2-8": (*SLICE, "--layers", "8"),
    "iq2-16": (*SLICE, "--layers", "16"),
}
"""Names of files and what `python -m ds4.synth` makes them of. Each has a head beside it."""


@dataclass(frozen=True)
class Model:
    """A file under the name that tables call it by, and its head."""

    name: str
    path: Path
    head: Path


def bundled() -> Model:
    """The pair in models/."""
    return Model("small", ROOT / "models/small.gguf", ROOT / "models/small-mtp.gguf")


def made(name: str, cache: Path, step: Callable[[str], None]) -> Model:
    """A slice from the cache, made first when missing: gigabytes, about 20 seconds each."""
    model = Model(name, cache / f"{name}.gguf", cache / f"{name}-head.gguf")
    if model.path.exists() and model.head.exists():
        return model
    step(f"making {model.path}")
    part = cache / f"{name}.part"
    run([sys.executable, "-m", "ds4.synth", str(part), "--head", str(model.head), *MADE[name]], ROOT / "python")
    part.rename(model.path)
    return model


def warm(model: Model, step: Callable[[str], None]) -> None:
    """Reads a file once, so that the system has it in memory."""
    step(f"reading {model.path}")
    for path in (model.path, model.head):
        with path.open("rb", buffering=0) as f:
            while f.read(1 << 24):
                pass


def run(command: list[str], where: Path | None = None, log: Path | None = None) -> str:
    """A program's standard output. ClickException with its last line on standard error when it fails."""
    try:
        done = subprocess.run(command, cwd=where, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as e:
        raise click.ClickException(f"{command[0]}: {e.strerror}") from e
    if log:
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        why = f"the last of {log}" if log else "it said"
        raise click.ClickException(f"{' '.join(command)}: status {done.returncode}; {why}: {said[-1] if said else 'nothing'}")
    return done.stdout


# ---- what a token reads ----

KINDS = ("routed experts", "attention", "shared expert", "output", "compressors, indexer", "router, norms and mixing")


def kind_of(name: str) -> str | None:
    """Which of KINDS a tensor is counted under; None: a table of which a row reads only its own line."""
    if name.startswith("token_embd") or "tid2eid" in name:
        return None
    if "_exps." in name:
        return KINDS[0]
    if "compressor" in name or "indexer" in name:
        return KINDS[4]
    if "_shexp." in name:
        return KINDS[2]
    if name.startswith("output."):
        return KINDS[3]
    small = any(part in name for part in ("hc_", "norm", "gate_inp", "probs_b", "sinks"))
    return KINDS[5] if small else KINDS[1]


def bytes_read(tensors: Iterable[TensorInfo], experts: int, used: int, rows: int = 1, picks: bool = True) -> dict[str, float]:
    """Bytes by KINDS that a pass has to read once: of the experts those that `rows` independent rows pick, on the average; the
    indexer's queries if any row has windows to pick from."""
    out = dict.fromkeys(KINDS, 0.0)
    for t in tensors:
        kind = None if t.head else kind_of(t.name)
        if kind and (picks or not ("indexer.attn_q" in t.name or "indexer.proj" in t.name)):
            out[kind] += t.bytes * (1 - (1 - used / experts) ** rows if kind == KINDS[0] else 1)
    return out
