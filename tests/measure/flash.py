"""What speculation gives on a model as deep as Flash, which is too large to be had here: a head that is right as often as a
script says, on slices of several depths.

The head's steps are really computed and paid for; what they draft is replaced by tokens of the recorded plain text, or by
others, so that the target accepts what the script wants accepted. The slices give the cost of a layer and the cost that does
not depend on layers, and these the cost of the whole model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ds4 import Session

from measure.figures import Figure, cell, line, number, ratio
from measure.ours import Ours
from measure.parts import PROMPT, Bench, Measure

SLICES = {4: "iq2", 8: "iq2-8", 16: "iq2-16"}
LAYERS = 43
CHANCES = (0.8, 0.65)
"""How often a draft is right, given that those before it are."""
CYCLES = 25
"""Of a run: so many that the shares of them are whole numbers."""
DEPTHS = (0, 1, 2)


def script(cycles: int, depth: int, chances: Sequence[float] = CHANCES) -> Iterator[int]:
    """How many drafts of each cycle are right: the shares are those asked for, spread evenly."""
    owed = [0.0] * depth
    for _ in range(cycles):
        right = 0
        for i in range(depth):
            owed[i] += chances[i]
            if owed[i] < 1 - 1e-9:
                break
            owed[i] -= 1
            right += 1
        yield right


def plain_text(session: Session, tokens: int) -> list[int]:
    """What the session goes on with, one token after the other; goes back."""
    start, text = session.position, [session.next()]
    while len(text) < tokens:
        session.step(text[-1])
        text.append(session.next())
    session.rewind(start)
    return text


def cycles(session: Session, text: Sequence[int], depth: int) -> dict[str, float]:
    """Milliseconds a cycle, of them the head's, going along `text` with as many right drafts as scripted; goes back.

    Depth 0 is plain decoding. Raises RuntimeError if the text is not the plain one.
    """
    start, done, head, vocab = session.position, 0, 0.0, session.engine.info.vocab
    began = time.perf_counter()
    for right in script(CYCLES, depth):
        at = time.perf_counter()
        if depth:
            session.draft(text[done], depth)
        head += time.perf_counter() - at
        wrong = (text[done + right + 1] + vocab // 2) % vocab
        ahead = [*text[done + 1 : done + 1 + right], *[wrong] * (depth - right)]
        kept = session.verify(text[done], ahead)
        if kept != text[done : done + 1 + right]:
            raise RuntimeError(f"{depth} drafts at position {session.position}: {kept} was committed, not the plain text")
        done += len(kept)
        session.next()
    seconds = time.perf_counter() - began
    session.rewind(start)
    return {"cycle": 1000 * seconds / CYCLES, "drafting": 1000 * head / CYCLES}


def tokens_a_cycle(depth: int) -> float:
    """What the script makes of a cycle."""
    return 1 + sum(script(CYCLES, depth)) / CYCLES


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a cycle, of each run: what does not depend on layers, and a layer's."""

    fixed: tuple[float, ...]
    layer: tuple[float, ...]

    def of(self, layers: int) -> tuple[float, ...]:
        """For so many layers."""
        return tuple(f + layers * w for f, w in zip(self.fixed, self.layer, strict=True))


def fit(by_layers: Mapping[int, Figure]) -> Cost:
    """The straight lines through the slices' costs, one for each run."""
    runs = zip(*(f.values for f in by_layers.values()), strict=True)
    lines = [line(list(zip(by_layers, run, strict=True))) for run in runs]
    return Cost(tuple(start for start, _ in lines), tuple(slope for _, slope in lines))


def name(depth: int) -> str:
    """As tables and CSV call it."""
    return f"depth {depth}" if depth else "plain"


def over_plain(cycle: Figure, plain: Figure, depth: int) -> Figure:
    """Tokens a second over plain decoding's."""
    values = tuple(tokens_a_cycle(depth) * p / c for c, p in zip(cycle.values, plain.values, strict=True))
    return Figure(cycle.part, cycle.file, cycle.threads, "tokens/s", f"{name(depth)} / plain", values, "ratio")


def flash(b: Bench) -> None:
    """All slices, the lines through them, the whole model."""
    found: dict[int, dict[int, Figure]] = {d: {} for d in DEPTHS}
    body, threads = [], max(b.threads)
    for layers, slice_name in SLICES.items():
        model = b.model(slice_name)
        with Ours(model, threads, head=True) as ours:
            s = ours.session
            s.set_sampling(presence_penalty=100.0)  # random weights repeat themselves, and would read fewer experts than a text
            ours.go(PROMPT)
            text = plain_text(s, CYCLES * (1 + max(DEPTHS)) + 1)
            sides: dict[str, Measure] = {name(d): partial(cycles, s, text, d) for d in DEPTHS}
            of = b.sides("flash", model.name, threads, sides, "ms")
        for d in DEPTHS:
            cycle = found[d][layers] = of[name(d), "cycle"]
            body.append(row(b, str(layers), d, cycle, of[name(d), "drafting"], found[0][layers]))
    costs = {d: fit(found[d]) for d in DEPTHS}
    whole = {d: Figure("flash", f"{LAYERS} layers", threads, "cycle", name(d), c.of(LAYERS), "ms") for d, c in costs.items()}
    b.report.add(*whole.values())
    body += [row(b, f"{LAYERS}, computed", d, whole[d], None, whole[0]) for d in DEPTHS]
    head = ["layers", "drafts", "ms a cycle", "of them drafting", "tokens a cycle", "tokens/s over plain"]
    b.report.table("A scripted head: right 80% of the time at the first position, then 65%", head, body)
    fitted = []
    for d, cost in costs.items():
        parts = [Figure("flash", "fit", threads, what, name(d), values, "ms") for what, values in vars(cost).items()]
        b.report.add(*parts)
        fitted.append([name(d), *map(cell, parts)])
    b.report.table("A cycle's cost in ms", ["drafts", "whatever the layers", "a layer"], fitted)


def row(b: Bench, layers: str, depth: int, cycle: Figure, drafting: Figure | None, plain: Figure) -> list[str]:
    """A line of the table; the ratio is kept."""
    times = over_plain(cycle, plain, depth) if depth else ratio(plain, plain)
    if depth:
        b.report.add(times)
    return [layers, name(depth), cell(cycle), cell(drafting if depth else None), number(tokens_a_cycle(depth)), cell(times)]
