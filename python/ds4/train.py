"""Train a small DeepSeek-V4 target and its MTP head on the King James Bible, and write both as GGUF.

The text comes from Debian's `bible-kjv` (public domain). The network below is the architecture's arithmetic in plain
PyTorch; its parameters carry the GGUF's tensor names, so that exporting is writing them down. The head learns what the
target itself would choose next (its whole distribution one position on), and chained steps, so that deeper drafts are
accepted too. Training is limited by time, hence step counts differ between machines.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from ds4 import gguf_write as gw
from ds4.outputs import replacing

SHAPE = gw.Shape(
    ratios=[0, 0, 4, 0, 128, 0, 4, 0],
    vocab=2048,
    width=256,
    heads=4,
    head_width=64,
    rotary=32,
    q_rank=128,
    o_groups=2,
    o_rank=64,
    experts=8,
    experts_used=2,
    expert_width=256,
    hash_layers=1,
    window=64,
    index_heads=16,
    index_width=128,
    index_top_k=64,
    sinkhorn=4,
    context=4096,
    yarn_factor=4.0,
    yarn_original=1024,
)
SPLITS = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
LENGTH = 512  # tokens of a training sequence
BATCH = 4
# The first chapters are read far more often, until the model knows them by heart, and mostly from their beginnings.
HEART_CHAPTERS, HEART_SHARE, BEGIN_SHARE = 8, 0.35, 0.6
COMPILE = os.environ.get("TORCHDYNAMO_DISABLE") != "1"


# ---------------------------------------------------------------- text


def chapters() -> list[str]:
    """The Bible's chapters, one verse a line, without verse numbers."""
    command = ["bible", "-f", "gen1:1-rev22:21"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found: list[list[str]] = []
    for line in lines:
        verse = re.match(r"\w+?(\d+):(\d+) (.*)", line)
        if not verse:
            continue
        if verse[2] == "1":
            found.append([])
        found[-1].append(verse[3])
    return ["\n".join(verses) + "\n" for verses in found]


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE with DeepSeek-V3's pre-split, the control tokens first."""
    t = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(s), "isolated") for s in SPLITS]
    t.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=gw.CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    t.train_from_iterator(texts, trainer)
    return t


