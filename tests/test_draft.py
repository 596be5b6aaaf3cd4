"""Cycles whose drafts the caller chooses: ds4_session_draft, ds4_session_verify and ds4_session_verify_logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from engine import Engine, Failed, bits

MODELS = [
    (ROOT / "tests/data/tiny/target.gguf", ROOT / "tests/data/tiny/head-ds4.gguf"),
    (ROOT / "models/small.gguf", ROOT / "models/small-mtp.gguf"),
]
PROMPT, LENGTH = list(range(40, 72)), 40


@pytest.mark.parametrize(("model", "head"), MODELS, ids=["tiny", "small"])
@pytest.mark.parametrize("margin", [0.0, 3.0])
def test_a_cycle_by_hand_is_a_step(model: Path, head: Path, margin: float) -> None:
    """draft, then verify: what is drafted, accepted, committed and left is what ds4_session_step does, bit for bit."""
    with Engine(model, head, threads=1) as engine:
        steps, hand = engine.session(), engine.session()
        for session in (steps, hand):
            session.set_mtp(3, margin)
            session.set_stops([], ignore_eos=True)
            session.eval(PROMPT)
        while steps.position < len(PROMPT) + LENGTH:
            token = steps.argmax()
            assert hand.argmax() == token
            before = hand.save()
            rows = hand.draft(token, 3)
            assert rows.shape == (3, engine.vocab)
            assert hand.save() == before and hand.position == steps.position
            assert hand.verify(token, [int(r.argmax()) for r in rows], 8) == steps.step(token, 8)
            assert np.array_equal(bits(hand.logits()), bits(steps.logits()))
            last = hand.position - 2
            if hand.tokens[last + 1] == token:  # nothing was accepted: that row has the first draft's inputs
                assert np.array_equal(bits(hand.head_logits(last, last + 1)[0]), bits(rows[0]))
        assert hand.tokens == steps.tokens
        for field in ("emitted", "cycles", "passes", "below_margin", "corrections", "bonus"):
            assert getattr(hand.stats, field) == getattr(steps.stats, field), field
        assert list(hand.stats.accepted) == list(steps.stats.accepted)
        if "small" in model.name:
            assert sum(hand.stats.accepted) >= (5 if margin else 20)


SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 2.0, "bias": {5: 3.0}},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "presence_penalty": 0.7, "seed": 6},
    {"temperature": 0.8, "seed": 7, "scheme": "rejection"},
    {"temperature": 1.2, "top_k": 9, "min_p": 0.02, "frequency_penalty": 0.3, "seed": 8, "scheme": "rejection"},
]


@pytest.mark.parametrize(("model", "head"), MODELS, ids=["tiny", "small"])
@pytest.mark.parametrize("sampler", range(len(SAMPLERS)))
def test_drafts_drawn_from_given_logits(model: Path, head: Path, sampler: int) -> None:
    """draft, then verify_logits: the step that ds4_session_step makes, however tokens are chosen."""
    with Engine(model, head, threads=1) as engine:
        steps, hand = engine.session(), engine.session()
        for session in (steps, hand):
            session.set_mtp(3, 0.0)
            session.set_stops([7, 8, 9], ignore_eos=True)
            session.eval(PROMPT)
            session.set_gen(**SAMPLERS[sampler])
        while steps.position < len(PROMPT) + 2 * LENGTH:
            token = steps.next()
            assert hand.next() == token
            before = hand.save()
            rows = hand.draft(token, 3)
            assert hand.save() == before
            assert hand.verify_logits(token, rows, 8) == steps.step(token, 8)
            assert hand.save() == steps.save()
        for field in ("emitted", "cycles", "passes", "corrections", "bonus"):
            assert getattr(hand.stats, field) == getattr(steps.stats, field), field
        assert list(hand.stats.accepted) == list(steps.stats.accepted)
        if "small" in model.name:
            assert sum(hand.stats.accepted) >= 15


def test_given_logits_that_are_none() -> None:
    """NaN and infinity are refused, -inf rules a token out; rows beyond what fits are not read."""
    with Engine(*MODELS[0], threads=1) as engine:
        session = engine.session()
        session.eval(PROMPT)
        before = session.save()
        for value in (np.nan, np.inf):
            rows = np.zeros((3, engine.vocab), np.float32)
            rows[1, 4] = value
            with pytest.raises(Failed, match="draft logit 4 of row 1 is"):
                session.verify_logits(3, rows, 4)
        with pytest.raises(Failed, match="17 drafts; a cycle takes at most 16"):
            session.verify_logits(3, np.zeros((17, engine.vocab)), 4)
        assert session.save() == before
        only = np.full((1, engine.vocab), -np.inf)
        for gen in SAMPLERS:
            session.set_gen(**gen)
            assert session.verify_logits(3, only, 4) == [3]  # nothing can be drawn from it, or what is drawn is refused
            session.rewind(len(PROMPT))
        assert session.verify_logits(3, only[:0], 4) == [3]


def test_a_token_that_was_drawn_stays_drawn() -> None:
    """Rejection leaves the token drawn in a draft's place; guesses in between do not lose it."""
    with Engine(*MODELS[0], mtp_draft=3, threads=1) as engine:
        session, left = engine.session(), 0
        session.set_stops([], ignore_eos=True)
        session.eval(PROMPT)
        session.set_gen(temperature=1.0, seed=3, scheme="rejection")
        for _ in range(20):
            session.step(session.next(), 4)
            before, token = session.save(), session.next()
            left += np.frombuffer(before[44:48], np.int32)[0] == token  # the snapshot's header holds it
            session.draft(token, 3)
            assert session.save() == before and session.next() == token
        assert left > 5


