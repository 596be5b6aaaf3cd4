"""The sampling oracle of the Python package: laws, acceptance, and that both schemes give the target's law."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from ds4 import registry, sampling
from ds4.sampling import SamplerConfig, speculative_output_marginal
from hypothesis import given
from hypothesis import strategies as st

SCHEMES = ["coupled", "rejection"]
GREEDY = SamplerConfig()


def scheme(name: str, **options: Any) -> SamplerConfig:
    return SamplerConfig(scheme=name, temperature=1.0, **options)  # type: ignore[arg-type]


@st.composite
def pairs(draw: st.DrawFn, rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Two laws over one vocabulary (or `rows` of each), some with zeros, ties, peaks, tiny probabilities; or the same law."""
    size = draw(st.integers(1, 7))
    weight = st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 0.25, 0.5, 1.0, 1.0, 3.0, 1e6])

    def one() -> np.ndarray:
        w = np.array(draw(st.lists(weight, min_size=size, max_size=size).filter(any)))
        return np.asarray(w / w.sum())

    def two() -> tuple[np.ndarray, np.ndarray]:
        p = one()
        return (p, p) if draw(st.integers(0, 9)) == 0 else (p, one())

    if rows is None:
        return two()
    both = [two() for _ in range(rows)]
    return np.array([p for p, _ in both] + [one()]), np.array([q for _, q in both])


# ---- the marginal ----


@pytest.mark.parametrize("name", SCHEMES)
@given(pairs())
def test_marginal_is_the_targets_law(name: str, pair: tuple[np.ndarray, np.ndarray]) -> None:
    p, q = pair
    out = speculative_output_marginal(p, q, scheme(name))
    assert out.dtype == np.float64 and out.shape == p.shape
    np.testing.assert_allclose(out, p, rtol=1e-9, atol=1e-14)
    assert abs(out.sum() - 1) < 1e-13


@pytest.mark.parametrize("name", SCHEMES)
@given(pairs(rows=3))
def test_marginal_of_a_cycle(name: str, pair: tuple[np.ndarray, np.ndarray]) -> None:
    p, q = pair
    out = speculative_output_marginal(p, q, scheme(name, speculative_depth=3))
    assert out.shape == p.shape
    np.testing.assert_allclose(out, p, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(out.sum(axis=1), 1, atol=1e-13)
    assert sampling.acceptance_rate(p, q, scheme(name)).shape == (3,)


@given(pairs())
def test_rates_of_acceptance(pair: tuple[np.ndarray, np.ndarray]) -> None:
    p, q = pair
    tv = np.abs(p - q).sum() / 2
    rejection = float(sampling.acceptance_rate(p, q, scheme("rejection")))
    coupled = float(sampling.acceptance_rate(p, q, scheme("coupled")))
    assert rejection == pytest.approx(1 - tv, abs=1e-12)
    assert (1 - tv) / (1 + tv) - 1e-12 <= coupled <= 1 - tv + 1e-12
    if np.array_equal(p, q):
        assert coupled == pytest.approx(1, abs=1e-12)


@given(pairs())
def test_coupled_joint_law(pair: tuple[np.ndarray, np.ndarray]) -> None:
    p, q = pair
    joint = sampling.coupled_joint(p, q)
    assert (joint >= 0).all()
    np.testing.assert_allclose(joint.sum(axis=1), p, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(joint.sum(axis=0), q, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(np.diag(joint), sampling.accepted_law(p, q, scheme("coupled")), rtol=1e-12)
    for i in np.flatnonzero((p > 1e-12) & (q > 1e-12)):  # the published form of the diagonal
        assert joint[i, i] == pytest.approx(1 / np.maximum(p / p[i], q / q[i]).sum(), rel=1e-9)


def test_coupled_joint_against_draws() -> None:
    """The formula against 400,000 pairs of draws with common noise."""
    rng = np.random.default_rng(5)
    p, q = np.array([0.5, 0.2, 0.2, 0.1, 0.0]), np.array([0.1, 0.35, 0.15, 0.0, 0.4])
    n = 400_000
    noise = rng.gumbel(size=(n, len(p)))
    with np.errstate(divide="ignore"):
        y, x = (np.log(p) + noise).argmax(axis=1), (np.log(q) + noise).argmax(axis=1)
    seen = np.zeros((len(p), len(p)))
    np.add.at(seen, (y, x), 1)
    expected = sampling.coupled_joint(p, q) * n
    cells = expected > 1
    assert not seen[~cells].any()
    chi = ((seen - expected)[cells] ** 2 / expected[cells]).sum()
    degrees = int(cells.sum()) - 1
    assert chi < degrees + 5 * math.sqrt(2 * degrees)


def test_lost_mass_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual that is not normalised loses mass, and the marginal's sum says so; likewise a wrong acceptance."""
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.5, 0.3])
    config = scheme("rejection")
    with monkeypatch.context() as m:
        m.setattr(sampling, "residual", lambda a, b: np.maximum(a - b, 0))
        out = speculative_output_marginal(p, q, config)
        assert out.sum() == pytest.approx(1 - 0.5 + 0.5 * 0.5)
    with monkeypatch.context() as m:
        m.setattr(sampling, "acceptance_probability", lambda a, b: np.ones(3))
        assert not np.allclose(speculative_output_marginal(p, q, config), p)
    with monkeypatch.context() as m:
        race = sampling._race
        m.setattr(sampling, "_race", lambda a, b: (race(a, b)[0], race(a, b)[1] * 0.9))
        assert speculative_output_marginal(p, q, scheme("coupled")).sum() < 0.99


def test_documented_call() -> None:
    target_p, draft_q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.2, 0.6])
    config = SamplerConfig(draft_core="stock", speculative_depth=2, verify_core="target")
    output = speculative_output_marginal(target_p, draft_q, config)
    np.testing.assert_allclose(output, target_p, rtol=1e-12)


