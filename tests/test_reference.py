"""The numpy reference against transformers' logits, and the engine's kv types against the reference with the rounding emulated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference
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
