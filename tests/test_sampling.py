"""The sampler: the law of one draw against ds4.sampling (float64, written apart from the engine), and the law of sampled text
with speculation, by counting; seeded text with coupled drafts is the plain text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ds4 import sampling
from engine import Engine, Failed, Session, check, ffi, gen_of, lib
from hypothesis import given, settings
from hypothesis import strategies as st

ffi.cdef(
    """
    typedef struct hook_chain hook_chain;
    hook_chain *hook_chain_new(int V, const float *target, const float *head, const ds4_gen *gen);
    void hook_chain_free(hook_chain *c);
    int hook_chain_run(hook_chain *c, int first, int depth, uint64_t seed, int n, int *out, int64_t *tried, int64_t *taken);
    int hook_chain_count(hook_chain *c, int first, int depth, uint64_t seed, int texts, int n, int64_t *counts,
                         int64_t *tried, int64_t *taken);
    int hook_law(const float *z, int V, const ds4_gen *gen, const int *text, int n, double *out);
    """
)


def c_law(z: np.ndarray, text: list[int], **options: Any) -> np.ndarray:
    z = np.ascontiguousarray(z, np.float32)
    out = np.empty(len(z))
    gen, keep = gen_of(**options)
    check(lib.hook_law(ffi.from_buffer("float[]", z), len(z), gen, text or [0], len(text), ffi.from_buffer("double[]", out)))
    del keep
    return out


# ---- one draw's law ----

# Numbers that float32 adds exactly, so that ties are ties on both sides, and there are many; edges of top_p that no law meets.
LOGITS = st.lists(st.integers(-12, 12).map(lambda i: i * 0.5), min_size=1, max_size=24)


@settings(max_examples=400, deadline=None)
@given(
    logits=LOGITS, temperature=st.sampled_from([0, 0.05, 0.7, 1, 1.5, 30]), top_k=st.sampled_from([0, 1, 2, 5, 100]),
    top_p=st.sampled_from([0, 0.31, 0.87, 0.9991, 1]), min_p=st.sampled_from([0, 0.05, 0.5, 1]),
    presence=st.sampled_from([0, 0.5, -1]), frequency=st.sampled_from([0, 0.25]), data=st.data(),
)  # fmt: skip
def test_the_law_is_the_oracles(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, presence: float, frequency: float, data: Any
) -> None:
    ids = st.integers(0, len(logits) - 1)
    text = data.draw(st.lists(ids, max_size=8))
    bias = data.draw(st.dictionaries(ids, st.sampled_from([-2.5, 0.25, 4, -math.inf]), max_size=3))
    options = dict(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, presence_penalty=presence, frequency_penalty=frequency
    )
    config = sampling.SamplerConfig(**options, logit_bias=bias)  # type: ignore[arg-type]
    z = np.array(logits, np.float32).astype(np.float64)
    counts = np.bincount(text, minlength=len(z))
    if sum(v == -math.inf for v in bias.values()) == len(z):
        with pytest.raises(Failed, match="no token"):
            c_law(z, text, **options, bias=bias)
        return
    got = c_law(z, text, **options, bias=bias)
    want = sampling.law(z, config, counts)
    assert np.allclose(got, want, rtol=1e-5, atol=1e-7)
    assert abs(got.sum() - 1) < 1e-9


def test_ties_are_kept_by_lowest_id() -> None:
    z = np.array([1, 3, 3, 3, 2], np.float32)
    assert np.flatnonzero(c_law(z, [], temperature=1, top_k=2)).tolist() == [1, 2]
    assert np.flatnonzero(c_law(z, [], temperature=1, top_p=0.3)).tolist() == [1, 2]
    assert np.flatnonzero(c_law(z, [], temperature=1, top_k=1)).tolist() == [1]
    assert np.flatnonzero(c_law(z, [], temperature=0)).tolist() == [1]


# ---- the law of the text, by counting ----

V, LENGTH = 5, 3
Chain = Callable[[int], list[int]]


class Chains:
    """Texts of a Markov model (logits [V, V] by the token before) drafted for by another one."""

    def __init__(self, target: np.ndarray, head: np.ndarray, **options: Any) -> None:
        self.target, self.head = (np.ascontiguousarray(a, np.float32) for a in (target, head))
        gen, self.keep = gen_of(**options)
        self.p = check(lib.hook_chain_new(
            len(target), ffi.from_buffer("float[]", self.target), ffi.from_buffer("float[]", self.head), gen
        ))  # fmt: skip
        self.tried, self.taken, self.room = ffi.new("int64_t[16]"), ffi.new("int64_t[16]"), ffi.new("int[]", 300)
        self.cycles = 0

    def run(self, depth: int, seed: int, n: int = LENGTH) -> list[int]:
        self.cycles += check(lib.hook_chain_run(self.p, 0, depth, seed, n, self.room, self.tried, self.taken))
        return list(self.room[0:n])

    def close(self) -> None:
        lib.hook_chain_free(self.p)


def heads(target: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Drafting models against a target [V, V]."""
    peaked = np.zeros_like(target)
    peaked[:, 2] = 12
    likely = target > np.median(target, axis=1, keepdims=True)
    return {
        "identical": target,
        "good": target + 0.4 * rng.standard_normal(target.shape),
        "bad": 2 * rng.standard_normal(target.shape),
        "peaked": peaked,
        "disjoint": np.where(likely, -60, target),      # where the target (its filters, at least) has next to nothing
    }


