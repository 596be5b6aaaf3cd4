"""Prompt lookup: the index against a search of the whole text, and exactness of what it drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from engine import Engine, Session, bits, ffi, lib
from fixtures import FIXTURES
from hypothesis import given, settings
from hypothesis import strategies as st

GUESSES = 8


class Index:
    """The engine's index of a text that this class holds."""

    def __init__(self, longest: int, ctx: int) -> None:
        self.p: Any = ffi.gc(lib.hook_lookup_new(longest, ctx), lib.hook_lookup_free)
        self.text = ffi.new("int[]", ctx)
        self.n = 0

    def add(self, tokens: list[int]) -> None:
        for token in tokens:
            self.text[self.n] = token
            self.n += 1
        lib.hook_lookup_add(self.p, self.text, self.n)

    def drop(self, n: int) -> None:
        """Back to the first n tokens; what stood behind them is overwritten."""
        lib.hook_lookup_drop(self.p, n)
        for i in range(n, self.n):
            self.text[i] = -7
        self.n = n

    def find(self, last: int) -> tuple[int, list[int]]:
        out = ffi.new("int[]", [-1] * GUESSES)
        length = lib.hook_lookup_find(self.p, self.text, last, GUESSES, out)
        return length, list(out) if length else []


def search(text: list[int], last: int, longest: int) -> tuple[int, list[int]]:
    """The longest earlier match of what text + [last] ends with, the newest of equals, and what followed it."""
    whole, best, at = [*text, last], 0, -1
    for p in range(len(text) - 1, -1, -1):
        length = 0
        while length < longest and length <= p and whole[p - length] == whole[-1 - length]:
            length += 1
        if length >= min(longest, 2) and length > best:
            best, at = length, p
    guesses = list(whole)
    for i in range(GUESSES if best else 0):
        guesses.append(guesses[at + 1 + i])
    return best, guesses[len(whole) :]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=7)), max_size=12),
)
def test_index(longest: int, alphabet: int, steps: list[tuple[int, list[int]]]) -> None:
    """Additions and rewinds in any order: always the answer that a search of the text gives, for every next token."""
    index, text = Index(longest, 100), list[int]()
    for back, more in steps:
        keep = max(0, len(text) - back)
        if back == 3:
            keep = len(text) // 2
        more = [token % alphabet for token in more]
        text = text[:keep] + more
        index.drop(keep)
        index.add(more)
        for last in range(alphabet):
            assert index.find(last) == search(text, last, longest), (text, last)


def test_long_texts() -> None:
    """Ten thousand tokens with repeats: a long match is found however far back, and a rewind to 0 leaves nothing."""
    rng = np.random.default_rng(0)
    text = [int(t) for t in rng.integers(0, 5000, 10000)]
    passage = text[1234:1300]
    index = Index(16, 12000)
    index.add(text + passage[:20])
    length, guesses = index.find(passage[20])
    assert length == 16 and guesses == passage[21 : 21 + GUESSES]
    index.drop(1234 + 10)
    assert index.find(passage[10])[0] == 0
    index.drop(0)
    index.add([1, 2])
    assert index.find(passage[20]) == (0, [])
    assert index.find(1) == (0, []) and Index(1, 8).find(3) == (0, [])


def test_periods() -> None:
    """In a loop the guess goes on past the end of the text."""
    index = Index(4, 64)
    index.add([9, 1, 2, 3, 1, 2])
    assert index.find(3) == (3, [1, 2, 3, 1, 2, 3, 1, 2])
    index = Index(4, 64)
    index.add([5, 5])
    assert index.find(5) == (2, [5] * GUESSES)


# ---------------------------------------------------------------- in the engine

PROMPT, LENGTH = 60, 180


def start(engine: Engine, prompt: list[int], draft: int, lookup: int, margin: float = 0) -> Session:
    session = engine.session()
    session.set_stops([], ignore_eos=True)
    session.set_lookup(lookup)
    session.set_mtp(draft, margin)
    session.eval(prompt)
    return session


def sure(model: Path) -> tuple[list[int], list[int]]:
    """A prompt whose second half begins as its first, and what the model makes of it."""
    prompt = [int(t) for t in np.load(model.parent / "prompt.npy")[:PROMPT]]
    with Engine(model, mtp_draft=0, threads=1) as engine:
        session = start(engine, prompt, 0, 0)
        text = session.generate(LENGTH)
        again = prompt + text + prompt
        session = start(engine, again, 0, 0)
        return again, session.generate(LENGTH)


