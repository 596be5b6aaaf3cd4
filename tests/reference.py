"""DeepSeek-V4 and its MTP head in numpy, float64, a whole prompt at a time: the model as arithmetic, to be read and to test against.

Written for clarity, not speed: no cache, no chunking. Weights are a dict of arrays in GGUF names, slowest dimension first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray
Rounding = Callable[[Array], Array]


def load(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Metadata without the "deepseek4." prefix, and every tensor dequantised to float64 (integers as they are)."""
    reader = gguf.GGUFReader(path)
    meta = {k.removeprefix("deepseek4."): f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    weights: dict[str, Array] = {}
    for t in reader.tensors:
        shape = [int(d) for d in reversed(t.shape)]
        integer = t.tensor_type == gguf.GGMLQuantizationType.I32
        data = t.data if integer else gguf.quants.dequantize(np.asarray(t.data), t.tensor_type)
        weights[t.name] = np.asarray(data).reshape(shape).astype(np.int64 if integer else np.float64)
    return meta, weights


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array, axis: int = -1) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def rms(x: Array, eps: float, weight: Array | float = 1.0) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: Array, positions: Array, freq: Array, direction: int = 1) -> Array:
    """Rotate the adjacent pairs of the last 2 * len(freq) dimensions of x (T, ..., width) by position * freq."""
    angle = positions[:, None] * freq * direction
    c, s = (f(angle).reshape(len(positions), *[1] * (x.ndim - 2), len(freq)) for f in (np.cos, np.sin))
    out, tail = x.copy(), x[..., -2 * len(freq) :]
    out[..., -2 * len(freq) :: 2] = tail[..., ::2] * c - tail[..., 1::2] * s
    out[..., -2 * len(freq) + 1 :: 2] = tail[..., ::2] * s + tail[..., 1::2] * c
    return out


def e4m3(x: Array) -> Array:
    """Nearest FP8 E4M3 value (4 exponent bits of bias 7, 3 of mantissa), half to even, saturating at 448."""
    a = np.minimum(np.abs(x), 448.0)
    exponent = np.maximum(np.floor(np.log2(np.maximum(a, 2.0**-20))), -6)
    step = 2.0 ** (exponent - 3)
    return np.sign(x) * np.minimum(np.round(a / step) * step, 448.0)


def fp8_rounding(rope_dim: int) -> Rounding:
    """The official rounding of kv rows: E4M3 with a power-of-two scale for 64 channels; the rotary tail in float16."""

    def rounding(x: Array) -> Array:
        body = x[..., :-rope_dim].astype(np.float32).astype(np.float64)
        groups = body.reshape(*body.shape[:-1], -1, 64)
        amax = np.maximum(np.abs(groups).max(-1, keepdims=True), 1e-4)
        scale = 2.0 ** np.ceil(np.log2(amax / 448))
        return np.concatenate(
            [
                (e4m3(groups / scale) * scale).reshape(body.shape),
                x[..., -rope_dim:].astype(np.float32).astype(np.float16).astype(np.float64),
            ],
            -1,
        )

    return rounding


def f16_rounding(x: Array) -> Array:
    return x.astype(np.float32).astype(np.float16).astype(np.float64)


