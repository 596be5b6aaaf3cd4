"""./ds4 --bench: what it counts, the shape of its table, CSV and JSON. No times are asserted."""

from __future__ import annotations

import csv
import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 17]
DEPTHS = [1, 2, 3, 4, 8]


@pytest.fixture(scope="module")
def small(root: Path) -> list[str]:
    return ["-m", str(root / "models/small.gguf"), "--mtp", str(root / "models/small-mtp.gguf")]


def run(ds4: Path, *args: Any, status: int = 0) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("DS4_")}
    command = [str(ds4), *map(str, args)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    return done


def break_even(frontier: dict[str, Any], depth: int) -> float | None:
    """The acceptance a with (1 + a + ... + a^depth) * plain = what the cycle costs; None if there is none up to 1."""
    plain, passes = frontier["pass_ms"]["1"], frontier["pass_ms"]
    cost = passes[str(depth + 1)] + depth * frontier["head_step_ms"] + frontier["repair_ms"]
    if cost > (depth + 1) * plain:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        a = (low + high) / 2
        low, high = (a, high) if sum(a**k for k in range(depth + 1)) * plain < cost else (low, a)
    return high


@pytest.fixture(scope="module")
def measured(ds4: Path, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tmp = tmp_path_factory.mktemp("bench")
    done = run(
        ds4, *small, "--bench", "--bench-ctx", "0,40,200", "--bench-runs", 1, "-n", 12, "-p", "In the beginning",
        "--mtp-margin", 0.5, "--mtp-draft", 5, "--csv", tmp / "b.csv", "--json", tmp / "b.json",
    )  # fmt: skip
    assert done.stderr == ""  # no progress in a pipe
    return {
        "text": done.stdout,
        "csv": list(csv.DictReader((tmp / "b.csv").open())),
        "json": json.loads((tmp / "b.json").read_text()),
    }


def test_json(measured: dict[str, Any]) -> None:
    j = measured["json"]
    assert [f["context"] for f in j["frontiers"]] == [1, 40, 200] and j["tokens"] == 12 and j["runs"] == 1
    assert [f["prompt_tokens"] for f in j["frontiers"]] == [1, 39, 160]
    assert j["frontiers"][0]["prompt_tokens_per_s"] is None
    for f in j["frontiers"]:
        assert [int(r) for r in f["pass_ms"]] == ROWS and all(ms > 0 for ms in f["pass_ms"].values())
        assert f["generation_tokens_per_s"] > 0 and f["head_step_ms"] > 0
        for depth in DEPTHS:
            expected, found = break_even(f, depth), f["break_even"][str(depth)]
            assert found == expected or abs(found - expected) < 1e-3
    assert [(c["draft"], c["margin"]) for c in j["sweep"]] == [
        ("plain", 0), *((str(d), 0.5) for d in [*DEPTHS, "auto", 5]), *((str(d), 0) for d in [*DEPTHS, "auto", 5]),
    ]  # fmt: skip
    for c in j["sweep"]:
        depth = 0 if c["draft"] == "plain" else 16 if c["draft"] == "auto" else int(c["draft"])
        assert c["tokens"] == 12 and c["tokens"] == c["passes"] + c["accepted"]
        assert c["first_accepted"] <= c["first_drafted"] <= c["passes"] and c["accepted"] <= c["drafted"] <= depth * c["passes"]
        assert abs(c["ratio"] - c["tokens_per_s"] / j["sweep"][0]["tokens_per_s"]) < 1e-3
    by_margin = {(c["draft"], c["margin"]): c["passes"] for c in j["sweep"]}
    assert by_margin["plain", 0] == 12 and by_margin["8", 0] == 2  # the model knows these verses by heart


def test_csv(measured: dict[str, Any]) -> None:
    lines, j = measured["csv"], measured["json"]
    assert list(lines[0]) == ["measure", "context", "rows", "draft", "margin", "value", "unit"]
    of = {(x["measure"], x["context"], x["rows"], x["draft"], x["margin"]): float(x["value"]) for x in lines}
    assert len(of) == len(lines)
    for f in j["frontiers"]:
        for rows, ms in f["pass_ms"].items():
            assert of["pass", str(f["context"]), rows, "", ""] == ms
        assert of["head step", str(f["context"]), "", "", ""] == f["head_step_ms"]
        for depth, a in f["break_even"].items():
            assert of.get(("break-even", str(f["context"]), "", depth, "")) == a
    prompt = str(j["prompt_tokens"])
    for c in j["sweep"]:
        draft, margin = c["draft"], f"{c['margin']:g}"
        assert of["speed", prompt, "", draft, margin] == c["tokens_per_s"]
        assert of["tokens a pass", prompt, "", draft, margin] == pytest.approx(c["tokens"] / c["passes"], abs=1e-4)
        if c["drafted"]:
            assert of["accepted", prompt, "", draft, margin] == pytest.approx(c["accepted"] / c["drafted"], abs=1e-4)


def test_table(measured: dict[str, Any]) -> None:
    text = measured["text"]
    for words in ["prompt tokens/s", "rows of a pass", "head step", "share that must be accepted", "plain", "drafts   margin"]:
        assert words in text
    assert max(map(len, text.splitlines())) <= 125


def test_margins_unless_given(ds4: Path, small: list[str], tmp_path: Path) -> None:
    """A fixed depth with 3 and with 0, auto with its own 0. Every run's text is new to auto and to the lookup: its counts are those
    of the first."""
    sweeps = []
    for runs in (1, 3):
        out = tmp_path / f"{runs}.json"
        args = ["--bench", "--bench-ctx", 0, "--bench-runs", runs, "-n", 16, "-p", "begat " * 20, "--draft-lookup", 3]
        run(ds4, *small, *args, "--json", out)
        sweeps.append(json.loads(out.read_text())["sweep"])
    assert [(c["draft"], c["margin"]) for c in sweeps[0]] == [
        ("plain", 0), *((str(d), 3) for d in DEPTHS), *((str(d), 0) for d in [*DEPTHS, "auto"]),
    ]  # fmt: skip
    counts = [[(c["passes"], c["drafted"], c["accepted"]) for c in sweep if c["draft"] != "auto"] for sweep in sweeps]
    assert counts[0] == counts[1]


def test_without_a_head(ds4: Path, small: list[str], tmp_path: Path) -> None:
    """Its own text as the prompt; frontiers that fit; nothing of drafts."""
    out = tmp_path / "b.json"
    done = run(ds4, *small[:2], "--bench", "--bench-runs", 2, "-n", 2, "-c", 600, "--json", out)
    j = json.loads(out.read_text())
    assert [f["context"] for f in j["frontiers"]] == [1, 512] and j["sweep"] == [] and j["prompt_tokens"] > 100
    assert "head_step_ms" not in j["frontiers"][0] and "break_even" not in j["frontiers"][0]
    assert "draft" not in done.stdout


def test_sampled(ds4: Path, small: list[str], tmp_path: Path) -> None:
    """With a temperature what is measured is that text: the counts are those of generating it."""
    text = ["-p", "And the LORD said", "--temp", 1.5, "--seed", 7, "-n", 24, "--ignore-eos", "--mtp-draft", 2]
    run(ds4, *small, *text, "--bench", "--bench-ctx", 0, "--bench-runs", 1, "--json", tmp_path / "b.json")
    run(ds4, *small, *text, "--stats-json", tmp_path / "s.json")
    stats = json.loads((tmp_path / "s.json").read_text())
    sweep = json.loads((tmp_path / "b.json").read_text())["sweep"]
    assert [(c["draft"], c["margin"]) for c in sweep] == [(str(d), 0) for d in ["plain", *DEPTHS, "auto"]]  # no margin holds for it
    (cell,) = (c for c in sweep if c["draft"] == "2")
    assert (cell["tokens"], cell["passes"]) == (stats["emitted"], stats["cycles"]) and cell["accepted"] == sum(
        stats["accepted"]
    )


def test_lookup_alone(ds4: Path, small: list[str], tmp_path: Path) -> None:
    """Without a head, depths of the lookup's drafts; sampled text as well."""
    out, args = tmp_path / "b.json", ["--bench", "--bench-ctx", 0, "--bench-runs", 1, "-n", 30, "-p", "begat " * 40]
    for more in ([], ["--temp", 0.1, "--seed", 3]):
        run(ds4, *small[:2], *args, "--draft-lookup", 4, "--json", out, *more)
        j = json.loads(out.read_text())
        assert [c["draft"] for c in j["sweep"]][:2] == ["plain", "1"] and j["draft_lookup"] == 4
        assert max(c["accepted"] for c in j["sweep"]) > 0 and "head_step_ms" not in j["frontiers"][0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--bench-ctx", "0"], ["--bench-ctx", "--bench"]),
        (["--csv", "f"], ["--csv", "--bench"]),
        (["--bench", "--bench-ctx", "5,5"], ["--bench-ctx", "5,5", "ascending"]),
        (["--bench", "--bench-ctx", "1,,2"], ["--bench-ctx", "1,,2"]),
        (["--bench", "--bench-ctx", ""], ["--bench-ctx"]),
        (["--bench", "--bench-ctx", ",".join(map(str, range(17)))], ["up to 16"]),
        (["--bench", "--bench-runs", "0"], ["--bench-runs", "1 to 99"]),
        (["--bench", "-n", "0"], ["-n", "at least 1"]),
        (["--bench", "--inspect"], ["--bench", "--inspect"]),
        (["--bench", "--session", "f"], ["--bench", "--session"]),
    ],
)
def test_misuse(ds4: Path, args: list[str], words: list[str]) -> None:
    done = run(ds4, *args, status=2)
    assert done.stdout == "" and done.stderr.count("\n") == 1 and all(word in done.stderr for word in words), done.stderr


def test_what_does_not_fit(ds4: Path, small: list[str], tmp_path: Path) -> None:
    for args, word in (
        (["--bench-ctx", "0,90", "-c", 100], "90"),
        (["--bench-ctx", "0", "-c", "17", "-n", "2"], "17 tokens are generated from there"),
        (["-p", "word " * 90, "-c", 100, "--bench-ctx", "0"], "prompt"),
    ):
        done = run(ds4, *small, "--bench", *args, status=1)
        assert done.stdout == "" and done.stderr.count("\n") == 1 and word in done.stderr


def test_progress_on_a_terminal_and_ctrl_c(ds4: Path, small: list[str]) -> None:
    """A bar where standard error is a terminal; Ctrl+C ends it with status 130 and no table."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [str(ds4), *small, "--bench", "--bench-runs", "99"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave
    )
    os.close(slave)
    shown, end = b"", time.monotonic() + 60
    while b"bench [" not in shown and time.monotonic() < end:
        shown += os.read(master, 4096)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    os.close(master)
    assert b"bench [" in shown and output == b"" and process.returncode == 130
