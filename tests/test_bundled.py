"""The bundled pair: its own head drafts, the text stays plain's; what models/README.md promises holds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from engine import Engine, bits, ffi, lib

PROMPTS = ["In the beginning", "And it came to pass", "The LORD is my shepherd; I shall not want."]
LENGTH = 600
SWEEP = [(depth, margin) for depth in (1, 2, 3, 4, 8, 16) for margin in ((0.0, 0.3, 3.0, 1000.0) if depth == 2 else (0.0, 3.0))]
RUNS = [(PROMPTS[0], 1), *((text, threads) for text in PROMPTS for threads in (1, 2) if (text, threads) != (PROMPTS[0], 1))]


@pytest.fixture(scope="module")
def pair(root: Path) -> tuple[Path, Path]:
    return root / "models/small.gguf", root / "models/small-mtp.gguf"


def prompt_ids(engine: Engine, text: str) -> list[int]:
    out, raw = ffi.new("int[]", 256), text.encode()
    n = lib.ds4_prompt(engine.p, raw, len(raw), False, out, 256)
    return list(out[0:n])


@pytest.mark.parametrize(("text", "threads"), RUNS)
def test_own_head(pair: tuple[Path, Path], text: str, threads: int) -> None:
    """Depths 1, 2, 3, 4, 8, 16 and margins 0, 0.3, 3 and 1000: 600 tokens, the logits and the head's after them. One text has all
    depths and margins, the other texts and two threads share them once more."""
    with Engine(*pair, threads=threads, ctx=1024) as engine:
        ids = prompt_ids(engine, text)

        def run(depth: int, margin: float) -> tuple[list[int], np.ndarray, np.ndarray, list[int]]:
            session = engine.session()
            session.set_stops([], ignore_eos=True)
            session.set_mtp(depth, margin)
            session.eval(ids)
            tokens = session.generate(LENGTH)
            result = (
                tokens,
                bits(session.logits()),
                bits(session.head_logits(session.position - 9, session.position - 1)),
                list(session.stats.accepted),
            )
            session.close()
            return result

        plain, share = run(0, 0), RUNS.index((text, threads))
        for depth, margin in SWEEP[share - 1 :: len(RUNS) - 1] if share else SWEEP:
            got = run(depth, margin)
            assert got[0] == plain[0], (depth, margin)
            assert np.array_equal(got[1], plain[1]) and np.array_equal(got[2], plain[2])
            assert (sum(got[3]) > 0) == (margin < 1000)


def test_held_out(root: Path, ds4: Path, pair: tuple[Path, Path]) -> None:
    """On text that no training saw, the head's first draft is the target's choice at least 65% of the time."""
    out = subprocess.run(
        [ds4, "-m", pair[0], "--mtp", pair[1], "--perplexity-file", root / "models/held-out.txt", "-c", "1024"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert float(re.search(r"first draft ([\d.]+)%", out)[1]) >= 65
    assert float(re.search(r"nats/token\s+([\d.]+)", out)[1]) < 3.5


def test_demo(root: Path, ds4: Path, pair: tuple[Path, Path]) -> None:
    """The README's command: three runs, one text."""
    out = subprocess.run(
        ["sh", "tests/demo.sh", str(ds4), str(pair[0]), str(pair[1])], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert "the three outputs are identical" in out and out.count("x plain") == 3