def joint_law(target: np.ndarray, config: sampling.SamplerConfig) -> np.ndarray:
    """float64 [V ** LENGTH]: the probability of each text behind token 0."""
    laws = np.array([sampling.law(row, config) for row in target.astype(np.float32).astype(np.float64)])
    out = np.ones((V,) * LENGTH)
    for text in itertools.product(range(V), repeat=LENGTH):
        for before, token in zip((0, *text[:-1]), text, strict=True):
            out[text] *= laws[before, token]
    return out.ravel()


def chi_square_p(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of the counts under the law, texts with fewer than 8 expected together; Wilson and Hilferty's approximation."""
    assert counts[law == 0].sum() == 0
    expected = law * counts.sum()
    rare = expected < 8
    seen, want = counts[~rare], expected[~rare]
    if expected[rare].sum() >= 1:
        seen, want = np.append(seen, counts[rare].sum()), np.append(want, expected[rare].sum())
    k = len(want) - 1
    if k == 0:
        return 1.0
    x = ((seen - want) ** 2 / want).sum()
    z = ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


FILTERS: dict[str, dict[str, Any]] = {"all": {}, "filtered": {"top_k": 4, "top_p": 0.9, "min_p": 0.04}}
TEXTS = 70_000      # of 3 tokens: 210,000 draws


@pytest.mark.parametrize("scheme", ["coupled", "rejection"])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
def test_the_law_of_the_text_is_the_targets(scheme: str, filters: str, temperature: float) -> None:
    rng = np.random.default_rng(int(temperature * 10))
    target = rng.standard_normal((V, V)) * 1.5
    options = {"temperature": temperature, **FILTERS[filters]}
    law = joint_law(target, sampling.SamplerConfig(**options))
    for name, head in heads(target, rng).items():
        chains = Chains(target, head, **options, scheme=scheme)
        counts = np.zeros(V**LENGTH, np.int64)
        run_many = lib.hook_chain_count(chains.p, 0, 2, 1000 * len(name), TEXTS, LENGTH, ffi.from_buffer("int64_t[]", counts),
                                        chains.tried, chains.taken)  # fmt: skip
        check(run_many)
        assert counts.sum() == TEXTS
        assert chi_square_p(counts, law) > 1e-4, (name, counts, law * TEXTS)
        rate = chains.taken[0] / chains.tried[0]
        if name == "identical":
            assert rate == 1
        if name == "disjoint":
            assert rate < 0.5
        chains.close()


def test_a_wrong_law_is_seen() -> None:
    """The counting can fail: the same texts against a law that is off by a little."""
    target = np.random.default_rng(3).standard_normal((V, V))
    chains = Chains(target, target, temperature=1)
    counts = np.zeros(V**LENGTH, np.int64)
    check(lib.hook_chain_count(chains.p, 0, 2, 1, TEXTS, LENGTH, ffi.from_buffer("int64_t[]", counts), chains.tried, chains.taken))
    assert chi_square_p(counts, joint_law(target, sampling.SamplerConfig(temperature=1.0))) > 1e-4
    assert chi_square_p(counts, joint_law(target, sampling.SamplerConfig(temperature=1.03))) < 1e-4


@pytest.mark.parametrize("scheme", ["coupled", "rejection"])
@pytest.mark.parametrize("name", ["identical", "good", "bad", "peaked", "disjoint"])
def test_acceptance_is_what_theory_says(scheme: str, name: str) -> None:
    rng = np.random.default_rng(5)
    target = np.tile(rng.standard_normal(V) * 1.5, (V, 1))      # every row the same: the first draft's rate is one number
    head = np.tile(heads(target, rng)[name][0], (V, 1))
    chains = Chains(target, head, temperature=1, scheme=scheme)
    counts = np.zeros(V**LENGTH, np.int64)
    check(lib.hook_chain_count(chains.p, 0, 1, 9, 40_000, LENGTH, ffi.from_buffer("int64_t[]", counts), chains.tried, chains.taken))
    config = sampling.SamplerConfig(temperature=1.0, scheme=scheme)  # type: ignore[arg-type]
    p, q = (sampling.law(a[0].astype(np.float32).astype(np.float64), config) for a in (target, head))
    want = float(sampling.acceptance_rate(p, q, config))
    n = chains.tried[0]
    assert abs(chains.taken[0] / n - want) < 5 * math.sqrt(max(want * (1 - want), 1e-12) / n) + 1e-12
    chains.close()


@pytest.mark.parametrize("depth", [1, 2, 5, 16])
def test_coupled_text_is_the_plain_text(depth: int) -> None:
    rng = np.random.default_rng(depth)
    target = rng.standard_normal((V, V)) * 1.5
    for name, head in heads(target, rng).items():
        chains = Chains(target, head, temperature=1, top_p=0.95)
        for seed in range(200):
            plain = chains.run(0, seed, 20)
            cycles = chains.cycles
            assert chains.run(depth, seed, 20) == plain, (name, seed)
            cycles = chains.cycles - cycles
            assert (cycles < 20) if name == "identical" else (cycles <= 20)
        chains.close()


def test_without_drafts_rejection_draws_the_plain_stream() -> None:
    target = np.random.default_rng(0).standard_normal((V, V))
    coupled, rejection = (Chains(target, target, temperature=1, scheme=s) for s in ("coupled", "rejection"))
    for seed in range(100):
        assert coupled.run(0, seed, 10) == rejection.run(0, seed, 10)


def test_top_k_1_is_greedy() -> None:
    rng = np.random.default_rng(1)
    target, head = rng.standard_normal((2, V, V))
    greedy = Chains(target, head, temperature=0).run(2, 0, 20)
    for scheme in ["coupled", "rejection"]:
        for seed in range(20):
            assert Chains(target, head, temperature=1.5, top_k=1, scheme=scheme).run(2, seed, 20) == greedy


# ---- with a model ----

MODELS = Path(__file__).resolve().parent.parent / "models"
PROMPT = [*range(300, 316)]


@pytest.fixture(scope="module")
def pair() -> Iterator[Engine]:
    with Engine(MODELS / "small.gguf", MODELS / "small-mtp.gguf") as engine:
        yield engine


def sampled(engine: Engine, n: int, draft: int, margin: float = 0, **options: Any) -> tuple[list[int], Session]:
    s = engine.session()
    s.set_mtp(draft, margin)
    s.set_gen(**options)
    s.eval(PROMPT)
    out: list[int] = []
    while len(out) < n:
        out += s.step(s.next(), n - len(out))
    return out, s


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.8},
    "hot": {"temperature": 1.5, "top_k": 50},
    "filtered": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.4, "penalty_from": 16},
    "biased": {"temperature": 0.9, "bias": {330: -math.inf, 19: 2.0}},
    "greedy, penalised": {"temperature": 0, "frequency_penalty": 2.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_seeded_text_is_the_plain_text(pair: Engine, options: dict[str, Any]) -> None:
    for seed in [1, 2**63]:
        plain, s = sampled(pair, 60, 0, **options, seed=seed)
        s.close()
        for draft, margin in [(1, 0), (3, 3), (8, 0)]:
            text, s = sampled(pair, 60, draft, margin, **options, seed=seed)
            assert text == plain, (seed, draft)
            assert s.stats.accepted[0] > 0 or margin
            assert sum(s.stats.accepted) + s.stats.corrections + s.stats.bonus == s.stats.emitted == 60
            s.close()


def test_the_margin_is_greedys_alone(pair: Engine) -> None:
    """A margin that would refuse every greedy draft refuses none at a temperature."""
    for temperature, held_back in [(0.0, True), (0.8, False)]:
        _, s = sampled(pair, 40, 2, 1000, temperature=temperature, seed=1)
        assert (s.stats.below_margin > 0) == held_back and (sum(s.stats.accepted) == 0) == held_back
        s.close()


def test_penalties_follow_the_text_row_by_row(pair: Engine) -> None:
    """A penalty that forbids what was said: no token comes twice, within a cycle either."""
    text, s = sampled(pair, 120, 4, temperature=0.8, seed=3, presence_penalty=100, penalty_from=len(PROMPT))
    assert len(set(text)) == 120 and sum(s.stats.accepted) > 0
    # after a rewind what was taken back may be said again
    s.rewind(len(PROMPT) + 80)
    assert s.next() == text[80]
    s.close()
    text, s = sampled(pair, 40, 4, temperature=0.8, seed=3, presence_penalty=100)
    assert not set(text) & set(PROMPT)
    s.close()


def test_a_mask_holds_for_drafts_and_text(pair: Engine) -> None:
    """A grammar of two kinds of tokens that must alternate; texts and positions as the callback sees them."""
    even = np.arange(pair.vocab) % 2 == 0
    seen: list[tuple[int, ...]] = []

    def mask(tokens: list[int], allowed: np.ndarray) -> None:
        seen.append(tuple(tokens))
        allowed[:] = even if tokens[-1] % 2 else ~even

    plain, s = sampled(pair, 40, 0, temperature=0.9, seed=5, mask=mask)
    s.close()
    assert all(a % 2 != b % 2 for a, b in zip([PROMPT[-1], *plain], plain, strict=False))
    seen.clear()
    drafted, s = sampled(pair, 40, 3, temperature=0.9, seed=5, mask=mask)
    assert drafted == plain and sum(s.stats.accepted) > 0
    whole = (*PROMPT, *plain)
    assert any(t == whole[: len(t)] for t in seen) and all(len(t) <= len(whole) + 3 for t in seen)
    s.close()


def test_a_mask_that_leaves_nothing_or_fails_is_an_error(pair: Engine) -> None:
    def none(_: list[int], allowed: np.ndarray) -> None:
        allowed[:] = 0

    def broken(tokens: list[int], _: np.ndarray) -> None:
        if len(tokens) > len(PROMPT) + 2:
            raise ValueError("broken grammar")

    with pytest.raises(Failed, match="no token at position 16"):
        sampled(pair, 4, 2, temperature=0.5, mask=none)
    for draft in [0, 4]:
        with pytest.raises(Failed, match="mask callback failed at position 19"):
            sampled(pair, 30, draft, temperature=0.5, mask=broken)
    s = pair.session()
    s.eval(PROMPT)
    s.set_gen(temperature=0.5, mask=none)
    with pytest.raises(Failed):
        s.next()
    s.set_gen(temperature=0.5)
    assert s.next() >= 0        # the session goes on
    s.close()


def test_a_stop_token_ends_drafting_and_keeps_the_law(pair: Engine) -> None:
    """Rejection: a stop token that was drawn is judged too; runs over seeds end in it as often as plain ones do."""
    ends = {0: 0, 3: 0}
    stops = [19, 330, 334]      # likely here and there
    for draft in ends:
        for seed in range(150):
            s = pair.session()
            s.set_mtp(draft, 0)
            s.set_gen(temperature=1.0, seed=seed, scheme="rejection")
            s.set_stops(stops, True)
            s.eval(PROMPT[:3])
            while s.position < 3 + 8 and s.next() not in stops:
                s.step(s.next(), 3 + 8 - s.position)
            ends[draft] += s.position < 3 + 8
            s.close()
    n, a, b = 150, ends[0], ends[3]
    p = (a + b) / (2 * n)
    assert 10 < a < 140 and abs(a - b) < 4 * math.sqrt(2 * n * p * (1 - p))


def test_a_pending_token_survives_fork_save_and_load(pair: Engine) -> None:
    """Rejection: the token drawn in a refused draft's place is the next one, in a copy too; a rewind forgets it."""
    found = 0
    for seed in range(40):
        _, s = sampled(pair, 12, 3, temperature=1.2, seed=seed, scheme="rejection")
        s.step(s.next(), 8)
        follow = s.next()
        copy = s.fork()
        again = pair.session()
        again.set_gen(temperature=1.2, seed=seed, scheme="rejection")
        again.load(s.save())
        assert copy.next() == follow == again.next() == s.next()
        found += follow != s.sample(temperature=1.2, seed=seed)
        if follow != s.sample(temperature=1.2, seed=seed):
            copy.rewind(copy.position - 1)
            copy.eval(s.tokens[-1:])
            assert copy.next() == s.sample(temperature=1.2, seed=seed)
        for x in (s, copy, again):
            x.close()
    assert found > 3            # it was another token than a plain draw, often enough


def redrawn(s: Session) -> int:
    """The plain draw by the session's own settings."""
    return int(check(lib.ds4_session_sample(s.p, ffi.NULL)))


def waiting(pair: Engine, seed: int, **options: Any) -> Session | None:
    """A session whose next token rejection has drawn in a draft's place, another than the plain draw; None if it is the same."""
    _, s = sampled(pair, 12, 3, temperature=1.2, seed=seed, scheme="rejection", **options)
    s.step(s.next(), 8)
    if s.next() != redrawn(s):
        return s
    s.close()
    return None


def test_new_settings_hold_for_the_next_token(pair: Engine) -> None:
    """A token drawn by rejection under other settings is drawn anew, as plain sampling draws; one drawn under the same settings
    stays, however the session came by them."""

    def only(ids: list[int], allowed: np.ndarray) -> None:
        allowed[:] = 0
        allowed[7:9] = 1

    options = {"temperature": 1.2, "scheme": "rejection"}
    found = 0
    for seed in range(40):
        s = waiting(pair, seed)
        if s is None:
            continue
        found += 1
        token, z, options["seed"] = s.next(), s.logits(), seed
        changed: list[dict[str, Any]] = [
            {"temperature": 0.4}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"seed": seed + 1000}, {"bias": {token: -math.inf}},
            {"bias": {5: 9.0}}, {"presence_penalty": 1.0, "penalty_from": 0}, {"frequency_penalty": 0.5},
        ]  # fmt: skip
        for change in changed:
            s.set_gen(**options | change)
            plain = s.sample(**{**options, **change, "scheme": "coupled"})
            assert s.next() == plain == s.fork().next(), change
            s.set_gen(**options, penalty_from=3)      # no penalties: the same law
            assert s.next() == token, change
        s.set_gen(**options, bias={token: -math.inf})
        assert s.next() != token
        other = pair.session()                        # a snapshot knows by which settings the token was drawn
        other.load(s.save())
        other.set_gen(**options)
        assert other.next() == token
        other.set_gen(**options | {"temperature": 1.3})
        assert other.next() == other.sample(temperature=1.3, seed=seed)
        s.set_gen(**options, mask=only)
        assert s.next() in (7, 8) and np.array_equal(s.logits(), z)
        s.set_gen(**options)
        assert s.next() == s.sample(temperature=1.2, seed=seed)      # masks cannot be compared: it is not asked for again
        s.close()
        other.close()
    assert found > 3


