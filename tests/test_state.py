"""After each cycle, every byte that a later token can read equals the state of plain decoding.

A snapshot holds just those bytes: tokens, raw rows, compressor rings, compressed and index rows, streams, for every rewind that
is still allowed; head rows and logits are compared beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from engine import Engine, Failed, Session, batch_step, bits, lib
from fixtures import FIXTURES, rewrite, tensors_of

PROMPT, TEXT = 40, 560


class Text:
    """A model and its plain greedy text."""

    def __init__(self, data: Path, name: str) -> None:
        self.files = data / name / "target.gguf", data / name / "head-ds4.gguf"
        with Engine(*self.files, mtp_draft=0, prefill_chunk=64) as engine:
            session = engine.session()
            session.set_stops([], ignore_eos=True)
            session.eval(np.load(data / name / "prompt.npy")[:PROMPT])
            session.generate(TEXT)
            self.tokens = np.array(session.tokens + [0] * 32, np.int32)

    def session(self, engine: Engine, position: int) -> Session:
        session = engine.session()
        session.set_stops([], ignore_eos=True)
        session.eval(self.tokens[:position])
        return session


@pytest.fixture(scope="module")
def texts(data: Path) -> dict[str, Text]:
    return {name: Text(data, name) for name in FIXTURES}


def same(fast: Session, plain: Session, text: Text) -> None:
    """Bring the plain session to the other's position, one token at a time, and compare."""
    while plain.position < fast.position:
        plain.step(int(text.tokens[plain.position]), 1)
    assert fast.save() == plain.save(), f"state at position {fast.position}"
    assert np.array_equal(bits(fast.logits()), bits(plain.logits()))
    window = min(fast.position - 1, 24)
    assert np.array_equal(
        bits(fast.head_logits(fast.position - 1 - window, fast.position - 1)),
        bits(plain.head_logits(plain.position - 1 - window, plain.position - 1)),
    )


def cycles(fast: Session, plain: Session, text: Text, wrongs: list[int], depth: int) -> None:
    """One cycle for each entry: the draft at which it is refused (depth: none is)."""
    for wrong in wrongs:
        fast.script(text.tokens, wrong)
        before = fast.position
        fast.step(fast.argmax(), depth + 1)
        assert fast.position - before == 1 + min(wrong, depth)
        same(fast, plain, text)


@pytest.mark.parametrize("max_rewind", [64, 1000])
@pytest.mark.parametrize("name", FIXTURES)
def test_every_accept_length_everywhere(texts: dict[str, Text], name: str, max_rewind: int) -> None:
    """Each accept length 0..4, starting at every position modulo 4, around 128 and 256, the window's and the rings' wraps."""
    text, depth = texts[name], 4
    with Engine(*text.files, prefill_chunk=20, max_rewind=max_rewind, ctx=1024, mtp_margin=0.0) as engine:
        ring = 20 + min(max_rewind, 1024)  # raw rows: + window - 1; compressor rows: + 3, + 7 or + 127
        starts = sorted(
            {
                *range(41, 45),
                *range(120, 137),
                *range(248, 262),
                *(ring + w + k for w in (3, 7, 11, 15, 19, 127) for k in range(-3, 4) if 41 <= ring + w + k < 520),
            }
        )
        fast, plain = text.session(engine, starts[0]), text.session(engine, starts[0])
        plain.set_mtp(0, 0)
        for start in starts:
            for session in (fast, plain):
                session.eval(text.tokens[session.position : start])
            for accepted in range(depth + 1):
                fast.set_mtp(depth, 0)
                cycles(fast, plain, text, [accepted], depth)
                if start % (depth + 1) == accepted:  # and 64 further tokens, every further cycle refused at the same draft
                    further, behind = fast.fork(), plain.fork()
                    assert further.generate(64) == text.tokens[fast.position : fast.position + 64].tolist()
                    same(further, behind, text)
                    further.close()
                    behind.close()
                for session in (fast, plain):  # again from here, with what was refused still in the rings
                    session.rewind(start)


