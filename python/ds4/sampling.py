"""How tokens are drawn, and the exact law of what speculation emits: numpy, float64, independent of the engine.

A law is a float64 array [V] of probabilities. `law(logits, config)` makes one from logits; `speculative_output_marginal`
gives the law of the tokens that come out when drafts of law q are verified against the target's p. Both schemes are exact,
so that law is p again, which is what the engine's sampler is tested against.

Two schemes:

- *coupled*: draft and target are drawn with the same noise, x = argmax(log q + G) and y = argmax(log p + G), G Gumbel. The
  draft is taken when x = y; what comes out is y in any case (Daliri, Musco and Suresh 2024, "Coupling without communication
  and drafter-invariant speculative decoding").
- *rejection*: draft x ~ q, taken with probability min(1, p(x)/q(x)); else a token of the law (p - q)+, normalised (Leviathan
  et al. 2023, Chen et al. 2023).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ds4 import registry
from ds4.errors import InvalidArgument

Array: TypeAlias = npt.NDArray[np.float64]

MAX_DEPTH = 16  # DS4_MAX_DRAFT
MAX_LOOKUP = 64
SUM_TOLERANCE = 1e-5  # how far the sum of a law may be from 1: a float32 softmax is within it


def _check(name: str, value: Any, ok: bool, expected: str) -> None:
    if not ok:
        raise InvalidArgument(f"{name} is {value!r}; expected {expected}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    _check(name, value, _is_number(value) and low <= value <= high, f"{low:g} to {high:g}")


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    _check(name, value, _is_integer(value) and low <= value <= high, f"an integer, {low} to {high}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplerConfig:
    """How tokens are drawn and speculated on. Frozen and checked: a wrong value raises InvalidArgument with its name.

    Defaults are greedy text, with a depth that the engine chooses. Change a copy with `dataclasses.replace`.
    """

    draft_core: str = "stock"
    """Who drafts: a name of `ds4.registry`."""
    speculative_depth: int | Literal["auto"] = "auto"
    """Tokens drafted a cycle, 0 (plain decoding) to 16, or "auto": what pays, from measured times and acceptance."""
    draft_lookup: int = 0
    """Draft also what followed the last time that up to so many tokens occurred, 0 to 64; 0: off, but for the core "lookup"."""
    verify_core: str = "target"
    """Who verifies: a name of `ds4.registry`."""
    temperature: float = 0.0
    """0: greedy, the largest logit, ties to the lowest id. Up to 100."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the most likely tokens until their sum reaches top_p; 1: all."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the first; 0: all."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the text holds; -100 to 100."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that the text holds it; -100 to 100."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Token id -> addend to its logit; -inf bans it. Kept as pairs, sorted by id."""
    mask: Callable[[npt.NDArray[np.int32]], npt.NDArray[np.bool_] | None] | None = None
    """Which tokens may follow: a function of the text's ids, int32 [n], to bool [V] (None: all); called for each token."""
    seed: int = 0
    """The same seed gives the same text; 0 to 2**64 - 1."""
    margin: float | None = None
    """Lead in logits that a draft needs to be taken from the batch, 0 to 1000; None: 0 with "auto", 3 with a fixed depth. Trades
    speed, never the text."""
    scheme: Literal["coupled", "rejection"] = "coupled"
    """How drafts are verified with a temperature."""

    def __post_init__(self) -> None:
        registry.draft_core(self.draft_core)
        registry.verify_core(self.verify_core)
        if self.speculative_depth != "auto":
            ok = _is_integer(self.speculative_depth) and 0 <= self.speculative_depth <= MAX_DEPTH
            _check("speculative_depth", self.speculative_depth, ok, f"0 to {MAX_DEPTH} or 'auto'")
        _check_integer("draft_lookup", self.draft_lookup, 0, MAX_LOOKUP)
        _check_number("temperature", self.temperature, 0, 100)
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        _check_number("top_p", self.top_p, 0, 1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("presence_penalty", self.presence_penalty, -100, 100)
        _check_number("frequency_penalty", self.frequency_penalty, -100, 100)
        _check_integer("seed", self.seed, 0, 2**64 - 1)
        if self.margin is not None:
            _check_number("margin", self.margin, 0, 1000)
        _check("mask", self.mask, self.mask is None or callable(self.mask), "a function or None")
        _check("scheme", self.scheme, self.scheme in ("coupled", "rejection"), "'coupled' or 'rejection'")
        bias = dict(self.logit_bias)
        for token, value in bias.items():
            _check("logit_bias", token, _is_integer(token) and token >= 0, "token ids")
            _check(f"logit_bias[{token}]", value, _is_number(value) and value < math.inf, "a number below infinity")
        object.__setattr__(self, "logit_bias", tuple((int(token), float(bias[token])) for token in sorted(bias)))

    @property
    def margin_used(self) -> float:
        """`margin`, or what it is if that is None."""
        return self.margin if self.margin is not None else 0.0 if self.speculative_depth == "auto" else 3.0

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of id and addend, sorted by id."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)


# ---- from logits to a law ----


def adjust_logits(
    logits: npt.ArrayLike,
    config: SamplerConfig,
    counts: npt.ArrayLike | None = None,
    mask: npt.ArrayLike | None = None,
) -> Array:
    """Logits after bias, penalties and mask: float64 [V].

    logits [V]; counts int [V]: how often the text so far holds each token (for the penalties; None: not at all); mask bool
    [V]: the tokens that may come (None: all; the config's function is not called). Raises InvalidArgument for shapes that differ, a bias outside the vocabulary, NaN or
    infinite logits, and when no token is left.
    """
    z = np.array(logits, np.float64)
    if z.ndim != 1 or not z.size:
        raise InvalidArgument(f"logits have shape {z.shape}; expected [V]")
    if np.isnan(z).any() or (z == np.inf).any():
        raise InvalidArgument("logits: expected numbers below infinity")
    for token, value in config.bias_pairs:
        _check("logit_bias", token, token < len(z), f"token ids below {len(z)}")
        z[token] += value
    if counts is not None:
        n = np.asarray(counts)
        _check("counts", n.shape, n.shape == z.shape and bool((n >= 0).all()), f"counts of shape {z.shape}")
        z -= config.presence_penalty * (n > 0) + config.frequency_penalty * n
    if mask is not None:
        allowed = np.asarray(mask, bool)
        _check("mask", allowed.shape, allowed.shape == z.shape, f"shape {z.shape}")
        z[~allowed] = -np.inf
    if not (z > -np.inf).any():
        raise InvalidArgument("no token is left: all are masked or banned")
    return z


def filter_logits(
    logits: npt.ArrayLike,
    config: SamplerConfig,
    counts: npt.ArrayLike | None = None,
    mask: npt.ArrayLike | None = None,
) -> Array:
    """Logits over temperature, relative to the best; -inf for what the filters drop. float64 [V].

    In this order: bias, penalties and mask (`adjust_logits`), temperature, top_k, top_p, min_p. Where likely tokens tie, those
    of lower id are kept. At temperature 0 only the best is left. Raises as `adjust_logits` does.
    """
    z = adjust_logits(logits, config, counts, mask)
    z -= z.max()
    order = np.argsort(-z, kind="stable")  # best first, ties: the lowest id first
    if config.temperature == 0:
        kept = order[:1]
    else:
        with np.errstate(over="ignore"):  # to -inf, at a temperature near 0
            z /= config.temperature
        kept = order[: config.top_k] if config.top_k else order
        weights = np.exp(z[kept])
        keep = (weights >= config.min_p) & (weights > 0)
        if config.top_p < 1:
            sums = np.concatenate([[0.0], np.cumsum(weights)])  # of the more likely ones
            keep &= sums[:-1] < config.top_p * sums[-1]
        keep[0] = True
        kept = kept[keep]
    out = np.full(len(z), -np.inf)
    out[kept] = z[kept]
    return out


def law(
    logits: npt.ArrayLike,
    config: SamplerConfig,
    counts: npt.ArrayLike | None = None,
    mask: npt.ArrayLike | None = None,
) -> Array:
    """The law that the next token is drawn from: softmax of `filter_logits`, float64 [V]. Raises as `adjust_logits` does."""
    weights = np.exp(filter_logits(logits, config, counts, mask))
    return np.asarray(weights / weights.sum())


# ---- one draft ----


def acceptance_probability(p: npt.ArrayLike, q: npt.ArrayLike) -> Array:
    """min(1, p/q), elementwise: how likely the rejection scheme takes a draft once it is drawn. 1 where q is 0."""
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    ones = np.ones(np.broadcast_shapes(p.shape, q.shape))
    return np.asarray(np.divide(np.minimum(p, q), q, out=ones, where=q > 0))


def residual(p: npt.ArrayLike, q: npt.ArrayLike) -> Array:
    """(p - q)+ normalised: the law of the rejection scheme's correction, float64 [V].

    Where that has no mass, p and q are the same law, no draft is refused, and p is returned.
    """
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    rest = np.maximum(p - q, 0)
    total = rest.sum()
    return np.asarray(rest / total) if total > 0 else p.copy()


def _race(p: Array, q: Array) -> tuple[Array, Array]:
    """M and F at each token's ratio p/q (infinite where q is 0), for the coupled scheme.

    Gumbel-max is a race: with E_j exponential of rate 1, the target draws argmin E_j / p_j and the draft argmin E_j / q_j.
    Integrating over the two winners' times leaves one integral over the ratio u of the times, in which the others take part
    through M(u) = sum_j max(p_j, u q_j): F(u) = integral of 1 / M^2 from 0 to u. M is linear between the ratios p_j / q_j, where
    1 / M^2 has the exact integral (b - a) / (M(a) M(b)).
    """
    with np.errstate(over="ignore"):
        ratio = np.divide(p, q, out=np.full(len(p), np.inf), where=q > 0)
    order = np.argsort(ratio, kind="stable")
    order, never = np.split(order, [int(np.isfinite(ratio).sum())])
    u = ratio[order]
    # M on the way to u[i]: the tokens before it count with u q, the others with p
    slope = np.cumsum(q[order]) - q[order]
    level = np.cumsum(p[order][::-1])[::-1] + p[never].sum()
    before = np.concatenate([[0.0], u[:-1]])
    m, f = np.full(len(p), np.inf), np.empty(len(p))
    m[order] = level + u * slope
    f[order] = np.cumsum((u - before) / (level + before * slope) / m[order])
    total = q[order].sum()
    f[never] = f[order[-1]] + 1 / ((p[never].sum() + u[-1] * total) * total)  # the rest, to infinity
    return m, f


def coupled_joint(p: npt.ArrayLike, q: npt.ArrayLike) -> Array:
    """Joint law of the coupled draws, float64 [V, V]: [y, x] is the probability of target's draw y and draft x.

    On the diagonal p_y / sum_j max(p_j, (p_y/q_y) q_j); off it p_y q_x (F(p_y/q_y) - F(p_x/q_x))+ with F as in `_race`. Rows
    sum to p, columns to q.
    """
    p, q = _a_law("p", p), _a_law("q", q)
    m, f = _race(p, q)
    joint = p[:, None] * q[None, :] * np.maximum(f[:, None] - f[None, :], 0)
    np.fill_diagonal(joint, np.where(np.isfinite(m) & (p > 0), p / np.where(p > 0, m, 1), 0))
    return np.asarray(joint)


def _coupled(p: Array, q: Array) -> tuple[Array, Array]:
    """Probability of each token as an accepted draft, and as the target's own where the draft was another: [V], [V]."""
    m, f = _race(p, q)
    accepted = np.where(np.isfinite(m) & (p > 0), p / np.where(p > 0, m, 1), 0)
    order = np.argsort(f, kind="stable")  # sum over x of q_x (F_y - F_x)+, by running sums
    mass, moment = np.cumsum(q[order]), np.cumsum((q * np.where(q > 0, f, 0))[order])
    other = np.empty(len(p))
    other[order] = np.maximum(f[order] * mass - moment, 0)
    return accepted, p * other


def _rejection(p: Array, q: Array) -> tuple[Array, Array]:
    """Probability of each token as an accepted draft, and as a correction: [V], [V]."""
    taken = acceptance_probability(p, q)
    return q * taken, float((q * (1 - taken)).sum()) * residual(p, q)


# ---- a cycle of drafts ----


def _a_law(name: str, value: npt.ArrayLike) -> Array:
    p = np.asarray(value, np.float64)
    if p.ndim != 1 or not p.size:
        raise InvalidArgument(f"{name} has shape {p.shape}; expected [V]")
    if not (np.isfinite(p).all() and (p >= 0).all()):
        raise InvalidArgument(f"{name}: expected probabilities, 0 or more")
    _check(f"the sum of {name}", float(p.sum()), abs(p.sum() - 1) <= SUM_TOLERANCE, "1")
    return p


def _laws(target_p: npt.ArrayLike, draft_q: npt.ArrayLike, config: SamplerConfig) -> tuple[list[Array], list[Array], bool]:
    """Checked rows of both, and whether the caller gave single rows."""
    p, q = np.asarray(target_p, np.float64), np.asarray(draft_q, np.float64)
    single = p.ndim == 1 and q.ndim == 1
    p, q = (a[None, :] if a.ndim == 1 else a for a in (p, q))
    if p.ndim != 2 or q.ndim != 2 or p.shape[1] != q.shape[1] or len(p) != len(q) + (not single):
        raise InvalidArgument(
            f"target_p has shape {np.shape(target_p)} and draft_q {np.shape(draft_q)}; expected [V] and [V], or [K+1, V] and [K, V]"
        )
    depth = 0 if config.draft_core == "none" else config.speculative_depth
    if depth != "auto" and len(q) > depth:
        raise InvalidArgument(f"draft_q has {len(q)} rows; draft_core {config.draft_core!r} with this depth drafts {depth}")
    rows = [_a_law(f"target_p[{i}]", row) for i, row in enumerate(p)]
    return rows, [_a_law(f"draft_q[{i}]", row) for i, row in enumerate(q)], single


def accepted_law(target_p: npt.ArrayLike, draft_q: npt.ArrayLike, config: SamplerConfig) -> Array:
    """Probability that token x is drafted and taken, float64 [V] or [K, V]; its sum is the rate of acceptance.

    target_p and draft_q as for `speculative_output_marginal`. Row i is for a cycle that comes to its draft i. With TV the
    total variation distance of p and q, the rate is 1 - TV for rejection and at least (1 - TV) / (1 + TV) for coupled. Raises
    InvalidArgument as `speculative_output_marginal` does.
    """
    p, q, single = _laws(target_p, draft_q, config)
    split = _coupled if config.scheme == "coupled" else _rejection
    rows = np.array([split(p[i], q[i])[0] for i in range(len(q))]).reshape(len(q), len(p[0]))
    return np.asarray(rows[0]) if single else rows


def acceptance_rate(target_p: npt.ArrayLike, draft_q: npt.ArrayLike, config: SamplerConfig) -> Array:
    """How likely a draft is taken, float64 scalar array or [K]: the sum of `accepted_law` over tokens."""
    return np.asarray(accepted_law(target_p, draft_q, config).sum(axis=-1))


def speculative_output_marginal(target_p: npt.ArrayLike, draft_q: npt.ArrayLike, config: SamplerConfig) -> Array:
    """The exact law of the tokens that a speculative cycle emits.

    target_p: float64 [V] with draft_q [V]: one draft and the token that comes out at its position; or target_p [K+1, V] with
    draft_q [K, V]: K drafts, row i of target_p the target's law behind i drafts. They are the laws that tokens are drawn from
    (`law`), all filters applied; of the config the scheme counts, and that it drafts as many.

    Returns float64 [V] or [K+1, V]: row i the law of the output at position i of a cycle that comes so far; for i < K an
    accepted draft or the target's token in place of a refused one, for i = K the token behind the last draft. Added up from
    those parts and *not* renormalised, so that mass which a scheme loses shows in the sum; equal to target_p up to rounding.

    Raises InvalidArgument for other shapes, for rows that are no laws (negative, not finite, sum not 1 within 1e-5) and for more
    drafts than the config's depth.
    """
    p, q, single = _laws(target_p, draft_q, config)
    split = _coupled if config.scheme == "coupled" else _rejection
    rows = [np.add(*split(p[i], q[i])) for i in range(len(q))]
    if single:
        return np.asarray(rows[0])
    return np.array([*rows, p[-1]])
