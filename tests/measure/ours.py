"""ds4's side: an opened engine that is asked for one quantity at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from ds4 import Engine, Session

from measure.files import Model

FIRST_WORD = 300  # ids below are control tokens and bytes
REWIND = 512
STRETCHED = 2048  # tokens that are read before a longer context is made of them


class Ours(AbstractContextManager["Ours"]):
    """A session on a file, with distinct random tokens to read: hash layers route by id, so repeated ones would read less."""

    def __init__(self, model: Model, threads: int, ctx: int = 4096, head: bool = False, seed: int = 0) -> None:
        self.model = model
        self.engine = Engine(model.path, model.head if head else None, threads=threads, ctx=ctx, margin=0.0, max_rewind=REWIND)
        vocab = self.engine.info.vocab
        order = np.random.default_rng(seed).permutation(np.arange(min(FIRST_WORD, vocab // 2), vocab))
        self.ids: list[int] = [int(t) for t in np.resize(order, max(ctx, 64))]
        self.session: Session = self.engine.session()
        self.session.set_stops([], ignore_eos=True)
        self.session.set_speculation(0)

    def __exit__(self, *_: Any) -> None:
        self.engine.close()

    def go(self, position: int) -> None:
        """To a position of the text, from wherever it is."""
        s = self.session
        if s.position > position:
            s.rewind(position if position >= s.rewind_floor else 0)
        if s.position < position:
            s.eval(self.ids[s.position : position])

    def at_context(self, position: int) -> bytes:
        """A snapshot there; one too far to read up to is made of a shorter one (hook_stretch in tests/hooks.c)."""
        self.go(min(position, STRETCHED))
        if position <= STRETCHED:
            return self.session.snapshot()
        import engine as hooks  # builds them

        with hooks.Engine(self.model.path, ctx=self.session.ctx, max_rewind=REWIND, threads=1) as e:
            s = e.session()
            s.load(self.session.snapshot())
            s.stretch(position)
            return s.save()

    def prompt(self, tokens: int) -> float:
        """Tokens a second of reading so many at the session's position; goes there and stays."""
        start = self.session.position
        began = time.perf_counter()
        self.session.eval(self.ids[start : start + tokens])
        return tokens / (time.perf_counter() - began)

    def decode(self, tokens: int) -> float:
        """Tokens a second of generating so many one by one; goes back."""
        s = self.session
        start, token = s.position, s.argmax()
        began = time.perf_counter()
        for _ in range(tokens):
            s.step(token)
            token = s.next()
        seconds = time.perf_counter() - began
        s.rewind(start)
        return tokens / seconds

    def speeds(self, prompts: Sequence[int], tokens: int) -> dict[str, float]:
        """As llama-bench measures: prompts from nothing, and generation from one token on."""
        out = {}
        for n in prompts:
            self.go(0)
            out[f"prompt {n}"] = self.prompt(n)
        if tokens:
            self.go(0)
            self.go(1)
            out["decode"] = self.decode(tokens)
        return out

    def pass_us(self, tokens: int) -> dict[str, float]:
        """Microseconds of a pass of one row by the engine's own clock, the mean of so many."""
        self.session.reset_stats()
        self.decode(tokens)
        stats = self.session.stats
        return {"a pass": 1000 * stats.verify_ms / stats.cycles}

    def passes(self, rows: Sequence[int], repeat: int = 3) -> dict[str, float]:
        """Milliseconds of verifying so many rows at the session's position, the median of `repeat`, and bytes read; goes back."""
        s = self.session
        start, out = s.position, {}
        for n in rows:
            all_ms, before = [], self.engine.work.weight_bytes
            for i in range(repeat):
                token, *drafts = self.ids[start + i * n : start + (i + 1) * n]
                began = time.perf_counter()
                s.verify(token, drafts)
                all_ms.append(1000 * (time.perf_counter() - began))
                s.rewind(start)
            out[f"rows {n}"] = statistics.median(all_ms)
            out[f"bytes of {n}"] = (self.engine.work.weight_bytes - before) / repeat
        return out
