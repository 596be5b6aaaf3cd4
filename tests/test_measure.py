"""`python -m measure`: what it computes, its options, and one run beside a peer that is played by a script. No times are asserted."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import built  # noqa: F401
import click
import numpy as np
import pytest
from conftest import ROOT, make
from ds4 import Engine, gguf_write, synth
from gguf import GGMLQuantizationType as Type
from measure import figures, files, flash, more, parts, peer, profile
from measure.figures import Figure, Report
from measure.files import Model
from measure.ours import Ours
from measure.peer import Peer

SHAPE = gguf_write.Shape(
    ratios=[0, 4, 128], vocab=640, width=64, heads=4, head_width=32, rotary=16, q_rank=32, o_groups=2, o_rank=32, experts=8,
    experts_used=2, expert_width=64, hash_layers=1, index_heads=2, index_width=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("measure")
    types = synth.Types.all(Type.Q8_0)
    synth.make_target(folder / "iq2.gguf", SHAPE, types, 1)
    synth.make_head(folder / "iq2-head.gguf", SHAPE, types, 2)
    return Model("iq2", folder / "iq2.gguf", folder / "iq2-head.gguf")


@pytest.fixture()
def ours(model: Model) -> Iterator[Ours]:
    with Ours(model, 1) as side:
        yield side


def figure(*values: float, who: str = "ds4") -> Figure:
    return Figure("decode", "iq2", 2, "decode", who, values, "tokens/s")


def test_figures() -> None:
    a, b = figure(9.0, 12.0, 10.0), figure(3.0, 4.0, 2.0, who="peer")
    assert a.median == 10 and figure(1.0, 2.0).median == 1.5
    assert a.row() == ("decode", "iq2", 2, "decode", "ds4", "10", "9", "12", 3, "tokens/s")
    both = figures.ratio(a, b)
    assert both.values == (3.0, 3.0, 5.0) and both.who == "ds4 / peer" and both.unit == "ratio"
    with pytest.raises(ValueError):
        figures.ratio(a, figure(1.0))
    assert figures.cell(a) == "10.0 (9.00 to 12.0)" and figures.cell(figure(0.5)) == "0.500" and figures.cell(None) == "-"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0625, "0.062"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (1234.5, "1234"), (-2.5, "-2.50")],
)
def test_number(value: float, text: str) -> None:
    assert figures.number(value) == text


def test_tables_and_csv(tmp_path: Path) -> None:
    shown: list[str] = []
    report = Report(show=shown.append)
    report.table("Speeds", ["a", "b"], [["1", "2"], ["3", "-"]])
    assert shown == ["\n**Speeds**\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | - |\n"]
    report.add(figure(1.0, 3.0), figure(2.0))
    report.write(tmp_path / "f.csv")
    lines = list(csv.DictReader((tmp_path / "f.csv").open()))
    assert list(lines[0]) == list(figures.COLUMNS) and [x["median"] for x in lines] == ["2", "2"]
    assert (lines[0]["low"], lines[0]["high"], lines[0]["runs"]) == ("1", "3", "2")


def test_in_turns() -> None:
    """a, b, a, b: not all of a first."""
    order: list[str] = []

    def side(name: str) -> dict[str, float]:
        order.append(name)
        return {"x": float(len(order)), "y": 0.0}

    steps: list[str] = []
    found = figures.in_turns({"a": lambda: side("a"), "b": lambda: side("b")}, 2, steps.append)
    assert order == ["a", "b", "a", "b"] and steps == ["run 1 of 2: a", "run 1 of 2: b", "run 2 of 2: a", "run 2 of 2: b"]
    assert found == {"a": {"x": (1.0, 3.0), "y": (0.0, 0.0)}, "b": {"x": (2.0, 4.0), "y": (0.0, 0.0)}}


def test_line() -> None:
    start, slope = figures.line([(4, 14.0), (8, 22.0), (16, 38.0)])
    assert (start, slope) == pytest.approx((6.0, 2.0))


def test_bytes_read(model: Model) -> None:
    """Every tensor is counted once, tables of single lines not at all, of the experts those that are picked."""
    with Engine(model.path, model.head) as engine:
        tensors = engine.tensors()
        session = engine.session()
        session.eval([5])
        before = engine.work.weight_bytes
        session.verify(6, [])
        counted = engine.work.weight_bytes - before
    target = [t for t in tensors if not t.head]
    experts = sum(t.bytes for t in target if "_exps." in t.name)
    tables = sum(t.bytes for t in target if t.name in ("token_embd.weight", "blk.0.ffn_gate_tid2eid.weight"))
    all_of_them = sum(t.bytes for t in target)
    one = files.bytes_read(tensors, 8, 2)
    assert sum(one.values()) == pytest.approx(all_of_them - tables - experts * 6 / 8)
    assert one["routed experts"] == pytest.approx(experts / 4)
    first = files.bytes_read(tensors, 8, 2, picks=False)
    queries = [t.bytes for t in target if t.name.endswith(("indexer.attn_q_b.weight", "indexer.proj.weight"))]
    assert queries and one["compressors, indexer"] - first["compressors, indexer"] == sum(queries)
    assert counted == pytest.approx(sum(first.values()) - sum(t.bytes for t in target if len(t.dims) == 1 or "_ape" in t.name))
    assert one["output"] == next(t.bytes for t in target if t.name == "output.weight")
    attention = ["q_a", "q_b", "kv", "output_a", "output_b"]
    assert one["attention"] == sum(
        t.bytes for t in target if t.name[4:] in {f"{i}.attn_{k}.weight" for i in range(3) for k in attention}
    )
    three = files.bytes_read(tensors, 8, 2, rows=3)
    assert three["routed experts"] == pytest.approx(experts * (1 - 0.75**3)) and three["attention"] == one["attention"]


def test_our_side(ours: Ours) -> None:
    """The rows and tokens are those that were asked for, and each measurement ends where it began."""
    assert len(set(ours.ids[:300])) == 300
    found = ours.speeds([20, 30], 5)
    assert set(found) == {"prompt 20", "prompt 30", "decode"} and all(v > 0 for v in found.values())
    assert ours.session.tokens == ours.ids[:1]
    stats = ours.session.stats
    assert (stats.prompt_tokens, stats.emitted, stats.passes) == (20 + 30 + 1, 5, 8)
    ours.go(40)
    assert ours.session.tokens == ours.ids[:40]
    ours.session.reset_stats()
    passes = ours.passes([1, 3], 2)
    assert set(passes) == {"rows 1", "rows 3", "bytes of 1", "bytes of 3"}
    assert ours.engine.info.weight_bytes > passes["bytes of 3"] > passes["bytes of 1"] > 0
    stats = ours.session.stats
    assert stats.cycles == 4 and sum(stats.drafted) == 2 * 2 and ours.session.position == 40


SPEEDS = [
    {"n_prompt": 256, "n_gen": 0, "avg_ts": 21.5, "samples_ts": [23.5, 20.5, 20.5]},
    {"n_prompt": 0, "n_gen": 24, "avg_ts": 4.25, "samples_ts": [4.25]},
]


def test_peer_speeds() -> None:
    assert peer.speeds(json.dumps(SPEEDS)) == {"prompt 256": 20.5, "decode": 4.25}


PEER = """#!{python}
import json, sys
words = [word for word in sys.argv[1:] if word != "--no-warmup"]
options = dict(zip(words[::2], words[1::2]))
assert options["--repack"] == "0" and options["-o"] == "json" and options["-t"] == "1"
tests = [{{"n_prompt": int(n), "n_gen": 0, "samples_ts": [2.0 * int(n)]}} for n in options["-p"].split(",") if n != "0"]
tests += [{{"n_prompt": 0, "n_gen": int(options["-n"]), "samples_ts": [8.0]}}] * (options["-n"] != "0")
print(json.dumps(tests))
"""


def run(*args: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "measure", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture(scope="module")
def peer_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("peer") / "llama-bench"
    program.write_text(PEER.format(python=sys.executable))
    program.chmod(0o755)
    return program


def test_run(model: Model, peer_program: Path, tmp_path: Path) -> None:
    """Tables and CSV of a small model that stands in the cache for the slice; nothing on standard error in a pipe."""
    make("build/read_speed")
    options = ["--cache", model.path.parent, "--files", "iq2", "--threads", 1, "--runs", 2, "--csv", tmp_path / "f.csv"]
    done = run(*options, "--peer", peer_program, "--only", "decode,prompt,rows")
    assert done.stderr == ""
    for title in ("Decoding", "Megabytes that a token reads", "Prompts", "Long prompts", "Passes by their rows"):
        assert f"**{title}**" in done.stdout
    lines = list(csv.DictReader((tmp_path / "f.csv").open()))
    of = {(x["part"], x["what"], x["who"]): x for x in lines}
    assert len(of) == len(lines) and all(x["runs"] == "2" and float(x["median"]) > 0 for x in lines)
    assert float(of["decode", "decode", "llama.cpp"]["median"]) == 8 and of["decode", "read", "memory"]["unit"] == "GB/s"
    assert ("decode", "prompt 256", "ds4 / llama.cpp") in of and ("prompt", "prompt 2048", "ds4 / llama.cpp") in of
    for n in parts.ROWS:
        assert float(of["rows", f"rows {n}", "llama.cpp"]["median"]) == 500
        assert ("rows", f"rows {n}", "ds4, over 1 row") in of and of["rows", f"bytes of {n}", "ds4"]["unit"] == "bytes"
    alone = run(*options, "--no-peer", "--only", "rows").stdout
    assert "| iq2 | 1 | 9 |" in alone and "| - | - |" in alone


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--only", "decode,nothing"], "'nothing'"),
        (["--files", "iq2,big.gguf"], "'big.gguf'"),
        (["--threads", "0"], "1 to 256"),
        (["--threads", "1,"], "--threads"),
        (["--runs", "0"], "--runs"),
        (["--peer", "no/where"], "--peer"),
        (["--no-peer", "--peer", __file__], "exclude"),
        (["file"], "unexpected"),
    ],
)
def test_misuse(args: list[str], word: str, tmp_path: Path) -> None:
    done = run("--cache", tmp_path / "cache", *args, status=2)
    assert word in done.stderr and done.stdout == "" and not (tmp_path / "cache").exists()


def test_failures(model: Model, peer_program: Path, tmp_path: Path) -> None:
    """A peer that fails, a file that is no model, a place that cannot be written: one message that names it, and status 1."""
    bad = tmp_path / "llama-bench"
    bad.write_text("#!/bin/sh\necho no such file >&2\nexit 3\n")
    bad.chmod(0o755)
    options = ["--cache", model.path.parent, "--files", "iq2", "--threads", 1, "--runs", 1, "--only", "prompt"]
    done = run(*options, "--peer", bad, status=1)
    assert "llama-bench" in done.stderr and "status 3" in done.stderr and "no such file" in done.stderr
    done = run(*options, "--peer", peer_program, "--csv", tmp_path / "no/where.csv", status=1)
    assert "where.csv" in done.stderr and done.stdout == ""
    for name in ("iq2.gguf", "iq2-head.gguf"):
        (tmp_path / name).write_bytes(b"GGUF" + bytes(60))
    done = run(*options, "--no-peer", "--cache", tmp_path, status=1)
    assert "iq2.gguf" in done.stderr and done.stderr.count("\n") == 1


def test_building_needs_its_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched before it is known that it can be built."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(click.ClickException, match="cmake is not installed"):
        peer.build(tmp_path, lambda text: None)
    assert list(tmp_path.iterdir()) == []


def test_a_built_peer_is_used_again(tmp_path: Path) -> None:
    program = tmp_path / f"peer-{peer.VERSION}/bin/llama-bench"
    program.parent.mkdir(parents=True)
    program.touch()
    assert peer.build(tmp_path, lambda text: None) == program


def test_read_speed() -> None:
    program = make("build/read_speed")
    assert float(files.run([str(program), "2", "8", "3"])) > 0
    for args in ([], ["0", "8", "3"], ["2", "8", "100"], ["2", "x", "3"]):
        done = subprocess.run([str(program), *args], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "usage" in done.stderr and done.stdout == ""


def test_script() -> None:
    """The shares come out exactly: of 25 first drafts 20 are right, of the second ones behind these 13."""
    plan = list(flash.script(25, 2))
    assert [plan.count(n) for n in (0, 1, 2)] == [5, 7, 13] and list(flash.script(25, 1)).count(1) == 20
    assert list(flash.script(3, 0)) == [0, 0, 0]
    assert flash.tokens_a_cycle(2) == pytest.approx(1 + 0.8 + 0.8 * 0.65) and flash.tokens_a_cycle(0) == 1
    behind_each_other = [sum(plan[i : i + 5]) for i in range(21)]
    assert max(behind_each_other) - min(behind_each_other) <= 2  # spread evenly


def test_fit() -> None:
    """Each run has its own line."""
    cost = flash.fit({4: figure(14.0, 8.0), 8: figure(22.0, 16.0), 16: figure(38.0, 32.0)})
    assert cost.fixed == pytest.approx((6.0, 0.0)) and cost.layer == pytest.approx((2.0, 2.0))
    assert cost.of(43) == pytest.approx((92.0, 86.0))


def test_scripted_cycles(model: Model) -> None:
    """The target takes what the script has right and nothing else; the head runs for every draft."""
    with Ours(model, 1, head=True) as ours:
        s = ours.session
        s.set_sampling(presence_penalty=100.0)
        ours.go(20)
        text = flash.plain_text(s, 90)
        assert s.position == 20 and len(set(text)) == 90
        for depth in (0, 1, 2):
            s.reset_stats()
            found = flash.cycles(s, text, depth)
            assert found["cycle"] > found["drafting"] >= 0 and s.position == 20
            stats = s.stats
            assert stats.cycles == 25 and sum(stats.drafted) == 25 * depth and stats.head_passes >= 25 * depth
            assert stats.accepted[:2] == ((0, 0), (20, 0), (20, 13))[depth]
        with pytest.raises(RuntimeError, match="not the plain text"):
            flash.cycles(s, [t + 1 for t in text], 2)


def test_flash(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From slices to the whole: every figure once, the last layer count computed."""
    for name in ("iq2", "iq2-8"):
        for end in (".gguf", "-head.gguf"):
            (tmp_path / f"{name}{end}").symlink_to(model.path.with_name("iq2" + end))
    monkeypatch.setattr(flash, "SLICES", {4: "iq2", 8: "iq2-8"})
    shown: list[str] = []
    report = Report(show=shown.append)
    flash.flash(parts.Bench(tmp_path, 2, [1], [], None, report, lambda text: None))
    of = {(f.file, f.what, f.who): f for f in report.figures}
    assert len(of) == len(report.figures) and all(len(f.values) == 2 for f in report.figures)
    for file in ("iq2", "iq2-8", "43 layers"):
        plain, cycle = of[file, "cycle", "plain"], of[file, "cycle", "depth 2"]
        speed = of[file, "tokens/s", "depth 2 / plain"]
        assert speed.values == pytest.approx([2.32 * p / c for p, c in zip(plain.values, cycle.values, strict=True)])
    assert "| 43, computed | depth 2 |" in shown[0] and "a layer" in shown[1]


