"""Measurements: what passes and head steps cost, what speculation brings. The figures of `./ds4 --bench`, in the same form.

Everything is measured `runs` times, in turns, so that a busy moment of the machine does not meet one side alone; medians count.
A result is a dict as `./ds4 --bench --json` writes it, so `table`, `rows` and `plot` take either's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds4.engine import Engine, Session
from ds4.errors import ContextFull, InvalidArgument
from ds4.generation import Depth

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17)
"""Rows of the passes that are timed."""
DEPTHS = (1, 2, 3, 4, 8)
"""Depths that are tried."""
CONTEXTS = (0, 512, 2048)
HEAD_DEPTH = 4
COLUMNS = ("measure", "context", "rows", "draft", "margin", "value", "unit")

Result = dict[str, Any]


@dataclass
class _Frontier:
    """Milliseconds at a length of context, one for each run."""

    context: int
    prompt_tokens: int
    prompt: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)
    passes: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in ROWS})
    step: list[float] = field(default_factory=list)
    repair: list[float] = field(default_factory=list)


@dataclass
class _Setting:
    """Speculation of some depth (0: plain) and margin: counters of the last run, milliseconds of all."""

    depth: Depth
    margin: float
    ms: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def _ms(began: float) -> float:
    return 1000 * (time.perf_counter() - began)


def _go(session: Session, ids: Sequence[int], n: int) -> None:
    """To the first n of the ids, from whatever beginning of them the session holds."""
    if session.position > n:
        session.rewind(n if n >= session.rewind_floor else 0)
    if session.position < n:
        session.eval(ids[session.position : n])


def _generate(session: Session, tokens: int, depth: Depth, margin: float, lookup: int = 0) -> float:
    """Generates so many tokens."""
    session.set_speculation(depth, margin, draft_lookup=lookup)
    session.reset_stats()
    began, made = time.perf_counter(), 0
    while made < tokens:
        made += len(session.step(session.argmax(), tokens - made))
    return _ms(began)


def _pass(session: Session, ids: Sequence[int]) -> float:
    """A pass over these ids with the logits of each row, as verification needs them: short ones several times."""
    start, all_ms = session.position, list[float]()
    while len(all_ms) < 3 or (sum(all_ms) < 20 and len(all_ms) < 9):
        began = time.perf_counter()
        session.eval_logits(ids)
        all_ms.append(_ms(began))
        session.rewind(start)
        if sum(all_ms) > 2000:
            break
    return statistics.median(all_ms)


def measure(
    engine: Engine,
    prompt: Sequence[int],
    *,
    tokens: int = 64,
    runs: int = 3,
    contexts: Sequence[int] | None = None,
    depths: Sequence[int] = DEPTHS,
    margins: Sequence[float] | None = None,
    lookup: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Measures an engine behind a prompt; a frontier's text is the prompt, over and over.

    contexts: ascending (None: those of 0, 512 and 2048 that fit). Speculation is tried with a head, or with a lookup of up to so
    many tokens (0: off): plain decoding, and the depths and "auto" by margins (None: 3 and 0, "auto" with 0), each in a fresh copy
    of the session. progress is called with how much is done, and of how much.

    Raises InvalidArgument if the engine's max_rewind is below tokens + 17 (every measurement goes back to where it began),
    ContextFull if a context or the prompt leaves no room.
    """
    info = engine.info
    behind = max(tokens, ROWS[-1])
    if not len(prompt):
        raise InvalidArgument("the prompt is empty")
    if tokens < 1 or runs < 1:
        raise InvalidArgument(f"tokens is {tokens} and runs {runs}; expected at least 1")
    if info.max_rewind < behind:
        raise InvalidArgument(f"max_rewind is {info.max_rewind}; {behind} tokens are generated and taken back")
    fitting = [c for c in CONTEXTS if max(c, 1) <= info.ctx - behind] if contexts is None else list(contexts)
    for a, b in zip(fitting, fitting[1:], strict=False):
        if a >= b:
            raise InvalidArgument(f"contexts are {fitting}; expected ascending numbers")
    drafts = info.has_head or lookup > 0
    longest = max(*fitting, 1, len(prompt) if drafts else 0)
    if not fitting or longest > info.ctx - behind:
        raise ContextFull(f"{behind} tokens behind {longest} do not fit a context of {info.ctx}")
    held = [max(c, 1) for c in fitting]
    frontiers = [_Frontier(c, c - before) for c, before in zip(held, [0, *held], strict=False)]
    settings = _settings(depths, margins) if drafts else []
    ids = [*prompt] * (1 + (held[-1] + ROWS[-1]) // len(prompt))
    total, done = runs * (len(frontiers) * (1 + len(ROWS)) + len(settings)), 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    with engine.session() as session:
        session.set_stops([], ignore_eos=True)
        for _ in range(runs):
            session.rewind(0)
            for f in frontiers:
                _measure_frontier(session, f, ids, tokens, step)
            for s in settings:
                _go(session, ids, len(prompt))
                with session.fork() as fresh:  # what "auto" and lookups learn from one text is not there in the next
                    s.ms.append(_generate(fresh, tokens, s.depth, s.margin, lookup))
                    s.counts = _counts(fresh)
                step()
    setup = {
        "version": _version(), "model": info.model_path, "name": info.name, "head": info.mtp_path or None, "isa": info.isa,
        "threads": info.threads, "ctx": info.ctx, "kv_type": info.kv_type, "prefill_chunk": info.prefill_chunk,
        "tokens": tokens, "runs": runs, "prompt_tokens": len(prompt), "draft_lookup": lookup,
    }  # fmt: skip
    plain = statistics.median(settings[0].ms) if settings else 0.0
    return {
        **setup,
        "frontiers": [_frontier_result(f) for f in frontiers],
        "sweep": [_setting_result(s, tokens, plain) for s in settings],
    }


def _settings(depths: Sequence[int], margins: Sequence[float] | None) -> list[_Setting]:
    found = [_Setting(0, 0.0)]
    for margin in dict.fromkeys((3.0, 0.0) if margins is None else margins):
        tried: list[Depth] = [*dict.fromkeys(depths)]
        if margins is not None or margin == 0:
            tried.append("auto")
        found += [_Setting(d, margin) for d in tried]
    return found


def _version() -> str:
    from ds4._native import version

    return version()


def _measure_frontier(session: Session, f: _Frontier, ids: Sequence[int], tokens: int, step: Callable[[], None]) -> None:
    began = time.perf_counter()
    _go(session, ids, f.context)
    if f.prompt_tokens > 1:
        f.prompt.append(_ms(began))
    f.token.append(_generate(session, tokens, 0, 0.0) / tokens)
    session.rewind(f.context)
    step()
    for n in ROWS:
        f.passes[n].append(_pass(session, ids[f.context : f.context + n]))
        step()
    if session.engine.info.has_head:
        _generate(session, min(tokens, 16), HEAD_DEPTH, 1000.0)
        stats = session.stats
        session.rewind(f.context)
        if steps := sum(stats.drafted):
            f.step.append(stats.draft_ms / steps)
        f.repair.append(stats.repair_ms / stats.cycles)


def _counts(session: Session) -> dict[str, int]:
    s = session.stats
    return {
        "tokens": s.emitted, "passes": s.passes, "drafted": sum(s.drafted), "accepted": sum(s.accepted),
        "first_drafted": s.drafted[0], "first_accepted": s.accepted[0],
    }  # fmt: skip


def break_even(depth: int, passes: dict[int, float], step_ms: float, repair_ms: float) -> float | None:
    """The share of drafts that must be accepted, each with the same probability, for this depth to pay; None: none does.

    The solution a of 1 + a + ... + a^depth = what a cycle costs, in plain passes. passes: milliseconds by number of rows.
    """
    worth = (passes[depth + 1] + depth * step_ms + repair_ms) / passes[1]
    if worth > depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        a = (low + high) / 2
        low, high = (a, high) if sum(a**k for k in range(depth + 1)) < worth else (low, a)
    return high


def _frontier_result(f: _Frontier) -> Result:
    passes = {n: statistics.median(ms) for n, ms in f.passes.items()}
    out: Result = {
        "context": f.context,
        "prompt_tokens": f.prompt_tokens,
        "prompt_tokens_per_s": 1000 * f.prompt_tokens / statistics.median(f.prompt) if f.prompt else None,
        "generation_tokens_per_s": 1000 / statistics.median(f.token),
        "pass_ms": {str(n): ms for n, ms in passes.items()},
    }
    if f.step:
        step, repair = statistics.median(f.step), statistics.median(f.repair)
        out |= {"head_step_ms": step, "repair_ms": repair}
        out["break_even"] = {str(d): break_even(d, passes, step, repair) for d in DEPTHS}
    return out


def _setting_result(s: _Setting, tokens: int, plain: float) -> Result:
    ms = statistics.median(s.ms)
    name = str(s.depth) if s.depth else "plain"
    return {"draft": name, "margin": s.margin, "tokens_per_s": 1000 * tokens / ms, "ratio": plain / ms, **s.counts}


# ---- results as text and pictures ----


def _lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns aligned to the right, two spaces apart."""
    width = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    for row in (head, *body):
        yield "  ".join(cell.rjust(w) for cell, w in zip(row, width, strict=True)).rstrip()


def _share(part: int, of: int) -> str:
    return f"{100 * part / of:.1f}%" if of else ""


def table(result: Result) -> str:
    """The figures to read."""
    frontiers, sweep = result["frontiers"], result["sweep"]
    contexts = [str(f["context"]) for f in frontiers]
    speeds = [
        [
            c,
            "-" if f["prompt_tokens_per_s"] is None else f"{f['prompt_tokens_per_s']:.1f}",
            f"{f['generation_tokens_per_s']:.1f}",
        ]
        for c, f in zip(contexts, frontiers, strict=True)
    ]
    out = [*_lines(["context", "prompt tokens/s", "generated tokens/s"], speeds), ""]
    passes = [
        [rows, *(f"{f['pass_ms'][rows]:.3f} ({f['pass_ms'][rows] / f['pass_ms']['1']:.2f})" for f in frontiers)]
        for rows in frontiers[0]["pass_ms"]
    ]
    out.append("ms of a pass (as much as passes of one row), by its rows and by context")
    out += [*_lines(["rows", *contexts], passes), ""]
    if all("break_even" in f for f in frontiers):
        out.append("share of drafts that must be accepted for them to pay, by depth and by context")
        needed = [
            [d, *("never" if f["break_even"][d] is None else f"{100 * f['break_even'][d]:.1f}%" for f in frontiers)]
            for d in frontiers[0]["break_even"]
        ]
        costs = [
            [name, *(f"{f[key]:.3f}" for f in frontiers)] for name, key in (("step", "head_step_ms"), ("repair", "repair_ms"))
        ]
        out += [*_lines(["drafts", *contexts], needed), "", "ms of a head step, and of a cycle's repair"]
        out += [*_lines(["", *contexts], costs), ""]
    if sweep:
        out.append(f"{result['tokens']} tokens behind the prompt's {result['prompt_tokens']}")
        tried = [
            [
                s["draft"], "" if s["draft"] == "plain" else f"{s['margin']:g}", f"{s['tokens_per_s']:.1f}", f"{s['ratio']:.3f}",
                f"{s['tokens'] / s['passes']:.2f}", _share(s["first_accepted"], s["first_drafted"]),
                _share(s["accepted"], s["drafted"]),
            ]
            for s in sweep
        ]  # fmt: skip
        out += _lines(["drafts", "margin", "tokens/s", "ratio", "tokens a pass", "first accepted", "all accepted"], tried)
    return "\n".join(out).rstrip() + "\n"


def rows(result: Result) -> Iterator[tuple[Any, ...]]:
    """One figure a row: `COLUMNS`, as `./ds4 --bench --csv` writes them."""
    for f in result["frontiers"]:
        at = f["context"]
        if f["prompt_tokens_per_s"] is not None:
            yield "prompt", at, "", "", "", f["prompt_tokens_per_s"], "tokens/s"
        yield "generation", at, "", "", "", f["generation_tokens_per_s"], "tokens/s"
        for n, ms in f["pass_ms"].items():
            yield "pass", at, n, "", "", ms, "ms"
        if "break_even" in f:
            yield "head step", at, "", "", "", f["head_step_ms"], "ms"
            yield "repair", at, "", "", "", f["repair_ms"], "ms"
        for depth, share in f.get("break_even", {}).items():
            if share is not None:
                yield "break-even", at, "", depth, "", share, "share"
    for s in result["sweep"]:
        where = (result["prompt_tokens"], "", s["draft"], f"{s['margin']:g}")
        yield "speed", *where, s["tokens_per_s"], "tokens/s"
        yield "ratio", *where, s["ratio"], "of plain"
        yield "tokens a pass", *where, s["tokens"] / s["passes"], "tokens"
        for name, part, of in (("first accepted", "first_accepted", "first_drafted"), ("accepted", "accepted", "drafted")):
            yield name, *where, s[part] / s[of] if s[of] else 0, "share"


def plot(result: Result, path: Path) -> None:
    """Draws the figures: passes by rows, speeds by context, depths and margins. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    frontiers, sweep = result["frontiers"], result["sweep"]
    figure, axes = plt.subplots(1, 3 if sweep else 2, figsize=(15 if sweep else 10, 4.5), layout="constrained")
    for f in frontiers:
        ms = f["pass_ms"]
        axes[0].plot([int(n) for n in ms], [v / ms["1"] for v in ms.values()], "o-", label=f"context {f['context']}")
    axes[0].set(xlabel="rows of a pass", ylabel="time, in passes of one row", title="What verification costs")
    contexts = [f["context"] for f in frontiers]
    axes[1].plot(contexts, [f["generation_tokens_per_s"] for f in frontiers], "o-", label="generated")
    prompts = [(f["context"], f["prompt_tokens_per_s"]) for f in frontiers if f["prompt_tokens_per_s"] is not None]
    if prompts:
        axes[1].plot(*zip(*prompts, strict=True), "s-", label="prompt")
    axes[1].set(xlabel="context, tokens", ylabel="tokens a second", title="Speed by context", yscale="log")
    for margin in dict.fromkeys(s["margin"] for s in sweep if s["draft"] != "plain"):
        tried = [s for s in sweep if s["draft"] != "plain" and s["margin"] == margin]
        axes[2].plot([s["draft"] for s in tried], [s["ratio"] for s in tried], "o-", label=f"margin {margin:g}")
    if sweep:
        axes[2].axhline(1, color="grey", linestyle=":", label="plain")
        axes[2].set(xlabel="drafts a cycle", ylabel="speed, plain = 1", title=f"Speculation, {result['tokens']} tokens")
    for a in axes:
        a.legend()
        a.grid(alpha=0.3)
    figure.suptitle(f"{result.get('name') or Path(result['model']).name}, {result['isa']}, {result['threads']} threads")
    figure.savefig(path, dpi=120)
    plt.close(figure)


__all__ = ["COLUMNS", "CONTEXTS", "DEPTHS", "ROWS", "Result", "break_even", "measure", "plot", "rows", "table"]
