"""Files that are not what they should be: one message that names the file and what was expected, nothing else."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from engine import Engine, Failed, bits
from fixtures import combined, rewrite, tensors_of

U32, F32, F64, ARRAY, STRING = (gguf.GGUFValueType[k] for k in ("UINT32", "FLOAT32", "FLOAT64", "ARRAY", "STRING"))


def refused(match: str, model: Path, head: Path | None = None, **options: Any) -> None:
    with pytest.raises(Failed, match=match) as error:
        Engine(model, head, **options)
    text = str(error.value)
    assert "\n" not in text and str(head or model) in text or str(model) in text


def logits(model: Path, head: Path | None = None, n: int = 40, **options: Any) -> np.ndarray:
    with Engine(model, head, kv_type="f32", **options) as engine:
        session = engine.session()
        return bits(session.eval_logits(np.arange(2, 2 + n)))


def test_no_gguf(data: Path, tmp_path: Path) -> None:
    good = (data / "tiny" / "target.gguf").read_bytes()
    path = tmp_path / "x.gguf"
    refused("cannot open: No such file", tmp_path / "absent.gguf")
    refused("not a file", tmp_path)
    for content, message in (
        (b"", "not a GGUF"),
        (b"GGUF", "not a GGUF"),
        (b"hello" * 100, "not a GGUF file"),
        (good[:4] + struct.pack("<I", 1) + good[8:], "version 1"),
        (good[:4] + struct.pack(">I", 3) + good[8:], "big-endian"),
        (good[:4] + struct.pack("<I", 9) + good[8:], "version 9"),
    ):
        path.write_bytes(content)
        refused(message, path)


def test_truncated(data: Path, tmp_path: Path) -> None:
    good = (data / "tiny" / "target.gguf").read_bytes()
    path = tmp_path / "x.gguf"
    for part in range(1, 64):
        path.write_bytes(good[: len(good) * part // 64])
        refused("truncated", path)


def test_architectures(data: Path, tmp_path: Path) -> None:
    tiny = data / "tiny"
    refused("architecture is llama; expected deepseek4", rewrite(tiny / "target.gguf", tmp_path / "llama.gguf", arch="llama"))
    refused("not a target", tiny / "head-ds4.gguf")
    refused("MTP head only", tiny / "head-llama.gguf")
    refused("it is a target", tiny / "target.gguf", tiny / "target.gguf")
    dspark = rewrite(
        tiny / "head-ds4.gguf",
        tmp_path / "dspark.gguf",
        arch="deepseek4_mtp_support",
        more={"mtp.0.main_proj.weight": np.zeros((64, 64), np.float32)},
    )
    refused("DSpark", tiny / "target.gguf", dspark)
    refused("DSpark", tiny / "target.gguf", rewrite(tiny / "head-ds4.gguf", tmp_path / "dflash.gguf", arch="dflash"))
    refused("holds no MTP head", tiny / "target.gguf", mtp_internal=True)


def test_foreign_heads(data: Path, tmp_path: Path) -> None:
    """Another width, stream count, vocabulary or layer count."""
    tiny, odd, edge = data / "tiny", data / "odd", data / "edge"
    refused("made for another target: experts 7 .*has 8", tiny / "target.gguf", odd / "head-ds4.gguf")
    count = {"deepseek4.expert_count": 8}
    support = "deepseek4_mtp_support"
    refused(
        r"e_proj.weight has shape \{96, 96",
        tiny / "target.gguf",
        rewrite(odd / "head-ds4.gguf", tmp_path / "w.gguf", arch=support, meta=count),
    )
    refused(
        r"hc_head_fn.weight has shape \{128, 2, 1\}, expected \{256, 4",
        tiny / "target.gguf",
        rewrite(edge / "head-ds4.gguf", tmp_path / "s.gguf", arch=support, meta=count),
    )
    refused("streams 2 .*has 4", tiny / "target.gguf", edge / "head-llama.gguf")
    refused("width 96 .*has 64", tiny / "target.gguf", odd / "head-llama.gguf")
    head = tiny / "head-llama.gguf"
    refused(
        "vocabulary 999 .*has 256", tiny / "target.gguf", rewrite(head, tmp_path / "v.gguf", meta={"deepseek4.vocab_size": 999})
    )
    tokens = gguf.GGUFReader(head).fields["tokenizer.ggml.tokens"].contents()
    refused(
        "vocabulary .tokenizer.ggml.tokens",
        tiny / "target.gguf",
        rewrite(head, tmp_path / "t.gguf", meta={"tokenizer.ggml.tokens": [*tokens[:-1], "zzz"]}),
    )
    renamed = {t.name: t.name.replace("blk.6.", "blk.4.") for t in gguf.GGUFReader(head).tensors}
    moved = rewrite(
        head,
        tmp_path / "m.gguf",
        meta={"deepseek4.block_count": 5},
        drop=set(renamed),
        more={new: np.asarray(tensors_of(head)[old].data) for old, new in renamed.items()},
    )
    refused("this target has 6", tiny / "target.gguf", moved)


@pytest.mark.parametrize("kind", ["target", "head-ds4", "head-llama"])
def test_missing_and_misshapen_tensors(data: Path, tmp_path: Path, kind: str) -> None:
    """Each tensor in turn: dropped, of another shape, of a type that is not read."""
    source = data / "tiny" / f"{kind}.gguf"
    arch = "deepseek4_mtp_support" if kind == "head-ds4" else "deepseek4"
    model, head = (source, None) if kind == "target" else (data / "tiny" / "target.gguf", True)
    seen = set()
    for name, t in tensors_of(source).items():
        short = name.split(".", 2)[-1] if name.startswith("blk.") else name
        if short in seen or kind == "head-llama" and not name.startswith("blk.6.") or name == "output.weight":
            continue
        seen.add(short)
        broken = rewrite(source, tmp_path / "x.gguf", arch=arch, drop={name})
        refused(r"missing|holds no MTP head|MTP head only", broken if head is None else model, broken if head else None)
        array = np.asarray(t.data)
        other = np.zeros((*array.shape[:-1], array.shape[-1] + 1), array.dtype)
        broken = rewrite(source, tmp_path / "x.gguf", arch=arch, tensors={name: other})
        refused("has shape|expected", broken if head is None else model, broken if head else None)
        broken = rewrite(source, tmp_path / "x.gguf", arch=arch, tensors={name: array.astype(np.float64)})
        refused("has type F64", broken if head is None else model, broken if head else None)


NEEDED = [
    "block_count",
    "embedding_length",
    "attention.head_count",
    "attention.key_length",
    "rope.dimension_count",
    "attention.q_lora_rank",
    "attention.output_group_count",
    "attention.output_lora_rank",
    "attention.sliding_window",
    "hyper_connection.count",
    "hyper_connection.sinkhorn_iterations",
    "hyper_connection.epsilon",
    "attention.layer_norm_rms_epsilon",
    "context_length",
    "rope.freq_base",
    "rope.scaling.factor",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "attention.compress_ratios",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
]


@pytest.mark.parametrize("key", NEEDED)
def test_keys(data: Path, tmp_path: Path, key: str) -> None:
    """Each key in turn: missing, a string, out of range."""
    source, full = data / "tiny" / "target.gguf", f"deepseek4.{key}"
    refused(f"key {full} is missing", rewrite(source, tmp_path / "x.gguf", meta={full: None}))
    refused(
        f"key {full}: expected a number",
        rewrite(source, tmp_path / "x.gguf", meta={full: None}, extra={full: ("seven", STRING)}),
    )
    for bad in (-1.0, 1e30, float("nan")):
        refused(f"key {full}", rewrite(source, tmp_path / "x.gguf", meta={full: None}, extra={full: (bad, F64)}))


def test_numbers_come_in_any_type(data: Path, tmp_path: Path) -> None:
    """float64 bases, int32 or scalar arrays, gating absent or a string, 3-D output_a, a block_count that counts a head: same bits."""
    tiny = data / "tiny"
    source, expected = tiny / "target.gguf", logits(tiny / "target.gguf")
    a = "deepseek4."
    for change, extra in (
        (
            {f"{a}rope.freq_base": None, f"{a}expert_weights_scale": None},
            {f"{a}rope.freq_base": (10000.0, F64), f"{a}expert_weights_scale": (1.5, F64)},
        ),
        (
            {f"{a}expert_feed_forward_length": None, f"{a}swiglu_clamp_exp": None},
            {f"{a}expert_feed_forward_length": ([32] * 6, ARRAY), f"{a}swiglu_clamp_exp": (10.0, F32)},
        ),
        ({f"{a}expert_gating_func": None}, {}),
        ({f"{a}expert_gating_func": None}, {f"{a}expert_gating_func": ("sqrtsoftplus", STRING)}),
        ({f"{a}vocab_size": None}, {f"{a}nextn_predict_layers": (1, U32)}),
    ):
        assert np.array_equal(logits(rewrite(source, tmp_path / "x.gguf", meta=change, extra=extra)), expected)
    deep = {
        n: np.asarray(t.data).reshape(2, -1, t.data.shape[-1])
        for n, t in tensors_of(source).items()
        if n.endswith("attn_output_a.weight")
    }
    assert np.array_equal(logits(rewrite(source, tmp_path / "x.gguf", tensors=deep)), expected)
    assert np.array_equal(logits(combined(tiny, tmp_path / "both.gguf")), expected)


def test_split_files(data: Path, tmp_path: Path) -> None:
    """A file in three parts, opened by any of them; a missing part is named."""
    source, expected = data / "tiny" / "target.gguf", logits(data / "tiny" / "target.gguf")
    names = list(tensors_of(source))
    paths = []
    for i in range(3):
        mine = set(names[i::3])
        paths.append(rewrite(source, tmp_path / f"tiny-{i + 1:05d}-of-00003.gguf", meta=None, drop=set(names) - mine))
    for path in paths:
        assert np.array_equal(logits(path), expected)
    paths[1].unlink()
    with pytest.raises(Failed, match="tiny-00002-of-00003.gguf: cannot open"):
        Engine(paths[0])


def test_duplicates_and_overlaps(data: Path, tmp_path: Path) -> None:
    """Keys or tensors that are there twice, and tensors that share bytes, by editing names and offsets in place."""
    good = (data / "tiny" / "target.gguf").read_bytes()
    path = tmp_path / "x.gguf"
    for old, new, message in (
        (b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight", "tensor blk.0.attn_norm.weight is there twice"),
        (b"deepseek4.block_count", b"deepseek4.vocab_sizee"[:21], "missing"),
        (b"blk.0.attn_norm.weight", b"blk.0.attn_\xff\xfe\xfd\xfc.weight", "not UTF-8"),
    ):
        at = good.index(old)
        path.write_bytes(good[:at] + new + good[at + len(old) :])
        refused(message, path)
    name = b"blk.0.attn_norm.weight"
    at = good.index(name) + len(name) + 4 + 8 + 4  # dimensions' count, one dimension, type: then the offset
    path.write_bytes(good[:at] + struct.pack("<Q", 0) + good[at + 8 :])
    refused("overlap", path)
    for offset in (1, 2**31, 2**63, 2**64 - 32):
        path.write_bytes(good[:at] + struct.pack("<Q", offset) + good[at + 8 :])
        refused("alignment|truncated", path)


def test_hash_table_is_checked(data: Path, tmp_path: Path) -> None:
    source, name = data / "tiny" / "target.gguf", "blk.0.ffn_gate_tid2eid.weight"
    table = np.asarray(tensors_of(source)[name].data).copy()
    table[77, 1] = 8
    refused("token 77 goes to expert 8", rewrite(source, tmp_path / "x.gguf", tensors={name: table}))


def test_context_limits(data: Path) -> None:
    target = data / "tiny" / "target.gguf"
    refused("made for at most 4096", target, ctx=5000)
    with Engine(target, ctx=64, max_rewind=64) as engine:
        session = engine.session()
        with pytest.raises(Failed, match="65 tokens at position 0 do not fit a context of 64"):
            session.eval(np.full(65, 7))
        assert session.position == 0
        session.eval(np.full(64, 7))
        session.logits()


def test_non_finite_weights(data: Path, tmp_path: Path) -> None:
    """NaN weights are not searched for at loading; the generation ends with an error that names the position."""
    source = data / "tiny" / "target.gguf"
    embed = np.asarray(tensors_of(source)["token_embd.weight"].data).copy()
    embed[9] = np.nan
    with Engine(rewrite(source, tmp_path / "x.gguf", tensors={"token_embd.weight": embed})) as engine:
        session = engine.session()
        session.eval([3, 4, 5])
        before = bits(session.logits())
        with pytest.raises(Failed, match="non-finite logits at position 3"):
            session.step(9, 1)
        assert session.position == 3 and np.array_equal(bits(session.logits()), before)