def test_small(ours: Ours, root: Path) -> None:
    """Each text is generated as often as there are prompts; drafts bring more tokens a pass, and as many tokens."""
    with Ours(files.bundled(), 1, head=True) as pair:
        prompts = more.beginnings(pair.engine)
        assert [len(p) for p in prompts.values()] == [1, 6] and len(set(map(tuple, prompts["held out"]))) == 6
        plain, two = (more.write(pair, prompts["known by heart"], d) for d in (0, 2))
        assert plain["tokens a pass"] == 1 and two["tokens a pass"] > 2 and pair.session.stats.emitted == more.WRITTEN
        assert more.write(pair, prompts["held out"][:2], more.AUTO)["tokens/s"] > 0
        assert pair.session.stats.emitted == 2 * more.WRITTEN


def test_least(ours: Ours) -> None:
    ours.go(1)
    assert ours.pass_us(7)["a pass"] > 0 and ours.session.stats.cycles == 7


def test_busy_core() -> None:
    """The other process is there, on one core, for as long as asked."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    with more.busy_core():
        (child,) = set(children.read_text().split()) - before
        assert os.sched_getaffinity(int(child)) == {max(os.sched_getaffinity(0))}
    assert set(children.read_text().split()) == before


def test_contexts(model: Model) -> None:
    """A long context made of a shorter one: as many tokens, as many compressed rows, and all that a session can do."""
    with Ours(model, 1, ctx=5000) as side:
        short, long = side.at_context(1024), side.at_context(4500)
        side.session.restore(short)
        assert side.session.tokens == side.ids[:1024]
        side.session.restore(long)
        s = side.session
        assert s.position == 4500 and s.tokens[:2048] == side.ids[:2048] == s.tokens[2048:4096]
        assert np.isfinite(s.logits()).all() and side.decode(3) > 0 and s.position == 4500
        s.rewind(s.rewind_floor)
        assert s.position == 4503 - 512  # three were decoded
        side.go(4600)  # its own text
        grown = len(side.at_context(4500)) - len(side.at_context(4244))
        row = model_row_bytes(side)
        assert grown == 256 * 4 + 256 // 4 * (row + 2 * SHAPE.index_width) + 256 // 128 * row


def model_row_bytes(side: Ours) -> int:
    """Of an f16 row."""
    return 2 * side.engine.info.head_dim


def test_more_parts(model: Model, peer_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and figures of the remaining parts, with small numbers of tokens."""
    monkeypatch.setattr(more, "WRITTEN", 8)
    monkeypatch.setattr(more, "PASSES", 5)
    monkeypatch.setattr(more, "CONTEXTS", (256, 4000, 5000))
    shown: list[str] = []
    bench = parts.Bench(model.path.parent, 2, [1], ["iq2"], Peer(peer_program), Report(show=shown.append), lambda text: None)
    for part in (more.small, more.least, more.busy, more.context, more.deep, more.load):
        part(bench)
    of = {(f.part, f.file, f.what, f.who): f for f in bench.report.figures}
    assert len(of) == len(bench.report.figures) and all(len(f.values) == 2 and min(f.values) > 0 for f in of.values())
    assert of["small", "small", "decode", "llama.cpp"].median == 8 and ("small", "small", "decode", "ds4 / llama.cpp") in of
    assert of["small", "held out", "tokens a pass", "depth 4"].unit == "tokens"
    assert of["least", "tiny", "a pass", "ds4"].unit == "microseconds" and of["load", "iq2", "load", "ds4"].unit == "ms"
    assert of["busy", "iq2", "decode", "llama.cpp, a core busy / llama.cpp, idle"].median == 1
    assert ("context", "iq2", "prompt 2048", "context 5000 / context 256") in of
    assert of["deep", "iq2", "prompt 2048", "llama.cpp"].median == 4096
    assert len(shown) == 7


