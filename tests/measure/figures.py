"""What was measured: figures with their spread, as Markdown tables and as CSV."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COLUMNS = ("part", "file", "threads", "what", "who", "median", "low", "high", "runs", "unit")


@dataclass(frozen=True)
class Figure:
    """One quantity, measured once a run."""

    part: str
    file: str
    threads: int
    what: str
    who: str
    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        """The middle one, of an even number the mean of the two in the middle."""
        return statistics.median(self.values)

    def row(self) -> tuple[object, ...]:
        """As in a line of the CSV file."""
        spread = (f"{v:.6g}" for v in (self.median, min(self.values), max(self.values)))
        return (self.part, self.file, self.threads, self.what, self.who, *spread, len(self.values), self.unit)


def ratio(a: Figure, b: Figure, who: str | None = None) -> Figure:
    """a over b, run by run: what was measured side by side is compared side by side."""
    values = tuple(x / y for x, y in zip(a.values, b.values, strict=True))
    return Figure(a.part, a.file, a.threads, a.what, who or f"{a.who} / {b.who}", values, "ratio")


def cell(f: Figure | None, digits: int = 3) -> str:
    """`9.81 (9.70 to 9.90)`: the median and the spread, to so many digits; a dash where nothing was measured."""
    if f is None:
        return "-"
    middle, low, high = (number(v, digits) for v in (f.median, min(f.values), max(f.values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def number(value: float, digits: int = 3) -> str:
    """With so many significant digits, never with an exponent."""
    if value == 0:
        return "0"
    size = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - size)}f}"


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]
    return "\n".join(lines) + "\n"


@dataclass
class Report:
    """The figures of all parts, and their tables as they come."""

    figures: list[Figure] = field(default_factory=list)
    show: Callable[[str], None] = print

    def add(self, *figures: Figure) -> None:
        """Keep figures for the CSV file."""
        self.figures += figures

    def table(self, title: str, head: Sequence[str], body: Iterable[Sequence[str]]) -> None:
        """Print a table."""
        self.show(f"\n**{title}**\n\n{markdown(head, body)}")

    def write(self, path: Path) -> None:
        """All figures, one a line. OSError."""
        with path.open("w", newline="", encoding="utf-8") as out:
            w = csv.writer(out, lineterminator="\n")
            w.writerow(COLUMNS)
            w.writerows(f.row() for f in self.figures)


def in_turns(
    sides: Mapping[str, Callable[[], Mapping[str, float]]], runs: int, step: Callable[[str], None] = lambda name: None
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Each side once, `runs` times over, so that a busy moment of the machine does not meet one side alone.

    A side returns its quantities by name. Returns, by side and by quantity, the values of all runs.
    """
    out: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for run in range(runs):
        for name, measure in sides.items():
            step(f"run {run + 1} of {runs}: {name}")
            for what, value in measure().items():
                out[name].setdefault(what, []).append(value)
    return {name: {what: tuple(values) for what, values in found.items()} for name, found in out.items()}


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The straight line of least squares through (x, y): its value at x = 0 and its slope."""
    slope, start = statistics.linear_regression(*zip(*points, strict=True))
    return start, slope