@pytest.mark.parametrize("name", FIXTURES)
def test_the_text_is_plain(data: Path, name: str) -> None:
    """With and without a head, fixed depths and auto, margins, a fork and a rewind on the way: plain's tokens and bits."""
    model, head = data / name / "target.gguf", data / name / "head-ds4.gguf"
    prompt, text = sure(model)
    with Engine(model, threads=1, mtp_draft=0) as engine:
        logits = bits(start(engine, prompt + text, 0, 0).logits())
    drafted = 0
    for with_head, draft, longest, margin in (
        (False, 1, 1, 0.0), (False, 4, 3, 0.0), (False, 16, 64, 0.2), (False, -1, 8, 0.0),
        (True, 3, 2, 0.0), (True, 16, 8, 1000.0), (True, -1, 5, 0.0),
    ):  # fmt: skip
        with Engine(model, head if with_head else None, threads=1, max_rewind=100) as engine:
            session = start(engine, prompt, draft, longest, margin)
            if draft == -1:
                session.costs(10, 0.01)
            assert session.generate(100) == text[:100]
            copy = session.fork()
            copy.rewind(copy.position - 33)
            resumed = start(engine, [1, 2, 3], draft, longest, margin)
            resumed.generate(40)
            resumed.load(session.save())
            for s in (session, copy, resumed):
                rest = LENGTH - (s.position - len(prompt))
                assert s.generate(rest) == text[-rest:], (draft, longest, margin)
                assert np.array_equal(bits(s.logits()), logits)
                x = s.stats
                assert x.lookup_accepted <= x.lookup_drafted <= sum(x.drafted)
                assert sum(x.accepted) + x.corrections + x.bonus == x.emitted
                drafted += x.lookup_drafted
                if not with_head:
                    assert x.lookup_drafted == sum(x.drafted) and x.lookup_accepted == sum(x.accepted) and x.head_passes == 0
    assert drafted > 100


def test_work_is_saved(data: Path) -> None:
    """The bundled model repeats itself: with lookup alone, far fewer passes; off, none of it runs."""
    model = ROOT / "models/small.gguf"
    with Engine(model) as engine:
        prompt = [0, *(int(x) for x in np.random.default_rng(1).integers(10, 2048, 100))]  # it soon turns in a circle
        plain = start(engine, prompt, 0, 0)
        text = plain.generate(200)
        assert plain.stats.passes - 1 == 200 and plain.stats.lookup_drafted == 0
        session = start(engine, prompt, 8, 4)
        assert session.generate(200) == text
        assert session.stats.passes - 1 < 100 and session.stats.lookup_accepted >= 100
        session.set_lookup(0)
        before = session.stats.lookup_drafted
        session.generate(20)
        assert session.stats.lookup_drafted == before


def test_the_likelier_drafts() -> None:
    """Beside a drafter that is always wrong the lookup drafts, in a text that repeats itself; beside one that is always right it does
    not, unless `auto` saves the drafter's steps by it."""
    with Engine(ROOT / "models/small.gguf", ROOT / "models/small-mtp.gguf", threads=1) as engine:
        prompt = [0, *(int(x) for x in np.random.default_rng(1).integers(10, 2048, 100))]  # it soon turns in a circle
        text = start(engine, prompt, 0, 0).generate(200)
        for draft in (3, -1):
            for wrong in (0, -1):
                s, out = start(engine, prompt, draft, 4), list[int]()
                s.script(np.array([*prompt, *text, *[0] * 20]), wrong)
                while len(out) < 200:
                    s.costs(1.0, 0.1)
                    out += s.step(s.argmax(), 200 - len(out))
                assert out == text and s.stats.passes < 110
                if wrong == 0:
                    assert sum(s.stats.accepted) == s.stats.lookup_accepted > 100
                elif draft == 3:
                    assert s.stats.lookup_drafted < 30