def test_one_draft_by_hand() -> None:
    p, q = np.array([0.5, 0.5]), np.array([0.75, 0.25])
    np.testing.assert_allclose(sampling.acceptance_probability(p, q), [2 / 3, 1])
    np.testing.assert_allclose(sampling.residual(p, q), [0, 1])
    np.testing.assert_allclose(sampling.residual(p, p), p)
    assert sampling.acceptance_probability(0.1, 0.4) == pytest.approx(0.25)
    assert sampling.acceptance_probability(0.0, 0.0) == 1
    np.testing.assert_allclose(sampling.accepted_law(p, q, scheme("rejection")), [0.5, 0.25])
    # coupled: both 0 with 1/max-sum = 1/(1 + max(1, 1/3)) = 1/2, both 1 with 1/(max(1, 3) + 1) = 1/4
    np.testing.assert_allclose(sampling.accepted_law(p, q, scheme("coupled")), [0.5, 0.25])
    np.testing.assert_allclose(sampling.coupled_joint(p, q), [[0.5, 0], [0.25, 0.25]], atol=1e-15)


@pytest.mark.parametrize(
    ("p", "q", "config", "message"),
    [
        (np.ones((2, 2)) / 2, np.ones((2, 2)) / 2, GREEDY, "expected [V] and [V], or [K+1, V] and [K, V]"),
        (np.ones(3) / 3, np.ones(2) / 2, GREEDY, "has shape (3,) and draft_q (2,)"),
        (np.array([0.5, 0.6]), np.ones(2) / 2, GREEDY, "the sum of target_p[0] is 1.1"),
        (np.ones(2) / 2, np.array([1.5, -0.5]), GREEDY, "draft_q[0]: expected probabilities"),
        (np.ones(2) / 2, np.array([np.nan, 1]), GREEDY, "draft_q[0]: expected probabilities"),
        (np.ones((4, 2)) / 2, np.ones((3, 2)) / 2, SamplerConfig(speculative_depth=2), "draft_q has 3 rows"),
        (np.ones(2) / 2, np.ones(2) / 2, SamplerConfig(draft_core="none"), "drafts 0"),
    ],
)
def test_wrong_laws(p: np.ndarray, q: np.ndarray, config: SamplerConfig, message: str) -> None:
    with pytest.raises(ValueError) as error:
        speculative_output_marginal(p, q, config)
    assert message in str(error.value)


