"""What is measured, a function a part: each prints its tables and keeps its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from measure import files
from measure.figures import Figure, Report, cell, in_turns, number, ratio
from measure.files import Model
from measure.ours import Ours
from measure.peer import Peer

DS4, PEER, MEMORY = "ds4", "llama.cpp", "memory"
ROWS = (1, 2, 3, 5, 9)
DECODED, PROMPT, LONG_PROMPT = 24, 256, 2048
READ_MIB, READ_ROUNDS = 1024, 9
UNITS = {"read": "GB/s", "tokens a pass": "tokens", **{f"bytes of {n}": "bytes" for n in ROWS}}
"""Of quantities measured along with others."""

Measure = Callable[[], Mapping[str, float]]


@dataclass
class Bench:
    """The choices of the command line, and where things are."""

    cache: Path
    runs: int
    threads: Sequence[int]
    names: Sequence[str]
    peer: Peer | None
    report: Report
    step: Callable[[str], None]

    def models(self) -> Iterator[Model]:
        """The slices to measure, each read into memory first."""
        for name in self.names:
            yield self.model(name)

    def model(self, name: str) -> Model:
        """One of them."""
        model = files.made(name, self.cache, self.step)
        files.warm(model, self.step)
        return model

    def sides(self, part: str, at: str, threads: int, sides: Mapping[str, Measure], unit: str) -> dict[tuple[str, str], Figure]:
        """Measures the sides in turns and keeps the figures: by side and quantity."""
        found = in_turns(sides, self.runs, lambda text: self.step(f"{part}, {at}, {threads} threads, {text}"))
        out = {}
        for who, quantities in found.items():
            for what, values in quantities.items():
                out[who, what] = Figure(part, at, threads, what, who, values, UNITS.get(what, unit))
        self.report.add(*out.values())
        return out

    def beside(self, ours: Figure, theirs: Figure | None) -> list[str]:
        """Cells: ours, theirs, the ratio, which is kept."""
        if not theirs:
            return [cell(ours), "-", "-"]
        times = ratio(ours, theirs)
        self.report.add(times)
        return [cell(ours), cell(theirs), cell(times)]


def read_speed(threads: int) -> dict[str, float]:
    """Gigabytes a second that memory gives so many threads."""
    program = str(files.ROOT / "build/read_speed")
    return {"read": float(files.run([program, str(threads), str(READ_MIB), str(READ_ROUNDS)]))}


def decode(b: Bench) -> None:
    """Decoding and a prompt of 256, beside the peer and beside what reading every byte once would take."""
    decoded, prompts, reads = [], [], []
    for model in b.models():
        for threads in b.threads:
            with Ours(model, threads) as ours:
                sides: dict[str, Measure] = {DS4: partial(ours.speeds, [PROMPT], DECODED)}
                if b.peer:
                    sides[PEER] = partial(b.peer.measure, model.path, threads, [PROMPT], DECODED)
                sides[MEMORY] = partial(read_speed, threads)
                ours.speeds([PROMPT], 2)
                of = b.sides("decode", model.name, threads, sides, "tokens/s")
                kinds = files.bytes_read(ours.engine.tensors(), ours.engine.info.experts, ours.engine.info.experts_used, picks=False)
            read, speed = of[MEMORY, "read"], of[DS4, "decode"]
            a_token = sum(kinds.values()) * 1e-9
            bound = tuple(v / a_token for v in read.values)
            limit = Figure("decode", model.name, threads, "decode", "limit", bound, "tokens/s")
            share = ratio(speed, limit, "ds4 / limit")
            b.report.add(limit, share)
            at = [model.name, str(threads)]
            decoded.append([*at, *b.beside(speed, of.get((PEER, "decode"))), cell(read), cell(limit), cell(share)])
            what = f"prompt {PROMPT}"
            prompts.append([*at, str(PROMPT), *b.beside(of[DS4, what], of.get((PEER, what)))])
        reads.append([model.name, *(number(v * 1e-6, 4) for v in (*kinds.values(), sum(kinds.values())))])
    head = ["file", "threads", "ds4 tokens/s", "llama.cpp tokens/s", "ratio", "memory GB/s", "limit tokens/s", "of the limit"]
    b.report.table("Decoding", head, decoded)
    b.report.table("Megabytes that a token reads", ["file", *files.KINDS, "all"], reads)
    b.report.table("Prompts", PROMPT_HEAD, prompts)


PROMPT_HEAD = ["file", "threads", "tokens", "ds4 tokens/s", "llama.cpp tokens/s", "ratio"]


def prompt(b: Bench) -> None:
    """A prompt of 2048."""
    body, threads = [], max(b.threads)
    for model in b.models():
        with Ours(model, threads) as ours:
            sides: dict[str, Measure] = {DS4: partial(ours.speeds, [LONG_PROMPT], 0)}
            if b.peer:
                sides[PEER] = partial(b.peer.measure, model.path, threads, [LONG_PROMPT], warm_up=False)
            ours.speeds([PROMPT], 0)
            of = b.sides("prompt", model.name, threads, sides, "tokens/s")
        what = f"prompt {LONG_PROMPT}"
        body.append([model.name, str(threads), str(LONG_PROMPT), *b.beside(of[DS4, what], of.get((PEER, what)))])
    b.report.table("Long prompts", PROMPT_HEAD, body)


def rows(b: Bench) -> None:
    """Passes of 1 to 9 rows, each with its logits, as verification needs them."""
    body = []
    for model in b.models():
        for threads in b.threads:
            with Ours(model, threads) as ours:
                ours.go(PROMPT)
                sides: dict[str, Measure] = {DS4: partial(ours.passes, ROWS)}
                if b.peer:
                    sides[PEER] = partial(peer_passes, b.peer, model, threads)
                of = b.sides("rows", model.name, threads, sides, "ms")
            for n in ROWS:
                cells = []
                for who in (DS4, PEER):
                    one, many = of.get((who, "rows 1")), of.get((who, f"rows {n}"))
                    times = ratio(many, one, f"{who}, over 1 row") if one and many else None
                    if times:
                        b.report.add(times)
                    cells += [cell(many), cell(times)]
                more = ratio(of[DS4, f"bytes of {n}"], of[DS4, "bytes of 1"])
                body.append([model.name, str(threads), str(n), *cells, number(more.median)])
    head = ["file", "threads", "rows", "ds4 ms", "over 1 row", "llama.cpp ms", "over 1 row", "bytes over 1 row"]
    b.report.table("Passes by their rows", head, body)


def peer_passes(peer: Peer, model: Model, threads: int) -> dict[str, float]:
    """Milliseconds of the peer's prompts of so many tokens."""
    found = peer.measure(model.path, threads, ROWS, repeat=3)
    return {f"rows {n}": 1000 * n / found[f"prompt {n}"] for n in ROWS}