def test_any_drafts_leave_the_text_alone() -> None:
    model, head = MODELS[0]
    with Engine(model, head, threads=1) as engine:
        plain = engine.session()
        plain.set_mtp(0, 0)
        plain.set_stops([], ignore_eos=True)
        plain.eval(PROMPT)
        text = plain.generate(LENGTH)
        session = engine.session()
        session.set_mtp(0, 0)  # the caller's drafts do not depend on the session's depth
        session.set_stops([], ignore_eos=True)
        session.eval(PROMPT)
        out: list[int] = []
        for cycle in range(LENGTH):
            right = cycle % 5
            drafts = [*text[len(out) + 1 :][:right], 1, 2, 3][:16]
            done = session.verify(session.argmax(), drafts, LENGTH - len(out))
            assert len(done) >= min(1 + right, LENGTH - len(out))
            out += done
            if len(out) == LENGTH:
                break
        assert out == text
        assert np.array_equal(bits(session.logits()), bits(plain.logits()))


def test_stops_limits_and_errors() -> None:
    model, head = MODELS[0]
    with Engine(model, head, threads=1, ctx=48) as engine:
        session = engine.session()
        assert session.draft(5, 4).shape == (0, engine.vocab)  # nothing to draft from
        assert session.verify(PROMPT[0], [], 4) == PROMPT[:1]
        session.eval(PROMPT[1:])
        token = session.argmax()
        ids = [int(row.argmax()) for row in session.draft(token, 4)]
        session.set_stops(ids[1:2], ignore_eos=True)
        assert len(session.draft(token, 4)) == ids.index(ids[1]) + 1
        assert session.stats.cycles == 1
        for call, message in (
            (lambda: session.draft(-1, 1), "token -1 is outside the vocabulary"),
            (lambda: session.draft(1, 17), "17 drafts; expected 0 to 16"),
            (lambda: session.verify(1, [1] * 17, 4), "17 drafts; a cycle takes at most 16"),
            (lambda: session.verify(1, [1, 10**6], 4), "token 1000000 is outside the vocabulary"),
            (lambda: session.verify(1, [1], 0), "max is 0"),
        ):
            with pytest.raises(Failed, match=message):
                call()
        assert session.position == len(PROMPT)
        session.set_stops([], ignore_eos=True)
        assert len(session.draft(token, 16)) == 48 - len(PROMPT) - 1
    with Engine(model, threads=1) as engine, pytest.raises(Failed, match="no MTP head is loaded"):
        engine.session().draft(1, 1)