# ---------------------------------------------------------------- the network


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension; without `weight` only the division."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def frequencies(s: gw.Shape, compressed: bool) -> np.ndarray:
    """Rotary frequencies of R/2 pairs; layers with compression use their own base and YaRN."""
    i = np.arange(s.rotary // 2, dtype=np.float64)
    if not compressed:
        return s.rope_base ** (-2 * i / s.rotary)
    base = s.compress_base
    f = base ** (-2 * i / s.rotary)

    def corr(beta: float) -> float:
        return s.rotary * math.log(s.yarn_original / (2 * math.pi * beta)) / (2 * math.log(base))

    low = max(0, math.floor(corr(s.yarn_beta_fast)))
    high = min(s.rotary - 1, math.ceil(corr(s.yarn_beta_slow)))
    ramp = np.clip((i - low) / max(high - low, 0.001), 0, 1)
    return f * (1 - ramp) + f / s.yarn_factor * ramp


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate adjacent pairs of the last R channels of x (..., d) by turn (2, ..., R/2), its cosines and sines."""
    cos, sin = turn[0], turn[1]
    r = 2 * cos.shape[-1]
    a, b = x[..., -r::2], x[..., x.shape[-1] - r + 1 :: 2]
    tail = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-r], tail], -1)


class Weights(nn.Module):
    """A tree of parameters made from GGUF names and shapes: `indexer.proj.weight` is self.indexer.proj.weight."""

    def __init__(self, tensors: Iterable[gw.Named]) -> None:
        super().__init__()
        for name, shape in tensors:
            *path, leaf = name.split(".")
            at: nn.Module = self
            for part in path:
                if not hasattr(at, part):
                    at.add_module(part, nn.Module())
                at = getattr(at, part)
            if "tid2eid" in name:
                at.register_buffer(leaf, torch.zeros(shape, dtype=torch.int32))
            elif leaf == "bias":
                at.register_buffer(leaf, torch.zeros(shape))
            else:
                at.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class Experts(torch.autograd.Function):
    """sum_k w_k expert_k(x): tokens are sorted by expert, so that each expert is three matrix products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, idx: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float) -> Tensor:
        """x (T, D), w and idx (T, k), gate and up (E, F, D), down (E, D, F) -> (T, D)."""
        order = idx.reshape(-1).argsort(stable=True)
        ends = torch.bincount(idx.reshape(-1), minlength=gate.shape[0]).cumsum(0).tolist()
        rows, share = order // idx.shape[1], w.reshape(-1)[order]
        out, kept, a = torch.zeros_like(x), [], 0
        for e, b in enumerate(ends):
            xe = x[rows[a:b]]
            g, u = xe @ gate[e].T, xe @ up[e].T
            h = F.silu(g.clamp(max=limit)).mul_(u.clamp(-limit, limit)).mul_(share[a:b, None])
            out.index_add_(0, rows[a:b], h @ down[e].T)
            kept += [g, u]
            a = b
        ctx.ends, ctx.limit, ctx.k = ends, limit, idx.shape[1]
        ctx.save_for_backward(x, order, share, gate, up, down, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, w, gate, up, down."""
        x, order, share, gate, up, down, *kept = ctx.saved_tensors
        rows, limit, a = order // ctx.k, ctx.limit, 0
        dx, dshare = torch.zeros_like(x), torch.zeros_like(share)
        dgate, dup, ddown = torch.zeros_like(gate), torch.zeros_like(up), torch.zeros_like(down)
        for e, b in enumerate(ctx.ends):
            g, u = kept[2 * e], kept[2 * e + 1]
            xe, dy, w = x[rows[a:b]], dout[rows[a:b]], share[a:b, None]
            gc, uc = g.clamp(max=limit), u.clamp(-limit, limit)
            sig = torch.sigmoid(gc)
            act = gc * sig
            h, dh = act * uc, dy @ down[e]
            dshare[a:b] = (dh * h).sum(-1)
            ddown[e] = dy.T @ h.mul_(w)
            dh.mul_(w)
            du = (dh * act).mul_(u.abs() < limit)
            dg = dh.mul_(uc).mul_(sig + act * (1 - sig)).mul_(g < limit)
            dgate[e], dup[e] = dg.T @ xe, du.T @ xe
            dx.index_add_(0, rows[a:b], torch.addmm(dg @ gate[e], du, up[e]))
            a = b
        dw = torch.empty_like(share)
        dw[order] = dshare
        return dx, dw.view(-1, ctx.k), None, dgate, dup, ddown, None


def mix_in(x: Tensor, hc: Any, s: gw.Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Streams x (T, n, D) -> the sub-block's input (T, D), post (n, T) and the mixing matrices C (n, n, T)."""
    n, v = s.streams, x.flatten(1)
    t = torch.mm(hc[0].weight, v.t()) * torch.rsqrt(v.pow(2).mean(-1) + s.eps)
    base, scale = hc[1].weight[:, None], hc[2].weight
    pre = torch.sigmoid(t[:n] * scale[0] + base[:n]) + s.hc_eps
    post = 2 * torch.sigmoid(t[n : 2 * n] * scale[1] + base[n : 2 * n])
    c = (t[2 * n :] * scale[2] + base[2 * n :]).view(n, n, -1)
    c = torch.softmax(c, 1) + s.hc_eps
    c = c / (c.sum(0, keepdim=True) + s.hc_eps)
    for _ in range(s.sinkhorn - 1):
        c = c / (c.sum(1, keepdim=True) + s.hc_eps)
        c = c / (c.sum(0, keepdim=True) + s.hc_eps)
    return (pre.t().unsqueeze(-1) * x).sum(1), post, c


def mix_out(x: Tensor, f: Tensor, post: Tensor, c: Tensor) -> Tensor:
    """The streams after a sub-block whose output is f (T, D): row b is post_b f + sum_a C[a, b] x_a."""
    n = x.shape[1]
    new = []
    for b in range(n):
        y = post[b][:, None] * f
        for a in range(n):
            y = y + c[a, b][:, None] * x[:, a]
        new.append(y)
    return torch.stack(new, 1)


def collapse(x: Tensor, hc: Any, s: gw.Shape) -> Tensor:
    """Streams (T, n, D) -> one row (T, D) for the output matrix."""
    v = x.flatten(1)
    t = torch.mm(hc[0].weight, v.t()) * torch.rsqrt(v.pow(2).mean(-1) + s.eps)
    w = torch.sigmoid(t * hc[2].weight + hc[1].weight[:, None]) + s.hc_eps
    return (w.t().unsqueeze(-1) * x).sum(1)


class Block(Weights):
    """One layer: attention and mixture of experts, each between hyper-connections."""

    def __init__(self, s: gw.Shape, ratio: int, hashed: bool) -> None:
        super().__init__(gw.block("", ratio, hashed, s))
        self.s, self.ratio, self.hashed = s, ratio, hashed
        self.load: Tensor | None = None

    def compress(self, x: Tensor, name: str, width: int, turn: Tensor) -> Tensor:
        """Rows (B, S // r, width) made from x (B, S, D) by the compressor called `name`."""
        r, batch = self.ratio, x.shape[0]
        part = [getattr(self, f"{name}_{k}").weight for k in ("kv", "gate", "ape", "norm")]
        x = x[:, : x.shape[1] // r * r]
        kv = F.linear(x, part[0]).view(batch, -1, r, part[0].shape[0])
        gate = F.linear(x, part[1]).view(batch, -1, r, part[0].shape[0]) + part[2]
        if r == 4:
            kv = torch.cat([F.pad(kv[:, :-1, :, :width], (0, 0, 0, 0, 1, 0)), kv[..., width:]], 2)
            before = F.pad(gate[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=float("-inf"))
            gate = torch.cat([before, gate[..., width:]], 2)
        rows = (kv * gate.softmax(2)).sum(2)
        return rotate(rms(rows, part[3], self.s.eps), turn[:, : x.shape[1] : r])

    def index(self, x: Tensor, qr: Tensor, turn: Tensor, seen: Tensor) -> Tensor:
        """The indexer's scores (B, S, C), minus infinity where a row is not in the past."""
        s, (batch, length, _) = self.s, x.shape
        rows = self.compress(x, "indexer_compressor", s.index_width, turn)
        q = F.linear(qr, self.indexer.attn_q_b.weight).view(batch, length, s.index_heads, s.index_width)
        q = rotate(q, turn[:, :, None])
        w = F.linear(x, self.indexer.proj.weight) / math.sqrt(s.index_width * s.index_heads)
        score = F.relu(torch.matmul(q.flatten(1, 2), rows.mT)).view(batch, length, s.index_heads, -1)
        return (score * w[..., None]).sum(2).masked_fill(~seen, float("-inf"))

    def attention(
        self, x: Tensor, turn: Tensor, batch: int, select: bool, teach: bool, past: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Streams after the attention sub-block, its kv rows, and the indexer's loss (0 unless `teach`).

        `past` is for a head's deeper drafts: the rows its earlier passes made, the first pass's first.
        """
        s, h, d = self.s, self.s.heads, self.s.head_width
        y, post, c = mix_in(x, (self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale), s)
        y = rms(y, self.attn_norm.weight, s.eps).view(batch, -1, s.width)
        length = y.shape[1]
        qr = rms(F.linear(y, self.attn_q_a.weight), self.attn_q_a_norm.weight, s.eps)
        q = rms(F.linear(qr, self.attn_q_b.weight).view(batch, length, h, d), None, s.eps)
        q = rotate(q, turn[:, :, None]) / math.sqrt(d)
        kv = rotate(rms(F.linear(y, self.attn_kv.weight), self.attn_kv_a_norm.weight, s.eps), turn)
        drafted = deeper_rows(past, kv) if past else []
        score, keys = self.local_scores(q, past[0] if past else kv)
        for back, rows in enumerate(drafted):
            own = (q * rows[:, :, None]).sum(-1, keepdim=True)
            score = torch.where(self.slot(length, back), own, score)
        loss = torch.zeros(())
        if self.ratio and length >= self.ratio:
            rows = self.compress(y, "attn_compressor", d, turn)
            count = rows.shape[1]
            seen = (torch.arange(count) + 1) * self.ratio <= torch.arange(length)[:, None] + 1
            if self.ratio == 4 and (teach or (select and count > s.index_top_k)):
                index = self.index(y.detach(), qr.detach(), turn, seen)
                if select and count > s.index_top_k:
                    best = index.detach().topk(s.index_top_k, -1).indices
                    seen = torch.zeros_like(index, dtype=torch.bool).scatter(-1, best, True) & seen
            far = torch.matmul(q.flatten(1, 2), rows.mT).view(batch, length, h, count)
            far = far.masked_fill(~seen.unsqueeze(-2), float("-inf"))
            score = torch.cat([score, far], -1)
        sink = self.attn_sinks.weight.view(1, 1, h, 1).expand(batch, length, h, 1)
        prob = torch.cat([score, sink], -1).softmax(-1)
        near = prob[..., : 2 * s.window]
        out = torch.zeros_like(q)
        for back, rows in enumerate(drafted):
            slot = self.slot(length, back)
            out = out + (near * slot).sum(-1, keepdim=True) * rows[:, :, None]
            near = near * ~slot
        out = out + torch.matmul(self.by_window(near), keys).reshape(batch, -1, h, d)[:, :length]
        if self.ratio and length >= self.ratio:
            far = prob[..., 2 * s.window : -1]
            out = out + torch.matmul(far.flatten(1, 2), rows).view(batch, length, h, d)
            if teach and self.ratio == 4:
                loss = index_loss(index, far.detach().sum(2), seen)
        out = rotate(out, torch.stack([turn[0], -turn[1]])[:, :, None])
        low = self.attn_output_a.weight.view(s.o_groups, s.o_rank, -1)
        groups = out.reshape(batch * length, s.o_groups, -1)
        mid = torch.cat([F.linear(groups[:, g], low[g]) for g in range(s.o_groups)], -1)
        return mix_out(x, F.linear(mid, self.attn_output_b.weight), post, c), kv, loss

    def slot(self, length: int, back: int) -> Tensor:
        """Which of the 2W local scores of each position is that of the row `back` positions ago (S, 1, 2W)."""
        w = self.s.window
        return (torch.arange(length)[:, None] % w + w - back == torch.arange(2 * w))[:, None]

    def by_window(self, x: Tensor) -> Tensor:
        """(B, S, H, n) -> (B, windows, window * H, n), zero rows behind S."""
        w = self.s.window
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % w))
        return x.reshape(x.shape[0], x.shape[1] // w, w * x.shape[2], x.shape[3])

    def local_scores(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of q (B, S, H, d) against its own and the previous window's rows (B, S, H, 2W), and those rows."""
        w, (batch, length, h, _) = self.s.window, q.shape
        rows = F.pad(kv, (0, 0, w, -length % w)).view(batch, -1, w, kv.shape[-1])
        keys = torch.cat([rows[:, :-1], rows[:, 1:]], 2)
        count = keys.shape[1]
        score = torch.matmul(self.by_window(q), keys.mT).view(batch, count, w, h, 2 * w)
        i, k = torch.arange(w)[:, None], torch.arange(2 * w)
        first = torch.arange(count)[:, None, None] == 0
        seen = (k > i) & (k <= i + w) & ~(first & (k < w))
        score = score.masked_fill(~seen[:, :, None], float("-inf"))
        return score.view(batch, count * w, h, 2 * w)[:, :length], keys

    def route(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """The experts' input, their weights and numbers (T, k), the shared expert's output, post and C."""
        s = self.s
        y, post, c = mix_in(x, (self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale), s)
        y = rms(y, self.ffn_norm.weight, s.eps)
        score = F.softplus(F.linear(y, self.ffn_gate_inp.weight)).sqrt()
        if self.hashed:
            idx = self.ffn_gate_tid2eid.weight[tokens.reshape(-1)].long()
        else:
            idx = (score + self.exp_probs_b.bias).topk(s.experts_used, -1).indices
        w = score.gather(1, idx)
        w = w / w.sum(-1, keepdim=True).clamp(min=6.103515625e-5) * s.expert_scale
        gate = F.linear(y, self.ffn_gate_shexp.weight).clamp(max=s.clamp)
        up = F.linear(y, self.ffn_up_shexp.weight).clamp(-s.clamp, s.clamp)
        return y, w, idx, F.linear(F.silu(gate) * up, self.ffn_down_shexp.weight), post, c

    def forward(
        self,
        x: Tensor,
        tokens: Tensor,
        turn: Tensor,
        select: bool = True,
        teach: bool = False,
        past: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Streams x (B*S, n, D) of tokens (B, S) -> the streams after this layer, its kv rows, the indexer's loss."""
        x, kv, loss = attention(self, x, turn, tokens.shape[0], select, teach, past)
        y, w, idx, shared, post, c = route(self, x, tokens)
        experts = self.ffn_gate_exps.weight, self.ffn_up_exps.weight, self.ffn_down_exps.weight
        routed = Experts.apply(y, w, idx, *experts, self.s.clamp)  # type: ignore[no-untyped-call]
        if not self.hashed:
            self.load = torch.bincount(idx.reshape(-1), minlength=self.s.experts)
        return join(x, routed, shared, post, c), kv, loss


def deeper_rows(past: list[Tensor], kv: Tensor) -> list[Tensor]:
    """For the pass after `past`, the rows its chain drafted 0, 1, ... positions ago, aligned with each position."""
    chain = [kv, *past[:0:-1]]
    return [F.pad(rows[:, : rows.shape[1] - back], (0, 0, back, 0)) for back, rows in enumerate(chain)]


def index_loss(index: Tensor, weight: Tensor, seen: Tensor) -> Tensor:
    """Cross-entropy of the indexer's scores against where the attention heads looked, over the rows they saw."""
    logp = index.masked_fill(~seen, float("-inf")).log_softmax(-1)
    goal = weight / weight.sum(-1, keepdim=True).clamp(min=1e-6)
    return -(goal * logp.masked_fill(~seen.expand_as(logp), 0.0)).nan_to_num(0.0).sum(-1).mean()


def _join(x: Tensor, routed: Tensor, shared: Tensor, post: Tensor, c: Tensor) -> Tensor:
    return mix_out(x, routed + shared, post, c)


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled once per kind of layer where a C++ compiler is at hand."""
    return torch.compile(f, dynamic=False) if COMPILE else f


torch._dynamo.config.recompile_limit = 64
attention, route, join = compiled(Block.attention), compiled(Block.route), compiled(_join)


class Target(Weights):
    """The whole target; parameters are named as in the GGUF."""

    def __init__(self, s: gw.Shape) -> None:
        super().__init__(t for t in gw.target_tensors(s) if not t[0].startswith("blk."))
        self.s = s
        self.blk = nn.ModuleList(Block(s, r, i < s.hash_layers) for i, r in enumerate(s.ratios))
        self.turns: dict[int, tuple[Tensor, Tensor]] = {}

    def turn(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (2, length, R/2) of plain and of compressed layers."""
        if length not in self.turns:
            angles = [np.arange(length)[:, None] * frequencies(self.s, k) for k in (False, True)]
            plain, yarn = (torch.tensor(np.stack([np.cos(a), np.sin(a)]), dtype=torch.float32) for a in angles)
            self.turns[length] = plain, yarn
        return self.turns[length]

    def forward(self, tokens: Tensor, select: bool = True, teach: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, S) -> logits (B*S, V), the last layer's streams (B*S, n, D), the indexers' loss."""
        s, turns = self.s, self.turn(tokens.shape[1])
        x = self.token_embd.weight[tokens.reshape(-1)].unsqueeze(1).expand(-1, s.streams, -1).contiguous()
        total = torch.zeros(())
        for b, ratio in zip(self.blk, s.ratios, strict=True):
            x, _, loss = b(x, tokens, turns[ratio > 0], select, teach)
            total = total + loss
        y = collapse(x, (self.output_hc_fn, self.output_hc_base, self.output_hc_scale), s)
        return F.linear(rms(y, self.output_norm.weight, s.eps), self.output.weight), x, total


class Head(Weights):
    """The MTP head: one more block behind two projections; embedding and output matrix are the target's."""

    def __init__(self, s: gw.Shape) -> None:
        own = {name for name, _ in gw.block("mtp.0.", 0, False, s)}
        super().__init__((name[6:], shape) for name, shape in gw.head_tensors(s) if name not in own)
        self.s, self.block = s, Block(s, 0, False)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by their GGUF names without `mtp.0.`."""
        return {name.removeprefix("block."): t for name, t in self.state_dict().items()}

    def step(
        self, target: Target, x: Tensor, tokens: Tensor, past: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Streams (B*S, n, D) at each position and the tokens (B, S) after them -> logits, own streams, kv rows."""
        s = self.s
        e = rms(target.token_embd.weight.detach()[tokens.reshape(-1)], self.enorm.weight, s.eps)
        e = F.linear(e, self.e_proj.weight)
        x = e.unsqueeze(1) + F.linear(rms(x, self.hnorm.weight, s.eps), self.h_proj.weight)
        x, kv, _ = self.block(x, tokens, target.turn(tokens.shape[1])[0], False, False, past)
        y = rms(collapse(x, (self.hc_head_fn, self.hc_head_base, self.hc_head_scale), s), self.norm.weight, s.eps)
        return F.linear(y, target.output.weight.detach()), x, kv

    def drafts(self, target: Target, x: Tensor, tokens: Tensor, depth: int) -> list[Tensor]:
        """Logits (B, S, V) of chained drafts, given the target's streams (B*S, n, D) of tokens (B, S).

        Row p of every entry predicts token p + 2 from token p + 1; the entry of depth m used the target's streams of
        p - m + 1, and the rows p - m + 2 ... p in its attention are the drafts' own, as when a draft is made.
        """
        batch, length = tokens.shape
        after, past, out = tokens.roll(-1, 1), list[Tensor](), list[Tensor]()
        for m in range(depth):
            if m:
                x = F.pad(x.view(batch, length, *x.shape[1:])[:, :-1], (0, 0, 0, 0, 1, 0)).flatten(0, 1)
            logits, x, kv = self.step(target, x, after, past or None)
            past.append(kv)
            out.append(logits.view(batch, length, -1))
        return out


# ---------------------------------------------------------------- training


def orthogonal(g: Tensor) -> Tensor:
    """The nearest matrices (..., m, n) with the singular values all roughly 1."""
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(4):  # the Newton-Schulz step of Muon (Jordan 2024)
        m = x @ x.mT
        x = 3.4445 * x + (2.0315 * (m @ m) - 4.775 * m) @ x
    turned: Tensor = x.mT if tall else x
    return turned


class Muon(torch.optim.Optimizer):
    """Momentum whose step is orthogonalised, all matrices of one shape in a batch; parameters without gradient rest."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(tuple(p.shape), []).append(p)
            for shape, params in shapes.items():
                moves = []
                for p in params:
                    assert p.grad is not None
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.lerp_(p.grad, 1 - group["momentum"])
                    moves.append(p.grad.lerp(m, group["momentum"]))
                lr = group["lr"] * max(1.0, shape[-2] / shape[-1]) ** 0.5
                for p, move in zip(params, orthogonal(torch.stack(moves)), strict=True):
                    p.mul_(1 - group["lr"] * group["decay"]).add_(move, alpha=-lr)


def initialise(m: nn.Module, s: gw.Shape, g: torch.Generator) -> None:
    """Small random matrices, norms of one, streams that start mixed by nearly the identity, random hash experts."""
    for name, p in [*m.named_parameters(), *m.named_buffers()]:
        with torch.no_grad():
            if name.endswith("tid2eid.weight"):
                p.copy_(torch.stack([torch.randperm(s.experts, generator=g)[: s.experts_used] for _ in p]))
            elif "norm" in name:
                p.fill_(1)
            elif name.endswith("_scale.weight"):
                p.fill_(1 if "head" in name or "output" in name else 0.5)
            elif name.endswith("_base.weight"):
                p.normal_(0, 0.3, generator=g)
                if p.numel() > s.streams:
                    p[2 * s.streams :] = 3 * torch.eye(s.streams).flatten()
            elif p.dim() >= 2:
                small = any(k in name for k in ("attn_output_b", "ffn_down"))
                std = 0.3 if name.startswith("token_embd") else (0.2 if small else 0.6) / p.shape[-1] ** 0.5
                p.normal_(0, std, generator=g)


def optimisers(m: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, AdamW for the rest: embedding, output, streams, router, indexer, vectors."""
    apart = ("token_embd", "output.weight", "hc_", "ffn_gate_inp", "_ape", "index")
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, p in m.named_parameters():
        (rest if p.dim() < 2 or any(k in name for k in apart) else matrices).append(p)
    adam = torch.optim.AdamW(rest, 3e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    both: list[torch.optim.Optimizer] = [Muon(matrices, 0.02), adam]
    for o in both:
        for group in o.param_groups:
            group["peak"] = group["lr"]
    return both


def rate(step: int, part: float) -> float:
    """The learning rate's share of its peak: warm-up by steps, then level, then down over the last 70% of the time."""
    return min(1.0, (step + 1) / 40) * min(1.0, max(0.0, 1.02 - part) / 0.7)


def pass_through(name: str, p: Tensor) -> None:
    """Make a new layer's parameter such that the layer at first only hands the streams on."""
    if any(k in name for k in ("attn_output_b", "ffn_down", "_fn.weight")):
        p.zero_()
    elif name.endswith("_base.weight"):
        p[2 * SHAPE.streams :] = 8 * torch.eye(SHAPE.streams).flatten()


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a GGUF file, F32 or I32."""
    return {t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors}


class Trainer:
    """A target, its head, their optimisers and the clock; saved to and resumed from one file."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.steps, self.seconds = out, 0, 0.0
        self.started = self.head_only = False
        self.rng = torch.Generator().manual_seed(seed)
        self.target, self.head = Target(SHAPE), Head(SHAPE)
        for m in (self.target, self.head):
            initialise(m, SHAPE, self.rng)
        self.opts = [optimisers(self.target), optimisers(self.head)]
        texts = chapters()
        self.held = texts[37::97]
        seen = [c for i, c in enumerate(texts) if i % 97 != 37]
        path = out / "tokenizer.json"
        if path.exists():
            self.tok = Tokenizer.from_file(str(path))
        else:
            self.tok = train_tokenizer(seen, SHAPE.vocab)
            self.tok.save(str(path))
        self.train, self.val = self.encode(seen), self.encode(self.held)
        self.heart = len(self.encode(seen[:HEART_CHAPTERS]))
        self.begins = (self.train == gw.BOS).nonzero().flatten()
        self.log = (out / "train.log").open("a")

    def encode(self, texts: list[str]) -> Tensor:
        """All texts as one row of tokens, each between BOS and EOS."""
        return torch.tensor([i for c in texts for i in [gw.BOS, *self.tok.encode(c).ids, gw.EOS]])

    def say(self, text: str) -> None:
        """Print a line and put it into the log."""
        print(text, flush=True)
        print(text, file=self.log, flush=True)

    def save(self) -> None:
        """Write the checkpoint, never leaving half a file."""
        state = {
            "target": self.target.state_dict(),
            "head": self.head.state_dict(),
            "opts": [o.state_dict() for pair in self.opts for o in pair],
            "rng": self.rng.get_state(),
            "clock": (self.steps, self.seconds),
        }
        torch.save(state, self.out / "checkpoint.tmp")
        os.replace(self.out / "checkpoint.tmp", self.out / "checkpoint.pt")

    def load(self) -> None:
        """Take everything from the checkpoint."""
        state = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.target.load_state_dict(state["target"])
        self.head.load_state_dict(state["head"])
        for o, kept in zip((o for pair in self.opts for o in pair), state["opts"], strict=True):
            o.load_state_dict(kept)
        self.rng.set_state(state["rng"])
        self.steps, self.seconds = state["clock"]

    def start(self, target: Path, head: Path) -> None:
        """Begin from a trained pair (F32 files, same sizes). If it has half the layers, or a third, each is followed by
        new ones that at first change nothing: what they add is zero, and their streams pass unmixed."""
        layers = len({n.split(".")[1] for n in read_tensors(target) if n.startswith("blk.")})
        every, files = SHAPE.layers // layers, (read_tensors(target), read_tensors(head))
        with torch.no_grad():
            for name, p in [*self.target.named_parameters(), *self.target.named_buffers()]:
                part = name.split(".")
                if part[0] == "blk" and int(part[1]) % every:
                    pass_through(name, p)
                else:
                    old = name if part[0] != "blk" else ".".join(["blk", str(int(part[1]) // every), *part[2:]])
                    p.copy_(torch.from_numpy(files[0][old]).view_as(p))
            for name, t in self.head.tensors().items():
                t.copy_(torch.from_numpy(files[1][f"mtp.0.{name}"]).view_as(t))
        for pair in self.opts:
            for group in (g for o in pair for g in o.param_groups):
                group["peak"] *= 0.4
        self.started = True

    def sample(self) -> Tensor:
        """A batch (BATCH, LENGTH) of training text, BOS first as in a prompt."""
        heart, begin = torch.rand(2, BATCH, generator=self.rng) < torch.tensor([[HEART_SHARE], [BEGIN_SHARE]])
        at = torch.rand(BATCH, generator=self.rng)
        starts = (at * (torch.where(heart, self.heart, len(self.train)) - LENGTH)).long()
        if bool((heart & begin).any()):  # where a prompt would begin: at a chapter's first word
            chapters = self.begins[self.begins < self.heart - LENGTH]
            starts = torch.where(heart & begin, chapters[(at * len(chapters)).long()], starts)
        ids = torch.stack([self.train[i : i + LENGTH] for i in starts.tolist()])
        ids[:, 0] = gw.BOS
        return ids

    def step(self, part: float) -> tuple[float, float]:
        """One step at `part` of the time: the target always, the head now and then. Returns both losses.

        The target trains with all compressed rows in sight; the indexer only learns where the heads look.
        """
        late = part > 0.55  # from here on the indexer learns, and the head at every step and a third draft
        ids = self.sample()
        trained: list[nn.Module] = []
        if self.head_only:
            with torch.no_grad():
                logits, streams, _ = self.target(ids)
        else:
            logits, streams, index = self.target(ids, select=False, teach=late and self.steps % 2 == 0)
            trained.append(self.target)
        logits = logits.view(BATCH, LENGTH, -1)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        if trained:
            (loss + 0.1 * index).backward()
        draft = float("nan")
        if late or self.started or self.head_only or self.steps % 4 == 0:
            trained.append(self.head)
            goal = (logits.detach()[:, 1:] * (1.5 if self.head_only else 1.0)).softmax(-1)  # the choice, more than its odds
            losses = []
            for back, row in enumerate(self.head.drafts(self.target, streams.detach(), ids, 3 if late else 2)):
                logp = row[:, back:-1].log_softmax(-1)
                losses.append(-(goal[:, back:] * logp).sum(-1).mean())
            total = torch.stack([x * w for x, w in zip(losses, (1.0, 0.6, 0.4), strict=False)]).sum()
            total.backward()  # type: ignore[no-untyped-call]
            draft = losses[0].item()
        for m, opts in ((m, self.opts[m is self.head]) for m in trained):
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            for o in opts:
                for group in o.param_groups:
                    group["lr"] = group["peak"] * rate(self.steps, part)
                o.step()
                o.zero_grad()
            balance(m, 0.002 * rate(self.steps, part))
        self.steps += 1
        return loss.item(), draft

    def run(self, minutes: float) -> None:
        """Train until the clock says `minutes`, saving every four."""
        begin, saved, recent = time.time() - self.seconds, time.time(), list[tuple[float, float]]()
        while (elapsed := time.time() - begin) < 60 * minutes:
            recent.append(self.step(elapsed / 60 / minutes))
            self.seconds = time.time() - begin
            if self.steps % 20 == 0:
                loss, draft = np.nanmean(np.array(recent), 0)
                speed = self.steps * BATCH * LENGTH / self.seconds
                self.say(f"step {self.steps}  {self.seconds:.0f} s  loss {loss:.3f}  head {draft:.3f}  {speed:.0f} tokens/s")
                recent.clear()
            if time.time() - saved > 240:
                self.save()
                saved = time.time()
        self.save()


@torch.no_grad()
def balance(m: nn.Module, by: float) -> None:
    """Nudge each router's bias towards experts that got fewer tokens than the mean."""
    for b in m.modules():
        if isinstance(b, Block) and b.load is not None:
            load = b.load.float()
            b.exp_probs_b.bias.add_(torch.sign(load.mean() - load), alpha=by)


# ---------------------------------------------------------------- what came of it


@torch.no_grad()
def evaluate(t: Trainer, ids: Tensor) -> tuple[float, list[float]]:
    """Loss of one sequence (S), and how often drafts 1, 1-2, 1-3 are all the target's greedy choice on it."""
    logits, streams, _ = t.target(ids[None])
    best = logits.argmax(-1)[1:]
    right = torch.ones(len(ids) - 1, dtype=torch.bool)
    shares = []
    for m, row in enumerate(t.head.drafts(t.target, streams, ids[None], 3)):
        now = row[0, :-1].argmax(-1) == best
        right = torch.cat([torch.zeros(1, dtype=torch.bool), right[:-1]]) & now if m else now
        shares.append(right[m:].float().mean().item())
    return F.cross_entropy(logits[:-1], ids[1:]).item(), shares


@torch.no_grad()
def greedy(t: Trainer, prompt: str, count: int) -> Tensor:
    """The target's greedy continuation, prompt included."""
    ids = [gw.BOS, *t.tok.encode(prompt).ids]
    for _ in range(count):
        ids.append(int(t.target(torch.tensor([ids]))[0][-1].argmax()))
    return torch.tensor(ids)


def report(t: Trainer) -> None:
    """Log held-out loss and acceptance, and greedy samples with acceptance on them."""
    torch.compiler.set_stance("force_eager")
    held = [evaluate(t, t.val[i : i + LENGTH]) for i in range(0, len(t.val) - LENGTH, LENGTH)]
    loss, shares = np.mean([x[0] for x in held]), np.mean([x[1] for x in held], 0)
    chars = len("".join(t.held)) / len(t.val)
    t.say(
        f"held out: loss {loss:.3f} nats a token ({loss / chars / math.log(2):.3f} bits a character); "
        f"drafts are the target's choice: first {shares[0]:.3f}, first and second {shares[1]:.3f}, "
        f"all three {shares[2]:.3f}"
    )
    for prompt in ("In the beginning", "And it came to pass", "Blessed are", "The LORD is my"):
        ids = greedy(t, prompt, 120)
        shares = np.array(evaluate(t, ids)[1])
        t.say(f"greedy, drafts {shares.round(3).tolist()}: {t.tok.decode(ids[1:].tolist())!r}")


Tensors = list[tuple[str, Tensor]]


def write_tensors(w: gguf.GGUFWriter, tensors: Tensors, dense: gguf.GGMLQuantizationType) -> None:
    """Add tensors, matrices in type `dense`, and finish the file."""
    for name, t in tensors:
        x = t.detach().contiguous().numpy()
        if dense == gguf.GGMLQuantizationType.F32 or x.dtype == np.int32 or gw.stays_f32(name, x.shape):
            w.add_tensor(name, x)
        else:
            w.add_tensor(name, gguf.quants.quantize(x, dense), raw_dtype=dense)
    assert w.path is not None
    with replacing(w.path) as file:
        w.write_header_to_file(file)
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()


def full_writer(t: Trainer, path: Path, with_head: bool) -> gguf.GGUFWriter:
    """A writer for a file with sizes and tokenizer."""
    w = gguf.GGUFWriter(path, gw.ARCHITECTURE)
    w.add_string("general.name", "ds4 small, King James Bible")
    gw.add_model_keys(w, SHAPE, with_head)
    vocab = t.tok.get_vocab()
    merges = json.loads(t.tok.to_str())["model"]["merges"]
    joined = [m if isinstance(m, str) else " ".join(m) for m in merges]
    gw.add_tokenizer_keys(w, sorted(vocab, key=lambda k: vocab[k]), joined)
    return w


def export(t: Trainer) -> None:
    """Write the pair in Q8_0 and F32, the head in llama.cpp's layout too, and the held-out text."""
    sd, hd = t.target.state_dict(), t.head.tensors()
    target = [(name, sd[name]) for name, _ in gw.target_tensors(SHAPE)]
    head = [(name, hd[name[6:]]) for name, _ in gw.head_tensors(SHAPE)]
    at = f"blk.{SHAPE.layers}."
    llama = [(n, sd[n]) for n in ("token_embd.weight", "output.weight", "output_norm.weight")]
    llama += [(f"output_hc_{k}.weight", hd[f"hc_head_{k}.weight"]) for k in ("fn", "base", "scale")]
    llama += [(at + name, hd[name]) for name, _ in gw.block("", 0, False, SHAPE)]
    llama += [(f"{at}nextn.{n}.weight", hd[f"{n}.weight"]) for n in ("enorm", "hnorm")]
    llama.append((f"{at}nextn.shared_head_norm.weight", hd["norm.weight"]))
    llama.append((f"{at}nextn.eh_proj.weight", torch.cat([hd["e_proj.weight"], hd["h_proj.weight"]], 1)))
    q8, f32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
    for mark, dense in (("", q8), ("-f32", f32)):
        write_tensors(full_writer(t, t.out / f"small{mark}.gguf", False), target, dense)
        w = gguf.GGUFWriter(t.out / f"small-mtp{mark}.gguf", gw.HEAD_ARCHITECTURE)
        gw.add_head_keys(w, SHAPE)
        write_tensors(w, head, dense)
    write_tensors(full_writer(t, t.out / "small-mtp-llama.gguf", True), llama, q8)
    (t.out / "held-out.txt").write_text("".join(t.held[:8]))


@click.command(help=__doc__.split("\n")[0])
@click.argument("out", metavar="OUT_DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--minutes", default=60.0, show_default=True, help="Length of the whole training.")
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--resume", is_flag=True, help="Go on from OUT_DIR/checkpoint.pt.")
@click.option(
    "--start",
    nargs=2,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="TARGET HEAD",
    help="Begin from a trained pair, F32 GGUF files; OUT_DIR holds its tokenizer.json.",
)
@click.option("--head-only", is_flag=True, help="From the checkpoint on, for --minutes, train the head alone.")
@click.option("--export-only", is_flag=True, help="Measure and export OUT_DIR/checkpoint.pt.")
def main(
    out: Path,
    minutes: float,
    seed: int,
    threads: int,
    resume: bool,
    start: tuple[Path, Path] | None,
    head_only: bool,
    export_only: bool,
) -> None:
    """The command line; OUT_DIR gets the GGUF files, the log and the checkpoint."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    t = Trainer(out, seed)
    if resume or export_only or head_only:
        t.load()
    if head_only:
        t.head_only, t.steps, t.seconds = True, 0, 0.0
    if start and not (resume or export_only or head_only):
        t.start(*start)
    millions = [sum(p.numel() for p in m.parameters()) / 1e6 for m in (t.target, t.head)]
    t.say(
        f"tokens {len(t.train)}, held out {len(t.val)}; "
        f"parameters: target {millions[0]:.2f}M, head {millions[1]:.2f}M; {LENGTH} x {BATCH} tokens a step"
    )
    if not export_only:
        t.run(minutes)
    export(t)
    report(t)


if __name__ == "__main__":
    main()
