"""Batches: many sessions in one pass. Each gives the bits it gives alone, whoever joins, leaves, fails or is cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import Engine, Failed, Session, batch_step, bits, lib
from fixtures import FIXTURES, rewrite, tensors_of


@dataclass
class Client:
    """A session with its own sampler and speculation, and what it said alone."""

    session: Session
    prompt: list[int]
    draft: int
    margin: float
    gen: dict[str, Any]
    n: int
    plain: list[int] = field(default_factory=list)
    state: bytes = b""
    out: list[int] = field(default_factory=list)

    @property
    def fed(self) -> int:
        return min(self.session.position, len(self.prompt))

    @property
    def done(self) -> bool:
        return self.fed == len(self.prompt) and len(self.out) == self.n

    def piece(self, most: int) -> tuple[list[int], int]:
        """What to evaluate next: tokens, and the most a step may commit (0: a prompt)."""
        if self.fed < len(self.prompt):
            return self.prompt[self.fed : self.fed + most], 0
        return [self.session.next()], self.n - len(self.out)


def alone(engine: Engine, client: Client, depth: int) -> None:
    """The client's text from a session without company: plain, but by rejection, whose text depends on the depth."""
    s = engine.session()
    s.set_stops([], True)
    s.set_gen(**client.gen)
    s.set_mtp(depth, client.margin)
    s.eval(client.prompt)
    while len(client.plain) < client.n:
        client.plain += s.step(s.next(), client.n - len(client.plain))
    client.state = s.save()
    s.close()


GENS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "top_k": 40, "seed": 6, "scheme": "rejection"},
    {"frequency_penalty": 0.3, "penalty_from": 4},
    {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5, "seed": 2**64 - 1},
]


def clients(engine: Engine, text: np.ndarray, count: int, rng: np.random.Generator, n: int = 24) -> list[Client]:
    """Sessions that differ in everything."""
    out = []
    for i in range(count):
        length = int(rng.integers(1, 150))
        start = int(rng.integers(0, len(text) - length))
        client = Client(
            engine.session(), text[start : start + length].tolist(), i % 5, [0.0, 3.0, 0.5][i % 3], GENS[i % len(GENS)],
            int(rng.integers(1, n + 1)),
        )  # fmt: skip
        client.session.set_stops([], True)
        client.session.set_gen(**client.gen)
        client.session.set_mtp(client.draft, client.margin)
        alone(engine, client, client.draft if client.gen.get("scheme") == "rejection" else 0)
        out.append(client)
    return out


def step(engine: Engine, group: list[Client], piece: int) -> None:
    asked = [(c.session, *c.piece(piece)) for c in group]
    for client, (_, tokens, most), got in zip(group, asked, batch_step(engine, asked), strict=True):
        assert not isinstance(got, Failed), got
        if most:
            assert got[0] == tokens[0] and 1 <= len(got) <= min(most, client.draft + 1)
            client.out += got
        else:
            assert 1 <= len(got) <= len(tokens)


def finish(engine: Engine, group: list[Client], piece: int = 32) -> None:
    while live := [c for c in group if not c.done]:
        step(engine, live, piece)


def check_all(group: list[Client]) -> None:
    for i, c in enumerate(group):
        assert c.out == c.plain, i
        assert c.session.save() == c.state, i
        stats = c.session.stats
        assert sum(stats.accepted) + stats.corrections + stats.bonus == stats.emitted == c.n
        assert stats.prompt_tokens == len(c.prompt)


@pytest.fixture(scope="module", params=FIXTURES)
def pair(request: pytest.FixtureRequest, data: Path) -> Iterator[tuple[Engine, np.ndarray]]:
    folder = data / request.param
    with Engine(folder / "target.gguf", folder / "head-ds4.gguf", ctx=512, prefill_chunk=48) as engine:
        yield engine, np.load(folder / "prompt.npy")


def test_each_session_gives_what_it_gives_alone(pair: tuple[Engine, np.ndarray]) -> None:
    engine, text = pair
    group = clients(engine, text, 7, np.random.default_rng(0))
    finish(engine, group)
    check_all(group)
    for c in group:
        c.session.close()


