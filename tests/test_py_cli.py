"""ds4py: its commands, what they print, and how they fail."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import built  # noqa: F401 - builds the extension
import click
import gguf
import pytest
from click.testing import CliRunner, Result
from conftest import ROOT, hear_interrupts
from ds4 import Model, SamplerConfig, bench, names
from ds4.cli import main
from ds4.engine import Engine
from ds4.errors import InvalidArgument
from fixtures import rewrite

SMALL, HEAD = ROOT / "models/small.gguf", ROOT / "models/small-mtp.gguf"
TINY = ROOT / "tests/data/tiny"
TEXT = "And it came to pass"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("DS4_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def run(*args: Any, status: int = 0, **more: Any) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in args], prog_name="ds4py", **more)
    assert result.exit_code == status, result.output
    return result


def process(*args: Any, status: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    """A process of its own, standard output and error in pipes."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "python")} | more.pop("env", {})
    command = [sys.executable, "-m", "ds4", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False, **more)
    assert done.returncode == status, done.stderr
    return done


# ---- help, misuse, failure ----


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    out = [path]
    for name, command in group.commands.items():
        out += commands(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]
    return out


@pytest.mark.parametrize("path", commands(main), ids=" ".join)
def test_help_everywhere(path: tuple[str, ...]) -> None:
    for option in ("--help", "-h"):
        out = run(*path, option)
        assert out.stdout.startswith("Usage: ds4py") and out.stderr == ""


def test_version() -> None:
    found = next(line.split('"')[1] for line in (ROOT / "ds4.h").read_text().splitlines() if "define DS4_VERSION" in line)
    assert run("--version").stdout == f"ds4py {found}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nonsense"], "No such command"),
        (["generate", "--nonsense"], "No such option"),
        (["generate", "-n", "-2", "-p", "x"], "-2 is not in the range"),
        (["generate", "--temp", "101", "-p", "x"], "is not in the range"),
        (["generate", "--temp", "nan", "-p", "x"], "nan is not in the range"),
        (["generate", "--mtp-margin", "nan", "-p", "x"], "nan is not in the range"),
        (["bench", "--csv", "f", "--json", "f"], "more than one would write"),
        (["bench", "--csv", "f", "--plot", "sub/../f"], "more than one would write"),
        (["generate", "--stop", "", "-p", "x"], "expected some text"),
        (["generate", "--threads", "257", "-p", "x"], "257 is not in the range"),
        (["generate", "--mtp-draft", "17", "-p", "x"], "17 is not in the range"),
        (["generate", "--mtp-draft", "many", "-p", "x"], "many"),
        (["generate", "--draft-core", "x", "-p", "x"], "is not one of"),
        (["generate", "--kv-type", "f64", "-p", "x"], "is not one of"),
        (["generate", "-p", "x", "--prompt-file", "-"], "only one of them"),
        (["generate", "-p", "x", "--raw-prompt", "--rendered"], "only one of them"),
        (["generate", "-p", "x", "--no-mtp", "--glm-mtp"], "only one of them"),
        (["generate", "--prompt-file", "/none"], "does not exist"),
        (["bench", "--bench-ctx", "5,4"], "expected ascending whole numbers"),
        (["bench", "--bench-ctx", "x"], "expected ascending whole numbers"),
        (["generate", "--logit-bias", "5", "-p", "x"], "expected ID:F"),
        (["generate", "--logit-bias", "5:inf", "-p", "x"], "expected ID:F"),
        (["completion", "tcsh"], "is not one of"),
        (["tokenize", "a", "--file", "-"], "only one of them"),
        (["bench", "--json", SMALL], "a GGUF file"),
        (["bench", "--csv", "none/x.csv"], "no such folder"),
        (["bench", "--plot", "."], "is a directory"),
        (["generate", "-p", "x", "--stats-json", "none/x"], "no such folder"),
        (["generate", "-p", "x", "--stats-json", ""], "expected the name of a file"),
        (["generate", "-p", "x", "-sys", "y", "--raw-prompt"], "--system needs the chat template"),
        (["generate", "--prompt-ids", SMALL, "--rendered"], "--prompt-ids is used as it is"),
        (["generate", "--logit-bias", f"{1 << 25}:5", "-p", "x"], "expected ID:F"),
        (["generate", "--logit-bias", "1_0:5", "-p", "x"], "expected ID:F"),
    ],
    ids=str,
)
def test_misuse(args: list[str], message: str) -> None:
    result = run(*args, status=2)
    assert message in result.stderr and result.stdout == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "-m", "nope", "-p", "x"], "no model 'nope': neither a file nor one of small, deepseek_v4"),
        (["generate", "-m", ROOT / "README.md", "-p", "x"], "README.md"),
        (["generate", "-m", SMALL, "--mtp", TINY / "head-ds4.gguf", "-p", "x"], "head-ds4.gguf"),
        (["generate", "-m", SMALL, "-c", 8, "-p", "word " * 20], "do not fit a context of 8"),
        (["generate", "-m", "small", "--prompt-ids", ROOT / "README.md"], "is not a token id"),
        (["tokenize", "-m", "small", "--decode", "1 x"], '"x" is not a token id'),
        (["tokenize", "-m", "small", "--decode", "99999"], "outside the vocabulary"),
        (["perplexity", "-m", "small", "/dev/null"], "too few"),
        (["bench", "-m", "small", "--bench-ctx", 9999], "do not fit a context"),
        (["bench", "-m", "small", "--no-mtp", "--bench-ctx", 0, "-c", 17, "-n", 2], "17 tokens behind 1 do not fit a context of 17"),
        (["generate", "-m", "", "-p", "x"], "no model '': neither a file nor one of"),
        (["bench", "--from", ROOT / "models/README.md"], "not what --json of a bench writes"),
        (["tokenize", "-m", "small", "--decode", "9" * 30], "is not a token id"),
        (["models", "remove", "x"], "is not registered"),
        (["models", "add", "small", SMALL], "expected letters"),
        (["models", "add", "x", ROOT / "README.md"], "README.md"),
    ],
    ids=str,
)
def test_failures_are_one_line(args: list[Any], message: str) -> None:
    result = run(*args, status=1)
    assert message in result.stderr and result.stdout == ""
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


