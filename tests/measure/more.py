"""More parts: the bundled pair, what a pass costs at the least, a busy core, long contexts, loading."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ds4 import Engine

from measure import files
from measure.figures import cell, ratio
from measure.files import Model
from measure.flash import name
from measure.ours import Ours
from measure.parts import DECODED, DS4, LONG_PROMPT, PEER, PROMPT, Bench, Measure

AUTO = -1
DEPTHS = (0, 1, 2, 3, 4, AUTO)
WRITTEN, BEGINNING, BEGINNINGS = 256, 48, 6
PASSES = 400
CONTEXTS = (1024, 32768, 100000)
BESIDE_BUSY = 8


# ---- the bundled pair ----


def beginnings(engine: Engine) -> dict[str, list[list[int]]]:
    """Prompts for the bundled model: a text that it knows by heart, and pieces of one that it never saw."""
    ids = engine.prompt((files.ROOT / "models/held-out.txt").read_text(encoding="utf-8"))
    step = len(ids) // BEGINNINGS
    pieces = [[ids[0], *ids[i * step + 1 : i * step + BEGINNING]] for i in range(BEGINNINGS)]
    return {"known by heart": [engine.prompt("In the beginning")], "held out": pieces}


def write(ours: Ours, prompts: Sequence[Sequence[int]], depth: int) -> dict[str, float]:
    """Tokens a second, and a pass, of going on behind each prompt."""
    s, seconds = ours.session, 0.0
    s.set_speculation("auto" if depth == AUTO else depth, 0.0)
    s.reset_stats()
    for prompt in prompts:
        s.rewind(0)
        s.eval(prompt)
        began, made, token = time.perf_counter(), 0, s.next()
        while made < WRITTEN:
            made += len(s.step(token, WRITTEN - made))
            token = s.next()
        seconds += time.perf_counter() - began
    stats = s.stats
    return {"tokens/s": stats.emitted / seconds, "tokens a pass": stats.emitted / stats.cycles}


def depth_name(depth: int) -> str:
    """As tables and CSV call it."""
    return "auto" if depth == AUTO else name(depth)


def small(b: Bench) -> None:
    """Plain decoding of the bundled model beside the peer, and what its head brings at margin 0."""
    model, body = files.bundled(), []
    for threads in b.threads:
        with Ours(model, threads) as ours:
            sides: dict[str, Measure] = {DS4: partial(ours.speeds, [], WRITTEN)}
            if b.peer:
                sides[PEER] = partial(b.peer.measure, model.path, threads, (), WRITTEN)
            of = b.sides("small", model.name, threads, sides, "tokens/s")
        body.append([str(threads), *b.beside(of[DS4, "decode"], of.get((PEER, "decode")))])
    b.report.table("The bundled model, plain", ["threads", "ds4 tokens/s", "llama.cpp tokens/s", "ratio"], body)
    body = []
    for threads in b.threads:
        with Ours(model, threads, head=True) as ours:
            for text, prompts in beginnings(ours.engine).items():
                sides = {depth_name(d): partial(write, ours, prompts, d) for d in DEPTHS}
                of = b.sides("small", text, threads, sides, "tokens/s")
                for d in DEPTHS:
                    speed = of[depth_name(d), "tokens/s"]
                    times = ratio(speed, of["plain", "tokens/s"])
                    if d:
                        b.report.add(times)
                    a_pass = of[depth_name(d), "tokens a pass"]
                    body.append([text, str(threads), depth_name(d), cell(speed), cell(times), cell(a_pass)])
    head = ["text", "threads", "drafts", "tokens/s", "over plain", "tokens a pass"]
    b.report.table("The bundled pair, margin 0", head, body)


# ---- the least ----


def least(b: Bench) -> None:
    """A pass of a model of width 64, where nothing but what surrounds the arithmetic is left, by the engine's own clock."""
    folder = files.ROOT / "tests/data/tiny"
    model, body = Model("tiny", folder / "target.gguf", folder / "head-ds4.gguf"), []
    for threads in b.threads:
        with Ours(model, threads, ctx=512) as ours:
            ours.go(1)
            ours.pass_us(PASSES)
            of = b.sides("least", model.name, threads, {DS4: partial(ours.pass_us, PASSES)}, "microseconds")
        body.append([model.name, str(threads), cell(of[DS4, "a pass"])])
    b.report.table("A pass of a model of width 64", ["file", "threads", "microseconds"], body)


