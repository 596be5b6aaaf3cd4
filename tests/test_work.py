"""What the engine computes, counted: rows, bytes of weights, experts, cached rows. Every number follows from the file's sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import Engine, Session, batch_step, lib
from fixtures import FIXTURES, head_forms, tensors_of
from reference import Array, Model, load

FIELDS = (
    "passes", "rows", "head_passes", "head_rows", "repaired_rows", "logit_rows", "weight_bytes", "experts", "kv_rows", "index_rows",
)  # fmt: skip
QUERIES = r"_exps|indexer\.(attn_q_b|proj)\."
VECTORS = re.compile(r"(norm|_base|_scale|_ape|_sinks|tid2eid)\.weight$|\.bias$|^token_embd")
PROMPT = 40


@dataclass
class Routes(Model):
    """The reference model, which remembers the experts of each row by layer."""

    seen: dict[str, Array] = field(default_factory=dict)

    def picks(self, s: Array, tokens: Array, p: str) -> Array:
        self.seen[p] = super().picks(s, tokens, p)
        return self.seen[p]


class Sizes:
    """A target's (and its head's) sizes: what a pass of it must read."""

    def __init__(self, folder: Path, text: list[int] | None = None) -> None:
        names = ("small.gguf", "small-mtp.gguf") if folder.name == "models" else ("target.gguf", "head-ds4.gguf")
        self.target, self.head = (folder / name for name in names)
        self.bytes = {n: int(t.n_bytes) for path in (self.target, self.head) for n, t in tensors_of(path).items()}
        self.m, weights = load(self.target)
        self.layers, self.used = int(self.m["block_count"]), int(self.m["expert_used_count"])
        self.routes = Routes(self.m, weights)
        if text:
            self.routes.forward(np.array(text))

    def dense(self, prefix: str, picks: bool = True) -> int:
        """Bytes of a block's matrices without its routed experts; without the indexer's queries where no row has windows to pick from."""
        left_out = "_exps" if picks else QUERIES
        return sum(n for t, n in self.bytes.items() if t.startswith(prefix) and not VECTORS.search(t) and not re.search(left_out, t))

    def expert(self, prefix: str) -> int:
        """Bytes of one of its experts."""
        every = sum(n for t, n in self.bytes.items() if t.startswith(prefix) and "_exps" in t)
        return every // int(self.m["expert_count"])

    @property
    def output(self) -> int:
        """Bytes that logits take."""
        return self.bytes["output.weight"] + self.bytes["output_hc_fn.weight"]

    def attended(self, position: int) -> tuple[int, int]:
        """Cached rows that the row there attends to, and that its indexer scores, in all layers of the target."""
        rows = scored = 0
        for ratio in self.m["attention.compress_ratios"][: self.layers]:
            windows = (position + 1) // ratio if ratio else 0
            picks = ratio == 4 and windows > self.m["attention.indexer.top_k"]
            rows += min(position + 1, self.m["attention.sliding_window"])
            rows += self.m["attention.indexer.top_k"] if picks else windows
            scored += windows if picks else 0
        return rows, scored

    def experts(self, layer: int, rows: list[int]) -> int:
        """How many experts these rows of the text choose between them."""
        return len(np.unique(self.routes.seen[f"blk.{layer}."][rows]))

    def work(self, passes: list[list[int]], logits: list[int]) -> dict[str, int]:
        """Of passes of these positions of the text; so many rows of each become logits."""
        out = dict.fromkeys(FIELDS, 0)
        for rows, with_logits in zip(passes, logits, strict=True):
            out["passes"] += 1
            out["rows"] += len(rows)
            out["logit_rows"] += with_logits
            out["weight_bytes"] += self.output if with_logits else 0
            picks = self.attended(max(rows))[1] > 0
            for layer in range(self.layers):
                chosen = self.experts(layer, rows)
                out["experts"] += chosen
                out["weight_bytes"] += self.dense(f"blk.{layer}.", picks) + chosen * self.expert(f"blk.{layer}.")
            for position in rows:
                seen, scored = self.attended(position)
                out["kv_rows"] += seen
                out["index_rows"] += scored
        return out


def counts(engine: Engine) -> dict[str, int]:
    work = lib.ds4_engine_work(engine.p)
    return {name: int(getattr(work, name)) for name in FIELDS}


def since(engine: Engine, before: dict[str, int]) -> dict[str, int]:
    now = counts(engine)
    return {name: now[name] - before[name] for name in FIELDS}


def text_of(folder: Path, n: int) -> list[int]:
    return np.resize(np.load(folder / "prompt.npy"), n).tolist()


def opened(sizes: Sizes, head: Path | None = None, **options: Any) -> Engine:
    return Engine(sizes.target, head, kv_type="f32", ctx=1024, mtp_margin=0.0, **options)


def started(engine: Engine, text: list[int], draft: int = 0) -> Session:
    s = engine.session()
    s.set_stops([], True)
    s.set_mtp(draft, 0)
    s.eval(text)
    return s


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("threads", [1, 2])
def test_passes(data: Path, name: str, threads: int) -> None:
    """Prompts in chunks, one token, several: each matrix once a pass, of the experts what the rows choose between them."""
    text = text_of(data / name, 130)
    sizes = Sizes(data / name, text)
    with opened(sizes, threads=threads, prefill_chunk=17) as engine:
        assert counts(engine) == dict.fromkeys(FIELDS, 0)
        s = started(engine, text[:PROMPT])
        assert counts(engine) == sizes.work([[*range(17)], [*range(17, 34)], [*range(34, 40)]], [0, 0, 1])
        before = counts(engine)
        s.step(text[PROMPT], 1)
        one = since(engine, before)
        assert one == sizes.work([[PROMPT]], [1])
        assert one["experts"] == sizes.layers * sizes.used
        every = sum(
            n for t, n in sizes.bytes.items() if not VECTORS.search(t) and "_exps" not in t and not t.startswith("mtp.")
        )
        assert one["weight_bytes"] == every + sum(sizes.used * sizes.expert(f"blk.{i}.") for i in range(sizes.layers))
        for k in (2, 3, 5, 17):
            at, before = s.position, counts(engine)
            s.eval_logits(text[at : at + k])
            assert since(engine, before) == sizes.work([[*range(at, at + k)]], [k])
        before = counts(engine)
        s.rewind(s.position - 3)
        s.logits()
        assert since(engine, before) == {**dict.fromkeys(FIELDS, 0), "logit_rows": 1, "weight_bytes": sizes.output}


@pytest.mark.parametrize("name", FIXTURES)
def test_long_contexts(data: Path, name: str) -> None:
    """What a token looks at: the window and what the indexer picks stay, what it scores grows by a row for four tokens."""
    sizes = Sizes(data / name)
    with Engine(sizes.target, ctx=4096, kv_type="fp8" if name == "edge" else "f16", prefill_chunk=512) as engine:
        s = engine.session()
        for position in (1000, 3999):
            s.eval(text_of(data / name, position - s.position))
            before = counts(engine)
            s.eval([1])
            got = since(engine, before)
            assert (got["kv_rows"], got["index_rows"]) == sizes.attended(position)
        index_layers = sizes.m["attention.compress_ratios"][: sizes.layers].count(4)
        assert got["index_rows"] == 1000 * index_layers


def test_a_batch_is_one_pass(data: Path) -> None:
    """Four sessions' tokens, and a prompt's piece beside them: one pass, and the experts of all rows once."""
    texts = [np.roll(text_of(data / "tiny", 60), 7 * i).tolist() for i in range(5)]
    every = [Sizes(data / "tiny", text) for text in texts]
    with opened(every[0]) as engine:
        sessions = [started(engine, text[: 20 + i]) for i, text in enumerate(texts[:4])]
        newcomer = engine.session()
        before = counts(engine)
        asked = [(s, [text[s.position]], 1) for s, text in zip(sessions, texts, strict=False)]
        batch_step(engine, [*asked, (newcomer, texts[4][:9], 0)])
        got = since(engine, before)
    rows = [[20 + i] for i in range(4)] + [[*range(9)]]
    chosen = [
        len(np.unique(np.concatenate([s.routes.seen[f"blk.{i}."][r].ravel() for s, r in zip(every, rows, strict=True)])))
        for i in range(every[0].layers)
    ]
    assert (got["passes"], got["rows"], got["logit_rows"], got["experts"]) == (1, 13, 5, sum(chosen))
    picks = every[0].attended(max(map(max, rows)))[1] > 0
    blocks = sum(every[0].dense(f"blk.{i}.", picks) + n * every[0].expert(f"blk.{i}.") for i, n in enumerate(chosen))
    assert got["weight_bytes"] == blocks + every[0].output
    assert got["kv_rows"] == sum(s.attended(q)[0] for s, r in zip(every, rows, strict=True) for q in r)


@pytest.mark.parametrize("form", range(3))
def test_drafting(data: Path, tmp_path: Path, form: int) -> None:
    """A draft step reads the head once and the output matrix once; rows to be made again, none after a refused draft, take one
    pass of four matrices."""
    sizes = Sizes(data / "edge")
    target, head, internal = list(head_forms(data / "edge", tmp_path))[form]
    step = sizes.dense("mtp.0.") + sizes.used * sizes.expert("mtp.0.") + sizes.bytes["output.weight"]
    repair = sum(sizes.bytes[f"mtp.0.{t}.weight"] for t in ("e_proj", "h_proj", "hc_attn_fn", "attn_kv"))
    with Engine(target, head, mtp_internal=internal, ctx=256, mtp_margin=0.0, mtp_shortlist=0) as engine:
        text = text_of(data / "edge", PROMPT)
        s = started(engine, text, 3)
        for back in (sizes.m["attention.sliding_window"] - 1, 0, 0):
            token, other = s.argmax(), s.fork()
            drafts = other.draft(token, 3).argmax(1).tolist()
            before = counts(engine)
            other.eval_logits([token, *drafts])
            verified, before = since(engine, before), counts(engine)
            assert s.step(token, 4) == [token]  # the head of this file is random
            assert since(engine, before) == {
                **verified, "head_passes": 3 + (back > 0), "head_rows": 3, "repaired_rows": back, "logit_rows": 4 + 3,
                "weight_bytes": verified["weight_bytes"] + 3 * step + (back > 0) * repair,
                "experts": verified["experts"] + 3 * sizes.used,
                "kv_rows": verified["kv_rows"] + 3 * sizes.m["attention.sliding_window"],
            }  # fmt: skip


def test_accepted_drafts_are_made_again(root: Path) -> None:
    """As many head rows as drafts were accepted, in one pass; none where none was."""
    sizes = Sizes(root / "models")
    with opened(sizes, sizes.head, mtp_shortlist=0) as engine:
        s = started(engine, list(range(300, 320)), 3)
        s.step(s.argmax(), 4)
        accepted, total = s.position - 21, 0
        for _ in range(40):
            before, at = counts(engine), s.position
            s.step(s.argmax(), 4)
            got = since(engine, before)
            assert (got["rows"], got["head_rows"], got["repaired_rows"]) == (4, 3, accepted)
            assert (got["passes"], got["head_passes"]) == (1, 3 + (accepted > 0))
            accepted = s.position - at - 1
            total += accepted
        assert total > 20


def test_a_shortlist_is_what_a_step_reads(root: Path) -> None:
    """Of the output matrix the first ids and the text's own, those of two sessions once; the target reads all of it."""
    sizes = Sizes(root / "models")
    row = sizes.bytes["output.weight"] // int(sizes.m["vocab_size"])
    with opened(sizes, sizes.head, mtp_shortlist=100) as engine:
        texts = [list(range(50, 250, 4)), list(range(60, 400, 5))]
        sessions = [started(engine, text, 1) for text in texts]
        picks = sizes.attended(max(map(len, texts)))[1] > 0
        blocks = sum(sizes.dense(f"blk.{i}.", picks) for i in range(sizes.layers)) + sizes.dense("mtp.0.")
        for s in sessions:
            s.draft(7, 1)  # the rows before are made
        for group in ([0], [1], [0, 1]):
            listed = set(range(100)).union(*(texts[i] for i in group))
            before = counts(engine)
            for out in batch_step(engine, [(sessions[i], [7], 2) for i in group]):
                assert out[0] == 7
            got = since(engine, before)
            assert got["weight_bytes"] == (
                blocks + sizes.output + len(listed) * row + got["experts"] * sizes.expert("mtp.0.")
            ), group
            assert (got["passes"], got["rows"], got["head_passes"], got["head_rows"]) == (1, 2 * len(group), 1, len(group))
            assert got["logit_rows"] == 3 * len(group) and got["repaired_rows"] == 0
            for i in group:
                sessions[i].rewind(len(texts[i]))
                sessions[i].draft(7, 1)