@pytest.mark.parametrize("name", FIXTURES)
def test_every_position_modulo_128(texts: dict[str, Text], name: str) -> None:
    """A draft refused at each of 128 positions in a row, as the first draft and behind accepted ones, twice in a row."""
    text, depth = texts[name], 4
    with Engine(*text.files, prefill_chunk=20, ctx=1024) as engine:
        base = text.session(engine, 128)
        for start in range(128, 256):
            for wrongs in ([0], [2, 1]):
                fast, plain = base.fork(), base.fork()
                fast.set_mtp(depth, 0)
                plain.set_mtp(0, 0)
                cycles(fast, plain, text, wrongs, depth)
                fast.close()
                plain.close()
            base.step(int(text.tokens[start]), 1)


@pytest.mark.parametrize("name", FIXTURES)
def test_sequences(texts: dict[str, Text], name: str) -> None:
    """Two partial rejects in a row, ten zero-accepts, a reject and then a full accept; then 64 further tokens."""
    text, depth = texts[name], 8
    with Engine(*text.files, prefill_chunk=64, ctx=1024) as engine:
        for wrongs in ([3, 5], [0] * 10, [2, 8, 8], [8, 0, 8, 1, 7, 4, 6, 2, 5, 3]):
            fast, plain = text.session(engine, 117), text.session(engine, 117)
            fast.set_mtp(depth, 0)
            cycles(fast, plain, text, wrongs, depth)
            assert fast.generate(64) == text.tokens[fast.position - 64 : fast.position].tolist()
            same(fast, plain, text)
            fast.close()
            plain.close()


def test_long_run(texts: dict[str, Text]) -> None:
    """Every position of a long run, accept lengths in turn, so that each meets each offset of windows and rings."""
    for name, text in texts.items():
        with Engine(*text.files, prefill_chunk=17, max_rewind=30, ctx=1024) as engine:
            fast, plain = text.session(engine, PROMPT), text.session(engine, PROMPT)
            fast.set_mtp(5, 0)
            order = np.random.default_rng(1).integers(0, 6, 400).tolist()
            while fast.position < TEXT + PROMPT - 8:
                cycles(fast, plain, text, [order.pop()], 5)
            assert fast.position > 500, name


def test_paused_drafting(texts: dict[str, Text]) -> None:
    """Drafting off for 5 tokens, then on: head rows are made up for at once, whatever the gap."""
    text = texts["tiny"]
    with Engine(*text.files, ctx=1024) as engine:
        fast, plain = text.session(engine, 60), text.session(engine, 60)
        for gap in (5, 1, 40, 2):
            fast.set_mtp(3, 0)
            fast.generate(11)
            fast.set_mtp(0, 0)
            fast.generate(gap)
            same(fast, plain, text)
            passes = fast.stats.head_passes
            fast.generate(3)
            assert fast.stats.head_passes == passes
        same(fast, plain, text)


@pytest.mark.parametrize("depth", [3, 8])
@pytest.mark.parametrize("name", FIXTURES)
def test_paused_oracle(texts: dict[str, Text], name: str, depth: int) -> None:
    """A drafter that is always right, paused for 5 tokens wherever the window and the rings wrap: the first cycle after it takes
    every draft again."""
    text = texts[name]
    with Engine(*text.files, prefill_chunk=17, max_rewind=30, ctx=1024) as engine:
        fast, plain = text.session(engine, 41), text.session(engine, 41)
        fast.script(text.tokens)
        while fast.position < 300:
            fast.set_mtp(depth, 0)
            cycles(fast, plain, text, [depth] * 2, depth)  # each takes all of its drafts
            fast.set_mtp(0, 0)
            before = list(fast.stats.drafted)
            for _ in range(5):
                assert len(fast.step(fast.argmax(), depth + 1)) == 1
            assert list(fast.stats.drafted) == before
            same(fast, plain, text)
        assert list(fast.stats.accepted)[:depth] == list(fast.stats.drafted)[:depth]


