"""Names, shapes and metadata of DeepSeek-V4 GGUF files: what ds4.train and ds4.synth have in common.

Shapes here are in row-major (NumPy) order; GGUF lists the same dimensions fastest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import gguf

ARCHITECTURE = "deepseek4"
HEAD_ARCHITECTURE = "deepseek4_mtp_support"
CONTROL_TOKENS = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
]
BOS, EOS, PAD = 0, 1, 2


@dataclass
class Shape:
    """Every size of a model. The defaults are DeepSeek-V4-Flash's, with the first four layers only."""

    ratios: list[int] = field(default_factory=lambda: [0, 0, 4, 128])
    vocab: int = 129280
    width: int = 4096
    heads: int = 64
    head_width: int = 512
    rotary: int = 64
    q_rank: int = 1024
    o_groups: int = 8
    o_rank: int = 1024
    experts: int = 256
    experts_used: int = 6
    experts_shared: int = 1
    expert_width: int = 2048
    expert_scale: float = 1.5
    clamp: float = 10.0
    hash_layers: int = 3
    window: int = 128
    index_heads: int = 64
    index_width: int = 128
    index_top_k: int = 512
    streams: int = 4
    sinkhorn: int = 20
    eps: float = 1e-6
    hc_eps: float = 1e-6
    context: int = 1048576
    rope_base: float = 10000.0
    compress_base: float = 160000.0
    yarn_factor: float = 16.0
    yarn_original: int = 65536
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0

    @property
    def layers(self) -> int:
        """How many blocks the target has."""
        return len(self.ratios)


Named = tuple[str, tuple[int, ...]]


def hyper_connection(prefix: str, s: Shape) -> Iterator[Named]:
    """The three tensors that mix the streams around one sub-block."""
    out = s.streams * (2 + s.streams)
    yield f"{prefix}_fn.weight", (out, s.streams * s.width)
    yield f"{prefix}_base.weight", (out,)
    yield f"{prefix}_scale.weight", (3,)


def collapse(prefix: str, s: Shape) -> Iterator[Named]:
    """The three tensors that turn the streams into one row before the output matrix."""
    yield f"{prefix}_fn.weight", (s.streams, s.streams * s.width)
    yield f"{prefix}_base.weight", (s.streams,)
    yield f"{prefix}_scale.weight", (1,)


def compressor(prefix: str, ratio: int, channels: int, s: Shape) -> Iterator[Named]:
    """A compressor: its projections, the position term of its gate, its norm. Windows of ratio 4 overlap."""
    wide = channels * (2 if ratio == 4 else 1)
    yield f"{prefix}_kv.weight", (wide, s.width)
    yield f"{prefix}_gate.weight", (wide, s.width)
    yield f"{prefix}_ape.weight", (ratio, wide)
    yield f"{prefix}_norm.weight", (channels,)


