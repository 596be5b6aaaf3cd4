"""After each cycle, every byte that a later token can read equals the state of plain decoding.

A snapshot holds just those bytes: tokens, raw rows, compressor rings, compressed and index rows, streams, for every rewind that
is still allowed; head rows and logits are compared beside it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine import Engine, Failed, Session, bits
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
    """Each accept length 0..4, starting at every position modulo 4, around the window's and the rings' wraps and modulo 128."""
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
        for start in starts:
            for accepted in range(depth + 1):
                fast, plain = text.session(engine, start), text.session(engine, start)
                fast.set_mtp(depth, 0)
                plain.set_mtp(0, 0)
                cycles(fast, plain, text, [accepted], depth)
                fast.close()
                plain.close()


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