def test_a_token_drawn_under_a_mask_stays_in_a_copy(pair: Engine) -> None:
    """But not where another mask may be in force: after set_gen or in another session."""

    def even(ids: list[int], allowed: np.ndarray) -> None:
        allowed[1::2] = 0

    found = 0
    for seed in range(40):
        s = waiting(pair, seed, mask=even)
        if s is None:
            continue
        found += 1
        token, copy, other = s.next(), s.fork(), pair.session()
        other.set_gen(temperature=1.2, seed=seed, scheme="rejection", mask=even)
        other.load(s.save())
        assert copy.next() == token == s.next()
        assert other.next() == redrawn(s) != token
        for x in (s, copy, other):
            x.close()
    assert found > 3


def test_wrong_samplers_are_refused(pair: Engine) -> None:
    s = pair.session()
    s.set_gen(temperature=0.5)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"temperature": -1}, "temperature"), ({"temperature": math.nan}, "temperature"), ({"top_k": -1}, "top_k"),
        ({"top_p": 1.5}, "top_p"), ({"min_p": -0.1}, "min_p"), ({"presence_penalty": 101}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"), ({"penalty_from": -1}, "penalty_from"),
        ({"bias": {pair.vocab: 1.0}}, "vocabulary"), ({"bias": {-1: 1.0}}, "vocabulary"), ({"bias": {3: math.inf}}, "bias of token 3"),
        ({"bias": {3: math.nan}}, "bias of token 3"), ({"scheme": 7}, "scheme"),
    ]  # fmt: skip
    for options, word in wrong:
        with pytest.raises(Failed, match=word):
            s.set_gen(**options)
        with pytest.raises(Failed, match=word) if word != "scheme" else pytest.raises(Failed):
            s.sample(**options)
    s.close()