def block(prefix: str, ratio: int, hashed: bool, s: Shape) -> Iterator[Named]:
    """All tensors of one block, `prefix` being `blk.7.` or `mtp.0.`."""
    d, f, e = s.width, s.expert_width, s.experts
    yield from hyper_connection(f"{prefix}hc_attn", s)
    yield from hyper_connection(f"{prefix}hc_ffn", s)
    yield f"{prefix}attn_norm.weight", (d,)
    yield f"{prefix}attn_q_a.weight", (s.q_rank, d)
    yield f"{prefix}attn_q_a_norm.weight", (s.q_rank,)
    yield f"{prefix}attn_q_b.weight", (s.heads * s.head_width, s.q_rank)
    yield f"{prefix}attn_kv.weight", (s.head_width, d)
    yield f"{prefix}attn_kv_a_norm.weight", (s.head_width,)
    yield f"{prefix}attn_sinks.weight", (s.heads,)
    yield f"{prefix}attn_output_a.weight", (s.o_groups * s.o_rank, s.heads * s.head_width // s.o_groups)
    yield f"{prefix}attn_output_b.weight", (d, s.o_groups * s.o_rank)
    if ratio:
        yield from compressor(f"{prefix}attn_compressor", ratio, s.head_width, s)
    if ratio == 4:
        yield f"{prefix}indexer.attn_q_b.weight", (s.index_heads * s.index_width, s.q_rank)
        yield f"{prefix}indexer.proj.weight", (s.index_heads, d)
        yield from compressor(f"{prefix}indexer_compressor", ratio, s.index_width, s)
    yield f"{prefix}ffn_norm.weight", (d,)
    yield f"{prefix}ffn_gate_inp.weight", (e, d)
    if hashed:
        yield f"{prefix}ffn_gate_tid2eid.weight", (s.vocab, s.experts_used)
    else:
        yield f"{prefix}exp_probs_b.bias", (e,)
    yield f"{prefix}ffn_gate_exps.weight", (e, f, d)
    yield f"{prefix}ffn_up_exps.weight", (e, f, d)
    yield f"{prefix}ffn_down_exps.weight", (e, d, f)
    yield f"{prefix}ffn_gate_shexp.weight", (f * s.experts_shared, d)
    yield f"{prefix}ffn_up_shexp.weight", (f * s.experts_shared, d)
    yield f"{prefix}ffn_down_shexp.weight", (d, f * s.experts_shared)


def target_tensors(s: Shape) -> Iterator[Named]:
    """Names and shapes of the target's tensors, in file order."""
    yield "token_embd.weight", (s.vocab, s.width)
    yield "output.weight", (s.vocab, s.width)
    yield "output_norm.weight", (s.width,)
    yield from collapse("output_hc", s)
    for i, ratio in enumerate(s.ratios):
        yield from block(f"blk.{i}.", ratio, i < s.hash_layers, s)


def head_tensors(s: Shape) -> Iterator[Named]:
    """Names and shapes of an MTP head's 32 tensors in ds4's layout."""
    for name in ("enorm", "hnorm", "norm"):
        yield f"mtp.0.{name}.weight", (s.width,)
    for name in ("e_proj", "h_proj"):
        yield f"mtp.0.{name}.weight", (s.width, s.width)
    yield from collapse("mtp.0.hc_head", s)
    yield from block("mtp.0.", 0, False, s)


def stays_f32(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is small and sensitive enough that no file quantises it below F32 or F16."""
    return len(shape) < 2 or any(part in name for part in ("hc_", "_ape", "ffn_gate_inp"))


def add_model_keys(w: gguf.GGUFWriter, s: Shape, with_head: bool = False) -> None:
    """Write every size of the model; `with_head` counts the MTP block, as llama.cpp's layout does."""
    blocks = s.layers + with_head
    ints = {
        "block_count": blocks,
        "context_length": s.context,
        "embedding_length": s.width,
        "embedding_length_out": s.width * s.streams,
        "vocab_size": s.vocab,
        "feed_forward_length": s.expert_width,
        "attention.head_count": s.heads,
        "attention.head_count_kv": 1,
        "attention.key_length": s.head_width,
        "attention.value_length": s.head_width,
        "attention.q_lora_rank": s.q_rank,
        "attention.output_lora_rank": s.o_rank,
        "attention.output_group_count": s.o_groups,
        "attention.sliding_window": s.window,
        "attention.indexer.head_count": s.index_heads,
        "attention.indexer.key_length": s.index_width,
        "attention.indexer.top_k": s.index_top_k,
        "rope.dimension_count": s.rotary,
        "rope.scaling.original_context_length": s.yarn_original,
        "expert_count": s.experts,
        "expert_used_count": s.experts_used,
        "expert_shared_count": s.experts_shared,
        "expert_feed_forward_length": s.expert_width,
        "expert_gating_func": 4,
        "hash_layer_count": s.hash_layers,
        "hyper_connection.count": s.streams,
        "hyper_connection.sinkhorn_iterations": s.sinkhorn,
    }
    floats = {
        "attention.layer_norm_rms_epsilon": s.eps,
        "attention.compress_rope_freq_base": s.compress_base,
        "rope.freq_base": s.rope_base,
        "rope.scaling.factor": s.yarn_factor,
        "rope.scaling.yarn_beta_fast": s.yarn_beta_fast,
        "rope.scaling.yarn_beta_slow": s.yarn_beta_slow,
        "expert_weights_scale": s.expert_scale,
        "hyper_connection.epsilon": s.hc_eps,
    }
    for key, value in ints.items():
        w.add_uint32(f"{ARCHITECTURE}.{key}", value)
    for key, number in floats.items():
        w.add_float32(f"{ARCHITECTURE}.{key}", number)
    if with_head:
        w.add_uint32(f"{ARCHITECTURE}.nextn_predict_layers", 1)
    w.add_string(f"{ARCHITECTURE}.rope.scaling.type", "yarn")
    w.add_bool(f"{ARCHITECTURE}.expert_weights_norm", True)
    w.add_array(f"{ARCHITECTURE}.attention.compress_ratios", s.ratios + [0] * with_head)
    w.add_array(f"{ARCHITECTURE}.swiglu_clamp_exp", [s.clamp] * blocks)


def add_head_keys(w: gguf.GGUFWriter, s: Shape) -> None:
    """Write the three keys that a head file in ds4's layout has; its sizes are the target's."""
    w.add_uint32(f"{ARCHITECTURE}.nextn_predict_layers", 1)
    w.add_uint32(f"{ARCHITECTURE}.mtp_layer_count", 1)
    w.add_uint32(f"{ARCHITECTURE}.expert_count", s.experts)


def add_tokenizer_keys(w: gguf.GGUFWriter, tokens: Sequence[str], merges: Sequence[str]) -> None:
    """Write a byte-level BPE tokenizer whose control tokens are those of CONTROL_TOKENS that `tokens` holds."""
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("deepseek-v3")
    w.add_token_list(tokens)
    w.add_token_types([3 if t in CONTROL_TOKENS else 1 for t in tokens])
    w.add_token_merges(merges)
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(EOS)
    w.add_pad_token_id(PAD)
    w.add_add_bos_token(True)