# ---- text ----


def test_generate() -> None:
    with Model.from_pretrained("small") as model:
        expected = model.generate(TEXT, sampler_cfg=SamplerConfig(speculative_depth=2), max_tokens=20)
        seeded = model.generate(TEXT, sampler_cfg=SamplerConfig(temperature=1.4, top_k=40, seed=3), max_tokens=20)
    for more in (
        [],
        ["--mtp-draft", 3, "--mtp-margin", 0],
        ["--mtp-draft", 3, "--mtp-shortlist", 1],
        ["--draft-core", "none"],
        ["--no-mtp", "-t", 1],
    ):
        assert run("generate", "-m", "small", "-p", TEXT, "-n", 20, *more).stdout == f"{expected}\n"
    sampling = ["--temp", 1.4, "--top-k", 40, "--seed", 3]
    for more in ([], ["--mtp-draft", 4]):
        assert run("generate", "-m", "small", "-p", TEXT, "-n", 20, *sampling, *more).stdout == f"{seeded}\n"
    ids = run("generate", "-m", "small", "-p", TEXT, "-n", 20, "--print-ids").stdout
    assert [int(line) for line in ids.splitlines()] == expected.tokens


def test_prompts(tmp_path: Path) -> None:
    expected = run("generate", "-m", "small", "-p", TEXT, "-n", 8).stdout
    (tmp_path / "p.txt").write_text(f"{TEXT}\n")
    assert run("generate", "-m", "small", "--prompt-file", tmp_path / "p.txt", "-n", 8).stdout == expected
    assert run("generate", "-m", "small", "-n", 8, input=TEXT).stdout == expected
    ids = run("tokenize", "-m", "small", "--bos", "--ids", TEXT).stdout
    (tmp_path / "ids").write_text(ids)
    assert run("generate", "-m", "small", "--prompt-ids", tmp_path / "ids", "-n", 8).stdout == expected
    assert run("generate", "-m", "small", "--raw-prompt", "-p", TEXT, "-n", 8).stdout == expected
    stopped = run("generate", "-m", "small", "-p", TEXT, "-n", 20, "--stop", "multiply").stdout
    assert stopped == ", when men began to \n"