@pytest.mark.parametrize("name", FIXTURES)
def test_paused_head(texts: dict[str, Text], name: str) -> None:
    """The head's guesses after a pause of any length have the bits of one that never paused, and of one that was never on."""
    text = texts[name]
    with Engine(*text.files, prefill_chunk=17, max_rewind=30, ctx=1024) as engine:
        never, paused = text.session(engine, 60), text.session(engine, 60)
        for pause in (5, 1, 17, 40, 200):
            for session in (never, paused):
                session.set_mtp(4, 0)
                session.generate(11)
            paused.set_mtp(0, 0)
            for session in (never, paused):
                session.generate(pause)
            off = text.session(engine, paused.position)
            token = paused.argmax()
            guesses = paused.draft(token, 8)
            assert guesses.shape == (8, engine.vocab)
            for session in (never, off):
                assert np.array_equal(bits(session.draft(token, 8)), bits(guesses)), pause
            assert never.save() == paused.save() == off.save()
            off.close()


def test_rewind_limits(texts: dict[str, Text]) -> None:
    """Within max_rewind of the highest position ever reached, or to 0; deeper is refused and changes nothing."""
    text = texts["odd"]
    with Engine(*text.files, max_rewind=30, prefill_chunk=16, ctx=1024) as engine:
        session = text.session(engine, 200)
        session.rewind(170)
        before = session.save()
        for bad in (169, 1, -1, 171):
            with pytest.raises(Failed, match="cannot rewind"):
                session.rewind(bad)
        assert session.save() == before
        session.eval(text.tokens[170:180])
        with pytest.raises(Failed, match="cannot rewind"):
            session.rewind(169)  # the highest was 200
        plain = text.session(engine, 180)
        assert np.array_equal(bits(session.logits()), bits(plain.logits()))
        session.rewind(0)
        session.eval(text.tokens[:180])
        assert session.save() == plain.save()


def failed_pass(text: Text, tmp: Path) -> None:
    """A pass of the most rows that fails (non-finite logits) commits nothing; then back as far as may be, with plain's bits."""
    embed = np.asarray(tensors_of(text.files[0])["token_embd.weight"].data).copy()
    spoiled = next(i for i in range(2, len(embed)) if i not in set(text.tokens.tolist()))
    embed[spoiled] = np.nan
    model = rewrite(text.files[0], tmp / "spoiled.gguf", tensors={"token_embd.weight": embed})
    with Engine(model, text.files[1], prefill_chunk=17, max_rewind=30, ctx=1024) as engine:
        for start in range(150, 154):
            session, plain = text.session(engine, start), text.session(engine, start - 29)
            tokens = [*text.tokens[start : start + 16].tolist(), spoiled]
            with pytest.raises(Failed, match=f"non-finite logits at position {start + 16}"):
                session.eval(tokens)
            assert session.position == start
            session.rewind(start - 30)
            for _ in range(2):
                session.eval(text.tokens[session.position : session.position + 1])
                if session.position == start - 29:
                    assert np.array_equal(bits(session.logits()), bits(plain.logits()))
            plain.eval(text.tokens[start - 29 : start - 28])
            assert np.array_equal(bits(session.logits()), bits(plain.logits()))


def test_failed_pass(texts: dict[str, Text], tmp_path: Path) -> None:
    for text in texts.values():
        failed_pass(text, tmp_path)


def test_many_forks(texts: dict[str, Text]) -> None:
    """Forks go their own ways without touching each other."""
    text = texts["edge"]
    with Engine(*text.files, ctx=1024) as engine:
        base = text.session(engine, 130)
        kept = base.save()
        other = base.fork()
        other.eval([5, 6, 7, 8] * 10)
        forks = [base.fork() for _ in range(3)]
        for depth, fork in enumerate(forks):
            fork.set_mtp(depth, 0)
            fork.script(text.tokens, depth)
            fork.generate(50)
        for fork in forks:
            assert fork.tokens == text.tokens[:180].tolist()
            assert fork.save() == forks[0].save()
        assert base.save() == kept


# ---- anything, in any order ----


