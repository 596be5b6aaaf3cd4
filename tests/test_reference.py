"""The numpy reference against transformers' logits, and the engine's kv types against the reference with the rounding emulated."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import reference
from ds4 import gguf_write as gw
from ds4 import synth
from engine import Engine, Failed
from fixtures import FIXTURES


def model(directory: Path, **rounding: reference.Rounding) -> reference.Model:
    meta, weights = reference.load(directory / "target.gguf")
    return reference.Model(meta, weights | reference.load(directory / "head-ds4.gguf")[1], **rounding)


@pytest.mark.parametrize("name", FIXTURES)
def test_reference(data: Path, name: str) -> None:
    """Within 1e-4: transformers keeps its rotary tables in float32 even in a float64 run."""
    prompt = np.load(data / name / "prompt.npy")
    m = model(data / name)
    logits, streams = m.forward(prompt)
    assert np.abs(logits - np.load(data / name / "logits.npy")).max() < 1e-4
    assert np.abs(m.head(streams, prompt) - np.load(data / name / "head.npy")).max() < 1e-4


# Every ratio's kind, each with hash routing and with scores, and a ratio that is neither 4 nor 128.
EVERY_KIND = gw.Shape(
    ratios=[4, 0, 128, 16, 4, 0, 128], hash_layers=3, vocab=300, width=64, heads=4, head_width=32, rotary=16, q_rank=32, o_groups=2,
    o_rank=16, experts=6, experts_used=3, expert_width=32, window=24, index_heads=2, index_width=32, index_top_k=7, streams=3,
    sinkhorn=5, context=512, yarn_original=64, clamp=2.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in float32, and 300 random tokens: windows and rings wrap, the indexer must choose, two windows of 128."""
    directory = tmp_path_factory.mktemp("every_kind")
    types = synth.Types.all(gguf.GGMLQuantizationType.F32)
    synth.make_target(directory / "target.gguf", EVERY_KIND, types, 5)
    synth.make_head(directory / "head-ds4.gguf", EVERY_KIND, types, 6)
    np.save(directory / "prompt.npy", np.random.default_rng(7).integers(0, EVERY_KIND.vocab, 300))
    return directory


def check_engine(directory: Path) -> None:
    """Target and head in float32 against float64: what is left is rounding."""
    m, prompt = model(directory), np.load(directory / "prompt.npy")
    logits, streams = m.forward(prompt)
    with Engine(directory / "target.gguf", directory / "head-ds4.gguf", kv_type="f32", prefill_chunk=512) as engine:
        session = engine.session()
        assert np.abs(session.eval_logits(prompt) - logits).max() < 5e-6 * np.abs(logits).max()
        assert np.abs(session.head_logits(0, len(prompt) - 1) - m.head(streams, prompt)).max() < 5e-6 * np.abs(logits).max()


@pytest.mark.parametrize("name", FIXTURES)
def test_engine(data: Path, name: str) -> None:
    check_engine(data / name)


def test_engine_on_every_kind_of_layer(every_kind: Path) -> None:
    check_engine(every_kind)


def first_rows(m: reference.Model, prompt: np.ndarray) -> np.ndarray:
    """The first layer's kv rows before rounding."""
    x = np.repeat(m.w["token_embd.weight"][prompt][:, None, :], m.n, 1)
    pre = m.mix(x, "blk.0.hc_attn")[0]
    y = reference.rms((pre[:, :, None] * x).sum(1), m.eps, m.w["blk.0.attn_norm.weight"])
    return m.kv_rows(y, "blk.0.", m.freq_compressed if m.meta["attention.compress_ratios"][0] else m.freq)


def check_rounding(data: Path, name: str, kv_type: str, rounding: reference.Rounding) -> None:
    """Stored rows are the reference's, rounded (but for values next to the middle of two codes, which float32 may put on either
    side); and the logits of the whole model follow the reference with that rounding, far closer than rounding moves them."""
    prompt = np.load(data / name / "prompt.npy")
    exact, rounded = model(data / name), model(data / name, round_kv=rounding, round_index=reference.f16_rounding)
    with Engine(data / name / "target.gguf", data / name / "head-ds4.gguf", kv_type=kv_type, prefill_chunk=512) as engine:
        session = engine.session()
        got, got_head = session.eval_logits(prompt), session.head_logits(0, len(prompt) - 1)
        rows = np.array([session.raw_row(0, i, exact.d) for i in range(len(prompt))])
    unrounded = first_rows(exact, prompt)
    expected = rounding(unrounded)
    assert (rows == expected).mean() > 0.995 and np.abs(rows - unrounded).max() <= np.abs(expected - unrounded).max() * 1.001
    logits, streams = rounded.forward(prompt)
    away = np.abs(logits - exact.forward(prompt)[0]).mean()
    assert away > 1e-6 and np.abs(got - logits).mean() < 0.15 * away  # the codes next to a middle add up
    assert np.abs(got_head - rounded.head(streams, prompt)).mean() < 0.15 * max(away, 1e-3)


def test_fp8_rows(data: Path) -> None:
    """On the one fixture whose sizes allow it."""
    check_rounding(data, "edge", "fp8", reference.fp8_rounding(model(data / "edge").rope_dim))


@pytest.mark.parametrize("name", FIXTURES)
def test_f16_rows(data: Path, name: str) -> None:
    check_rounding(data, name, "f16", reference.f16_rounding)


def test_fp8_is_refused(data: Path) -> None:
    """The part of a row without rotation must be a multiple of 64."""
    for name in ("tiny", "odd"):
        with pytest.raises(Failed, match="multiple of 64"):
            Engine(data / name / "target.gguf", kv_type="fp8")


def test_e4m3() -> None:
    """All 127 non-negative codes are fixed points; halves go to even; large values saturate."""
    codes = np.array([(c & 7) / 8 * 2.0**-6 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7) for c in range(127)])
    assert np.array_equal(reference.e4m3(codes), codes) and codes[-1] == 448
    middles = (codes[:-1] + codes[1:]) / 2
    even = np.where(np.arange(126) % 2 == 0, codes[:-1], codes[1:])
    assert np.array_equal(reference.e4m3(middles), even)
    assert reference.e4m3(np.array([1e9, -460.0])).tolist() == [448, -448]
