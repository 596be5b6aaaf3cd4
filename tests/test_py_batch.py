"""Batches from Python: each text as alone, whoever joins, leaves or fails; masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import built  # noqa: F401
import ds4
import numpy as np
import numpy.typing as npt
import pytest
from conftest import ROOT
from ds4 import Batch, Engine, Session

PAIR = (ROOT / "models/small.gguf", ROOT / "models/small-mtp.gguf")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(*PAIR, ctx=512, threads=1, prefill_chunk=32, margin=0, speculative_depth=1) as engine:
        yield engine


def even(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """A mask: even ids only, but after a text of a length that 5 divides."""
    keep = np.ones(2048, np.bool_)
    keep[1::2] = len(tokens) % 5 == 0
    return keep


TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("In the beginning", {"max_tokens": 30, "speculative_depth": 3}),
    ("And the LORD said", {"max_tokens": 25, "temperature": 1.2, "seed": 3, "speculative_depth": 2}),
    ("In the beginning", {"max_tokens": 40, "stop": "earth", "speculative_depth": 4}),
    ("Now it came to pass " * 12, {"max_tokens": 9, "logprobs": 2}),
    ("The", {"max_tokens": 20, "mask": even, "speculative_depth": 2}),
    ("Behold", {"max_tokens": 12, "frequency_penalty": 2.0, "temperature": 0.7, "speculative_depth": 0}),
    ("And", {"max_tokens": 0}),
    ("Again", {"max_tokens": 15, "logit_bias": {19: -float("inf")}, "speculative_depth": 1}),
]


def test_as_alone(engine: Engine) -> None:
    """Joining one after another; text, tokens, log-probabilities and why it ended."""
    alone = [engine.generate(prompt, **options) for prompt, options in TEXTS]
    with Batch(engine) as batch:
        waiting, texts, pieces = list(TEXTS), [], []
        while waiting or batch:
            if waiting:
                prompt, options = waiting.pop(0)
                texts.append(batch.add(prompt, **options))
            pieces += batch.step()
    for text, expected in zip(texts, alone, strict=True):
        got = text.result()
        assert text.done and (got, got.tokens) == (expected, expected.tokens), text.number
        assert (got.logprobs, got.finish_reason) == (expected.logprobs, expected.finish_reason)
        assert "".join(p for t, p in pieces if t is text) == expected
    assert not engine._handle.sessions  # each left with its session


def test_one_pass_for_all(engine: Engine) -> None:
    """The point of it: as many passes of the target as the longest text has steps."""
    start = engine.work
    with Batch(engine) as batch:
        for _ in range(6):
            batch.add("And", max_tokens=10, speculative_depth=0)
        batch.run()
    done = engine.work - start
    assert done.passes == 1 + 10 and done.rows == 6 * (len(engine.prompt("And")) + 10)


def test_leave_and_sessions(engine: Engine) -> None:
    """A text that leaves does not disturb the others; a session of yours goes on as if it had been alone."""
    expected = engine.generate("In the beginning", max_tokens=30)
    with Session(engine) as mine, Batch(engine) as batch:
        first = mine.generate("In the beginning", max_tokens=10)
        text = batch.add(session=mine, max_tokens=10)
        other = batch.add("And", max_tokens=400)
        batch.step()
        batch.remove(other)
        batch.remove(other)
        assert other.session.closed and not other.done and len(batch) == 1
        with pytest.raises(ds4.InvalidArgument, match="not in the batch"):
            batch.add("x", session=mine)
        batch.run()
        assert not mine.closed
        assert first.tokens + text.result().tokens + mine.generate(max_tokens=10).tokens == expected.tokens


def test_failures_stay_apart(engine: Engine) -> None:
    """A mask that raises, a session that is cancelled, closed or moved: each ends with its own error, the text before it kept."""

    class Boom(Exception):
        pass

    def mask(tokens: npt.NDArray[np.int32]) -> None:
        if len(tokens) > 12:
            raise Boom

    good = engine.generate("In the beginning", max_tokens=25)
    with Session(engine) as cancelled, Session(engine) as closed, Session(engine) as moved, Batch(engine) as batch:
        texts = [
            batch.add("In the beginning", max_tokens=25),
            batch.add("In the beginning", max_tokens=25, mask=mask),
            batch.add("In the beginning", max_tokens=25, session=cancelled),
            batch.add("In the beginning", max_tokens=25, session=closed),
            batch.add("In the beginning", max_tokens=25, mask=lambda tokens: np.ones(7)),
            batch.add("In the beginning", max_tokens=25, session=moved),
        ]
        batch.step()
        batch.step()
        cancelled.cancel()
        moved.rewind(moved.position - 1)
        closed.close()
        last = {}
        while batch:
            last |= {t.number: p for t, p in batch.step()}
        assert [type(t.error) for t in texts] == [type(None), Boom, ds4.Cancelled, ds4.Closed, TypeError, ds4.InvalidArgument]
        assert texts[0].result() == good and last[1].finish_reason == "error"
        assert cancelled.tokens[1:] and good.startswith("".join(texts[1]._pieces)) and len(texts[1]._pieces) > 1
        with pytest.raises(Boom):
            texts[1].result()


def test_a_moved_prompt(engine: Engine) -> None:
    """A session that something else moves between two parts of its prompt, or in the middle of a stream, is not gone on with."""
    with Session(engine) as session, Batch(engine) as batch:
        text = batch.add([5] * (engine.info.prefill_chunk + 5), session=session)
        batch.step()
        session.eval([5])
        ((_, piece),) = batch.step()
        assert piece.finish_reason == "error" and len(batch) == 0
        with pytest.raises(ds4.InvalidArgument, match="something else moved it"):
            text.result()
        stream = session.stream(max_tokens=20)
        next(stream)
        session.rewind(session.position - 1)
        with pytest.raises(ds4.InvalidArgument, match="something else moved it"):
            next(stream)


def test_refused(engine: Engine) -> None:
    with Batch(engine) as batch, Engine(PAIR[0], threads=1) as other, Session(other) as stranger:
        with pytest.raises(ds4.InvalidArgument, match="session of the batch's engine"):
            batch.add("x", session=stranger)
        with pytest.raises(ds4.ContextFull, match="600 tokens do not fit: the session has room for 512"):
            batch.add([5] * 600)
        with pytest.raises(ds4.InvalidArgument, match="temperature is -1"):
            batch.add("x", temperature=-1)
        with pytest.raises(TypeError, match="no option"):
            batch.add("x", temp=1)  # type: ignore[call-arg]
        assert len(batch) == 0 and batch.step() == []
        for _ in range(batch.capacity):
            batch.add("x")
        with pytest.raises(ds4.InvalidArgument, match="the batch is full: 32 texts"):
            batch.add("x")
    assert not engine._handle.sessions


@pytest.mark.parametrize("depth", [0, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks(engine: Engine, depth: int, temperature: float) -> None:
    """Only what the mask allows, the same text at every depth; what it raises reaches the caller and the session goes on."""
    options: dict[str, Any] = {"max_tokens": 20, "temperature": temperature, "seed": 4, "mask": even}
    text = engine.generate("And the LORD", speculative_depth=depth, **options)
    assert text.tokens == engine.generate("And the LORD", speculative_depth=0, **options).tokens
    start = len(engine.prompt("And the LORD"))
    assert all(t % 2 == 0 or (start + i) % 5 == 0 for i, t in enumerate(text.tokens))
    seen = []

    def mask(tokens: npt.NDArray[np.int32]) -> None:
        seen.append(len(tokens))
        if len(tokens) == start + 9:
            raise KeyError("mine")

    with Session(engine) as session:
        with pytest.raises(KeyError, match="mine"):
            session.generate("And the LORD", max_tokens=20, speculative_depth=depth, mask=mask)
        assert max(seen) >= start + 9 and start < session.position <= start + 9
        held = session.tokens[start:]
        rest = session.generate(max_tokens=20 - len(held), speculative_depth=depth).tokens
        assert held + rest == engine.generate("And the LORD", max_tokens=20).tokens
