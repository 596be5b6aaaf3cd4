"""`python -m measure`: what it computes, its options, and one run beside a peer that is played by a script. No times are asserted."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import built  # noqa: F401
import click
import pytest
from conftest import ROOT, make
from ds4 import Engine, gguf_write, synth
from gguf import GGMLQuantizationType as Type
from measure import figures, files, parts, peer
from measure.figures import Figure, Report
from measure.files import Model
from measure.ours import Ours

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
    target = [t for t in tensors if not t.head]
    experts = sum(t.bytes for t in target if "_exps." in t.name)
    tables = sum(t.bytes for t in target if t.name in ("token_embd.weight", "blk.0.ffn_gate_tid2eid.weight"))
    all_of_them = sum(t.bytes for t in target)
    one = files.bytes_read(tensors, 8, 2)
    assert sum(one.values()) == pytest.approx(all_of_them - tables - experts * 6 / 8)
    assert one["routed experts"] == pytest.approx(experts / 4)
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
    assert set(ours.passes([1, 3], 2)) == {"rows 1", "rows 3"}
    stats = ours.session.stats
    assert stats.cycles == 4 and sum(stats.drafted) == 2 * 2 and ours.session.position == 40


SPEEDS = [
    {"n_prompt": 256, "n_gen": 0, "avg_ts": 20.5, "samples_ts": [20.5]},
    {"n_prompt": 0, "n_gen": 24, "avg_ts": 4.25, "samples_ts": [4.25]},
]


def test_peer_speeds() -> None:
    assert peer.speeds(json.dumps(SPEEDS)) == {"prompt 256": 20.5, "decode": 4.25}


PEER = """#!{python}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["--repack"] == "0" and options["-o"] == "json" and options["-t"] == "1"
tests = [{{"n_prompt": int(n), "n_gen": 0, "avg_ts": 2.0 * int(n)}} for n in options["-p"].split(",") if n != "0"]
tests += [{{"n_prompt": 0, "n_gen": int(options["-n"]), "avg_ts": 8.0}}] * (options["-n"] != "0")
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
    done = run(*options, "--peer", peer_program)
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
        assert ("rows", f"rows {n}", "ds4, over 1 row") in of
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
