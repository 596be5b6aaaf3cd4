"""Speculation never changes the text: every accept length, depth, margin and thread count, bit for bit.

The random heads of the fixtures never agree with their targets, so acceptance is made by a scripted drafter: it proposes the
plain text with one wrong token at a chosen place of each cycle.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine import Engine, Failed, Session, bits
from fixtures import FIXTURES

DEPTHS = [1, 2, 3, 4, 8, 16]
PROMPT, LENGTH, END = 40, 600, 200


def started(engine: Engine, prompt: np.ndarray) -> Session:
    session = engine.session()
    session.set_stops([], ignore_eos=True)
    session.eval(prompt)
    return session


class Plain:
    """What plain decoding gives: the text, the logits after it, and the head's logits at its end."""

    def __init__(self, data: Path, name: str) -> None:
        self.target, self.head = data / name / "target.gguf", data / name / "head-ds4.gguf"
        self.prompt = np.load(data / name / "prompt.npy")[:PROMPT]
        with Engine(self.target, self.head, mtp_draft=0, threads=1) as engine:
            session = started(engine, self.prompt)
            self.tokens = session.generate(LENGTH)
            assert session.stats.head_passes == 0
            self.logits = session.logits()
            fed = started(engine, np.concatenate([self.prompt, np.array(self.tokens, np.int32)]))
            assert np.array_equal(bits(fed.logits()), bits(self.logits))
            self.head_logits = fed.head_logits(fed.position - 12, fed.position - 1)
        self.text = np.concatenate([self.prompt, np.array(self.tokens, np.int32), np.zeros(32, np.int32)])


@pytest.fixture(scope="module")
def plains(data: Path) -> dict[str, Plain]:
    return {name: Plain(data, name) for name in FIXTURES}


def same_end(session: Session, plain: Plain) -> None:
    assert np.array_equal(bits(session.logits()), bits(plain.logits))
    assert np.array_equal(bits(session.head_logits(session.position - 12, session.position - 1)), bits(plain.head_logits))