def test_options_reach_the_engine() -> None:
    """Each changes the text, or it would be ignored."""
    base = ["generate", "-m", "small", "-p", TEXT, "-n", 12, "--temp", 2, "--seed", 5]
    plain = run(*base).stdout
    for option in (
        ["--top-k", 2], ["--top-p", 0.1], ["--min-p", 0.5], ["--seed", 6], ["--temp", 0.5], ["--presence-penalty", 50],
        ["--frequency-penalty", -50], ["--logit-bias", "5:99"], ["-sys", "Be brief. "],
    ):  # fmt: skip
        assert run(*base, *option).stdout != plain, option
    rejection = [run(*base, "--mtp-sampling", "rejection", "--mtp-draft", d).stdout for d in (0, 4)]
    assert rejection[0] != rejection[1]


def test_stats(tmp_path: Path) -> None:
    result = run("generate", "-m", "small", "-p", TEXT, "-n", 20, "--mtp-draft", 3, "--stats", "--stats-json", "s.json")
    assert "draft 3" in result.stderr and "20 tokens" in result.stderr and "ended by length" in result.stderr
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["generated_tokens"] == 20 and found["emitted"] == 20 and found["drafted"][2] > 0
    assert sum(found["accepted"]) + found["corrections"] + found["bonus"] == 20


def test_margin_unless_given() -> None:
    """0 with auto, 3 with a number."""
    for more, margin in (([], "0"), (["--mtp-draft", 2], "3"), (["--mtp-margin", 0.5], "0.5"), (["--mtp-draft", 2, "--mtp-margin", 0], "0")):
        result = run("generate", "-m", "small", "-p", TEXT, "-n", 3, "--stats", *more)
        assert f"; margin {margin} held back" in result.stderr


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    """One line that says what could not be written, and no traceback; a closed standard output takes nothing from the answer."""
    args = ["generate", "-m", "small", "-p", TEXT, "-n", "5", "-q"]
    assert process(*args, "--stats-json", "/dev/full", status=1).stderr == "Error: /dev/full: No space left on device\n"
    command = [sys.executable, "-m", "ds4", *args]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
        assert (done.returncode, done.stderr) == (1, "Error: standard output: No space left on device\n")
    done = subprocess.run(
        [*command, "--stats-json", "s.json"], stderr=subprocess.PIPE, text=True, env=environment, check=False,
        preexec_fn=lambda: os.close(1),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "s.json").read_text())["generated_tokens"] == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_output(tmp_path: Path, number: signal.Signals) -> None:
    """It ends the program as ever, once what was begun is removed; one that is ignored stays so."""
    code = """
import signal, sys, time
from ds4.outputs import replacing
if sys.argv[2:]:
    signal.signal(int(sys.argv[2]), signal.SIG_IGN)
with replacing(sys.argv[1]) as file:
    file.write_text("half")
    print("begun", flush=True)
    time.sleep(0.5 if sys.argv[2:] else 60)
"""
    (tmp_path / "there").write_text("figures")
    default = {n: signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGHUP)}
    for args, status, text in (["new"], -number, ""), (["there"], -number, "figures"), (["there", number], 0, "half"):
        child = subprocess.Popen(
            [sys.executable, "-c", code, *(str(int(a)) if isinstance(a, int) else a for a in args)], stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT / "python")}, text=True,
            preexec_fn=lambda: [signal.signal(n, handler) for n, handler in default.items()],
        )  # fmt: skip
        assert child.stdout and child.stdout.readline() == "begun\n" and len(os.listdir(tmp_path)) == 2
        child.send_signal(number)
        assert child.wait(60) == status and os.listdir(tmp_path) == ["there"]
        assert text in ("", (tmp_path / "there").read_text())


