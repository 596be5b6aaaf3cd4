"""The head's shortlist: drafts come from the vocabulary's first ids and the text's own tokens, and the text stays plain's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from conftest import ROOT
from engine import Engine, Failed, Session, batch_step

LOWEST = np.finfo(np.float32).min
PAIR = (ROOT / "models/small.gguf", ROOT / "models/small-mtp.gguf")
V = 2048
PROMPT = [0, *np.random.default_rng(3).integers(300, 1400, 20).tolist()]


def open_pair(shortlist: int, **options: float) -> Engine:
    return Engine(*PAIR, ctx=512, mtp_shortlist=shortlist, mtp_margin=0.0, **options)


def started(engine: Engine, prompt: list[int] = PROMPT, depth: int = 2) -> Session:
    s = engine.session()
    s.set_mtp(depth, 0)
    s.set_stops([], True)
    s.eval(prompt)
    return s


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[list[int], np.ndarray, list[int]]]:
    """What plain decoding gives: greedy tokens and last logits, and sampled tokens."""
    with open_pair(0) as engine:
        s = started(engine, depth=0)
        greedy, logits = s.generate(200), s.logits()
        s.rewind(0)
        s.eval(PROMPT)
        yield greedy, logits, sampled(s)


def sampled(s: Session) -> list[int]:
    s.set_gen(temperature=0.8, top_p=0.95, seed=11)
    out: list[int] = []
    while len(out) < 100:
        out += s.step(s.next(), 100 - len(out))
    return out


@pytest.mark.parametrize("shortlist", [1, 64, 700, V - 1, V, 1 << 30])
def test_the_text_is_plains(plain: tuple[list[int], np.ndarray, list[int]], shortlist: int) -> None:
    greedy, logits, drawn = plain
    with open_pair(shortlist) as engine:
        s = started(engine)
        assert s.generate(200) == greedy and np.array_equal(s.logits(), logits)
        assert s.stats.accepted[0] > 20
        s.rewind(0)
        s.eval(PROMPT)
        assert sampled(s) == drawn


def test_drafts_are_the_best_of_the_list() -> None:
    with open_pair(100) as engine:
        s = started(engine)
        s.generate(60)
        for token in (s.argmax(), 1500):
            listed = np.zeros(V, bool)
            listed[:100] = True
            listed[s.tokens] = True
            got = s.draft(token, 1)[0]
            assert ((got == LOWEST) == ~listed).all()
            full = s.fork()
            full.eval([token, 5])
            want = full.head_logits(s.position - 1, s.position)[0]
            assert np.array_equal(got[listed], want[listed])


def test_the_list_is_the_texts_alone() -> None:
    """After rewinds, forks, loads and in company a session drafts as one that was never anywhere else."""
    with open_pair(10) as engine:
        s = started(engine)
        ids = s.generate(80)
        s.eval([3, 1999])
        s.draft(700, 1)
        s.rewind(len(PROMPT) + 40)
        s.eval([600] * 44)
        fresh = started(engine, PROMPT + ids[:40] + [600] * 44)
        want = fresh.draft(700, 2)
        assert np.array_equal(s.draft(700, 2), want) and np.array_equal(s.fork().draft(700, 2), want)
        other = started(engine, [0, *range(1500, 1600)])
        other.draft(9, 2)
        other.load(fresh.save())
        assert np.array_equal(other.draft(700, 2), want)


def test_a_list_is_not_widened_by_company() -> None:
    with open_pair(10, conf_log=True) as engine:
        alone = started(engine)
        fresh, company = alone.fork(), started(engine, [0, *range(300, 700)])
        steps = [alone.step(alone.argmax(), 3) for _ in range(30)]
        lines = engine.lines.copy()
        assert len(lines) > 20
        engine.lines.clear()
        for step in steps:
            both = batch_step(engine, [(fresh, [fresh.argmax()], 3), (company, [company.argmax()], 3)])
            assert both[0] == step
        assert set(lines) <= set(engine.lines) and len(engine.lines) > len(lines)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(Failed, match=r"mtp_shortlist is -1; expected 0 or more"):
        open_pair(-1)