def test_lookup_needs_no_head(data: Path) -> None:
    """A step that a lookup drafts for: rows of the target, nothing of the head."""
    sizes = Sizes(data / "tiny")
    with opened(sizes, sizes.head) as engine:
        s = started(engine, [*range(30, 60)] * 3, 5)
        lib.ds4_session_set_head(s.p, False)
        s.set_lookup(4)
        before = counts(engine)
        s.step(30, 6)
        got = since(engine, before)
        assert (got["passes"], got["rows"], got["logit_rows"], got["head_passes"]) == (1, 6, 6, 0)


def test_nothing_runs_for_speculation_that_is_skipped(data: Path) -> None:
    """Off, without room, not worth it, at a stop, or greedy text without a head: plain decoding's work to the byte."""
    text = text_of(data / "odd", PROMPT + 9)
    sizes = Sizes(data / "odd", text)
    one = sizes.work([[PROMPT]], [1])
    with opened(sizes, sizes.head) as engine:
        for draft, room in ((0, 9), (4, 1), (-1, 9)):
            s = started(engine, text[:PROMPT], draft)
            s.costs(1.0, 1.0, 50.0, 50.0)  # a head step is dearer than fifty plain passes
            before = counts(engine)
            assert s.step(text[PROMPT], room) == [text[PROMPT]]
            assert since(engine, before) == one, draft
            before = counts(engine)
            s.argmax()
            s.next()
            s.save()
            assert since(engine, before) == dict.fromkeys(FIELDS, 0)


def test_given_drafts_cost_rows_alone(data: Path) -> None:
    text = text_of(data / "edge", PROMPT + 5)
    sizes = Sizes(data / "edge", text)
    with opened(sizes, sizes.head) as engine:
        s = started(engine, text[:PROMPT], 3)
        before = counts(engine)
        s.verify(text[PROMPT], text[PROMPT + 1 :], 9)
        assert since(engine, before) == sizes.work([[*range(PROMPT, PROMPT + 5)]], [5])
