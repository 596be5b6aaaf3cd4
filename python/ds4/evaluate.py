"""How well a model knows a text: nats a token, and how often the head's first draft is the target's choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds4.engine import Engine, Session
from ds4.errors import InvalidArgument

ROOM = 1 << 26  # bytes of logits at a time


@dataclass(frozen=True)
class Perplexity:
    """What `perplexity` found."""

    tokens: int
    """How many were scored."""
    nats: float
    """Mean of -log p(token), natural logarithm."""
    window: int
    """Tokens of a window, BOS included."""
    moved: int
    """How far each window is behind the one before."""
    drafts: int
    """How many of the head's first drafts were compared; 0 without a head."""
    right: int
    """How many of those were the target's own choice."""

    @property
    def perplexity(self) -> float:
        """exp(nats)."""
        return math.exp(self.nats)


def _chunks(session: Session, ids: list[int]) -> Iterator[tuple[int, npt.NDArray[np.float32], npt.NDArray[np.int64]]]:
    """Evaluates ids from position 0 on. Yields the first row of a chunk, the target's logits [n, V], and the head's choices
    [n - 1], or [n] behind the first chunk: those of rows first - 1 on (first for the first chunk); empty without a head."""
    info = session.engine.info
    rows = max(1, min(info.prefill_chunk, ROOM // (4 * info.vocab)))
    if info.has_head:  # a chunk's head rows begin one before it, which the session must be able to go back to
        rows = max(1, min(rows, info.max_rewind - 1))
    for first in range(0, len(ids), rows):
        logits = session.eval_logits(ids[first : first + rows])
        start, stop = max(first - 1, 0), first + len(logits) - 1
        head = session.head_logits(start, stop).argmax(axis=1) if info.has_head and stop > start else np.empty(0, np.int64)
        yield first, logits, head


def perplexity(engine: Engine, ids: list[int], progress: Callable[[int, int], None] | None = None) -> Perplexity:
    """Scores a text in windows of the engine's whole context, BOS first if there is one, as `./ds4 --perplexity-file` does.

    The first window is scored whole, each later one moves by half a window and is scored where it is new, so that every token but
    the first has at least half a window before it. ids: the text's, without BOS. progress is called with tokens done and in
    all. Raises InvalidArgument for a text or a context that is too short.
    """
    bos = [engine.info.bos] if engine.info.bos >= 0 else []
    window, stride = engine.info.ctx - len(bos), (engine.info.ctx - len(bos)) // 2
    if window < 2:
        raise InvalidArgument(f"ctx is {engine.info.ctx}: too small for a perplexity")
    if len(ids) + len(bos) < 2:
        raise InvalidArgument(f"{len(ids)} tokens are too few for a perplexity")
    nats, scored, drafts, right = 0.0, 0, 0, 0
    start, done = 0, 0 if bos else 1
    with engine.session() as session:
        while done < len(ids):
            part = bos + ids[start : start + window]
            new = done - start + len(bos)  # the first of the window that is not scored yet
            session.rewind(0)
            choices = np.empty(len(part), np.int64)
            for first, logits, head in _chunks(session, part):
                choices[first : first + len(logits)] = logits.argmax(axis=1)
                at = np.arange(max(new, first + 1), min(first + len(logits), len(part) - 1) + 1)  # row at - 1 is about `at`
                z = logits[at - 1 - first].astype(np.float64)
                top = z.max(axis=1)
                norm = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
                nats += float((norm - z[np.arange(len(at)), [part[i] for i in at]]).sum())
                scored += len(at)
                q = np.arange(max(first - 1, 0), max(first - 1, 0) + len(head))  # guesses what row q + 1 chooses
                counted = (q + 2 >= new) & (q + 2 < len(part))
                drafts += int(counted.sum())
                right += int((counted & (choices[q + 1] == head)).sum())
                if progress:
                    progress(max(done, start + first + len(logits) - len(bos)), len(ids))
            done = start + len(part) - len(bos)
            start += stride
    return Perplexity(scored, nats / scored, engine.info.ctx, stride, drafts, right)