SAMPLES = """
\tffffffff815d53b0 next_page
\t           1aaa0 q256_tile_256 (inlined)
\t           1aaa0 tile_iq2_xxs_avx2
\t           9dbbf products
\t           9e827 moe (inlined)
\t           b3708 block
\t            57f8 ds4_session_step
\t            57f8 main

\t           1aaa0 tile_q8_0_avx2
\t           9e827 moe
\t            57f8 ds4_session_step

\t           1aaa0 route
\t           9e827 moe
\t            57f8 ds4_session_step

\t           1aaa0 tile_q8_0_avx2
\t           9e827 attention
\t            57f8 ds4_session_step

\t           1aaa0 score_windows
\t           9e827 pick_windows
\t           9e827 attention
\t            57f8 eval_prompt

\t           1aaa0 read_layer
\t            57f8 main
"""


def test_profile() -> None:
    """Samples of passes are counted by the innermost named function, and within the experts by the product's type."""
    assert profile.shares(SAMPLES) == {
        "1 row": {
            "routed experts": 0.25, "shared expert": 0.25, "routing, activation, adding up": 0.25,
            "projections of attention's output": 0.25,
        },
        "256 rows": {"indexer": 1.0},
    }  # fmt: skip
    names = profile.by_size({"indexer": 0.5, "the rest": 0.7})
    assert names[:2] == ["the rest", "indexer"] and len(names) == len(set(names)) == 11


def test_profile_knows_the_engine() -> None:
    """The functions and types that samples are counted by are those of ds4.c."""
    text = (ROOT / "ds4.c").read_text()
    for function in [*profile.OPERATIONS, "ds4_session_step", "ds4_session_eval"]:
        assert re.search(rf"^\w[\w *]*\b{function}\(.*\) \{{", text, re.M), function
    assert "eval_prompt(" in (ROOT / "ds4_cli.c").read_text()