@pytest.mark.parametrize("seed", range(3))
def test_joining_and_leaving_at_every_step(pair: tuple[Engine, np.ndarray], seed: int) -> None:
    """Any of the sessions take part in a step, prompts in pieces of any size; some are forked and some saved and loaded."""
    engine, text = pair
    rng = np.random.default_rng(seed + 10)
    group = clients(engine, text, 6, rng)
    while live := [c for c in group if not c.done]:
        chosen = [c for c in live if rng.random() < 0.6]
        step(engine, chosen, int(rng.integers(1, 60)))
        moved = live[int(rng.integers(len(live)))]
        if rng.random() < 0.2:
            copy = moved.session.fork()
            copy.gen = moved.session.gen
            moved.session.close()
            moved.session = copy
    for c in group:
        assert c.out == c.plain and c.session.save() == c.state
        c.session.close()


def test_forced_accept_lengths(pair: tuple[Engine, np.ndarray]) -> None:
    """Scripted drafts, refused at each place, in sessions side by side at other places of one text."""
    engine, text = pair
    prompt = text[:60].tolist()
    with_plain = engine.session()
    with_plain.set_stops([], True)
    with_plain.set_mtp(0, 0)
    with_plain.eval(prompt)
    plain = with_plain.generate(150)
    whole = np.array(prompt + plain + [0] * 20, np.int32)
    group = []
    for wrong in range(5):
        s = engine.session()
        s.set_stops([], True)
        s.set_mtp(4, 0)
        s.eval(whole[: 60 + 7 * wrong])
        s.script(whole, wrong)
        group.append(s)
    for _ in range(12):
        before = [s.position for s in group]
        asked = [(s, [int(whole[s.position])], 100) for s in group]
        for wrong, (s, start, got) in enumerate(zip(group, before, batch_step(engine, asked), strict=True)):
            assert len(got) == 1 + min(wrong, 4) and got == whole[start : start + len(got)].tolist()
            assert s.position == start + len(got)
    for s in group:
        alone = engine.session()
        alone.set_mtp(0, 0)
        alone.eval(whole[: s.position])
        assert s.save() == alone.save() and np.array_equal(bits(s.logits()), bits(alone.logits()))
        alone.close()
        s.close()
    with_plain.close()


def test_eight_sessions_of_one_prompt(pair: tuple[Engine, np.ndarray]) -> None:
    engine, text = pair
    first = engine.session()
    first.set_stops([], True)
    first.eval(text[:90])
    group = [first, *(first.fork() for _ in range(7))]
    plain = engine.session()
    plain.set_stops([], True)
    plain.set_mtp(0, 0)
    plain.eval(text[:90])
    want = plain.generate(40)
    outs: list[list[int]] = [[] for _ in group]
    for i, s in enumerate(group):
        s.set_stops([], True)
        s.set_mtp(i % 4, 0)
    while any(len(o) < 40 for o in outs):
        live = [i for i in range(8) if len(outs[i]) < 40]
        for i, got in zip(
            live, batch_step(engine, [(group[i], [group[i].next()], 40 - len(outs[i])) for i in live]), strict=True
        ):
            outs[i] += got
    assert outs == [want] * 8
    assert len({s.save() for s in group} | {plain.save()}) == 1
    for s in [*group, plain]:
        s.close()


def test_one_pass_for_all(pair: tuple[Engine, np.ndarray]) -> None:
    """4 busy sessions take a quarter of the passes; a prompt in pieces rides along."""
    engine, text = pair

    def busy(n: int) -> list[Client]:
        group = []
        for i in range(n):
            s = engine.session()
            s.set_stops([], True)
            s.set_mtp(0, 0)
            group.append(Client(s, text[10 * i : 10 * i + 10].tolist(), 0, 0, {}, 30))
        return group

    def passes() -> int:
        return int(lib.ds4_engine_work(engine.p).passes)

    start = passes()
    finish(engine, busy(4))
    together = passes() - start
    start = passes()
    for client in busy(4):
        finish(engine, [client])
    assert together * 4 == passes() - start == 4 * 31
    newcomer = busy(1)[0]
    newcomer.prompt = text[:200].tolist()
    others = busy(3)
    for c in others:
        c.session.eval(c.prompt)
    start = passes()
    finish(engine, [*others, newcomer], 16)
    assert passes() - start == 13 + 30  # 200 tokens in pieces of 16, then its own 30