@dataclass
class Model:
    """A target, with a head's weights (ds4's layout, "mtp.0.") among its own if it has one."""

    meta: dict[str, Any]
    w: dict[str, Array]
    round_kv: Rounding = staticmethod(lambda x: x)
    round_index: Rounding = staticmethod(lambda x: x)

    def __post_init__(self) -> None:
        m = self.meta
        self.eps, self.hc_eps = m["attention.layer_norm_rms_epsilon"], m["hyper_connection.epsilon"]
        self.n, self.width = m["hyper_connection.count"], m["embedding_length"]
        self.heads, self.d, self.rope_dim = m["attention.head_count"], m["attention.key_length"], m["rope.dimension_count"]
        pairs = np.arange(self.rope_dim // 2)
        self.freq = m["rope.freq_base"] ** (-2 * pairs / self.rope_dim)
        base = m["attention.compress_rope_freq_base"]
        f = base ** (-2 * pairs / self.rope_dim)
        low, high = (
            self.rope_dim
            * np.log(m["rope.scaling.original_context_length"] / (2 * np.pi * m[f"rope.scaling.yarn_beta_{k}"]))
            / (2 * np.log(base))
            for k in ("fast", "slow")
        )
        low, high = max(0.0, np.floor(low)), min(self.rope_dim - 1.0, np.ceil(high))
        ramp = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
        self.freq_compressed = f * (1 - ramp) + f / m["rope.scaling.factor"] * ramp

    # ---- hyper-connections ----

    def mix(self, x: Array, name: str) -> tuple[Array, Array, Array]:
        """pre (T, n), post (T, n) and C (T, n, n) from the streams x (T, n, D)."""
        n, scale, base = self.n, self.w[f"{name}_scale.weight"], self.w[f"{name}_base.weight"]
        t = rms(x.reshape(len(x), -1), self.eps) @ self.w[f"{name}_fn.weight"].T
        pre = sigmoid(t[:, :n] * scale[0] + base[:n]) + self.hc_eps
        post = 2 * sigmoid(t[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        c = softmax((t[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)) + self.hc_eps
        c = c / (c.sum(1, keepdims=True) + self.hc_eps)
        for _ in range(self.meta["hyper_connection.sinkhorn_iterations"] - 1):
            c = c / (c.sum(2, keepdims=True) + self.hc_eps)
            c = c / (c.sum(1, keepdims=True) + self.hc_eps)
        return pre, post, c

    def sub_block(self, x: Array, name: str, norm: str, f: Callable[[Array], Array]) -> Array:
        pre, post, c = self.mix(x, name)
        y = rms((pre[:, :, None] * x).sum(1), self.eps, self.w[norm])
        return post[:, :, None] * f(y)[:, None, :] + np.einsum("tab,tad->tbd", c, x)

    def collapse(self, x: Array, name: str, norm: str) -> Array:
        t = rms(x.reshape(len(x), -1), self.eps) @ self.w[f"{name}_fn.weight"].T
        weight = sigmoid(t * self.w[f"{name}_scale.weight"] + self.w[f"{name}_base.weight"]) + self.hc_eps
        return rms((weight[:, :, None] * x).sum(1), self.eps, self.w[norm]) @ self.w["output.weight"].T

    # ---- attention ----

    def windows(self, y: Array, name: str, ratio: int, width: int) -> Array:
        """The compressor's rows (windows, width): a softmax of the gate over each window's slots, weighting kv."""
        kv, gate = (y @ self.w[f"{name}_{k}.weight"].T for k in ("kv", "gate"))
        gate = gate + self.w[f"{name}_ape.weight"][np.arange(len(y)) % ratio]
        count, rows = len(y) // ratio, []
        for i in range(count):
            here = slice(i * ratio, (i + 1) * ratio)
            if ratio != 4:
                g, v = gate[here], kv[here]
            else:
                before = slice((i - 1) * ratio, i * ratio) if i else slice(0, 0)
                g = np.concatenate([gate[before, :width], gate[here, width:]])
                v = np.concatenate([kv[before, :width], kv[here, width:]])
            rows.append((softmax(g, 0) * v).sum(0))
        out = rms(np.array(rows).reshape(count, width), self.eps, self.w[f"{name}_norm.weight"])
        return rotate(out, np.arange(count) * ratio, self.freq_compressed)

    def picked(self, p: str, y: Array, qr: Array, visible: Array) -> Array:
        """Which compressed rows each position sees (T, windows), by the indexer's scores; ties to the lower index."""
        m, positions = self.meta, np.arange(len(y))
        heads, width, top = m["attention.indexer.head_count"], m["attention.indexer.key_length"], m["attention.indexer.top_k"]
        keys = self.round_index(self.windows(y, f"{p}indexer_compressor", 4, width))
        q = rotate(
            (qr @ self.w[f"{p}indexer.attn_q_b.weight"].T).reshape(len(y), heads, width), positions, self.freq_compressed
        )
        weight = y @ self.w[f"{p}indexer.proj.weight"].T / np.sqrt(width * heads)
        score = (weight[:, :, None] * np.maximum(q @ keys.T, 0)).sum(1)
        score = np.where(visible, score, -np.inf)
        order = np.argsort(-score, axis=1, kind="stable")[:, :top]
        chosen = np.zeros_like(visible)
        np.put_along_axis(chosen, order, True, 1)
        return visible & chosen

    def kv_rows(self, y: Array, p: str, freq: Array) -> Array:
        """The raw rows (T, d), both keys and values, before rounding."""
        return rotate(
            rms(y @ self.w[f"{p}attn_kv.weight"].T, self.eps, self.w[f"{p}attn_kv_a_norm.weight"]), np.arange(len(y)), freq
        )

    def attention(self, y: Array, p: str, ratio: int) -> Array:
        t, w, positions = len(y), self.w, np.arange(len(y))
        freq = self.freq_compressed if ratio else self.freq
        qr = rms(y @ w[f"{p}attn_q_a.weight"].T, self.eps, w[f"{p}attn_q_a_norm.weight"])
        q = rotate(rms((qr @ w[f"{p}attn_q_b.weight"].T).reshape(t, self.heads, self.d), self.eps), positions, freq)
        rows = self.round_kv(self.kv_rows(y, p, freq))
        age = positions[:, None] - positions[None, :]
        seen = (age >= 0) & (age < self.meta["attention.sliding_window"])
        if ratio:
            compressed = self.round_kv(self.windows(y, f"{p}attn_compressor", ratio, self.d))
            visible = (np.arange(len(compressed))[None, :] + 1) * ratio <= positions[:, None] + 1
            if ratio == 4 and len(compressed):
                visible = self.picked(p, y, qr, visible)
            rows, seen = np.concatenate([rows, compressed]), np.concatenate([seen, visible], 1)
        score = np.where(seen[:, None, :], q @ rows.T / np.sqrt(self.d), -np.inf)
        sinks = np.broadcast_to(w[f"{p}attn_sinks.weight"][None, :, None], (t, self.heads, 1))
        out = rotate(softmax(np.concatenate([score, sinks], -1))[..., :-1] @ rows, positions, freq, -1)
        groups = self.meta["attention.output_group_count"]
        o_a = w[f"{p}attn_output_a.weight"].reshape(groups, self.meta["attention.output_lora_rank"], -1)
        low = np.einsum("tgi,goi->tgo", out.reshape(t, groups, -1), o_a)
        return low.reshape(t, -1) @ w[f"{p}attn_output_b.weight"].T

    # ---- MoE ----

    def expert(self, y: Array, gate: Array, up: Array, down: Array, limit: float) -> Array:
        g, u = np.minimum(y @ gate.T, limit), np.clip(y @ up.T, -limit, limit)
        return (g * sigmoid(g) * u) @ down.T

    def picks(self, s: Array, tokens: Array, p: str) -> Array:
        """The experts (T, used) of each row, best first."""
        if f"{p}ffn_gate_tid2eid.weight" in self.w:
            return self.w[f"{p}ffn_gate_tid2eid.weight"][tokens]
        return np.argsort(-(s + self.w[f"{p}exp_probs_b.bias"]), axis=1, kind="stable")[:, : self.meta["expert_used_count"]]

    def moe(self, y: Array, tokens: Array, p: str, limit: float) -> Array:
        w = self.w
        s = np.sqrt(np.logaddexp(0, y @ w[f"{p}ffn_gate_inp.weight"].T))
        picks = self.picks(s, tokens, p)
        weight = np.take_along_axis(s, picks, 1)
        weight = weight / np.maximum(weight.sum(1, keepdims=True), 6.103515625e-5) * self.meta["expert_weights_scale"]
        out = self.expert(y, *(w[f"{p}ffn_{k}_shexp.weight"] for k in ("gate", "up", "down")), limit)
        for e in range(self.meta["expert_count"]):
            row, k = np.nonzero(picks == e)
            if len(row):
                np.add.at(
                    out,
                    row,
                    weight[row, k, None]
                    * self.expert(y[row], *(w[f"{p}ffn_{name}_exps.weight"][e] for name in ("gate", "up", "down")), limit),
                )
        return out

    # ---- the whole ----

    def block(self, x: Array, tokens: Array, p: str, ratio: int, limit: float) -> Array:
        x = self.sub_block(x, f"{p}hc_attn", f"{p}attn_norm.weight", lambda y: self.attention(y, p, ratio))
        return self.sub_block(x, f"{p}hc_ffn", f"{p}ffn_norm.weight", lambda y: self.moe(y, tokens, p, limit))

    def clamp(self, layer: int) -> float:
        limits = self.meta["swiglu_clamp_exp"]
        return limits[min(layer, len(limits) - 1)]

    def forward(self, tokens: Array) -> tuple[Array, Array]:
        """Logits (T, V) and the streams (T, n, D) after the last layer."""
        x = np.repeat(self.w["token_embd.weight"][tokens][:, None, :], self.n, 1)
        for i, ratio in enumerate(self.meta["attention.compress_ratios"][: self.meta["block_count"]]):
            x = self.block(x, tokens, f"blk.{i}.", ratio, self.clamp(i))
        return self.collapse(x, "output_hc", "output_norm.weight"), x

    def head(self, streams: Array, tokens: Array) -> Array:
        """The head's logits (T - 1, V): row q from the streams at q and the token at q + 1."""
        w, following = self.w, tokens[1:]
        e = rms(w["token_embd.weight"][following], self.eps, w["mtp.0.enorm.weight"]) @ w["mtp.0.e_proj.weight"].T
        x = e[:, None, :] + rms(streams[:-1], self.eps, w["mtp.0.hnorm.weight"]) @ w["mtp.0.h_proj.weight"].T
        x = self.block(x, following, "mtp.0.", 0, self.clamp(self.meta["block_count"]))
        return self.collapse(x, "mtp.0.hc_head", "mtp.0.norm.weight")
