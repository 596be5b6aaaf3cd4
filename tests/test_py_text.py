"""Text out of tokens: whole characters, stop texts that never leak, log-probabilities."""

from __future__ import annotations

import built  # noqa: F401
import numpy as np
import pytest
from ds4 import InvalidArgument
from ds4.generation import Settings, Text, logprobs_of, request_of
from hypothesis import given
from hypothesis import strategies as st

WORDS = st.text(alphabet="abé語😀\n", max_size=30)
STOPS = st.lists(st.text(alphabet="abé語😀\n", min_size=1, max_size=4), max_size=3)


def cut(text: str, stops: list[str]) -> str:
    """Up to the stop text that is complete first; of those that end there, the longest."""
    for end in range(len(text) + 1):
        lengths = [len(s) for s in stops if text[:end].endswith(s)]
        if lengths:
            return text[: end - max(lengths)]
    return text


def feed(data: bytes, cuts: list[int], stops: list[str]) -> list[str]:
    """The pieces of a text whose bytes come in some division."""
    edges = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    text, parts = Text(stops), []
    for a, b in zip(edges, edges[1:], strict=False):
        text.feed(data[a:b])
        parts.append(text.release())
    return [*parts, text.release(final=True)]


@given(WORDS, st.lists(st.integers(0, 200), max_size=20), STOPS)
def test_stops_and_characters(text: str, cuts: list[int], stops: list[str]) -> None:
    """Whatever the division into tokens, the text is the same, and what was given out is never taken back."""
    parts = feed(text.encode(), cuts, stops)
    assert "".join(parts) == cut(text, stops)
    assert not any("\ufffd" in part for part in parts)


@given(st.binary(max_size=40), st.lists(st.integers(0, 200), max_size=20))
def test_any_bytes(data: bytes, cuts: list[int]) -> None:
    """Bytes that are no UTF-8 become what bytes.decode makes of them."""
    assert "".join(feed(data, cuts, [])) == data.decode("utf-8", "replace")


def test_held_back() -> None:
    """What may become a stop text waits; no more than that."""
    parts = feed(b"a<b</en\nc", list(range(9)), ["</end>", "\n\n"])
    assert parts == ["a", "", "<b", "", "", "", "", "</en", "\nc", ""]


@given(st.lists(st.sampled_from([-1.5, 0.0, 0.25, 3.0, 7.5]), min_size=1, max_size=12), st.integers(0, 14))
def test_logprobs(values: list[float], n: int) -> None:
    """Best first, ties to the lower id, probabilities that sum to 1."""
    z = np.array(values, np.float32)
    got = logprobs_of(z, 0, n)
    assert [t for t, _ in got.top] == sorted(range(len(z)), key=lambda i: (-z[i], i))[:n]
    every = logprobs_of(z, 0, len(z)).top
    assert abs(sum(np.exp(p) for _, p in every) - 1) < 1e-12 and dict(every)[0] == got.logprob


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"logprobs": -1},
        {"logprobs": 1.5},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [1.5]},
        {"stop": [None]},
        {"stop": True},
        {"stop": None},
        {"stop": b"a"},
    ],
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        request_of(options, Settings(0, 3.0))  # type: ignore[arg-type]


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match=r"no option 'max_token'; there are .*max_tokens"):
        request_of({"max_token": 3}, Settings(0, 3.0))  # type: ignore[typeddict-unknown-key]
