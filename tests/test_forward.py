"""The forward pass against Hugging Face transformers: tests/data/*/ hold random models with reference logits (float64 runs)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine import Engine, bits
from fixtures import FIXTURES, head_forms

CHUNKS = [(300, 1), (257, 3), (64, 2), (17, 5), (7, 1), (3, 2), (1, 1)]  # rows of a pass, threads


def prefill(engine: Engine, prompt: np.ndarray, chunk: int) -> np.ndarray:
    session = engine.session()
    out = np.concatenate([session.eval_logits(prompt[i : i + chunk]) for i in range(0, len(prompt), chunk)])
    session.close()
    return out


@pytest.mark.parametrize("name", FIXTURES)
def test_target_logits(data: Path, name: str) -> None:
    """Every position within 1e-4 of the reference; every chunking and thread count with the same bits."""
    prompt, reference = np.load(data / name / "prompt.npy"), np.load(data / name / "logits.npy")
    first = None
    for chunk, threads in CHUNKS:
        with Engine(data / name / "target.gguf", kv_type="f32", prefill_chunk=chunk, threads=threads) as engine:
            got = prefill(engine, prompt, chunk)
        assert np.abs(got - reference).max() < 1e-4
        first = got if first is None else first
        assert np.array_equal(bits(got), bits(first)), f"chunk {chunk}, {threads} threads"


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_instruction_sets(data: Path, name: str, kv_type: str) -> None:
    """Scalar, AVX2, AVX-VNNI, AVX-512 and AMX give the same bits through the whole model."""
    prompt = np.load(data / name / "prompt.npy")[:160]
    results = []
    for isa in isas():
        with Engine(data / name / "target.gguf", kv_type=kv_type, isa=isa) as engine:
            results.append(bits(prefill(engine, prompt, 50)))
    assert all(np.array_equal(r, results[0]) for r in results)


def isas() -> list[str]:
    """Those this machine has; scalar everywhere."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    needs = {"avx2": "avx2", "avxvnni": "avx_vnni", "avx512": "avx512_vnni", "amx": "amx_int8"}
    return ["scalar", *(isa for isa, flag in needs.items() if flag in flags.split())]


@pytest.mark.parametrize("name", FIXTURES)
def test_head_logits(data: Path, tmp_path: Path, name: str) -> None:
    """All three forms of the head's file, within 1e-4 of the reference and with the same bits."""
    prompt, reference = np.load(data / name / "prompt.npy"), np.load(data / name / "head.npy")
    first = None
    for target, head, internal in head_forms(data / name, tmp_path):
        for chunk in (300, 7):
            with Engine(target, head, mtp_internal=internal, kv_type="f32", prefill_chunk=chunk) as engine:
                session, parts = engine.session(), []
                for at in range(0, len(prompt), chunk):
                    before = max(0, session.position - 1)
                    session.eval(prompt[at : at + chunk])
                    parts.append(session.head_logits(before, session.position - 1))
            got = np.concatenate(parts)
            assert np.abs(got - reference).max() < 1e-4
            first = got if first is None else first
            assert np.array_equal(bits(got), bits(first))


@pytest.mark.parametrize("name", FIXTURES)
def test_greedy_tokens(data: Path, name: str) -> None:
    """The 600 tokens that the reference continues with."""
    greedy = np.load(data / name / "greedy.npy")
    with Engine(data / name / "target.gguf", kv_type="f32") as engine:
        session = engine.session()
        session.set_stops([], ignore_eos=True)
        session.eval(greedy[:40])
        assert session.generate(600) == greedy[40:].tolist()
