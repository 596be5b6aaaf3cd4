"""Whole models of every tensor type: against a twin dequantised to F32, and with the same bits in every instruction set."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from ds4 import gguf_write as gw
from ds4 import synth
from engine import Engine, bits
from gguf import GGMLQuantizationType as Type
from test_forward import isas

SHAPE = gw.Shape(
    ratios=[0, 4, 128],
    vocab=300,
    width=256,
    heads=4,
    head_width=128,
    rotary=32,
    q_rank=256,
    o_groups=2,
    o_rank=128,
    experts=4,
    experts_used=2,
    expert_width=256,
    hash_layers=1,
    window=16,
    index_heads=4,
    index_width=64,
    index_top_k=8,
    sinkhorn=4,
    context=1024,
    yarn_original=256,
)

# Root mean square of the logits' difference over that of the logits. What is left is rounding activations to int8 (by 32 or by
# 256 values) and F16 rows; a router's near-tie that it flips moves one row far, hence the median over rows.
BOUNDS = {
    Type.F32: 1e-5,
    Type.F16: 1e-5,
    Type.BF16: 1e-5,
    Type.Q8_0: 0.05,
    Type.Q4_0: 0.05,
    Type.MXFP4: 0.05,
    Type.Q4_K: 0.08,
    Type.Q5_K: 0.08,
    Type.Q6_K: 0.08,
    Type.Q3_K: 0.08,
    Type.Q2_K: 0.08,
    Type.IQ2_XXS: 0.08,
}
TOKENS = np.random.default_rng(3).integers(8, 300, 150)


def run(model: Path, head: Path, **options: str) -> tuple[np.ndarray, np.ndarray]:
    with Engine(model, head, kv_type="f32", prefill_chunk=150, **options) as engine:
        session = engine.session()
        return session.eval_logits(TOKENS), session.head_logits(0, len(TOKENS) - 1)


def off(got: np.ndarray, expected: np.ndarray) -> float:
    """Median over rows of the relative root mean square difference."""
    return float(np.median(np.sqrt(((got - expected) ** 2).mean(1) / (expected**2).mean(1))))


def test_all_types_are_covered() -> None:
    assert set(BOUNDS) == set(synth.TYPES)


@pytest.mark.parametrize("kind", BOUNDS, ids=lambda t: t.name)
def test_against_twin(tmp_path: Path, kind: Type) -> None:
    types = dataclasses.replace(synth.Types.all(kind), aux=kind if kind in synth.PLAIN else Type.F16)
    model, head = tmp_path / "m.gguf", tmp_path / "h.gguf"
    synth.make_target(model, SHAPE, types, 1)
    synth.make_head(head, SHAPE, types, 2)
    results = [run(model, head, isa=isa) for isa in isas()]
    for logits, head_logits in results[1:]:
        assert np.array_equal(bits(logits), bits(results[0][0])) and np.array_equal(bits(head_logits), bits(results[0][1]))
    synth.twin(model, tmp_path / "mt.gguf")
    synth.twin(head, tmp_path / "ht.gguf")
    twin = run(tmp_path / "mt.gguf", tmp_path / "ht.gguf")
    for got, expected in zip(results[0], twin, strict=True):
        assert np.isfinite(got).all() and off(got, expected) < BOUNDS[kind], off(got, expected)


def test_unread_type_is_named(tmp_path: Path, data: Path) -> None:
    from engine import Failed
    from fixtures import rewrite, tensors_of

    name = "blk.1.attn_q_a.weight"
    array = np.asarray(tensors_of(data / "tiny" / "target.gguf")[name].data)
    rewrite(data / "tiny" / "target.gguf", tmp_path / "x.gguf", types={name: Type.Q5_1})
    assert array.shape[-1] % 32 == 0
    with pytest.raises(Failed, match="blk.1.attn_q_a.weight has type Q5_1, which ds4 does not read"):
        Engine(tmp_path / "x.gguf")