# ---- a busy core ----


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process that never rests, on the last of the cores that this one may use."""
    core = max(os.sched_getaffinity(0))
    work = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.DEVNULL)
    try:
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def beside_busy(measure: Measure) -> Mapping[str, float]:
    """The same with a core busy."""
    with busy_core():
        return measure()


def busy(b: Bench) -> None:
    """Decoding with every thread while another process keeps a core busy, beside an idle machine and beside one thread."""
    body, threads = [], max(b.threads)
    for model in b.models():
        with Ours(model, threads) as ours, Ours(model, 1) as alone:
            sides = busy_sides(DS4, partial(ours.speeds, [], BESIDE_BUSY), partial(alone.speeds, [], BESIDE_BUSY))
            if b.peer:
                many, one = (partial(b.peer.measure, model.path, t, (), BESIDE_BUSY) for t in (threads, 1))
                sides |= busy_sides(PEER, many, one)
            ours.speeds([PROMPT], 0)
            of = b.sides("busy", model.name, threads, sides, "tokens/s")
        for who in (DS4, PEER) if b.peer else (DS4,):
            idle, one_thread, beside = (of[f"{who}, {how}", "decode"] for how in ("idle", "1 thread", "a core busy"))
            shares = [ratio(beside, idle), ratio(beside, one_thread)]
            b.report.add(*shares)
            body.append([model.name, who, *map(cell, (idle, one_thread, beside, *shares))])
    head = ["file", "", f"{threads} threads", "1 thread", f"{threads} threads, a core busy", "of idle", "of 1 thread"]
    b.report.table("Decoding while another process keeps a core busy, tokens/s", head, body)


def busy_sides(who: str, many: Measure, one: Measure) -> dict[str, Measure]:
    """The three circumstances."""
    return {f"{who}, idle": many, f"{who}, 1 thread": one, f"{who}, a core busy": partial(beside_busy, many)}


# ---- long contexts ----


def at(ours: Ours, snapshot: bytes, tokens: int) -> dict[str, float]:
    """Tokens a second of decoding there, and of a long prompt there."""
    ours.session.restore(snapshot)
    return {"decode": ours.decode(tokens), f"prompt {LONG_PROMPT}": ours.prompt(LONG_PROMPT)}


def context(b: Bench) -> None:
    """Decoding and a prompt of 2048 at some lengths of context."""
    body, threads = [], max(b.threads)
    for model in b.models():
        with Ours(model, threads, ctx=max(CONTEXTS) + LONG_PROMPT + 64) as ours:
            sides: dict[str, Measure] = {}
            for n in CONTEXTS:
                b.step(f"context, {model.name}: to {n}")
                sides[f"context {n}"] = partial(at, ours, ours.at_context(n), DECODED)
            of = b.sides("context", model.name, threads, sides, "tokens/s")
        first = f"context {CONTEXTS[0]}"
        for who in sides:
            cells = [model.name, who]
            for what in ("decode", f"prompt {LONG_PROMPT}"):
                share = ratio(of[who, what], of[first, what])
                if who != first:
                    b.report.add(share)
                cells += [cell(of[who, what]), cell(share)]
            body.append(cells)
    head = ["file", "", "decoding, tokens/s", f"of {first}", f"prompt of {LONG_PROMPT}, tokens/s", f"of {first}"]
    b.report.table("Long contexts", head, body)


def deep(b: Bench) -> None:
    """A prompt of 2048 at context 32768, beside the peer, which reads its way there each run: minutes."""
    body, threads, depth = [], max(b.threads), CONTEXTS[1]
    for model in b.models():
        with Ours(model, threads, ctx=depth + LONG_PROMPT + 64) as ours:
            snapshot = ours.at_context(depth)
            sides: dict[str, Measure] = {DS4: partial(at, ours, snapshot, 1)}
            if b.peer:
                sides[PEER] = partial(b.peer.measure, model.path, threads, [LONG_PROMPT], depth=depth, warm_up=False)
            of = b.sides("deep", model.name, threads, sides, "tokens/s")
        what = f"prompt {LONG_PROMPT}"
        body.append([model.name, str(depth), *b.beside(of[DS4, what], of.get((PEER, what)))])
    head = ["file", "context", "ds4 tokens/s", "llama.cpp tokens/s", "ratio"]
    b.report.table("A prompt of 2048 at a long context", head, body)


# ---- loading ----


def load_ms(path: Path, threads: int) -> dict[str, float]:
    """Milliseconds from nothing to an opened engine, the file being in memory."""
    began = time.perf_counter()
    with Engine(path, threads=threads):
        return {"load": 1000 * (time.perf_counter() - began)}


def load(b: Bench) -> None:
    """How long opening a file takes."""
    body, threads = [], max(b.threads)
    for model in b.models():
        of = b.sides("load", model.name, threads, {DS4: partial(load_ms, model.path, threads)}, "ms")
        body.append([model.name, f"{model.path.stat().st_size * 1e-9:.2f}", cell(of[DS4, "load"])])
    b.report.table("Loading a file that is in memory", ["file", "GB", "ms"], body)
