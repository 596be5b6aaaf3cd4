"""Ends of a generation at every offset of an accepted block: EOS, stop tokens, token limits, the end of the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import Engine, Failed, Session, batch_step, bits, check, ffi, lib
from fixtures import rewrite

PROMPT, DEPTH = 40, 8


class Case:
    """The tiny model with an EOS of our choosing and its plain text."""

    def __init__(self, data: Path, tmp: Path) -> None:
        source = data / "tiny"
        prompt = np.load(source / "prompt.npy")[:PROMPT]
        with Engine(source / "target.gguf") as engine:
            session = engine.session()
            session.set_stops([], ignore_eos=True)
            session.eval(prompt)
            tokens = session.generate(60)
        # A token that is said first at 25 or later, so that the text before it is as long as any block.
        self.end = next(i for i in range(25, 60) if tokens[i] not in tokens[:i])
        self.eos = tokens[self.end]
        self.model = rewrite(source / "target.gguf", tmp / "eos.gguf", meta={"tokenizer.ggml.eos_token_id": self.eos})
        self.head = source / "head-ds4.gguf"
        self.tokens = tokens
        self.text = np.array([*prompt.tolist(), *tokens, *[0] * 20], np.int32)

    def session(self, engine: Engine, position: int, depth: int = DEPTH) -> Session:
        session = engine.session()
        session.set_mtp(depth, 0)
        session.eval(self.text[:position])
        session.script(self.text)
        return session


@pytest.fixture(scope="module")
def case(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(data, tmp_path_factory.mktemp("stops"))


def identity(session: Session) -> None:
    s = session.stats
    assert sum(s.accepted) + s.corrections + s.bonus == s.emitted


def ended_like_plain(session: Session, engine: Engine, case: Case, position: int) -> None:
    """The state at an end is the state of plain decoding there."""
    assert session.position == position and session.tokens == case.text[:position].tolist()
    plain = engine.session()
    plain.set_mtp(0, 0)
    plain.eval(case.text[:position])
    assert session.save() == plain.save() and np.array_equal(bits(session.logits()), bits(plain.logits()))
    identity(session)
    plain.close()


@pytest.mark.parametrize("kind", ["eos", "stop token"])
def test_stop_at_every_offset(case: Case, kind: str) -> None:
    """The stop stands at every offset of a block of 9; limits before, at and behind it. It is never evaluated."""
    with Engine(case.model, case.head, ctx=256) as engine:
        for offset in range(DEPTH + 2):
            start = case.end - offset
            for most in sorted({1, max(1, offset - 1), max(1, offset), offset + 1, offset + 2, 50}):
                session = case.session(engine, PROMPT + start)
                if kind == "stop token":
                    session.set_stops([1, case.eos, 2], ignore_eos=True)
                got = session.generate(most)
                assert got == case.tokens[start : start + min(most, offset)], (offset, most)
                ended_like_plain(session, engine, case, PROMPT + start + len(got))
                assert (session.argmax() == case.eos) == (most >= offset)
                session.close()


@pytest.mark.parametrize("max_rewind", [0, 3, 64])
def test_keep_at_every_offset(case: Case, max_rewind: int) -> None:
    """A stop found in the text of an accepted block: what is kept of it is the state of plain decoding, how far it goes back, the
    snapshot and the counters included; and it goes on as plain decoding does, whatever may stand in its rings."""
    with Engine(case.model, case.head, ctx=256, max_rewind=max_rewind, prefill_chunk=17) as engine:
        for kept in range(1, DEPTH + 2):
            start = case.end - DEPTH - 1
            session, plain = case.session(engine, PROMPT + start), case.session(engine, PROMPT + start, 0)
            assert len(session.step(int(case.text[PROMPT + start]), DEPTH + 1)) == DEPTH + 1
            session.keep(kept)
            for i in range(kept):
                plain.generate(1)
                assert np.array_equal(bits(step_logits(session, i)), bits(plain.logits()))
            ended_like_plain(session, engine, case, PROMPT + start + kept)
            assert session.save() == plain.save()
            floor = lib.ds4_session_rewind_floor
            assert floor(session.p) == floor(plain.p) == max(1, PROMPT + start + kept - max_rewind)
            assert session.stats.emitted == plain.stats.emitted == kept and sum(session.stats.accepted) == kept - 1
            with pytest.raises(Failed, match=f"the last step has no row {kept}"):
                step_logits(session, kept)
            for wrong in (0, kept + 1):
                with pytest.raises(Failed, match=f"{wrong} tokens to keep; the last step committed {kept}"):
                    session.keep(wrong)
            for s in (session, plain):
                s.set_stops([], ignore_eos=True)
            assert session.generate(20) == plain.generate(20)
            assert session.save() == plain.save()
            identity(session)
            session.rewind(session.position - min(max_rewind, 2))
            if max_rewind:
                with pytest.raises(Failed, match="the last step committed 0"):
                    session.keep(1)


GENS: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.9, "seed": 4},
    {"frequency_penalty": 0.4, "presence_penalty": 0.1, "penalty_from": PROMPT},
    {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.2, "seed": 9, "bias": {5: 2.0}},
]


@pytest.mark.parametrize("batch", [False, True], ids=["alone", "batch"])
@pytest.mark.parametrize("gen", GENS, ids=["drawn", "penalties", "both"])
def test_stops_of_chosen_text(case: Case, gen: dict[str, Any], batch: bool) -> None:
    """A stop token at every offset of a block of drawn or adjusted text, alone and in a batch, the limit around it: the text, the
    next token and the state are plain's."""
    with Engine(case.model, case.head, ctx=256) as engine:

        def started(depth: int, tokens: list[int]) -> Session:
            session = engine.session()
            session.set_mtp(depth, 0)
            session.set_gen(**gen)
            session.set_stops([], ignore_eos=True)
            session.eval(case.text[:PROMPT])
            for token in tokens:
                session.step(token, 1)
            return session

        plain, text = started(0, []), []
        for _ in range(60):
            text.append(plain.next())
            plain.step(text[-1], 1)
        end = next(i for i in range(DEPTH + 2, 60) if text[i] not in text[:i])
        company = engine.session()
        for offset in range(DEPTH + 2):
            start = end - offset
            for most in sorted({1, max(1, offset), offset + 1, 30}):
                session, out = started(DEPTH, text[:start]), []
                session.set_stops([text[end]], ignore_eos=True)
                session.script([*case.text[:PROMPT], *text])
                while len(out) < most and not lib.ds4_session_is_stop(session.p, token := session.next()):
                    asked = [(company, [3, 4, 5], 0), (session, [token], most - len(out))]
                    out += batch_step(engine, asked)[1] if batch else session.step(token, most - len(out))
                    if company.position > 200:
                        company.rewind(0)
                n = min(most, offset)
                assert out == text[start : start + n] and session.next() == text[start + n]
                assert session.stats.cycles - start == -(-n // (DEPTH + 1))  # one pass for a whole block
                behind = started(0, text[: start + n])
                assert session.save() == behind.save() and np.array_equal(bits(session.logits()), bits(behind.logits()))
                identity(session)
                session.close()
                behind.close()


def step_logits(session: Session, i: int) -> np.ndarray:
    """float32 [V]: logits after the i-th token of the last step."""
    p = check(lib.ds4_session_step_logits(session.p, i))
    return np.frombuffer(ffi.buffer(p, 4 * session.engine.vocab), np.float32)


def test_eval_speculative_argmax_stops(case: Case) -> None:
    """The C API's own loop: the same ends, and it returns the token that comes next."""
    with Engine(case.model, case.head, ctx=256) as engine:
        for offset in range(1, DEPTH + 2):
            start = case.end - offset
            session = case.session(engine, PROMPT + start)
            token = lib.ds4_session_eval_speculative_argmax(session.p, int(case.text[PROMPT + start]), 50)
            assert token == case.eos
            ended_like_plain(session, engine, case, PROMPT + case.end)
            session.close()
            for most in range(1, offset + 1):
                session = case.session(engine, PROMPT + start)
                token = lib.ds4_session_eval_speculative_argmax(session.p, int(case.text[PROMPT + start]), most)
                assert token == case.text[PROMPT + start + most] and session.position == PROMPT + start + most
                session.close()


def test_small_limits(case: Case) -> None:
    """max 0 is refused, 1 and 2 give 1 and 2, whatever the depth."""
    with Engine(case.model, case.head, ctx=256) as engine:
        for depth in (1, 2, 8, 16):
            session = case.session(engine, PROMPT, depth)
            with pytest.raises(Failed, match="max is 0"):
                session.step(int(case.text[PROMPT]), 0)
            assert session.position == PROMPT
            assert session.step(int(case.text[PROMPT]), 1) == case.tokens[:1]
            assert session.step(int(case.text[PROMPT + 1]), 2) == case.tokens[1:3]
            identity(session)


def test_end_of_context(case: Case) -> None:
    """The last slots at depth 8; prompts of ctx - 1, ctx and ctx + 1 tokens."""
    for room in range(11):
        with Engine(case.model, case.head, ctx=PROMPT + room, max_rewind=64) as engine:
            session = case.session(engine, PROMPT)
            assert session.generate(100) == case.tokens[:room]
            ended_like_plain(session, engine, case, PROMPT + room)
            with pytest.raises(Failed, match="context is full|do not fit"):
                session.step(3, 1)
            with pytest.raises(Failed, match="do not fit a context"):
                session.eval([3])
            ended_like_plain(session, engine, case, PROMPT + room)
    with Engine(case.model, case.head, ctx=30) as engine:
        for n in (29, 30):
            session = case.session(engine, n)
            assert session.position == n and session.argmax() >= 0
            assert len(session.step(int(case.text[n]), 5)) == 1 if n == 29 else True
        session = engine.session()
        with pytest.raises(Failed, match="31 tokens at position 0 do not fit a context of 30"):
            session.eval(case.text[:31])
        assert session.position == 0


def test_cancel(case: Case) -> None:
    """A cancel ends the next call with an error; the session stays as it was and goes on after it is cleared."""
    with Engine(case.model, case.head, ctx=256) as engine:
        session = case.session(engine, PROMPT)
        lib.ds4_session_cancel(session.p)
        for call in (lambda: session.step(int(case.text[PROMPT]), 5), lambda: session.eval(case.text[PROMPT : PROMPT + 5])):
            with pytest.raises(Failed, match=f"cancelled at position {PROMPT}"):
                call()
        assert lib.ds4_session_cancelled(session.p)
        lib.ds4_session_clear_cancel(session.p)
        assert session.generate(20) == case.tokens[:20]
        ended_like_plain(session, engine, case, PROMPT + 20)