class Pair:
    """A session that does all it can, and one that only ever decodes token by token; whatever was done, their states are equal."""

    def __init__(self, engines: list[Engine], seed: int) -> None:
        self.engines, self.rng = engines, np.random.default_rng(seed)
        self.fast, self.plain, self.companion = (engines[0].session() for _ in range(3))
        for s in (self.fast, self.plain, self.companion):
            s.set_stops([], True)
        self.plain.set_mtp(0, 0)
        self.prompt()
        self.follow()
        self.companion.eval([5, 6, 7])

    def tokens(self, n: int) -> list[int]:
        return [int(t) for t in self.rng.integers(2, self.fast.engine.vocab, n)]

    def drafts(self, token: int, n: int) -> tuple[list[int], int]:
        """n tokens that plain decoding says behind `token`, one of them often another; how many before that."""
        oracle = self.plain.fork()
        oracle.gen = self.plain.gen
        out = [token]
        while len(out) <= n:
            oracle.step(out[-1], 1)
            out.append(oracle.next())
        oracle.close()
        wrong = int(self.rng.integers(0, n + 3))
        return [t if i != wrong else (t + 1) % self.fast.engine.vocab for i, t in enumerate(out[1:])], min(wrong, n)

    def start(self) -> int:
        """The plain session's choice: asking the other one for its own would let it put things right before the step."""
        return self.plain.next() if self.rng.random() < 0.8 else self.tokens(1)[0]

    def prompt(self) -> None:
        """New tokens, or a piece of the text once more, for lookups to find."""
        text, n = self.fast.tokens, int(self.rng.integers(1, 60))
        self.fast.eval(text[-n:] if text and self.rng.random() < 0.6 else self.tokens(n))

    def own_drafts(self) -> None:
        """By the head, by lookup, by whichever is likelier; as many as asked for, or as pay."""
        self.fast.set_lookup(int(self.rng.choice([0, 2, 9])))
        self.fast.costs(1, 0.05)  # so that what is drafted does not depend on the clock
        self.fast.set_mtp(int(self.rng.integers(-1, 6)), float(self.rng.choice([0, 3])))
        self.fast.step(self.start(), int(self.rng.integers(1, 8)))

    def verify(self) -> None:
        token, most = self.start(), int(self.rng.integers(1, 20))
        drafts, right = self.drafts(token, int(self.rng.integers(0, 17)))
        self.fast.set_mtp(0, 0)
        done = self.fast.verify(token, drafts, most)
        assert len(done) == min(1 + right, most)
        if self.rng.random() < 0.4:
            self.fast.keep(int(self.rng.integers(1, len(done) + 1)))

    def draft(self) -> None:
        self.fast.draft(self.start(), int(self.rng.integers(0, 9)))

    def batch(self) -> None:
        """In one pass with another session, which decodes, or reads a piece of a prompt."""
        token, other = self.start(), self.tokens(int(self.rng.integers(1, 30)))
        drafts, right = self.drafts(token, 5)
        self.fast.set_mtp(5, 0)
        self.fast.set_lookup(0)
        self.fast.script([*self.fast.tokens, token, *drafts])
        asked = [(self.companion, other if len(other) > 9 else other[:1], 0 if len(other) > 9 else 4), (self.fast, [token], 9)]
        before = self.fast.position
        for got in batch_step(self.fast.engine, asked if self.rng.random() < 0.5 else asked[::-1]):
            assert not isinstance(got, Failed)
        assert 1 <= self.fast.position - before <= 1 + right  # drafts are cut when rows are short
        lib.hook_script_free(self.fast.p, self.fast.scripts.pop())
        if self.companion.position > 700:
            self.companion.rewind(0)
            self.companion.eval([5, 6, 7])

    def fork(self) -> None:
        fork = self.fast.fork()
        fork.gen = self.fast.gen
        self.fast.close()
        self.fast = fork

    def move(self) -> None:
        """To another engine: other chunks, threads and kernels."""
        kept, gen = self.fast.save(), self.options
        self.fast.close()
        self.companion.close()
        engine = self.engines[int(self.rng.integers(len(self.engines)))]
        self.fast, self.companion = engine.session(), engine.session()
        self.fast.load(kept)
        for s in (self.fast, self.companion):
            s.set_stops([], True)
        self.fast.set_gen(**gen)
        self.companion.eval([5, 6, 7])

    def rewind(self) -> None:
        floor = lib.ds4_session_rewind_floor(self.fast.p)
        to = int(self.rng.integers(floor, self.fast.position + 1)) if self.rng.random() < 0.95 else 0
        for s in (self.fast, self.plain):
            s.rewind(to)

    options: dict[str, object] = {}

    def sampler(self) -> None:
        """Another way to choose tokens, for both."""
        rng = self.rng
        self.options = {"temperature": 0.0, "seed": int(rng.integers(1 << 40))}
        if rng.random() < 0.7:
            self.options |= {
                "temperature": float(rng.choice([0.1, 0.8, 2])),
                "top_k": int(rng.choice([0, 5])),
                "top_p": float(rng.choice([1, 0.8])),
            }
        if rng.random() < 0.5:
            recent = max(0, self.fast.position - int(rng.integers(0, 30)))  # few tokens count, so that one too many shows
            self.options |= {
                "frequency_penalty": float(rng.choice([1.5, -4])),
                "penalty_from": recent,
                "bias": {3: 1.5, 8: -np.inf},
            }
        for s in (self.fast, self.plain):
            s.set_gen(**self.options)

    def follow(self) -> None:
        """Bring the plain session to the other's position, one token at a time."""
        tokens = self.fast.tokens
        assert self.plain.tokens == tokens[: self.plain.position]
        for token in tokens[self.plain.position :]:
            self.plain.step(token, 1)

    def compare(self, what: str) -> None:
        fast, plain = self.fast, self.plain
        at = f"{what} at {fast.position}"
        assert fast.save() == plain.save(), at
        floor = lib.ds4_session_rewind_floor(fast.p)
        assert floor == lib.ds4_session_rewind_floor(plain.p), at
        if not fast.position:
            return
        assert np.array_equal(bits(fast.logits()), bits(plain.logits())), at
        assert fast.next() == plain.next(), at
        rows = max(floor, fast.position - 25), fast.position - 1
        if self.rng.random() < 0.3 and rows[0] < rows[1]:
            assert np.array_equal(bits(fast.head_logits(*rows)), bits(plain.head_logits(*rows))), at

    def run(self, n: int) -> None:
        actions = [
            self.prompt,
            self.own_drafts,
            self.verify,
            self.draft,
            self.batch,
            self.fork,
            self.move,
            self.rewind,
            self.sampler,
        ]
        likely = np.array([1.5, 6, 6, 1, 5, 1, 1, 2, 1.0])
        for _ in range(n):
            if self.fast.position > 850:
                self.fast.rewind(0)
                self.plain.rewind(0)
            action = actions[int(self.rng.choice(len(actions), p=likely / likely.sum()))] if self.fast.position else self.prompt
            action()
            self.follow()
            if self.rng.random() < 0.6:
                self.compare(action.__name__)


@pytest.mark.parametrize("seed", range(40 if os.environ.get("DS4_DEEP") else 2))
@pytest.mark.parametrize("name", FIXTURES)
def test_anything_in_any_order(data: Path, name: str, seed: int) -> None:
    """Prompts, the head's drafts, right and wrong ones, what is kept of a step, batches, forks, snapshots into other engines,
    rewinds and samplers: after each the state, logits, next token and head rows are those of plain decoding."""
    files = data / name / "target.gguf", data / name / "head-ds4.gguf"
    same_rewind: dict[str, int] = {"max_rewind": 30, "ctx": 1024}
    with (
        Engine(*files, prefill_chunk=17, **same_rewind) as first,
        Engine(*files, prefill_chunk=64, threads=1, isa="scalar", mtp_shortlist=64, **same_rewind) as second,
    ):
        Pair([first, second], seed).run(150)
