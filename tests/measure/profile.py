"""Where a pass spends its time: Linux's perf samples ./ds4, and samples are counted by the function of the forward pass that
they were taken under."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from measure import files
from measure.figures import Figure, number
from measure.parts import DS4, PROMPT, Bench

HERTZ, PROGRAM = 499, "build/ds4_frames"
"""Samples a second; ./ds4 with frame pointers, by which perf finds callers: kernels keep more on the stack than it would copy."""
WRITTEN = 24
PHASES = {"ds4_session_step": "1 row", "ds4_session_eval": f"{PROMPT} rows", "eval_prompt": f"{PROMPT} rows"}
OPERATIONS = {
    "output_logits": "output matrix",
    "pick_windows": "indexer",
    "compress": "compressors",
    "project": "projections of q and kv",
    "attend": "attention over rows",
    "attention": "projections of attention's output",
    "moe": "routed experts",
    "hyper_enter": "hyper-connections",
    "hyper_leave": "hyper-connections",
}
"""Functions of the forward pass, the inner one first where one calls another, and what they are."""
EXPERTS = {"q8_0": "shared expert", "": "routing, activation, adding up"}
"""By the type of the product that a sample under `moe` is in: Q8_0, or none. Any other type is a routed expert's."""
TYPED = re.compile(r"tile_(q8_0|iq2_xxs|q2_k|q3_k|q4_k|q5_k|q6_k|q4_0|mxfp4)_")


def stacks(text: str) -> Iterator[list[str]]:
    """The functions of each sample, the innermost first, from `perf script -F ip,sym`."""
    for sample in text.split("\n\n"):
        lines = (line.split(None, 1) for line in sample.splitlines())
        found = [words[1].removesuffix(" (inlined)").strip() for words in lines if len(words) == 2]
        if found:
            yield found


def operation(stack: list[str]) -> str:
    """What a sample of a pass belongs to."""
    for function, what in OPERATIONS.items():
        if function not in stack:
            continue
        if function != "moe":
            return what
        types = [m[1] for m in map(TYPED.match, stack) if m]
        return EXPERTS.get(types[0] if types else "", what)
    return "the rest"


def shares(text: str) -> dict[str, dict[str, float]]:
    """By phase and operation, the share of the phase's samples."""
    counts: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES.values()}
    for stack in stacks(text):
        phase = next((name for function, name in PHASES.items() if function in stack), None)
        if phase:
            counts[phase][operation(stack)] += 1
    return {phase: {what: n / c.total() for what, n in c.items()} for phase, c in counts.items()}


def profile(b: Bench) -> None:
    """A prompt of 256 and 24 tokens behind it, on one thread, as perf sees them."""
    if not shutil.which("perf"):
        raise click.ClickException("perf is not installed; it takes the samples of the part `profile`")
    files.run(["make", "-s", "-C", str(files.ROOT), PROGRAM])
    ids = Path(b.cache / "profile-ids")
    ids.write_text(" ".join(str(300 + 7 * i) for i in range(PROMPT)), encoding="utf-8")
    samples = str(b.cache / "profile-samples")
    for model in b.models():
        b.step(f"profile, {model.name}")
        ds4 = [
            str(files.ROOT / PROGRAM),
            "-m",
            str(model.path),
            "--prompt-ids",
            str(ids),
            "-n",
            str(WRITTEN),
            "-t",
            "1",
            "-c",
            "1024",
        ]
        record = ["perf", "record", "-q", "-F", str(HERTZ), "--call-graph", "fp", "-o", samples]
        files.run([*record, *ds4, "--ignore-eos", "--print-ids", "--quiet"])
        found = shares(files.run(["perf", "script", "-i", samples, "-F", "ip,sym"]))
        phases = list(found)
        if not all(found.values()):
            raise click.ClickException(f"{samples}: perf kept no samples of {' or '.join(p for p in phases if not found[p])}")
        for phase in phases:
            b.report.add(
                *(Figure("profile", model.name, 1, w, f"{DS4}, {phase}", (v,), "share") for w, v in found[phase].items())
            )
        body = [
            [what, *(f"{number(100 * found[phase].get(what, 0))}%" for phase in phases)] for what in by_size(found[phases[0]])
        ]
        b.report.table(f"Where a pass spends its time: {model.name}, 1 thread", ["", *phases], body)


def by_size(found: dict[str, float]) -> list[str]:
    """The operations, the largest first, and those that this phase has none of."""
    return sorted(dict.fromkeys([*OPERATIONS.values(), *EXPERTS.values(), "the rest"]), key=lambda what: -found.get(what, 0))