def test_a_failure_leaves_no_output(tmp_path: Path) -> None:
    """And figures of another run as they were; a link, a file's mode and standard output are what they were, too."""
    (tmp_path / "far").write_text("figures")
    (tmp_path / "far").chmod(0o640)
    (tmp_path / "link").symlink_to("far")
    for command in (["generate", "--stats-json"], ["bench", "--csv"], ["bench", "--json"], ["bench", "--plot"]):
        for name in ("new", "link"):
            run(*command, name, "-m", "small", "-c", 8, "-p", "word " * 20, status=1)
    assert sorted(os.listdir(tmp_path)) == ["far", "link"] and (tmp_path / "far").read_text() == "figures"
    generate = ["generate", "-m", "small", "-p", TEXT, "-n", 5]
    run(*generate, "--stats-json", "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "far").stat().st_mode & 0o777 == 0o640
    assert json.loads((tmp_path / "far").read_text())["generated_tokens"] == 5
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    with (tmp_path / "all").open("wb") as f:
        command = [sys.executable, "-m", "ds4", *map(str, generate), "--stats-json", "/dev/stdout"]
        subprocess.run(command, stdout=f, env=environment, check=True)
    answer, _, figures = (tmp_path / "all").read_text().partition("{")
    assert answer == run(*generate).stdout and json.loads("{" + figures)["generated_tokens"] == 5


def test_as_ds4_does(ds4: Path, tmp_path: Path) -> None:
    """Options that both programs have mean the same, and say the same beside the answer."""
    (tmp_path / "p").write_bytes(TEXT.encode() + b"\r\n")
    (tmp_path / "ids").write_text("5 6 7")
    odd = ROOT / "tests/data/tiny/target.gguf"
    for args in (
        ["-m", SMALL, "--prompt-file", "p"],
        ["-m", SMALL, "-p", TEXT, "--think"],
        ["-m", SMALL, "-p", TEXT, "--mtp-draft", "0"],
        ["-m", SMALL, "-p", TEXT, "--mtp-draft", "3"],
        ["-m", SMALL, "-p", TEXT, "--mtp-draft", "auto", "-q"],
        ["-m", SMALL, "-p", TEXT, "--mtp-margin", "0"],
        ["-m", SMALL, "-p", TEXT, "--mtp-sampling", "rejection", "--temp", "1"],
        ["-m", SMALL, "-p", TEXT, "--draft-lookup", "4", "--mtp-draft", "3"],
        ["-m", odd, "--prompt-ids", "ids", "--print-ids"],
    ):
        ours = run("generate", "--no-mtp", *args, "-n", 12)
        done = subprocess.run([str(a) for a in (ds4, *args, "-n", 12)], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
        assert ours.stdout.rstrip("\n") == done.stdout.rstrip("\n")
        assert ours.stderr.replace("ds4py: ", "ds4: note: ") == done.stderr


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["generate", "-p", TEXT, "-n", 20, "--mtp-draft", 2, "--mtp-margin", 3]
    unset = run(*args)
    assert "small bundled one" in unset.stderr and run(*args, "-q").stderr == ""
    monkeypatch.setenv("DS4_MODEL", str(SMALL))
    assert run(*args).stderr == ""
    monkeypatch.setenv("DS4_MTP_CONF_LOG", "1")
    monkeypatch.setenv("DS4_MTP_MIN_MARGIN", "1000")
    result = run(*args)
    assert "margin 1000 below-margin" in result.stderr and result.stdout == unset.stdout
    monkeypatch.setenv("DS4_MTP_CONF_LOG", "2")
    assert "DS4_MTP_CONF_LOG" in run(*args, status=2).stderr
    monkeypatch.setenv("DS4_MTP_MIN_MARGIN", "x")
    assert "DS4_MTP_MIN_MARGIN" in run(*args, status=2).stderr


def test_chat() -> None:
    """Lines are messages; the second answer sees the first turn."""
    talk = "In the beginning\n/ctx\n/stats\n/help\n  /quit is text here\n/new\nIn the beginning\n/think\n/quit\nnever read\n"
    lines = run("chat", "-m", "small", "-n", 10, input=talk).stdout.splitlines()
    assert lines[0].startswith(" God created the heaven") and lines[-1] == lines[0]
    assert any(line.endswith("of 4096 tokens") for line in lines) and any(line.startswith("generated") for line in lines)
    assert any(line.startswith("/nothink") for line in lines)
    with Model.from_pretrained("small") as model:
        turns = [{"role": "user", "content": "In the beginning"}]
        first = model.chat(turns, max_tokens=10)
        turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And"}]
        second = model.chat(turns, max_tokens=10)
    out = run("chat", "-m", "small", "-n", 10, input="In the beginning\nAnd\n").stdout
    assert out == "".join(text.removesuffix("\n") + "\n" for text in (first.text, second.text))


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with V4's chat template, its head beside it."""
    folder = tmp_path_factory.mktemp("talker")
    (folder / "talker-mtp.gguf").symlink_to(HEAD)
    template = ("{{ bos_token }}<｜User｜><｜Assistant｜><think></think>", gguf.GGUFValueType.STRING)
    return rewrite(SMALL, folder / "talker.gguf", extra={"tokenizer.chat_template": template})


def test_prompts_are_the_other_programs(talker: Path, ds4: Path) -> None:
    """User turns, system texts, thinking, rendered and raw text: the ids that ./ds4 generates."""
    rendered = "<｜User｜>Hail<｜Assistant｜></think>"
    for args in (
        ["-p", "Hail"], ["-p", "Hail", "-sys", "Be brief."], ["-p", "Hail", "--think"], ["-p", "Hail", "--think-max"],
        ["-p", "Hail", "--raw-prompt"], ["-p", rendered, "--rendered"], ["-p", rendered], ["-p", ""],
        ["-p", "Hail", "--temp", "0.9", "--top-p", "0.9", "--seed", "4", "--presence-penalty", "1", "--logit-bias", "17:-2"],
        ["-p", "Hail", "--logit-bias", "300:999", "--logit-bias", "300:-9", "--ignore-eos"],
    ):  # fmt: skip
        args = [*args, "-n", "12", "--print-ids", "-m", str(talker)]
        theirs = subprocess.run([ds4, *args], capture_output=True, text=True, check=True).stdout
        assert run("generate", *args).stdout == theirs and theirs.count("\n") > 3, args


def test_chat_turns(talker: Path) -> None:
    """A talk with and without thinking, in one session, is the library's conversation."""
    out = run("chat", "-m", talker, "-n", 12, "-sys", "Be brief.", input="Hail\n/think\nAnd now?\n/nothink\nAnd?\n").stdout
    turns: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    expected = ""
    with Model.from_pretrained(talker) as model:
        for text, thinking in (("Hail", "off"), ("And now?", "on"), ("And?", "off")):
            turns.append({"role": "user", "content": text})
            answer = model.chat(turns, thinking=thinking, max_tokens=12)  # type: ignore[arg-type]
            turns.append({"role": "assistant", "content": answer.text, "reasoning": answer.reasoning})
            shown = model.decode(answer.tokens)
            expected += shown.removesuffix("\n") + "\n"
    assert out == expected


# ---- looking at things ----


def test_inspect() -> None:
    text = run("inspect", "-m", "small").stdout
    assert "layers 8 (1 hash-routed), width 256, streams 4" in text and str(HEAD) in text
    c_text = subprocess.run([ROOT / "ds4", "-m", SMALL, "--mtp", HEAD, "--inspect"], capture_output=True, text=True, check=True)
    assert set(c_text.stdout.splitlines()) >= {
        line for line in text.splitlines() if not re.search("scratch|tables|in all", line)
    }
    found = json.loads(run("inspect", "-m", "small", "--json", "--tensors").stdout)
    assert found["layers"] == 8 and len(found["tensors"]) == len(
        run("inspect", "-m", "small", "--tensors").stdout.splitlines()
    ) - (len(text.splitlines()) + 1)


def test_tokenize() -> None:
    assert (
        run("tokenize", "-m", "small", "hello é\n").stdout
        == '79\t"h"\n586\t"ell"\n86\t"o"\n228\t" "\n135\t"\\xc3"\n110\t"\\xa9"\n206\t"\\n"\n'
    )
    ids = run("tokenize", "-m", "small", "--ids", "--bos", "hello").stdout
    assert ids == "0 79 586 86\n"
    assert run("tokenize", "-m", "small", "--decode", "79 586 86").stdout == "hello"
    data = b"\xff bytes \x00 of any kind\n"
    ids = run("tokenize", "-m", "small", "--ids", input=data).stdout
    assert run("tokenize", "-m", "small", "--decode", ids).stdout_bytes == data
    text = "<｜end▁of▁sentence｜>"
    assert run("tokenize", "-m", "small", "--ids", "--control", text).stdout == "1\n"
    assert len(run("tokenize", "-m", "small", "--ids", text).stdout.split()) > 3


def test_perplexity_is_the_other_programs(ds4: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text((ROOT / "models/held-out.txt").read_text()[:3000])
    for ctx, head in ((100, True), (400, False), (4096, True)):
        mine = run("perplexity", "-m", SMALL, "--mtp" if head else "--no-mtp", *([HEAD] if head else []), "-c", ctx, "text")
        command = map(str, [ds4, "-m", SMALL, *(["--mtp", HEAD] if head else []), "-c", ctx, "--perplexity-file", "text"])
        assert mine.stdout == subprocess.run(list(command), capture_output=True, text=True, check=True).stdout


# ---- bench ----


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    with Model.from_pretrained("small", max_rewind=64) as model:
        ids = model.encode(TEXT)
        done: list[tuple[int, int]] = []
        result = bench.measure(
            model.engine, ids, tokens=12, runs=1, contexts=[0, 40], depths=[1, 3], progress=lambda *at: done.append(at)
        )
        assert done[-1][0] == done[-1][1] == len(done)
    return result


def test_bench_counts(measured: dict[str, Any]) -> None:
    assert [f["context"] for f in measured["frontiers"]] == [1, 40] and measured["frontiers"][1]["prompt_tokens"] == 39
    for f in measured["frontiers"]:
        passes = {int(n): ms for n, ms in f["pass_ms"].items()}
        assert list(passes) == list(bench.ROWS) and min(passes.values()) > 0 and f["head_step_ms"] > 0
        for depth, share in f["break_even"].items():
            cost = passes[int(depth) + 1] + int(depth) * f["head_step_ms"] + f["repair_ms"]
            if share is None:
                assert cost > (int(depth) + 1) * passes[1]
            elif share > 1e-9:
                assert sum(share**k for k in range(int(depth) + 1)) * passes[1] == pytest.approx(cost, rel=1e-6)
    assert [(s["draft"], s["margin"]) for s in measured["sweep"]] == [
        ("plain", 0.0), ("1", 3.0), ("3", 3.0), ("1", 0.0), ("3", 0.0), ("auto", 0.0),
    ]  # fmt: skip
    for s in measured["sweep"]:
        assert s["tokens"] == 12 == s["passes"] + s["accepted"] and s["accepted"] <= s["drafted"]
    assert measured["sweep"][4]["passes"] < 12 == measured["sweep"][0]["passes"]


def test_bench_of_lookups() -> None:
    """Drafts of lookups without a head; margins that are given hold for auto too; each run in a fresh session: the same counts."""
    with Engine(SMALL, threads=1, ctx=512, max_rewind=64) as engine:
        ids = engine.prompt("begat " * 40)
        once, twice = (
            bench.measure(engine, ids, tokens=30, runs=runs, contexts=[0], depths=[2], margins=[0.5], lookup=4)["sweep"] for runs in (1, 2)
        )  # fmt: skip
        assert [(s["draft"], s["margin"]) for s in once] == [("plain", 0.0), ("2", 0.5), ("auto", 0.5)]
        assert once[1]["accepted"] > 0
        assert [once[1][k] == twice[1][k] for k in ("tokens", "passes", "drafted", "accepted")] == [True] * 4
        with pytest.raises(InvalidArgument):
            bench.measure(engine, ids, contexts=[0], depths=[1], lookup=65, tokens=2, runs=1)


def test_bench_command(measured: dict[str, Any], ds4: Path) -> None:
    """A short run, and the figures of an earlier one, of either program, as table, CSV, JSON and picture."""
    short = ["-n", 3, "--bench-runs", 1, "--bench-ctx", "0", "-p", TEXT]
    text = run("bench", "-m", "small", *short, "--mtp-draft", 5, "--json", "a.json").stdout
    mine = json.loads(Path("a.json").read_text())
    assert [s["draft"] for s in mine["sweep"][:7]] == ["plain", "1", "2", "3", "4", "5", "8"]
    assert [s["margin"] for s in mine["sweep"] if s["draft"] == "auto"] == [0] and "medians of 1" in text
    command = [ds4, "-m", SMALL, "--mtp", HEAD, "--bench", *short, "--json", "c.json", "--csv", "c.csv"]
    subprocess.run(list(map(str, command)), capture_output=True, check=True)
    theirs = json.loads(Path("c.json").read_text())
    assert mine.keys() <= theirs.keys() | {"name"}
    assert all(a.keys() == b.keys() for k in ("frontiers", "sweep") for a, b in zip(mine[k], theirs[k], strict=False))
    text = run("bench", "--from", "c.json", "--csv", "again.csv", "--plot", "c.png").stdout
    assert "share of drafts that must be accepted" in text and "tokens a pass" in text
    rows = [list(csv.DictReader(Path(name).open())) for name in ("c.csv", "again.csv")]
    assert [{**r, "value": ""} for r in rows[0]] == [{**r, "value": ""} for r in rows[1]]
    assert all(float(a["value"]) == pytest.approx(float(b["value"]), abs=1e-3) for a, b in zip(*rows, strict=True))
    assert Path("c.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "--plot needs matplotlib" in run("bench", "--plot", "x.png", status=1).stderr


# ---- names, completion, other modules ----


def test_models() -> None:
    assert "not set; the small one stands in" in run("models", "list").stdout
    run("models", "add", "tiny", TINY / "target.gguf", "--mtp", TINY / "head-ds4.gguf")
    assert names.registered() == {"tiny": names.Entry(TINY / "target.gguf", TINY / "head-ds4.gguf")}
    assert f"tiny             {TINY / 'target.gguf'}  --mtp {TINY / 'head-ds4.gguf'}" in run("models", "list").stdout
    assert "layers" in run("inspect", "-m", "tiny").stdout
    assert "registered already" in run("models", "add", "tiny", SMALL, status=1).stderr
    run("models", "add", "tiny", SMALL, "--replace")
    run("models", "remove", "tiny")
    assert names.registered() == {}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    script = run("completion", shell).stdout
    assert "_DS4PY_COMPLETE" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def complete(*words: str) -> set[str]:
    env = {"_DS4PY_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["ds4py", *words]), "COMP_CWORD": str(len(words))}
    command = [sys.executable, "-c", "from ds4.cli import main; main(prog_name='ds4py')"]
    env = os.environ | env | {"PYTHONPATH": str(ROOT / "python")}
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout
    return {line.split(",", 1)[1] for line in out.splitlines()}


def test_completion() -> None:
    names.add("flash-q2", TINY / "target.gguf")
    assert complete("in") == {"inspect"}
    assert {"small", "deepseek_v4", "flash-q2"} <= complete("generate", "-m", "")
    assert complete("models", "remove", "fl") == {"flash-q2"}
    assert complete("generate", "--draft-core", "st") == {"stock"}
    assert "--mtp-draft" in complete("generate", "--mtp")


def test_other_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = ["--layers", 2, "--type", "F16", "--vocab", 300, "--width", 64, "--heads", 2, "--head-width", 32, "--rotary", 16]
    sizes += ["--q-rank", 16, "--o-groups", 2, "--o-rank", 16, "--experts", 2, "--experts-used", 1, "--expert-width", 32]
    run("synth", tmp_path / "x.gguf", "--head", tmp_path / "x-mtp.gguf", *sizes)
    assert "layers 2" in run("inspect", "-m", tmp_path / "x.gguf").stdout
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "ds4.train", raising=False)
    assert "needs gguf, tokenizers and torch" in run("train", "out", status=1).stderr
    assert "OUT_DIR" not in run("train", "--help").stdout and "torch" in run("train", "--help").stdout


def test_documented_commands(tmp_path: Path) -> None:
    """Every command of docs/ds4py.md, as it stands."""
    (tmp_path / "flash.gguf").symlink_to(TINY / "target.gguf")
    (tmp_path / "flash-mtp.gguf").symlink_to(TINY / "head-ds4.gguf")
    (tmp_path / "question.txt").write_text("In the beginning God created the heaven")
    lines = [line.strip() for line in (ROOT / "docs/ds4py.md").read_text().splitlines() if line.startswith("    ds4py ")]
    assert len(lines) > 12
    for line in lines:
        run(*shlex.split(line)[1:], input="")


# ---- processes ----


def test_a_pipe_gets_text_alone(tmp_path: Path) -> None:
    done = process("generate", "-m", "small", "-n", 8, input=TEXT)
    assert done.stdout == ", when men began to multiply\n" and done.stderr == ""
    done = process("perplexity", "-m", "small", ROOT / "models/README.md")
    assert done.stderr == ""
    process("generate", "-m", "small", "--nonsense", status=2)
    process("generate", "-m", "nope", "-p", "x", status=1)


def test_a_terminal_gets_bars(tmp_path: Path) -> None:
    """Progress on standard error; no control characters on standard output."""
    (tmp_path / "long").write_text((ROOT / "models/held-out.txt").read_text()[:6000])
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "ds4", "perplexity", "-m", str(SMALL), "long"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "python"), "TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=secondary, env=env, timeout=60, check=True)
    os.close(secondary)
    shown = b""
    while len(chunk := _read(primary)):
        shown += chunk
    os.close(primary)
    assert b"evaluated" in shown and b"100%" in shown and done.stdout.startswith(b"tokens")


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # the other side is closed
        return b""


def test_interrupt() -> None:
    """Ctrl+C ends a generation with status 130; what came is printed."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, "-m", "ds4", "generate", "-m", "small", "-p", TEXT, "-n", "-1", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, preexec_fn=hear_interrupts) as p:
        assert p.stdout is not None
        begun = p.stdout.read(10)
        time.sleep(0.1)
        p.send_signal(signal.SIGINT)
        rest, errors = p.communicate(timeout=60)
    assert p.returncode == 130, errors
    assert begun == b", when men" and b"Traceback" not in errors