def test_lookups_that_are_refused() -> None:
    """`auto` stops drafting what the text promises when the model does not choose it."""
    with Engine(ROOT / "models/small.gguf", threads=1) as engine:
        prompt = [0, *(int(x) for x in np.random.default_rng(2).integers(10, 2048, 40))] * 2
        s = start(engine, prompt, -1, 8)
        for _ in range(100):
            s.costs(1.0, 0.3)
            s.step(s.tokens[-41], 17)
        assert s.stats.lookup_accepted < 10 and 0 < s.stats.lookup_drafted < 60


def test_collisions() -> None:
    """N-grams that share a chain are told apart."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        text = [int(t) for t in rng.integers(0, 40, 60)]
        index = Index(3, 64)
        index.add(text)
        for last in range(40):
            assert index.find(last) == search(text, last, 3), (text, last)


def test_a_step_that_is_cut_short(data: Path) -> None:
    """ds4_session_keep takes a lookup's drafts back, from its counters and its index too."""
    model = ROOT / "models/small.gguf"
    with Engine(model) as engine:
        prompt = list(range(300, 400)) * 2
        session = start(engine, prompt, 8, 4)
        plain = start(engine, prompt, 0, 0)
        text, out = plain.generate(120), list[int]()
        cut = 0
        while len(out) < 100:
            got = session.step(session.argmax(), 9)
            if len(got) > 2:
                session.keep(2)
                got, cut = got[:2], cut + 1
            out += got
        assert cut > 5 and out == text[: len(out)]
        assert session.stats.emitted == len(out) and session.stats.lookup_accepted == sum(session.stats.accepted)


class Watched:
    """A session that only lookups draft for, and what they should draft, by a search of its text."""

    def __init__(self, engine: Engine, session: Session, longest: int, depth: int) -> None:
        self.engine, self.session, self.longest, self.depth = engine, session, longest, depth
        self.guessed = 0
        session.set_lookup(longest)
        session.set_mtp(depth, 0)

    def copy(self, session: Session) -> Watched:
        other = Watched.__new__(Watched)
        other.__dict__ |= self.__dict__ | {"session": session}
        return other

    def step(self, stops: list[int], token: int | None = None) -> list[int]:
        """A step; what it drafts, and how many, is what the search finds, up to a stop token."""
        s, before = self.session, self.session.stats.lookup_drafted
        if token is None:  # a text that repeats itself, whatever the model makes of it
            token = s.tokens[-41] if s.position > 41 else s.argmax()
        length, guesses = search(s.tokens, token, self.longest)
        guesses = guesses[: self.depth] if length else []
        guesses = guesses[: next((i for i, g in enumerate(guesses) if g in stops), len(guesses))]
        self.engine.lines.clear()
        out = s.step(token, 20)
        drafts = [int(line.split("draft ")[1].split()[0]) for line in self.engine.lines]
        assert drafts == guesses[: len(drafts)] and s.stats.lookup_drafted - before == len(guesses)
        assert not set(out[1:]) & set(stops)
        self.guessed += len(guesses)
        return out


@pytest.mark.parametrize("longest", [1, 3])
def test_what_is_drafted(longest: int) -> None:
    """By steps, and after parts kept of them, rewinds, another text, forks and loads: what a search of the text finds."""
    rng = np.random.default_rng(longest)
    with Engine(ROOT / "models/small.gguf", conf_log=True, max_rewind=100, threads=1) as engine:
        prompt = [0, *(int(x) for x in rng.integers(10, 2048, 40))] * 2
        stops = [prompt[20], prompt[33]]
        watched = Watched(engine, engine.session(), longest, 5)
        watched.session.set_stops(stops, True)
        watched.session.eval(prompt)
        for turn in range(40):
            s = watched.session
            out = watched.step(stops)
            if turn % 7 == 3 and len(out) > 1:
                s.keep(1)
            if turn % 7 == 4:  # what is written anew repeats itself: its newest matches are where other tokens were
                again = rng.integers(10, 2048, 4).tolist()
                s.rewind(s.position - 9)
                s.eval(again * 2)
                watched.step(stops, again[0])
            if turn % 7 == 5:
                watched = watched.copy(s.fork())
            if turn % 7 == 6:
                other = engine.session()
                other.set_stops(stops, True)
                other.eval(rng.integers(10, 2048, 300))
                loaded = Watched(engine, other, longest, 5)
                loaded.step(stops)
                other.load(s.save())
                loaded.guessed, watched = watched.guessed, loaded
        assert watched.guessed > 60