def test_a_session_that_fails_leaves_the_others(pair: tuple[Engine, np.ndarray]) -> None:
    """Cancelled in the middle, a full context, a wrong token, a mask that fails: one message each, the others' text as ever."""
    engine, text = pair
    group = clients(engine, text, 5, np.random.default_rng(3), 20)
    for c in group:
        c.session.eval(c.prompt)
    full = engine.session()
    full.eval(np.resize(text, 512))
    cancelled = engine.session()
    cancelled.eval(text[:30])
    state = cancelled.save()
    lib.ds4_session_cancel(cancelled.p)
    wrong = engine.session()
    asked = [
        (cancelled, [3], 4), (group[0].session, *group[0].piece(1)), (full, [3], 4), (wrong, [engine.vocab], 0),
        (group[1].session, *group[1].piece(1)),
    ]  # fmt: skip
    got = batch_step(engine, asked)
    for at, word in [(0, "cancelled at position 30"), (2, "context is full: 512"), (3, "outside the vocabulary")]:
        assert isinstance(got[at], Failed) and word in str(got[at])
    group[0].out += got[1]
    group[1].out += got[4]
    assert cancelled.save() == state and wrong.position == 0 and full.position == 512
    finish(engine, group)
    check_all(group)
    lib.ds4_session_clear_cancel(cancelled.p)
    assert batch_step(engine, [(cancelled, [3], 1)]) == [[3]]
    for s in [full, cancelled, wrong, *(c.session for c in group)]:
        s.close()


def test_a_batch_that_cannot_be_meant_is_refused(pair: tuple[Engine, np.ndarray], data: Path) -> None:
    engine, text = pair
    s, other = engine.session(), engine.session()
    s.eval(text[:5])
    state = s.save()
    with Engine(data / "tiny" / "target.gguf", ctx=64) as stranger:
        foreign = stranger.session()
        for asked, word in [
            ([(s, [1], 1), (s, [1], 1)], "same session"),
            ([(s, [1, 2], 1)], "1 token"),
            ([(s, [], 0)], "no tokens"),
            ([(s, [1], -1)], "max is -1"),
            ([(other, [1], 0), (foreign, [1], 1)], "another engine"),
            ([(s, [1], 1)] * 500, "a batch of 500"),
        ]:
            with pytest.raises(Failed, match=word):
                batch_step(engine, asked)
    assert batch_step(engine, []) == []
    assert s.save() == state and other.position == 0
    s.close()
    other.close()


def test_rows_that_run_short_cut_drafts_and_prompts(data: Path) -> None:
    """17 rows for 9 sessions of depth 8 and two long prompts: slower, the same text."""
    folder = data / "tiny"
    text = np.load(folder / "prompt.npy")
    with Engine(folder / "target.gguf", folder / "head-ds4.gguf", ctx=256, prefill_chunk=1, mtp_margin=0.0) as engine:
        assert lib.ds4_engine_batch_rows(engine.p) == 17
        group = []
        for i in range(11):
            s = engine.session()
            s.set_stops([], True)
            s.set_mtp(8, 0)
            prompt = text[i : i + (9 if i < 9 else 120)].tolist()
            client = Client(s, prompt, 8, 0, {}, 12)
            alone(engine, client, 0)
            if i < 9:
                s.eval(prompt)
            group.append(client)
        finish(engine, group, 100)
        check_all(group)


def test_non_finite_logits_end_one_session(data: Path, tmp_path: Path) -> None:
    """A token whose embedding is no number, in one session of three."""
    source = data / "tiny" / "target.gguf"
    embedding = np.array(tensors_of(source)["token_embd.weight"].data, np.float32)
    embedding[77] = np.nan
    model = rewrite(source, tmp_path / "x.gguf", tensors={"token_embd.weight": embedding})
    with Engine(model, ctx=64) as engine:
        sessions = [engine.session() for _ in range(3)]
        for s in sessions:
            s.eval([1, 2, 3])
        states = [s.save() for s in sessions]
        got = batch_step(engine, [(sessions[0], [5], 1), (sessions[1], [77], 1), (sessions[2], [6], 1)])
        assert got[0] == [5] and got[2] == [6] and isinstance(got[1], Failed) and "position 3" in str(got[1])
        assert sessions[1].save() == states[1]
        assert batch_step(engine, [(sessions[1], [5], 1)]) == [[5]] and sessions[1].save() == sessions[0].save()
