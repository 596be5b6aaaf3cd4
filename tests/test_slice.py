"""Flash's real widths (D 4096, 64 heads of 512, IQ2_XXS and Q2_K experts, Q8_0, F16) in a slice small enough for a test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ds4 import gguf_write as gw
from ds4 import synth
from engine import Engine, bits


def private_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def test_real_widths(tmp_path: Path) -> None:
    shape = gw.Shape(vocab=4096, experts=8, hash_layers=1)
    synth.make_target(tmp_path / "m.gguf", shape, synth.Types(), 1)
    synth.make_head(tmp_path / "h.gguf", shape, synth.Types(gate_up=synth.Type.Q4_K, down=synth.Type.Q4_K), 2)
    prompt = np.random.default_rng(0).integers(266, 4096, 140)  # over the window, and past one window of ratio 128
    before = private_bytes()
    with Engine(tmp_path / "m.gguf", tmp_path / "h.gguf", ctx=1024, prefill_chunk=64, mtp_draft=2, mtp_margin=0.0) as engine:
        session = engine.session()
        session.set_stops([], ignore_eos=True)
        session.eval(prompt)
        tokens = session.generate(8)
        assert np.isfinite(session.logits()).all() and session.stats.head_passes > 0
        used, stated = (
            private_bytes() - before,
            sum(getattr(engine.info, f"{part}_bytes") for part in ("scratch", "table", "session")),
        )
        assert used < stated + (32 << 20), (used, stated)  # the weights are mapped, not copied
        assert engine.info.weight_bytes < engine.info.file_bytes
        plain = engine.session()
        plain.set_stops([], ignore_eos=True)
        plain.set_mtp(0, 0.0)
        plain.eval(prompt)
        assert plain.generate(8) == tokens
        assert np.array_equal(bits(plain.logits()), bits(session.logits()))
