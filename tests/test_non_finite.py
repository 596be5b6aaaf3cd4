"""NaN and infinite weights and scales: a generation ends with one error that names the position; nothing else breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ds4 import synth
from engine import Engine, Failed, bits
from fixtures import rewrite, tensors_of
from gguf import GGMLQuantizationType as Type
from test_types import SHAPE

NAMES = [
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "output_hc_fn.weight",
    "blk.1.attn_norm.weight",
    "blk.1.attn_q_a.weight",
    "blk.1.attn_kv.weight",
    "blk.0.attn_sinks.weight",
    "blk.0.ffn_down_shexp.weight",
    "blk.1.hc_ffn_scale.weight",
    "blk.0.attn_output_b.weight",
    "blk.2.attn_compressor_kv.weight",
]


def spoilt(array: np.ndarray, value: float) -> np.ndarray:
    out = np.array(array, np.float32)
    out.reshape(-1)[out.size // 2 :: 97] = value
    return out


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_spoilt_target(data: Path, tmp_path: Path, name: str, value: float) -> None:
    """Plain and speculative runs fail at the same position with the same message, or (an infinity that a clamp or a softmax
    swallows) give the same text, greedy or drawn; never a crash, never a token chosen from a NaN."""
    source, head = data / "tiny" / "target.gguf", data / "tiny" / "head-ds4.gguf"
    model = rewrite(source, tmp_path / "x.gguf", tensors={name: spoilt(tensors_of(source)[name].data, value)})
    with Engine(model, head, ctx=256) as engine:
        for gen in ({}, {"temperature": 0.8, "seed": 3}):
            plain = ended(engine, 0, **gen)
            for depth in (1, 3):
                assert ended(engine, depth, **gen) == plain


def ended(engine: Engine, depth: int, **gen: Any) -> tuple[str, list[int]]:
    """How a generation of 40 tokens ended, and what it gave."""
    session = engine.session()
    session.set_stops([], ignore_eos=True)
    session.set_mtp(depth, 0.0)
    session.set_gen(**gen)
    tokens, token, outcome = [], 7, "fine"
    try:
        while len(tokens) < 40:
            tokens += session.step(token, 40 - len(tokens))
            assert np.isfinite(session.logits()).all()
            token = session.next()
    except Failed as e:
        outcome = str(e)
        assert f"non-finite logits at position {session.position}" in outcome
    s = session.stats
    assert sum(s.accepted) + s.corrections + s.bonus == s.emitted == len(tokens) == session.position
    session.rewind(0)  # the session is still usable
    assert session.position == 0
    session.close()
    return outcome, tokens


def test_spoilt_head(data: Path, tmp_path: Path) -> None:
    """A head that computes NaN drafts nothing; the text is plain's."""
    target, source = data / "tiny" / "target.gguf", data / "tiny" / "head-ds4.gguf"
    head = rewrite(
        source,
        tmp_path / "h.gguf",
        arch="deepseek4_mtp_support",
        tensors={"mtp.0.norm.weight": spoilt(tensors_of(source)["mtp.0.norm.weight"].data, np.nan)},
    )
    texts = []
    for depth in (0, 4):
        with Engine(target, head, mtp_draft=depth, ctx=256) as engine:
            session = engine.session()
            session.set_stops([], ignore_eos=True)
            session.eval([5, 6, 7])
            texts.append((session.generate(50), bits(session.logits()).tolist()))
            assert sum(session.stats.drafted) == 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", [t for t in synth.SCALES], ids=lambda t: t.name)
def test_spoilt_scales(tmp_path: Path, kind: Type) -> None:
    """A NaN or infinite block scale reaches the logits as non-finite, in every type that has one: it cannot vanish."""
    synth.make_target(tmp_path / "m.gguf", SHAPE, synth.Types.all(kind), 1)
    name = "output.weight"
    for scale in (np.float16(np.nan), np.float16(np.inf)):
        raw = np.array(tensors_of(tmp_path / "m.gguf")[name].data)
        block = raw.reshape(-1)[: raw.size]
        at = synth.SCALES[kind].at
        block[at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
        rewrite(tmp_path / "m.gguf", tmp_path / "x.gguf", tensors={name: raw})
        with Engine(tmp_path / "x.gguf", ctx=64) as engine:
            session = engine.session()
            with pytest.raises(Failed, match="non-finite logits at position 2"):
                session.eval([9, 8, 7])
            assert session.position == 0