def identity(session: Session) -> None:
    """accepted + corrections + bonus = emitted."""
    stats = session.stats
    assert sum(stats.accepted) + stats.corrections + stats.bonus == stats.emitted
    assert all(a <= d for a, d in zip(stats.accepted, stats.drafted, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", FIXTURES)
def test_every_accept_length(plains: dict[str, Plain], name: str, depth: int, threads: int) -> None:
    """One wrong token at each place (-1: none), margins 0, 0.3, 3 and 1000: 600 tokens and the end's bits are plain's. Margins, which
    hold nearly all back, are for the last 200 tokens but for one model; and fewer with two threads, who do not judge them."""
    plain, every = plains[name], name == "tiny" and threads == 1
    with Engine(plain.target, plain.head, threads=threads) as engine:
        for margin in (0.0, 0.3, 3.0, 1000.0) if threads == 1 else (0.0, 3.0):
            places = (
                [-1, *range(depth)]
                if margin == 0 and every
                else [-1]
                if margin == 1000
                else sorted({-1, depth // 2, depth - 1} if margin == 0 else {-1, depth - 1})
            )
            begin = 0 if margin == 0 or every else LENGTH - END
            for wrong in places:
                session = started(engine, plain.text[: PROMPT + begin])
                session.set_mtp(depth, margin)
                session.script(plain.text, wrong)
                assert session.generate(LENGTH - begin) == plain.tokens[begin:], f"margin {margin}, wrong {wrong}"
                same_end(session, plain)
                identity(session)
                accepted = list(session.stats.accepted)
                if margin == 0:  # exactly the drafts before the wrong one are taken
                    assert all(accepted[: depth if wrong < 0 else wrong])
                    assert not any(accepted[depth if wrong < 0 else wrong :])
                if margin == 1000:
                    assert not any(accepted) and session.stats.below_margin > 0
                session.close()


@pytest.mark.parametrize("depth", [1, 3, 16])
def test_work_is_saved(plains: dict[str, Plain], depth: int) -> None:
    """With every draft right a pass commits depth + 1 tokens."""
    plain = plains["tiny"]
    with Engine(plain.target, plain.head) as engine:
        session = started(engine, plain.prompt)
        session.set_mtp(depth, 0)
        session.script(plain.text)
        before = session.stats.passes
        session.generate(LENGTH)
        assert session.stats.passes - before == -(-LENGTH // (depth + 1))


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("layout", ["head-ds4.gguf", "head-llama.gguf"])
def test_own_head(plains: dict[str, Plain], data: Path, name: str, layout: str) -> None:
    """The model's own (bad) head drafts: same text, same bits, and the head ran."""
    plain = plains[name]
    for depth, margin in ((1, 3.0), (2, 0.0), (5, 0.0)):
        with Engine(plain.target, data / name / layout, mtp_draft=depth, mtp_margin=margin) as engine:
            session = started(engine, plain.prompt)
            assert session.generate(LENGTH) == plain.tokens
            same_end(session, plain)
            identity(session)
            assert session.stats.head_passes >= session.stats.cycles and session.stats.drafted[depth - 1] > 0


@pytest.mark.parametrize("name", FIXTURES)
def test_fork_rewind_and_snapshots_in_mid_speculation(plains: dict[str, Plain], name: str) -> None:
    """At any point of a speculative run a fork, a rewound copy and a resumed snapshot go on with plain's bits."""
    plain = plains[name]
    with (
        Engine(plain.target, plain.head, max_rewind=64) as engine,
        Engine(plain.target, plain.head, max_rewind=64, prefill_chunk=32, threads=1) as other,
    ):
        session = started(engine, plain.prompt)
        session.set_mtp(4, 0)
        session.script(plain.text, 2)
        for _ in range(4):
            done = session.position - PROMPT
            session.generate(101)
            copy, back = session.fork(), session.fork()
            resumed = other.session()
            resumed.set_stops([], ignore_eos=True)
            resumed.load(session.save())
            back.rewind(max(1, back.position - 37))
            for s in (copy, back, resumed):
                s.set_mtp(2, 0)
                rest = s.generate(LENGTH - (s.position - PROMPT))
                assert rest == plain.tokens[LENGTH - len(rest) :], done
                same_end(s, plain)
                s.close()


def test_rewind_everywhere(plains: dict[str, Plain]) -> None:
    """From one long run back to every position within reach: logits there and the next tokens are plain's."""
    plain = plains["odd"]
    with Engine(plain.target, plain.head, prefill_chunk=17, max_rewind=150) as engine:
        session = started(engine, plain.text[: PROMPT + 400])
        forward = [bits(session.logits())]
        base = session.fork()
        for back in (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 150):
            s = base.fork()
            s.rewind(s.position - back)
            s.set_mtp(3, 0)
            s.script(plain.text, 1)
            at = s.position - PROMPT
            assert s.generate(40) == plain.tokens[at : at + 40]
            s.eval(plain.text[s.position : PROMPT + 400]) if s.position < PROMPT + 400 else None
            if s.position == PROMPT + 400:
                assert np.array_equal(bits(s.logits()), forward[0])
            s.close()
        with pytest.raises(Failed, match="cannot rewind"):
            base.rewind(base.position - 151)
        assert base.position == PROMPT + 400 and np.array_equal(bits(base.logits()), forward[0])


def test_stops_and_limits(plains: dict[str, Plain]) -> None:
    """A stop token is never evaluated, wherever in a block it would stand; max tokens and a full context cut a block."""
    plain = plains["tiny"]
    stop = plain.tokens[50]
    first = plain.tokens.index(stop)
    for depth in (1, 2, 8):
        with Engine(plain.target, plain.head, ctx=PROMPT + 100, max_rewind=64) as engine:
            for lead in range(min(depth, first) + 1):
                session = started(engine, plain.prompt)
                session.set_mtp(depth, 0)
                session.generate(first - lead)
                session.set_stops([stop], ignore_eos=True)
                session.script(plain.text)
                assert session.generate(500) == plain.tokens[first - lead : first]
                assert session.argmax() == stop
                session.close()
            for most in (1, 2, 3, 7):
                session = started(engine, plain.prompt)
                session.set_mtp(depth, 0)
                session.script(plain.text)
                assert session.generate(most) == plain.tokens[:most]
                assert session.generate(500) == plain.tokens[most:100]  # the last slot of the context is used
                with pytest.raises(Failed, match="context is full"):
                    session.step(5, 1)
                session.close()


def test_margin_env_free_log(plains: dict[str, Plain]) -> None:
    """conf_log gives a line a draft, with the target's choice and the verdict."""
    plain = plains["tiny"]
    with Engine(plain.target, plain.head, conf_log=True, mtp_draft=3, mtp_margin=0.3) as engine:
        session = started(engine, plain.prompt)
        session.script(plain.text, 1)
        session.generate(60)
        lines = engine.lines
        assert lines and all(line.startswith("mtp: position ") for line in lines)
        assert sum("accepted" in line for line in lines) == sum(session.stats.accepted)
        assert any("rejected" in line for line in lines)


def test_snapshot_is_refused(plains: dict[str, Plain], tmp_path: Path) -> None:
    """Another model, another kv type, a damaged or longer snapshot: refused whole, the session as it was."""
    plain, foreign = plains["tiny"], plains["odd"]
    with (
        Engine(plain.target, kv_type="f16") as engine,
        Engine(foreign.target) as wrong,
        Engine(plain.target, kv_type="f32") as f32,
        Engine(plain.target, ctx=20, max_rewind=20) as small,
    ):
        session = started(engine, plain.prompt)
        good = session.save()
        broken = bytearray(good)
        broken[len(broken) // 2] ^= 1
        for target, data, message in (
            (wrong, good, "another model"),
            (f32, good, "kv type"),
            (engine, bytes(broken), "checksum"),
            (engine, good[:-1], "damaged"),
            (engine, good[:20], "not a snapshot"),
            (small, good, "does not fit"),
            (engine, b"x" * len(good), "not a snapshot"),
        ):
            s = target.session()
            s.eval([3, 5, 7])
            before = bits(s.logits())
            with pytest.raises(Failed, match=message):
                s.load(data)
            assert s.tokens == [3, 5, 7] and np.array_equal(bits(s.logits()), before)
        s = engine.session()
        s.eval([3, 5, 7])
        before, step = s.save(), len(good) // 64
        altered = [good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :] for at in (*range(64), *range(64, len(good), step))]
        for bad in (*altered, *(good[:n] for n in range(0, len(good), step)), good + b"\0"):
            with pytest.raises(Failed):
                s.load(bad)
            assert s.save() == before
        s.load(good)
        assert np.array_equal(bits(s.logits()), bits(session.logits())) and s.save() == good
