"""Faults that users found, each with the value that showed it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from engine import Engine, Failed, bits, check, ffi, lib


def run(ds4: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(ds4), "-q", *map(str, args)], capture_output=True, text=True, errors="replace")


@pytest.mark.parametrize("back", [0, 1, 2])
@pytest.mark.parametrize("draft", [2, 8, 16])
def test_stop_text_with_a_small_max_rewind(ds4: Path, root: Path, back: int, draft: int) -> None:
    """A stop text inside an accepted block takes the rest of the block back, whatever --max-rewind says."""
    common = ("-m", root / "models/small.gguf", "-p", "And the LORD said", "-n", 120, "--max-rewind", back)
    for stop in ("the LORD", "e"):
        plain = run(ds4, *common, "--stop", stop)
        fast = run(ds4, *common, "--stop", stop, "--mtp", root / "models/small-mtp.gguf", "--mtp-draft", draft, "--mtp-margin", 0)
        assert (plain.returncode, plain.stdout) == (fast.returncode, fast.stdout) and plain.returncode == 0, fast.stderr


def test_tiny_temperatures_are_greedy(data: Path) -> None:
    with Engine(data / "tiny/target.gguf") as engine:
        session = engine.session()
        session.eval([5, 6, 7])
        for temperature in (1e-45, 1e-40, 1e-38, 1e-20, 1e-6):
            for top_k, top_p, min_p in ((0, 1.0, 0.0), (1, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (0, 0.0, 0.0)):
                gen = ffi.new("ds4_gen *", {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": 3})
                assert check(lib.ds4_session_sample(session.p, gen)) == session.argmax(), (temperature, top_k, top_p, min_p)


def test_filters_keep_what_they_say(data: Path) -> None:
    """Draws at many seeds stay inside the filter, and the unfiltered law is softmax (chi-square over 4,000 draws)."""
    with Engine(data / "tiny/target.gguf") as engine:
        session = engine.session()
        session.eval([5, 6, 7])
        z = session.logits().astype(np.float64)
        p = np.exp((z - z.max()) / 0.7)
        p /= p.sum()
        order = np.argsort(-p, kind="stable")

        def draws(n: int, **options: float) -> np.ndarray:
            out = []
            for seed in range(n):
                gen = ffi.new("ds4_gen *", {"temperature": 0.7, "top_p": 1.0, "seed": seed, **options})
                out.append(check(lib.ds4_session_sample(session.p, gen)))
            return np.array(out)

        assert set(draws(400, top_k=3)) == set(order[:3].tolist())
        inside = int(np.searchsorted(np.cumsum(p[order]), 0.5)) + 1
        assert set(draws(400, top_p=0.5)) <= set(order[:inside].tolist())
        assert set(draws(400, min_p=0.5)) <= set(np.flatnonzero(p >= 0.5 * p.max() * 0.999).tolist())
        n = 4000
        seen = np.bincount(draws(n), minlength=len(p))
        big = p * n >= 8
        statistic = ((seen[big] - n * p[big]) ** 2 / (n * p[big])).sum()
        assert statistic < big.sum() + 5 * np.sqrt(2 * big.sum())


def test_head_logits_of_a_fork(data: Path) -> None:
    """Rows whose streams a fork did not get are refused, not computed from nothing; the others are equal."""
    with Engine(data / "tiny/target.gguf", data / "tiny/head-ds4.gguf", max_rewind=8) as engine:
        session = engine.session()
        session.eval(np.arange(76) + 3)
        fork = session.fork()
        for start in range(0, 74):
            expected = bits(session.head_logits(start, start + 2))
            try:
                assert np.array_equal(bits(fork.head_logits(start, start + 2)), expected), start
            except Failed as e:
                assert "can still be made" in str(e) and start < 67


def test_output_onto_the_model_is_refused(ds4: Path, root: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    shutil.copy(root / "models/small.gguf", model)
    for option in ("--stats-json", "--dump-logprobs", "--dump-logits"):
        done = run(ds4, "-m", model, "-p", "a", "-n", 3, option, model)
        assert done.returncode == 2 and "a GGUF file" in done.stderr
    assert model.stat().st_size == (root / "models/small.gguf").stat().st_size


def test_null_handles() -> None:
    """What the shown program does when a file is missing."""
    assert lib.ds4_engine_open_session(ffi.NULL) == ffi.NULL
    assert lib.ds4_session_eval_speculative_argmax(ffi.NULL, 0, 100) == -1


def test_negative_counts(data: Path) -> None:
    with Engine(data / "tiny/target.gguf") as engine:
        session = engine.session()
        session.eval([5])
        assert lib.ds4_session_top_logprobs(session.p, -5, ffi.new("ds4_logprob[]", 1)) == -1