def test_no_drafts() -> None:
    p = np.array([0.25, 0.75])
    out = speculative_output_marginal(p[None, :], np.empty((0, 2)), SamplerConfig(draft_core="none"))
    np.testing.assert_array_equal(out, p[None, :])


# ---- from logits to a law ----

numbers = st.sampled_from([-40.0, -3.0, -1.0, 0.0, 0.0, 0.5, 1.0, 2.0, 2.0, 30.0])


def plain_law(z: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The filters one after the other, a token at a time."""
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    best = z[order[0]]
    weight = {i: math.exp((z[i] - best) / temperature) for i in order}
    if top_k:
        order = order[:top_k]
    total, mass = sum(weight[i] for i in order), 0.0
    kept: list[int] = []
    for i in order:
        if top_p < 1 and kept and mass >= top_p * total:
            break
        kept.append(i)
        mass += weight[i]
    kept = [i for i in kept if weight[i] >= min_p]
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(z))]


@given(
    st.lists(numbers, min_size=1, max_size=8),
    st.sampled_from([0.3, 1.0, 1.5]),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.4, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_filters(z: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    config = SamplerConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    p = sampling.law(z, config)
    np.testing.assert_allclose(p, plain_law(z, temperature, top_k, top_p, min_p), rtol=1e-12, atol=1e-300)
    kept = sampling.filter_logits(z, config)
    assert p.sum() == pytest.approx(1, abs=1e-14) and ((kept > -np.inf) == (p > 0)).all()
    assert p[int(np.argmax(z))] > 0  # the best is always left


@given(st.lists(numbers, min_size=1, max_size=8), st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0]))
def test_greedy_law_is_the_lowest_best_id(z: list[float], top_k: int, top_p: float) -> None:
    p = sampling.law(z, SamplerConfig(top_k=top_k, top_p=top_p))
    assert p[z.index(max(z))] == 1 and p.sum() == 1


def test_ties_are_kept_by_lowest_id() -> None:
    z = [1.0, 2.0, 2.0, 2.0]
    np.testing.assert_allclose(sampling.law(z, SamplerConfig(temperature=1, top_k=2)), [0, 0.5, 0.5, 0])
    np.testing.assert_allclose(sampling.law([0.0] * 4, SamplerConfig(temperature=1, top_p=0.5)), [0.5, 0.5, 0, 0])


def test_penalties_bias_and_mask() -> None:
    z = np.zeros(5)
    config = SamplerConfig(presence_penalty=1.0, frequency_penalty=0.5, logit_bias={4: 2.0, 0: -1.0})
    np.testing.assert_allclose(sampling.adjust_logits(z, config, counts=[0, 1, 3, 0, 0]), [-1, -1.5, -2.5, 0, 2])
    masked = sampling.adjust_logits(z, config, mask=[True, True, True, True, False])
    np.testing.assert_array_equal(masked, [-1, 0, 0, 0, -np.inf])
    p = sampling.law(z, dataclasses.replace(config, temperature=1.0), mask=[False, True, False, True, False])
    np.testing.assert_allclose(p, [0, 0.5, 0, 0.5, 0])
    banned = SamplerConfig(logit_bias={1: -math.inf}, temperature=0.5)
    np.testing.assert_allclose(sampling.law([0.0, 9.0], banned), [1, 0])
    for options in ({"mask": [False] * 5}, {"mask": [True]}, {"counts": [1]}, {"counts": [-1] * 5}):
        with pytest.raises(ValueError):
            sampling.adjust_logits(z, config, **options)
    for logits in ([np.nan], [np.inf], [], [[0.0]]):
        with pytest.raises(ValueError, match="logits"):
            sampling.adjust_logits(logits, GREEDY)
    with pytest.raises(ValueError, match="logit_bias is 4; expected token ids below 2"):
        sampling.adjust_logits([0.0, 1.0], config)


def test_tiny_temperature() -> None:
    np.testing.assert_array_equal(sampling.law([0.0, 5.0, 4.0], SamplerConfig(temperature=1e-300)), [0, 1, 0])


# ---- config and registry ----


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("draft_core", ["stok", "", "target"]),
        ("verify_core", ["stock"]),
        ("speculative_depth", [-1, 17, 1.0, "Auto", True, None]),
        ("temperature", [-0.1, 101, math.nan, "1", True]),
        ("top_k", [-1, 1.5, True]),
        ("top_p", [-0.1, 1.1, math.nan]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [101, math.inf]),
        ("frequency_penalty", [-101, math.nan]),
        ("seed", [-1, 2**64, 0.5]),
        ("margin", [-1, 1001, math.nan]),
        ("draft_lookup", [-1, 65, 1.5]),
        ("scheme", ["both"]),
        ("mask", [3, "x"]),
        ("logit_bias", [{-1: 1.0}, {0.5: 1.0}]),
        ("logit_bias[3]", [{3: math.inf}, {3: math.nan}, {3: "x"}]),
    ],
)
def test_wrong_options_are_named(option: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError) as error:
            SamplerConfig(**{option.split("[")[0]: value})
        assert str(error.value).startswith(f"{option} is ") and "expected" in str(error.value)


def test_margin_unless_given() -> None:
    used = [SamplerConfig(**given).margin_used for given in ({}, {"speculative_depth": 2}, {"margin": 1.5}, {"margin": 0, "speculative_depth": 2})]
    assert used == [0, 3, 1.5, 0]


def test_config_is_frozen_and_a_value() -> None:
    config = SamplerConfig(logit_bias={5: 1, 2: -0.5}, speculative_depth=np.int64(3), temperature=np.float32(0.5))
    assert config.bias_pairs == ((2, -0.5), (5, 1.0))
    assert config == dataclasses.replace(config) == pickle.loads(pickle.dumps(config))
    assert hash(config) == hash(dataclasses.replace(config, seed=0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


class Repeat:
    def __init__(self, session: Any) -> None:
        pass

    def propose(self, token: int, k: int) -> list[int]:
        return [token] * k


def test_registry() -> None:
    assert registry.draft_cores() == ["stock", "lookup", "none"] and registry.verify_cores() == ["target"]
    assert registry.draft_core("stock").needs_head and not registry.draft_core("lookup").needs_head
    with pytest.raises(ValueError, match="draft_core is 'x'; expected one of 'stock', 'lookup', 'none'"):
        registry.draft_core("x")
    with pytest.raises(ValueError, match="verify_core is 'x'; expected one of 'target'"):
        registry.verify_core("x")
    registry.register_draft_core("repeat", Repeat, "the last token again")
    try:
        assert SamplerConfig(draft_core="repeat").draft_core == "repeat"
        assert registry.draft_core("repeat").make is Repeat
        with pytest.raises(ValueError, match="registered already"):
            registry.register_draft_core("repeat", Repeat)
    finally:
        registry.unregister("repeat")
    with pytest.raises(ValueError, match="repeat"):
        SamplerConfig(draft_core="repeat")
    for name in ("stock", "target", "repeat"):
        with pytest.raises(ValueError, match="not a registered core"):
            registry.unregister(name)
    with pytest.raises(ValueError, match="expected a name"):
        registry.register_draft_core("", Repeat)
    with pytest.raises(TypeError, match="expected a function"):
        registry.register_draft_core("bad", 3)  # type: ignore[arg-type]
