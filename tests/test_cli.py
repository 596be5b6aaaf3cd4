"""./ds4 as users and scripts meet it: its words, its files, its exit codes, its chat."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import rewrite, tensors_of

PROMPT = "In the beginning"
V4_TEMPLATE = "{{ bos_token }}<｜User｜><｜Assistant｜><think></think>"
USER = "<｜User｜>"
BASE_MODEL_TOKENS = 512


def environment(**more: str) -> dict[str, str]:
    """The environment without what would change ds4's behaviour, and with `more`."""
    return {k: v for k, v in os.environ.items() if not k.startswith("DS4_")} | more


class Cli:
    """Runs ds4 with the small model unless told otherwise."""

    def __init__(self, program: Path, root: Path) -> None:
        self.program, self.root = program, root
        self.model, self.head = root / "models/small.gguf", root / "models/small-mtp.gguf"
        self.data = root / "tests/data"

    def __call__(
        self, *args: Any, stdin: bytes = b"", status: int = 0, env: dict[str, str] | None = None, cwd: Path | None = None,
        model: Path | None = None,
    ) -> subprocess.CompletedProcess[bytes]:  # fmt: skip
        """Runs with -m `model`, and asserts the exit status."""
        return self.bare("-m", model or self.model, *args, stdin=stdin, status=status, env=env, cwd=cwd)

    def bare(
        self, *args: Any, stdin: bytes = b"", status: int = 0, env: dict[str, str] | None = None, cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[bytes]:  # fmt: skip
        command = [os.fsencode(str(a)) if not isinstance(a, bytes) else a for a in [self.program, *args]]
        done = subprocess.run(
            command, input=stdin, capture_output=True, env=environment(**(env or {})), cwd=cwd, timeout=300, check=False
        )
        assert done.returncode == status, done.stderr.decode(errors="replace")
        return done

    def start(self, *args: Any, stdout: Any = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """Runs in the background, without standard input."""
        command = [str(a) for a in [self.program, "-m", *args]]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, env=environment())

    def ids(self, *args: Any, **kwargs: Any) -> list[int]:
        return [int(line) for line in self(*args, "--print-ids", **kwargs).stdout.split()]

    def speculation(self, draft: int = 2, margin: float = 3.0) -> list[Any]:
        return ["--mtp", self.head, "--mtp-draft", draft, "--mtp-margin", margin]

    def stats(self, tmp: Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        path = tmp / "stats.json"
        self(*args, "--stats-json", path, **kwargs)
        return dict(json.loads(path.read_text()))


@pytest.fixture(scope="session")
def cli(ds4: Path, root: Path) -> Cli:
    return Cli(ds4, root)


def one_line(stderr: bytes) -> str:
    """The single line that a failure prints."""
    text = stderr.decode()
    assert text.endswith("\n") and text.count("\n") == 1 and text.startswith("ds4: "), text
    return text


def with_metadata(source: Path, target: Path, key: str, value: str) -> Path:
    """A copy of a GGUF file with one more string among its metadata.

    The addition goes right behind the header and is filled up with spaces to a multiple of the alignment, so that every
    tensor keeps its place.
    """
    data = source.read_bytes()
    fixed = 8 + len(key) + 4 + 8
    text = value.encode()
    text += b" " * (-(fixed + len(text)) % 64)
    entry = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IQ", 8, len(text)) + text
    (count,) = struct.unpack_from("<Q", data, 16)
    target.write_bytes(data[:16] + struct.pack("<Q", count + 1) + entry + data[24:])
    return target


@pytest.fixture(scope="session")
def talker(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with V4's chat template."""
    return with_metadata(
        cli.model, tmp_path_factory.mktemp("talker") / "talker.gguf", "tokenizer.chat_template", V4_TEMPLATE
    )


@pytest.fixture(scope="session")
def plain(cli: Cli) -> bytes:
    """48 greedy tokens of the small model."""
    return cli("-p", PROMPT, "-n", 48).stdout


# ---- misuse and bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--frobnicate"], ["--frobnicate", "--help"]),
        (["--frobnicate=3"], ["--frobnicate"]),
        (["-z"], ["-z"]),
        (["word"], ["word", "-p"]),
        (["-n"], ["-n", "-1 to 16777216"]),
        (["-n", "--stats"], ["-n", "-1 to 16777216"]),
        (["-n", "many"], ["-n", "many", "-1 to 16777216"]),
        (["--tokens=1.5"], ["--tokens", "1.5"]),
        (["-n", "99999999999999999999"], ["-n", "99999999999999999999"]),
        (["--mtp-draft", "-1"], ["--mtp-draft", '"-1"', "0 to 16"]),
        (["--mtp-draft", "17"], ["--mtp-draft", "17", "0 to 16"]),
        (["--mtp-draft=2x"], ["--mtp-draft", "2x", "0 to 16, or auto"]),
        (["--mtp-draft", "Auto"], ["--mtp-draft", "Auto", "or auto"]),
        (["--draft-lookup", "65"], ["--draft-lookup", "65", "0 to 64"]),
        (["--mtp-margin", "-1"], ["--mtp-margin", "-1", "0 to 1000"]),
        (["--mtp-margin", "1001"], ["--mtp-margin", "1001", "0 to 1000"]),
        (["--mtp-margin", "nan"], ["--mtp-margin", "nan", "0 to 1000"]),
        (["--mtp-margin="], ["--mtp-margin", '""', "0 to 1000"]),
        (["--temp", "inf"], ["--temp", "inf"]),
        (["--threads", "257"], ["--threads", "257", "1 to 256"]),
        (["--temp", "-0.1"], ["--temp", "-0.1"]),
        (["--top-p", "1.1"], ["--top-p", "0 to 1"]),
        (["--min-p", "0x1"], ["--min-p", "0x1"]),
        (["--top-k", "-1"], ["--top-k", "-1"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--presence-penalty", "101"], ["--presence-penalty", "101", "-100 to 100"]),
        (["--frequency-penalty", "x"], ["--frequency-penalty", "x"]),
        (["--mtp-sampling", "both"], ["--mtp-sampling", "both", "coupled", "rejection"]),
        (["--logit-bias", "5"], ["--logit-bias", "5", "ID:BIAS"]),
        (["--logit-bias", "5:inf"], ["--logit-bias", "5:inf"]),
        (["--logit-bias", "-5:1"], ["--logit-bias", "-5:1"]),
        (["--seed", "18446744073709551616"], ["--seed"]),
        (["--ctx", "0"], ["--ctx", "1 to"]),
        (["-t", "0"], ["-t", "1 to 256"]),
        (["--prefill-chunk", "4097"], ["--prefill-chunk", "1 to 4096"]),
        (["--kv-type", "q8"], ["--kv-type", "q8", "f32, f16 or fp8"]),
        (["--isa", "mmx"], ["--isa", "auto"]),
        (["--backend", "metal"], ["--backend", "metal", "cpu"]),
        (["--stop", ""], ["--stop"]),
        (["-m", "", "-p", "a"], ["-m", "name of a file"]),
        (["--stats-json=", "-p", "a"], ["--stats-json", "name of a file"]),
        (["--stats=yes"], ["--stats", "no value"]),
        (["--mtp", "a", "--glm-mtp"], ["--mtp", "--glm-mtp"]),
        (["-p", "a", "--prompt-file", "b"], ["-p", "--prompt-file"]),
        (["--raw-prompt", "--rendered", "-p", "a"], ["--raw-prompt", "--rendered"]),
        (["--raw-prompt", "-sys", "s", "-p", "a"], ["--system", "--raw-prompt"]),
        (["--prompt-ids", "f", "--rendered"], ["--prompt-ids", "--rendered"]),
        (["--inspect", "--dump-tokens"], ["--inspect", "--dump-tokens"]),
        (["--perplexity-file", "f", "-p", "a"], ["--perplexity-file"]),
        (["--session", "f", "--dump-logits", "g", "-p", "a"], ["--session", "--dump-logits"]),
        (["--dump-head-logits", "f", "-p", "a"], ["--dump-head-logits", "--mtp"]),
        (["--session", "f", "--stats-json", "f", "-p", "a"], ["--session", "--stats-json", "write f"]),
        (["--prompt-file", "f", "--stats-json", "f"], ["--prompt-file", "--stats-json", "f would be read and written"]),
        (["--bench", "--csv", "f", "--json", "f"], ["--csv", "--json", "write f"]),
        (["--bench", "--csv", "f", "--json", "./f"], ["--csv", "--json", "write ./f"]),
        (["--stats-json", "f", "--inspect"], ["--stats-json", "--inspect"]),
        (["--stats", "--dump-tokens", "-p", "a"], ["--stats", "--dump-tokens"]),
        (["--print-ids", "--perplexity-file", "f"], ["--print-ids", "--perplexity-file"]),
        (["--dump-logprobs", "f", "--perplexity-file", "g"], ["--dump-logprobs", "--perplexity-file"]),
        (["--session", "f", "--inspect"], ["--session", "--inspect"]),
    ],
)
def test_misuse_is_one_line_and_status_2(cli: Cli, args: list[str], words: list[str]) -> None:
    done = cli.bare(*args, status=2)
    line = one_line(done.stderr)
    assert done.stdout == b"" and all(word in line for word in words), line


@pytest.mark.parametrize("value", ["soft", "-1", "1000.5", "3.0x", "nan"])
def test_a_bad_margin_in_the_environment_is_misuse(cli: Cli, value: str) -> None:
    line = one_line(cli("-p", "a", status=2, env={"DS4_MTP_MIN_MARGIN": value}).stderr)
    assert "DS4_MTP_MIN_MARGIN" in line and value in line and "0 to 1000" in line


def test_a_bad_log_switch_in_the_environment_is_misuse(cli: Cli) -> None:
    assert "DS4_MTP_CONF_LOG" in one_line(cli("-p", "a", status=2, env={"DS4_MTP_CONF_LOG": "maybe"}).stderr)


def test_bad_input_is_one_line_and_status_1(cli: Cli, tmp_path: Path) -> None:
    def fails(*args: Any, model: Path | None = None, says: str = "") -> None:
        done = cli(*args, "-q", model=model, status=1)
        assert done.stdout == b"" and says in one_line(done.stderr), done.stderr

    tiny, edge = cli.data / "tiny", cli.data / "edge"
    text, short = tmp_path / "text.gguf", tmp_path / "short.gguf"
    text.write_text("not a model\n" * 100)
    short.write_bytes(cli.model.read_bytes()[:-1000])
    ask = ["-p", "a", "-n", 1]
    fails(*ask, model=tmp_path / "absent.gguf", says="absent.gguf")
    fails(*ask, model=tmp_path, says=str(tmp_path))
    fails(*ask, model=text, says="text.gguf")
    fails(*ask, model=short, says="short.gguf")
    fails(*ask, "--mtp", tmp_path / "absent.gguf", says="absent.gguf")
    fails(*ask, "--mtp", tiny / "head-ds4.gguf", says="head-ds4.gguf")
    fails(*ask, "--mtp", cli.model, model=cli.head, says="small")
    fails(*ask, "--mtp", tiny / "head-ds4.gguf", model=edge / "target.gguf", says="head-ds4.gguf")
    fails(*ask, "--glm-mtp", says="small.gguf")
    fails("--prompt-file", tmp_path / "absent.txt", says="absent.txt")
    fails("--prompt-file", tmp_path, says=str(tmp_path))
    fails("-p", "word " * 200, "-c", 64, says="the context holds 64")
    fails("--perplexity-file", tmp_path / "absent.txt", says="absent.txt")


def test_bad_ids_are_named(cli: Cli, tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    bad = {"1 two 3": '"two"', "5 -1": '"-1"', "": "empty", " \n": "empty", "7 99999": "99999", "1 2\0": "ids"}
    for text, says in bad.items():
        ids.write_text(text)
        assert says in one_line(cli("--prompt-ids", ids, "--print-ids", "-n", 1, status=1).stderr)


def test_damaged_sessions_are_refused(cli: Cli, tmp_path: Path) -> None:
    saved = tmp_path / "s"
    cli("-p", PROMPT, "-n", 4, "--session", saved)
    whole = saved.read_bytes()
    for damaged in [whole[:-1], whole[: len(whole) // 2], b"", whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]]:
        saved.write_bytes(damaged)
        done = cli("-p", "", "-n", 4, "--session", saved, status=1)
        assert str(saved) in one_line(done.stderr) and done.stdout == b"" and saved.read_bytes() == damaged
    saved.write_bytes(whole)
    done = cli("-p", "", "-n", 4, "--session", saved, "--kv-type", "f32", status=1)
    assert one_line(done.stderr) == f"ds4: {saved}: a snapshot of kv type f16, this session has f32\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error(cli: Cli) -> None:
    with open("/dev/full", "wb") as full:
        process = cli.start(cli.model, "-p", PROMPT, "-n", 4, stdout=full)
        _, errors = process.communicate()
    assert process.returncode == 1 and "standard output" in one_line(errors)
    done = cli("-p", PROMPT, "-n", 4, "--dump-logprobs", "/dev/full", status=1)
    assert "/dev/full" in one_line(done.stderr)


# ---- help and defaults -----------------------------------------------------------------------------------------------


def test_version(cli: Cli, root: Path) -> None:
    version = re.search(r'DS4_VERSION "(.+)"', (root / "ds4.h").read_text())
    assert version and cli.bare("--version").stdout.decode() == f"ds4 {version[1]}\n"


def test_help_names_every_option(cli: Cli, root: Path) -> None:
    done = cli.bare("--help")
    text = done.stdout.decode()
    names = re.findall(r'^    \{"(--[a-z-]+)", (NULL|"-[a-z]+")', (root / "ds4_cli.c").read_text(), re.MULTILINE)
    assert len(names) > 40 and done.stderr == b"" and cli.bare("-h").stdout == done.stdout
    for name, brief in names:
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", text), name
        assert brief == "NULL" or f"{brief[1:-1]}, {name}" in text, brief
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - {n for n, _ in names} == {"--name"}
    assert max(map(len, text.splitlines())) <= 125


def test_help_states_the_defaults_there_are(cli: Cli, tmp_path: Path) -> None:
    text = cli.bare("--help").stdout.decode()
    stats = cli.stats(tmp_path, "-p", PROMPT, "-n", 1, "--mtp", cli.head)
    stated = {
        "--prefill-chunk": stats["prefill_chunk"], "--max-rewind": stats["max_rewind"], "--mtp-draft": stats["mtp_draft"],
        "--mtp-margin": stats["mtp_margin"], "--mtp-shortlist": stats["mtp_shortlist"], "--temp": stats["temperature"], "--top-k": stats["top_k"],
        "--top-p": stats["top_p"], "--min-p": stats["min_p"], "--seed": stats["seed"],
    }  # fmt: skip
    for option, value in stated.items():
        found = re.search(rf"^ +{option} .*?\(([\d.]+|auto)[:)]", text, re.MULTILINE | re.DOTALL)
        assert found and (found[1] if found[1] == "auto" else float(found[1])) == value, option
    assert re.search(r"--kv-type .*\((\w+)\)", text)[1] == stats["kv_type"]  # type: ignore[index]


def test_both_forms_of_long_options(cli: Cli, plain: bytes) -> None:
    assert cli(f"--prompt={PROMPT}", "--tokens=48").stdout == plain
    assert cli("--prompt", PROMPT, "--tokens", "48").stdout == plain
    assert "".join(tokens(cli("--prompt=--stats", "--dump-tokens"))[1][1:]) == "--stats"


# ---- the model -------------------------------------------------------------------------------------------------------


def test_which_model_is_used(cli: Cli, plain: bytes, tmp_path: Path) -> None:
    args = ["-p", PROMPT, "-n", 48]
    bundled = cli.bare(*args, cwd=tmp_path)
    assert bundled.stdout == plain and b"small one" in bundled.stderr
    assert cli.bare(*args, "-q", cwd=tmp_path).stderr == b""
    named = cli.bare(*args, cwd=tmp_path, env={"DS4_MODEL": str(cli.model)})
    assert named.stdout == plain and named.stderr == b""
    (tmp_path / "ds4flash.gguf").symlink_to(cli.data / "tiny/target.gguf")
    assert "tiny" not in str(tmp_path)
    inspected = cli.bare("--inspect", cwd=tmp_path).stdout.decode()
    assert "ds4flash.gguf" in inspected and "vocabulary 256" in inspected
    assert "absent.gguf" in one_line(cli.bare(*args, cwd=tmp_path, env={"DS4_MODEL": "absent.gguf"}, status=1).stderr)


def test_installed_and_stray_programs(cli: Cli, plain: bytes, tmp_path: Path) -> None:
    program, share = tmp_path / "usr/bin/ds4", tmp_path / "usr/share/ds4"
    program.parent.mkdir(parents=True)
    share.mkdir(parents=True)
    shutil.copy(cli.program, program)
    stray = Cli(program, cli.root)
    line = one_line(stray.bare("-p", "a", cwd=tmp_path, status=1).stderr)
    assert "DS4_MODEL" in line and "-m" in line
    (share / "small.gguf").symlink_to(cli.model)
    assert stray.bare("-p", PROMPT, "-n", 48, cwd=tmp_path).stdout == plain


def test_inspect(cli: Cli) -> None:
    text = cli("--inspect", "--mtp", cli.head).stdout.decode()
    words = "small.gguf small-mtp.gguf layers Q8_0 F32 experts vocabulary memory scratch session"
    for word in words.split():
        assert word in text, word
    assert f"{cli.model.stat().st_size} bytes" in text and f"{cli.head.stat().st_size} bytes" in text
    assert "token_embd.weight" not in text
    tensors = cli("--inspect-tensors", "--mtp", cli.head).stdout.decode()
    assert "token_embd.weight" in tensors and "mtp.0.enorm.weight" in tensors
    assert "--glm-mtp" in cli("--inspect", model=cli.data / "edge/combined.gguf").stdout.decode()


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_ids_in_and_ids_out(cli: Cli, tmp_path: Path) -> None:
    tiny = cli.data / "tiny"
    greedy = np.load(tiny / "greedy.npy")
    ids, want = greedy[:40], greedy[40:80].tolist()
    file = tmp_path / "ids"
    file.write_text("\n".join(" ".join(map(str, row)) for row in ids.reshape(-1, 10)) + "\n")
    args = ["--print-ids", "-n", 40, "--kv-type", "f32", "--ignore-eos"]
    done = cli("--prompt-ids", file, *args, model=tiny / "target.gguf")
    assert [int(x) for x in done.stdout.split()] == want and done.stdout.count(b"\n") == 40
    assert cli("--prompt-ids", "-", *args, model=tiny / "target.gguf", stdin=file.read_bytes()).stdout == done.stdout
    drafted = cli("--prompt-ids", file, *args, "--mtp", tiny / "head-ds4.gguf", "--mtp-draft", 3, model=tiny / "target.gguf")
    assert drafted.stdout == done.stdout


def test_the_ways_to_give_a_prompt_agree(cli: Cli, plain: bytes, tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    for ending in ["", "\n", "\r\n"]:
        file.write_bytes((PROMPT + ending).encode())
        assert cli("--prompt-file", file, "-n", 48).stdout == plain
        assert cli("-n", 48, stdin=file.read_bytes()).stdout == plain
    assert cli("--prompt-file", "-", "-n", 48, stdin=PROMPT.encode()).stdout == plain
    ids = [line.split(b"\t")[0] for line in cli("-p", PROMPT, "--dump-tokens").stdout.splitlines()]
    file.write_bytes(b" ".join(ids))
    assert cli("--prompt-ids", file, "-n", 48).stdout == plain
    assert cli("-p", PROMPT, "--raw-prompt", "-n", 48).stdout == plain


def tokens(done: subprocess.CompletedProcess[bytes]) -> tuple[list[int], list[str]]:
    pairs = [line.split("\t", 1) for line in done.stdout.decode().splitlines()]
    return [int(i) for i, _ in pairs], [t[1:-1] for _, t in pairs]


def test_rendering(cli: Cli, talker: Path) -> None:
    bos = "<｜begin▁of▁sentence｜>"
    ids, texts = tokens(cli("-p", "Hail", "--dump-tokens"))
    assert texts[0] == bos and "".join(texts[1:]) == "Hail"
    for option in ["--raw-prompt", "--rendered"]:
        assert tokens(cli("-p", "Hail", "--dump-tokens", option, model=talker))[0] == ids
    assert tokens(cli("-p", bos + "Hail", "--dump-tokens", "--rendered", model=talker))[0] == ids
    _, texts = tokens(cli("-p", "Hail", "--dump-tokens", model=talker))
    assert "".join(texts) == f"{bos}{USER}Hail<｜Assistant｜></think>"
    _, texts = tokens(cli("-p", "Hail", "-sys", "Be brief.", "--think", "--dump-tokens", model=talker))
    assert "".join(texts) == f"{bos}Be brief.{USER}Hail<｜Assistant｜><think>"
    thought = tokens(cli("-p", "Hail", "--think", "--dump-tokens", model=talker))[0]
    assert len(tokens(cli("-p", "Hail", "--think-max", "--dump-tokens", model=talker))[0]) > len(thought)
    user = tokens(cli("-p", USER, "--rendered", "--dump-tokens", model=talker))
    assert user[1] == [bos, USER] and len(tokens(cli("-p", USER, "--raw-prompt", "--dump-tokens"))[0]) > 2
    assert tokens(cli("-p", USER, "--dump-tokens", model=talker))[1].count(USER) == 1
    _, texts = tokens(cli("-p", 'a"\\\n\té', "--raw-prompt", "--dump-tokens"))
    assert r"\"" in "".join(texts) and r"\\" in "".join(texts) and r"\n" in "".join(texts) and r"\x09" in "".join(texts)


def test_a_foreign_chat_template_is_named(cli: Cli, talker: Path, tmp_path: Path) -> None:
    other = with_metadata(
        cli.model, tmp_path / "other.gguf", "tokenizer.chat_template", "{% for m in messages %}é\n<|im_start|>"
    )
    warning = cli("-p", "a", "-n", 1, model=other).stderr.decode()
    assert "warning" in warning and "chat template" in warning and "for m in messages" in warning
    assert cli("-p", "a", "-n", 1, "--raw-prompt", model=other).stderr == b""
    assert cli("-p", "a", "-n", 1, model=talker).stderr == b""
    assert cli("-p", "a", "-n", 1).stderr == b""


# ---- generation ------------------------------------------------------------------------------------------------------


def test_speculation_changes_nothing(cli: Cli, plain: bytes) -> None:
    for draft, margin in [(1, 3.0), (2, 3.0), (2, 0), (5, 0), (16, 1000)]:
        assert cli("-p", PROMPT, "-n", 48, *cli.speculation(draft, margin)).stdout == plain


def test_auto_and_lookup_change_nothing(cli: Cli, plain: bytes, tmp_path: Path) -> None:
    """With a head the depth is auto unless given; lookup drafts without one; what was drafted is counted by source."""
    head = ["--mtp", cli.head]
    for more in ([], ["--mtp-draft", "auto", "--mtp-margin", 0], ["--draft-lookup", 4], ["--mtp-draft=3", "--draft-lookup=64"]):
        assert cli("-p", PROMPT, "-n", 48, *head, *more).stdout == plain
    assert cli("-p", PROMPT, "-n", 48, "--draft-lookup", 2).stdout == plain
    auto = cli.stats(tmp_path, "-p", PROMPT, "-n", 96, *head, "--mtp-margin", 0)
    assert auto["mtp_draft"] == "auto" and auto["draft_lookup"] == 0 and auto["lookup_drafted"] == 0
    for more, margin in (([], 0), (["--mtp-draft", 2], 3), (["--mtp-margin", 3], 3), (["--mtp-draft", 2, "--mtp-margin", 1], 1)):
        assert cli.stats(tmp_path, "-p", PROMPT, "-n", 2, *head, *more)["mtp_margin"] == margin
    assert len(auto["drafted"]) == len(auto["accepted"]) == 16 and auto["pruned"] >= 0
    assert sum(auto["accepted"]) + auto["corrections"] + auto["bonus"] == auto["emitted"] == 96
    circle = ["-p", "begat " * 40, "-n", 120, "--draft-lookup", 3, "--mtp-draft", 4]
    s = cli.stats(tmp_path, *circle)
    assert s["head"] is None and s["draft_lookup"] == 3 and s["mtp_draft"] == 4 and s["head_passes"] == 0
    assert s["lookup_drafted"] == sum(s["drafted"]) > 0 and s["lookup_accepted"] == sum(s["accepted"])
    text = cli(*circle, "--stats").stderr.decode()
    assert re.search(r"^lookup +\d+ drafted +\d+ accepted", text, re.MULTILINE)
    assert "auto " in cli("-p", PROMPT, "-n", 4, *head, "--stats").stderr.decode()
    assert cli("-p", PROMPT, "-n", 1, "--draft-lookup", 4, "--mtp-draft", 2).stderr == b""


def test_counters(cli: Cli, tmp_path: Path) -> None:
    s = cli.stats(tmp_path, "-p", PROMPT, "-n", 48, *cli.speculation(3, 0))
    assert sum(s["accepted"]) + s["corrections"] + s["bonus"] == s["emitted"] == s["generated_tokens"] == 48
    assert len(s["drafted"]) == len(s["accepted"]) == 3 and s["drafted"][0] > 0 and s["head_passes"] > 0
    assert all(a <= d for a, d in zip(s["accepted"], s["drafted"], strict=True))
    assert s["finish_reason"] == "length" and s["mtp_draft"] == 3 and s["mtp_margin"] == 0 and s["cycles"] <= 48
    assert s["prompt_tokens"] == s["prompt_evaluated"] == len(cli("-p", PROMPT, "--dump-tokens").stdout.splitlines())
    for key in ["prompt_ms", "generation_ms", "prompt_tokens_per_s", "generation_tokens_per_s", "draft_ms", "verify_ms"]:
        assert s[key] > 0, key
    assert Path(s["model"]).name == "small.gguf" and Path(s["head"]).name == "small-mtp.gguf"
    without = cli.stats(tmp_path, "-p", PROMPT, "-n", 48)
    assert without.keys() == s.keys() and without["head"] is None and without["drafted"] == []
    assert without["head_passes"] == 0 and without["emitted"] == 48
    prompt, work = without["prompt_work"], without["generation_work"]
    assert (prompt["passes"], prompt["rows"], work["passes"], work["rows"]) == (1, s["prompt_tokens"], 48, 48)
    assert s["generation_work"]["passes"] == s["cycles"] and s["generation_work"]["head_rows"] >= sum(s["drafted"])
    assert 0 < s["generation_work"]["weight_bytes"] and work["weight_bytes"] % 48 == 0


def test_stats_for_people(cli: Cli, plain: bytes) -> None:
    done = cli("-p", PROMPT, "-n", 48, "--stats", *cli.speculation())
    text = done.stderr.decode()
    assert done.stdout == plain
    for word in ["prompt", "generated", "tokens/s", "MB read a token", "draft 1", "draft 2", "accepted", "verify", "repair", "ended by length"]:
        assert word in text, word
    sampled = cli("-p", PROMPT, "-n", 2, "--stats", *cli.speculation(1), "--temp", 0.5).stderr.decode()
    assert "margin" in text and "margin" not in sampled     # which it says nothing about


def test_sampled_text_is_the_same_with_a_head(cli: Cli, tmp_path: Path) -> None:
    args = ["-p", PROMPT, "-n", 40, "--temp", 0.9, "--top-p", 0.95, "--top-k", 40, "--min-p", 0.01, "--seed", 7]
    args += ["--presence-penalty", 0.4, "--frequency-penalty", 0.2, "--logit-bias", "400:-inf", "--logit-bias", "401:1.5"]
    s = cli.stats(tmp_path, *args, *cli.speculation(3))
    assert s["mtp_draft"] == 3 and s["head_passes"] > 0 and s["accepted"][0] > 0 and s["cycles"] < 40
    plain = cli(*args)
    assert plain.stderr == b"" and cli(*args).stdout == plain.stdout
    for draft in [1, 2, 5]:
        assert cli(*args, *cli.speculation(draft)).stdout == plain.stdout
    loose = ["-p", "Thou", "-n", 40, "--temp", 2.5]     # where the model is unsure
    assert len({cli(*loose, "--seed", seed).stdout for seed in range(4)}) == 4


def test_rejection_sampling(cli: Cli, tmp_path: Path) -> None:
    args = ["-p", PROMPT, "-n", 40, "--temp", 0.9, "--seed", 7, "--mtp-sampling", "rejection"]
    s = cli.stats(tmp_path, *args, *cli.speculation(3))
    assert s["mtp_sampling"] == "rejection" and s["accepted"][0] > 0
    assert sum(s["accepted"]) + s["corrections"] + s["bonus"] == s["emitted"] == 40
    assert cli(*args, *cli.speculation(3)).stdout == cli(*args, *cli.speculation(3)).stdout
    assert cli(*args).stdout == cli(*args[:-2]).stdout      # without drafts there is nothing to judge


def test_penalties_and_bias_change_greedy_text_too(cli: Cli) -> None:
    args = ["-p", "And the LORD said", "-n", 60, "--print-ids"]
    plain = cli.ids(*args[:-1])
    for more in [["--frequency-penalty", 9], ["--presence-penalty", 20], ["--logit-bias", f"{plain[0]}:-inf"]]:
        changed = cli.ids(*args[:-1], *more)
        assert changed != plain and cli.ids(*args[:-1], *more, *cli.speculation(3)) == changed
    assert plain[0] not in cli.ids(*args[:-1], "--logit-bias", f"{plain[0]}:-inf")
    assert cli.ids(*args[:-1], "--logit-bias", "77:1000") == [77] * 60
    done = cli("-p", "a", "-n", 1, "--logit-bias", "999999:1", status=1)
    assert "999999" in one_line(done.stderr) and "vocabulary" in one_line(done.stderr)


def test_the_head_in_the_file(cli: Cli, tmp_path: Path) -> None:
    edge = cli.data / "edge"
    ids = tmp_path / "ids"
    ids.write_text(" ".join(map(str, np.load(edge / "prompt.npy")[:50])))
    args = ["--prompt-ids", ids, "--print-ids", "-n", 20, "--ignore-eos"]
    for more in [[], ["--temp", 1]]:
        alone = cli(*args, *more, model=edge / "combined.gguf")
        drafted = cli(*args, *more, "--glm-mtp", model=edge / "combined.gguf", env={"DS4_MTP_CONF_LOG": "1"})
        assert drafted.stdout == alone.stdout and drafted.stderr


@pytest.mark.parametrize("option", [("--mtp-draft", 2), ("--mtp-margin", 0), ("--mtp-sampling", "rejection"), ("--mtp-shortlist", 9)])
def test_options_of_drafts_without_a_head_are_noted(cli: Cli, option: tuple[str, object]) -> None:
    assert b"note: without a head" in cli("-p", "a", "-n", 1, *option).stderr
    assert cli("-p", "a", "-n", 1, "--mtp-draft", 0).stderr == b""
    assert cli("-p", "a", "-n", 1, *option, "-q").stderr == b""


def test_lengths(cli: Cli, tmp_path: Path) -> None:
    assert cli("-p", PROMPT, "-n", 0).stdout == b""
    prompt = len(cli("-p", PROMPT, "--dump-tokens").stdout.splitlines())
    for speculation in [[], cli.speculation(4, 0)]:
        for n in [-1, 1000]:
            s = cli.stats(tmp_path, "-p", PROMPT, "-n", n, "-c", prompt + 21, "--ignore-eos", *speculation)
            assert s["generated_tokens"] == 21 and s["finish_reason"] == "length"
        s = cli.stats(tmp_path, "-p", PROMPT, "-c", prompt, *speculation)
        assert s["generated_tokens"] == 0 and s["finish_reason"] == "length"
    s = cli.stats(tmp_path, "-p", PROMPT, "--ignore-eos", "-c", 1024, *cli.speculation(4, 0))
    assert s["generated_tokens"] == BASE_MODEL_TOKENS


def test_the_end_of_text_ends_it_and_is_not_printed(cli: Cli, tmp_path: Path) -> None:
    """A model that ends its text: in the random fixtures EOS comes soon when one samples hot."""
    tiny = cli.data / "tiny"
    ids = tmp_path / "ids"
    ids.write_text("5 6 7")
    args = ["--prompt-ids", ids, "--temp", 100, "-n", 2000]
    for seed in range(3):
        stats = tmp_path / "s.json"
        out = cli(*args, "--seed", seed, "--print-ids", "--stats-json", stats, model=tiny / "target.gguf")
        got, s = [int(x) for x in out.stdout.split()], json.loads(stats.read_text())
        assert s["finish_reason"] == "eos" and 1 not in got and len(got) == s["generated_tokens"] < 2000
        on = cli.ids(*args, "--seed", seed, "--ignore-eos", "-n", len(got) + 5, model=tiny / "target.gguf")
        assert on[: len(got)] == got and on[len(got)] == 1 and len(on) == len(got) + 5


@pytest.mark.parametrize("speculate", [False, True])
def test_stops_at_every_offset(cli: Cli, speculate: bool) -> None:
    args = ["-p", PROMPT, "-n", 20, *(cli.speculation(4, 0) if speculate else [])]
    whole = cli(*args).stdout
    assert len(whole) > 40
    for at in range(len(whole)):
        stop = whole[at : at + 1 + at % 11]
        done = cli(*args, b"--stop=" + stop)
        assert done.stdout == whole[: whole.index(stop)], (at, stop)


@pytest.mark.parametrize("speculate", [False, True])
def test_what_only_begins_like_a_stop_is_printed(cli: Cli, tmp_path: Path, speculate: bool) -> None:
    args = ["-p", PROMPT, "-n", 20, *(cli.speculation(4, 0) if speculate else [])]
    whole = cli(*args).stdout
    almost = [b"--stop=" + whole[at : at + 5] + b"\x01" for at in range(0, len(whole), 3)]
    assert cli(*args, *almost).stdout == whole
    assert cli.stats(tmp_path, *args, *almost)["finish_reason"] == "length"
    first = min(whole.index(b"a"), whole.index(b"e"))
    assert cli(*args, "--stop", "e", "--stop", "a").stdout == whole[:first]
    assert cli.stats(tmp_path, *args, "--stop", "e")["finish_reason"] == "stop"


def test_a_stop_leaves_the_session_as_plain_decoding_does(cli: Cli, tmp_path: Path) -> None:
    """Drafts that were committed behind the stop are taken back: the saved session has plain decoding's bytes, the counters
    count what was printed."""
    whole = cli("-p", PROMPT, "-n", 30).stdout
    for at in range(10, 40, 3):
        stop = whole[at : at + 2]
        shown, saved = [], [tmp_path / "plain", tmp_path / "fast"]
        for file, speculation in zip(saved, [[], cli.speculation(5, 0)], strict=True):
            file.unlink(missing_ok=True)
            args = ["-p", PROMPT, "-n", 30, b"--stop=" + stop, "--max-rewind", at % 4, "--session", file, *speculation]
            s = cli.stats(tmp_path, *args)
            assert s["finish_reason"] == "stop"
            assert sum(s["accepted"]) + s["corrections"] + s["bonus"] == s["emitted"] == s["generated_tokens"]
            shown.append(s["generated_tokens"])
        assert shown[0] == shown[1] and saved[0].read_bytes() == saved[1].read_bytes()


def test_a_stop_text_and_a_limit(cli: Cli, tmp_path: Path) -> None:
    """A stop text at every offset of a block of 9, with the limit before it, at it and behind it, and the smallest limits: text,
    reason, counters and the saved session are plain decoding's."""
    ids = cli.ids("-p", PROMPT, "-n", 12)
    pieces = [cli("-p", PROMPT, "-n", n).stdout for n in range(13)]
    for offset in range(1, 11):
        stop = pieces[offset][len(pieces[offset - 1]) :]
        end = next(n for n in range(1, 13) if stop in pieces[n])  # its first occurrence is complete with this token
        for most in sorted({0, 1, 2, end - 1, end, end + 1}):
            runs = []
            for speculation in ([], cli.speculation(8, 0)):
                saved, stats = tmp_path / "s", tmp_path / "j"
                saved.unlink(missing_ok=True)
                files = ["--session", saved, "--stats-json", stats]
                out = cli("-p", PROMPT, "-n", most, b"--stop=" + stop, *files, *speculation).stdout
                s = json.loads(stats.read_text())
                assert sum(s["accepted"]) + s["corrections"] + s["bonus"] == s["emitted"] == s["generated_tokens"]
                runs.append((out, s["finish_reason"], s["generated_tokens"], saved.read_bytes()))
            n = min(most, end)
            assert runs[0] == runs[1] and runs[0][2] == n <= len(ids)
            assert runs[0][:2] == ((pieces[end][: pieces[end].index(stop)], "stop") if most >= end else (pieces[n], "length"))


def test_bytes_that_are_no_text(cli: Cli, tmp_path: Path) -> None:
    """A random model over bytes: what it prints is what Python makes of its bytes, tokens and speculation aside."""
    tiny, file = cli.data / "tiny", tmp_path / "ids"
    file.write_text(" ".join(map(str, np.load(tiny / "prompt.npy")[:40])))
    bos, eos, bos_text = 0, 1, "Ā".encode()  # a control token is its own text
    for seed in range(12):
        args = ["--prompt-ids", file, "-n", 300, "--temp", 1 + seed, "--seed", seed, "--ignore-eos"]
        ids = cli.ids(*args, model=tiny / "target.gguf")
        pieces = [b"" if i == eos else bos_text if i == bos else bytes([i]) for i in ids]
        want = b"".join(pieces).decode(errors="replace")
        assert cli(*args, model=tiny / "target.gguf").stdout.decode() == want
    greedy = ["--prompt-ids", file, "-n", 300, "--ignore-eos"]
    plain = cli(*greedy, model=tiny / "target.gguf").stdout
    assert plain.decode()
    drafted = cli(*greedy, "--mtp", tiny / "head-ds4.gguf", "--mtp-draft", 4, "--mtp-margin", 0, model=tiny / "target.gguf")
    assert drafted.stdout == plain


def test_no_write_ends_inside_a_character(cli: Cli) -> None:
    target = cli.data / "tiny/target.gguf"
    process = cli.start(target, "-p", "é日本", "--raw-prompt", "-n", 200, "--temp", 20, "--ignore-eos")
    assert process.stdout
    while block := os.read(process.stdout.fileno(), 65536):
        block.decode()
    assert process.wait() == 0


# ---- readers that leave, streams that are closed, disks that are full ------------------------------------------------


def test_a_reader_that_leaves(cli: Cli, tmp_path: Path) -> None:
    """It ends the program at once; a session's file stays as it was, and neither half a file nor one beside it is left."""
    saved, begun = tmp_path / "s", tmp_path / "j"
    cli("-p", PROMPT, "-n", 5, "--session", saved)
    before = saved.read_bytes()
    process = cli.start(cli.model, "-p", "", "-n", 4000, "--ignore-eos", "--session", saved, "--dump-logprobs", begun)
    assert process.stdout and process.stdout.read(10)
    process.stdout.close()
    assert process.wait(60) == -signal.SIGPIPE and process.stderr and process.stderr.read() == b""
    assert saved.read_bytes() == before and os.listdir(tmp_path) == ["s"]


def test_a_signal_leaves_no_output(cli: Cli, tmp_path: Path) -> None:
    """It ends the program as ever; what was there stays, and what was begun, beside it, is removed."""
    new, there = tmp_path / "new", tmp_path / "there"
    there.write_text("figures")
    for out in (new, there):
        process = cli.start(cli.model, "-p", PROMPT, "-n", -1, "--ignore-eos", "--dump-logprobs", out)
        assert process.stdout and process.stdout.read(10) and len(os.listdir(tmp_path)) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM and process.stderr and process.stderr.read() == b""
    assert os.listdir(tmp_path) == ["there"] and there.read_text() == "figures"


def test_an_ignored_signal_stays_ignored(cli: Cli, tmp_path: Path) -> None:
    """As nohup wants it, though the signal is one that would end the program."""
    args = [cli.program, "-m", cli.model, "-p", PROMPT, "-n", "-1", "--ignore-eos", "--dump-logprobs", tmp_path / "j"]
    process = subprocess.Popen(
        args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    assert process.stdout and process.stdout.read(10)
    process.send_signal(signal.SIGHUP)
    assert process.stdout.read(100)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM and os.listdir(tmp_path) == []


def test_closed_streams_are_not_taken_for_files(cli: Cli, tmp_path: Path) -> None:
    """What would have been printed there does not go to the next file that is opened."""
    stats = tmp_path / "s.json"
    args = [cli.program, "-m", cli.model, "-p", PROMPT, "-n", "5", "--stats", "--stats-json", stats]
    for fd, status in ((0, 0), (1, 1), (2, 0)):
        stats.unlink(missing_ok=True)
        done = subprocess.run(
            args, capture_output=True, preexec_fn=lambda fd=fd: os.close(fd), env=environment(), check=False
        )
        assert done.returncode == status
        if status == 0:
            assert json.loads(stats.read_text())["generated_tokens"] == 5
            assert done.stdout and bool(done.stderr) == (fd != 2)
        else:
            assert one_line(done.stderr) == "ds4: standard output: Bad file descriptor\n" and not stats.exists()


def test_a_file_beyond_the_limit(cli: Cli, tmp_path: Path) -> None:
    """RLIMIT_FSIZE, whose signal would end the program: a message, and nothing is left of the file."""
    limit = (16384, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    for option in ("--session", "--dump-logits"):
        done = subprocess.run(
            [cli.program, "-m", cli.model, "-p", PROMPT, "-n", "5", option, tmp_path / "f"],
            capture_output=True, env=environment(), check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
        )  # fmt: skip
        assert done.returncode == 1 and one_line(done.stderr).endswith(": File too large\n")
        assert os.listdir(tmp_path) == []


OUTPUTS = [["--stats-json"], ["--dump-logprobs"], ["--dump-logits"], ["--session"], ["--bench", "--csv"], ["--bench", "--json"]]


def test_outputs_that_cannot_be_written(cli: Cli, tmp_path: Path) -> None:
    """Seen before the model is looked for, where it can be; and always one line that names the option and the file."""
    model, absent = tmp_path / "m", tmp_path / "absent"
    shutil.copy(cli.model, model)
    for *more, option in OUTPUTS:
        for path, why in ((tmp_path / "none/f", "No such file"), (tmp_path, "irectory|not a file"), (model, "a GGUF file")):
            done = cli("-p", PROMPT, *more, option, path, model=absent, status=2)
            assert re.search(f"{option} {path}: .*({why})", one_line(done.stderr)) and done.stdout == b""
    assert os.listdir(tmp_path) == ["m"] and model.read_bytes() == cli.model.read_bytes()
    for option in ("--stats-json", "--dump-logprobs"):
        done = cli("-p", PROMPT, "-n", 5, option, "/dev/full", status=1)
        assert "/dev/full" in one_line(done.stderr) and done.stdout == cli("-p", PROMPT, "-n", 5).stdout
    with Path("/dev/full").open("wb") as full:
        assert cli.start(cli.model, "-p", PROMPT, "-n", 5, stdout=full).wait(60) == 1


def test_a_failure_leaves_no_output(cli: Cli, tmp_path: Path) -> None:
    """Nothing is there that was not before: neither an empty file nor half a text. Whole figures of another run stay."""
    source, folder = cli.data / "tiny/target.gguf", tmp_path / "outputs"
    folder.mkdir()
    embedding = np.array(tensors_of(source)["token_embd.weight"].data)
    embedding[9] = np.nan
    model = rewrite(source, tmp_path / "x.gguf", tensors={"token_embd.weight": embedding})
    ids, out = tmp_path / "ids", folder / "f"
    ids.write_text("5 6 7 9 5")
    args = ["--prompt-ids", ids, "--print-ids", "--prefill-chunk", 1, "-n", 3]
    for *more, option in OUTPUTS:
        ask = [*args[:2], *args[3:], *more, option, out] if more else [*args, option, out]
        assert "non-finite" in one_line(cli(*ask, model=model, status=1).stderr) and os.listdir(folder) == []
    out.write_text("figures")
    cli(*args, "--stats-json", out, model=model, status=1)
    assert out.read_text() == "figures"
    link = folder / "link"
    link.symlink_to("far")
    cli(*args, "--dump-logprobs", link, model=model, status=1)
    assert link.is_symlink() and not (folder / "far").exists()
    out.chmod(0o640)
    assert cli(*args, "--dump-logits", link, "--stats-json", out, model=source) and (folder / "far").stat().st_size > 128
    assert link.is_symlink() and out.stat().st_mode & 0o777 == 0o640 and json.loads(out.read_text())
    assert sorted(os.listdir(folder)) == ["f", "far", "link"]


def test_outputs_onto_standard_output(cli: Cli, tmp_path: Path) -> None:
    """By its name it goes on where it stands, a file too."""
    with (tmp_path / "all").open("wb") as f:
        f.write(b"before\n")
        f.flush()
        options = ["-p", PROMPT, "-n", 5, "--stats-json", "/dev/stdout"]
        assert cli.start(cli.model, *options, stdout=f).wait(60) == 0
    before, _, figures = (tmp_path / "all").read_text().partition("{")
    assert before == "before\n" + cli(*options[:4]).stdout.decode() and json.loads("{" + figures)["generated_tokens"] == 5


# ---- sessions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculate", [False, True])
def test_a_resumed_session_equals_one_run(cli: Cli, plain: bytes, tmp_path: Path, speculate: bool) -> None:
    speculation = cli.speculation(3, 0) if speculate else []
    saved = tmp_path / "talk"
    parts = [cli("-p", PROMPT, "-n", 20, "--session", saved, *speculation).stdout]
    parts += [cli("-p", "", "-n", 1, "--session", saved, *speculation).stdout]
    parts += [cli("-n", 27, "--session", saved, *speculation).stdout]
    assert b"".join(parts) == plain


def test_a_session_keeps_its_links_and_modes(cli: Cli, tmp_path: Path) -> None:
    """Saving replaces what a link leads to, not the link; a file keeps its mode, a new one has what the umask leaves."""
    (tmp_path / "far").mkdir()
    real, link, twice = tmp_path / "far/real", tmp_path / "link", tmp_path / "far/twice"
    link.symlink_to("far/twice")
    twice.symlink_to(real)
    for mode in (None, 0o640, 0o606):
        if mode:
            real.chmod(mode)
        cli("-p", PROMPT, "-n", 1, "--session", link)
        assert link.is_symlink() and twice.is_symlink() and real.is_file() and not real.is_symlink()
        umask = os.umask(0)
        os.umask(umask)
        assert real.stat().st_mode & 0o777 == (mode or 0o666 & ~umask)
    assert sorted(p.name for p in (tmp_path / "far").iterdir()) == ["real", "twice"]


def test_a_session_that_cannot_be_saved_is_an_error_at_once(cli: Cli, tmp_path: Path) -> None:
    """Before the model is opened: nothing is printed."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    paths = [tmp_path / "missing/s", loop, Path("/proc/s"), tmp_path / ("x" * 300), tmp_path / "y/../../s"]
    if os.getuid():
        read_only = tmp_path / "read-only"
        cli("-p", PROMPT, "-n", 1, "--session", read_only)
        read_only.chmod(0o400)
        paths.append(read_only)
    for path in paths:
        done = cli("-p", PROMPT, "-n", 1, "--session", path, status=2)
        assert done.stdout == b"" and path.name in one_line(done.stderr)
    for path in (tmp_path, Path("/dev/null")):
        done = cli("-p", PROMPT, "-n", 1, "--session", path, status=2)
        assert done.stdout == b"" and "not a file" in one_line(done.stderr)
    assert [p for p in tmp_path.iterdir() if p.name != "read-only"] == [loop]


def test_a_prompt_continues_a_session(cli: Cli, plain: bytes, tmp_path: Path) -> None:
    saved = tmp_path / "s"
    cli("-p", PROMPT, "-n", 0, "--session", saved)
    kept = saved.read_bytes()
    again = cli.stats(tmp_path, "-p", PROMPT, "-n", 48, "--session", saved)
    assert again["prompt_evaluated"] == 0 and again["generated_tokens"] == 48
    saved.write_bytes(kept)
    assert cli("-p", PROMPT, "-n", 48, "--session", saved).stdout == plain
    saved.write_bytes(kept)  # a longer prompt: its rest is evaluated
    longer = cli("-p", PROMPT + " was the word", "-n", 20, "--session", saved).stdout
    assert longer == cli("-p", PROMPT + " was the word", "-n", 20).stdout
    saved.write_bytes(kept)  # another prompt: it follows what is there
    s = cli.stats(tmp_path, "-p", " God said", "-n", 20, "--session", saved)
    assert s["prompt_tokens"] == again["prompt_tokens"] + s["prompt_evaluated"]
    full = "the prompt has"
    assert full in one_line(cli("-p", "word " * 100, "-n", 1, "-c", 80, "--session", saved, status=1).stderr)


def test_a_prompt_is_a_further_turn_of_a_talk(cli: Cli, talker: Path, tmp_path: Path) -> None:
    saved = tmp_path / "s"
    first = cli("-p", "Hail", "-n", 6, "--session", saved, model=talker).stdout
    second = cli("-p", "And now?", "-n", 12, "--session", saved, model=talker).stdout
    rendered = f"{USER}Hail<｜Assistant｜></think>".encode() + first
    rendered += f"<｜end▁of▁sentence｜>{USER}And now?<｜Assistant｜></think>".encode()
    assert cli("-n", 12, "--rendered", model=talker, stdin=rendered).stdout == second


# ---- dumps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "odd", "edge"])
def test_logits_of_every_position(cli: Cli, tmp_path: Path, name: str) -> None:
    data = cli.data / name
    ids = np.load(data / "prompt.npy")
    file, target, head = tmp_path / "ids", tmp_path / "target.npy", tmp_path / "head.npy"
    file.write_text(" ".join(map(str, ids)))
    common = ["--prompt-ids", file, "--kv-type", "f32", "--mtp", data / "head-ds4.gguf"]
    bits = set()
    for chunk in [1, 7, 64, 256]:
        done = cli(
            *common,
            "--prefill-chunk",
            chunk,
            "--dump-logits",
            target,
            "--dump-head-logits",
            head,
            model=data / "target.gguf",
        )
        assert done.stdout == b""
        bits.add((target.read_bytes(), head.read_bytes()))
    assert len(bits) == 1
    got, want = np.load(target), np.load(data / "logits.npy")
    assert got.dtype == np.float32 and got.shape == want.shape and np.abs(got - want).max() < 1e-4
    got, want = np.load(head), np.load(data / "head.npy")
    assert got.dtype == np.float32 and got.shape == want.shape and np.abs(got - want).max() < 1e-4
    alone = tmp_path / "alone.npy"
    cli(*common, "--dump-head-logits", alone, "--max-rewind", 2, model=data / "target.gguf")
    assert alone.read_bytes() == head.read_bytes()


def test_dumping_then_generating(cli: Cli, plain: bytes, tmp_path: Path) -> None:
    assert cli("-p", PROMPT, "--dump-logits", tmp_path / "l.npy").stdout == b""
    assert cli("-p", PROMPT, "--dump-logits", tmp_path / "l.npy", "-n", 48).stdout == plain


def test_logprobs_are_the_same_with_speculation(cli: Cli, tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.jsonl" for i in range(3)]
    args = ["-p", PROMPT, "-n", 40, "--dump-logprobs"]
    cli(*args, files[0])
    cli(*args, files[1], *cli.speculation(3, 0))
    cli(*args, files[2], *cli.speculation(2, 3))
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    prompt = len(cli("-p", PROMPT, "--dump-tokens").stdout.splitlines())
    assert [r["id"] for r in rows] == cli.ids("-p", PROMPT, "-n", 40)
    assert [r["position"] for r in rows] == list(range(prompt, prompt + 40))
    for row in rows:
        assert row["top"][0] == [row["id"], row["logprob"]] and len(row["top"]) == 5 and row["logprob"] < 0
        assert [p for _, p in row["top"]] == sorted((p for _, p in row["top"]), reverse=True)
    logits = tmp_path / "logits.npy"
    cli("-p", PROMPT, "--dump-logits", logits)
    last = np.load(logits)[-1].astype(float)
    assert math.isclose(rows[0]["logprob"], last.max() - np.log(np.exp(last).sum()), abs_tol=1e-7)


def test_perplexity(cli: Cli, tmp_path: Path) -> None:
    text = "And the earth was without form, and void; and darkness was upon the face of the deep.\n" * 6
    file, logits = tmp_path / "text", tmp_path / "logits.npy"
    file.write_text(text)

    def measured(*args: Any) -> tuple[int, float, float, str]:
        out = cli("--perplexity-file", file, *args).stdout.decode()
        found = re.search(r"tokens +(\d+) scored\nnats/token +([\d.]+)\nperplexity +([\d.]+)\nwindows +(\d+) tokens", out)
        assert found, out
        return int(found[1]), float(found[2]), float(found[3]), out

    ids, _ = tokens(cli("-p", text, "--raw-prompt", "--dump-tokens"))
    cli("-p", text, "--raw-prompt", "--dump-logits", logits)
    z = np.load(logits).astype(float)
    logprobs = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    want = -np.mean([logprobs[i, ids[i + 1]] for i in range(len(ids) - 1)])
    scored, nats, perplexity, _ = measured()
    assert scored == len(ids) - 1 and abs(nats - want) < 1e-5 and math.isclose(perplexity, math.exp(nats), rel_tol=1e-5)
    scored, windowed, _, out = measured("-c", 33, *cli.speculation())
    assert scored == len(ids) - 1 and 0 < windowed < 20 and "33 tokens, moved by 16" in out and "first draft" in out
    file.write_text("")
    assert "too short" in one_line(cli("--perplexity-file", file, status=1).stderr)


# ---- environment -----------------------------------------------------------------------------------------------------


def test_environment(cli: Cli, plain: bytes, tmp_path: Path) -> None:
    args = ["-p", PROMPT, "-n", 48, *cli.speculation(2, 3.0)]
    assert cli.stats(tmp_path, *args)["mtp_margin"] == 3
    assert cli.stats(tmp_path, *args, env={"DS4_MTP_MIN_MARGIN": "0.5"})["mtp_margin"] == 0.5
    assert cli.stats(tmp_path, *args, env={"DS4_MTP_MIN_MARGIN": ""})["mtp_margin"] == 3
    strict, loose = (cli.stats(tmp_path, *args, env={"DS4_MTP_MIN_MARGIN": m}) for m in ["1000", "0"])
    assert sum(strict["accepted"]) == 0 < sum(loose["accepted"]) and strict["below_margin"] > 0
    assert cli(*args, env={"DS4_MTP_CONF_LOG": "0"}).stderr == b""
    logged = cli(*args, env={"DS4_MTP_CONF_LOG": "1"})
    assert logged.stdout == plain
    lines, s = logged.stderr.decode().splitlines(), cli.stats(tmp_path, *args)
    assert 0 < len(lines) <= sum(s["drafted"]) and all(re.search(r"\d", line) for line in lines)


# ---- interrupts and the chat -----------------------------------------------------------------------------------------


def test_an_interrupt_ends_an_answer(cli: Cli, tmp_path: Path) -> None:
    stats, saved = tmp_path / "s.json", tmp_path / "s"
    args = ["-p", PROMPT, "-n", -1, "--ignore-eos", "--stats-json", stats, "--session", saved]
    process = cli.start(cli.model, *args)
    assert process.stdout and process.stdout.read(60)
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.wait(60) == 130
    s = json.loads(stats.read_text())
    assert s["finish_reason"] == "cancelled" and s["generated_tokens"] > 0 and saved.exists()


def test_an_interrupt_in_a_prompt(cli: Cli, tmp_path: Path) -> None:
    """Status 130 after the pass in work, nothing printed, the saved session as it was."""
    saved, text, started = tmp_path / "s", tmp_path / "long", tmp_path / "j"
    cli("-p", PROMPT, "-n", 5, "--session", saved)
    before = saved.read_bytes()
    text.write_text(PROMPT * 600)
    args = ["--prompt-file", text, "--prefill-chunk", 1, "--session", saved, "--dump-logprobs", started]  # many passes
    os.mkfifo(started)
    process = cli.start(cli.model, *args)
    reader = os.open(started, os.O_RDONLY)  # waits for the writer: the model is open, the prompt about to be read
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    os.close(reader)
    assert process.stdout and process.stderr and process.stdout.read() == process.stderr.read() == b""
    assert saved.read_bytes() == before


class Terminal:
    """ds4 behind a pseudo-terminal."""

    def __init__(self, command: list[Any], **env: str) -> None:
        self.seen = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(command[0], [str(c) for c in command], environment(**{"TERM": "xterm", **env}))

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """Waits for a pattern behind what was found before; returns its match."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"ended without {pattern!r}: {self.seen!r}") from None
        self.seen = self.seen[found.end() :]
        return found

    def prompt(self) -> str:
        """Waits until the editor takes a line; returns what came before."""
        found = self.until(r"\x1b\[\?2004h\r\x1b\[J> \r\x1b\[2C")
        return found.string[: found.start()]

    def ask(self, line: str) -> str:
        """Sends a line; returns what comes before the next prompt, without the line itself and control sequences."""
        self.send(line + "\r")
        self.until(r"\x1b\[\?2004l")
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", self.prompt())

    def status(self) -> int:
        """Waits for the end; the exit status."""
        try:
            while os.read(self.fd, 65536):
                pass
        except OSError:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self.fd)


@pytest.fixture
def chat(cli: Cli, talker: Path) -> Iterator[Terminal]:
    command = [cli.program, "-m", talker, "--ignore-eos", "-n", 40, *cli.speculation()]
    terminal = Terminal(command)
    yield terminal
    terminal.close()


def test_chat_commands(chat: Terminal) -> None:
    assert "/help" in chat.prompt()
    for command in ["/think", "/nothink", "/ctx", "/stats", "/read", "/quit", "Ctrl+C"]:
        assert command in chat.ask("/help")
    assert "no answer yet" in chat.ask("/stats")
    assert "0 of " in chat.ask("/ctx")
    assert "thinking is on" in chat.ask("/think")
    assert "thinking is off" in chat.ask("/nothink")
    assert "/frob" in chat.ask("/frob")
    assert "absent" in chat.ask("/read absent")
    chat.send("/quit\r")
    assert chat.status() == 0


def test_chat_answers(chat: Terminal, cli: Cli, talker: Path) -> None:
    chat.prompt()
    answer = chat.ask("Who art thou?")
    alone = cli("-p", "Who art thou?", "-n", 40, "--ignore-eos", model=talker).stdout.decode()
    assert answer.replace("(ended by length)\n", "").strip() == alone.strip()
    stats = chat.ask("/stats")
    assert "tokens/s" in stats and "draft 2" in stats
    used = int(re.search(r"(\d+) of", chat.ask("/ctx"))[1])  # type: ignore[index]
    chat.ask("And what is thy name?")
    more = int(re.search(r"(\d+) of", chat.ask("/ctx"))[1])  # type: ignore[index]
    assert more > used + 40
    # only what is new was evaluated
    assert int(re.search(r"prompt +(\d+) tokens", chat.ask("/stats"))[1]) < used  # type: ignore[index]
    chat.ask("/new")
    assert "0 of" in chat.ask("/ctx")
    again = chat.ask("Who art thou?")
    assert again == answer
    chat.send("\x04")
    assert chat.status() == 0


def test_chat_reads_files(chat: Terminal, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "question"
    file.write_text("Who art\nthou?")
    chat.prompt()
    assert len(chat.ask(f"/read {file}")) > 40
    assert "draft" in chat.ask("/stats")


def test_chat_history_and_keys(chat: Terminal) -> None:
    chat.prompt()
    chat.ask("/ctx")
    chat.ask("/stats")
    up, down, left, home, end, delete = "\x1b[A", "\x1b[B", "\x1b[D", "\x1b[H", "\x1bOF", "\x1b[3~"
    assert "0 of" in chat.ask(up + up)  # /ctx
    assert "0 of" in chat.ask(up + up + up + down + up + down + down + down + "/ctx" + left + "x\x7f")
    assert "no command /xtc" in chat.ask("tcé\x7f" + home + "/x" + end + "Q\x02\x04")
    assert "no command /ab" in chat.ask("junk\x15/abcd\x01\x06\x06\x06\x0b")
    assert "no command /e" in chat.ask("/e word\x17\x17/e日本" + left + left + delete + delete)
    chat.send("half a line\x03")
    chat.until(r"\^C")
    chat.prompt()
    chat.send("\x1b[200~/two\rlines\x1b[201~\r")
    chat.until("no command /two")
    chat.prompt()
    assert "0 of" in chat.ask("\x0c/ctx")


def test_chat_interrupt_keeps_the_chat(cli: Cli, talker: Path) -> None:
    chat = Terminal([cli.program, "-m", talker, "--ignore-eos", "-c", 4096])
    chat.prompt()
    chat.send("Speak long.\r")
    chat.until(r"\x1b\[\?2004l.{40}")
    chat.send("\x03")
    assert "(stopped)" in chat.prompt()
    assert "ended by cancelled" in chat.ask("/stats")
    used = int(re.search(r"(\d+) of", chat.ask("/ctx"))[1])  # type: ignore[index]
    assert 10 < used < 4096
    chat.send("And again.\r")
    chat.until(r"\x1b\[\?2004l.{40}")
    chat.send("\x03")
    assert "(stopped)" in chat.prompt()
    chat.send("/quit\r")
    assert chat.status() == 0
    chat.close()


def test_chat_of_a_base_model_and_its_session(cli: Cli, tmp_path: Path) -> None:
    saved = tmp_path / "s"
    command = [cli.program, "-m", cli.model, "-n", 12, "--session", saved]
    chat = Terminal(command)
    assert "base model" in chat.prompt()
    first = chat.ask(PROMPT)
    alone = cli("-p", PROMPT, "-n", 12).stdout.decode()
    assert first.replace("(ended by length)\n", "").strip("\n") == alone.strip("\n")
    chat.send("/quit\r")
    assert chat.status() == 0
    chat.close()
    chat = Terminal(command)
    assert "The session holds" in chat.prompt()
    on = chat.ask("")
    both = cli("-p", PROMPT, "-n", 24).stdout.decode()
    assert both.startswith(alone) and on.replace("(ended by length)\n", "").strip("\n") == both[len(alone) :].strip("\n")
    chat.send("\x04")
    assert chat.status() == 0
    chat.close()


def test_chat_on_a_terminal_without_a_cursor(cli: Cli) -> None:
    chat = Terminal([cli.program, "-m", cli.model, "-n", 4], TERM="dumb")
    chat.until("> ")
    chat.send("/ctx\n")
    chat.until(r"0 of \d+ tokens.*> ")
    chat.send("/quit\n")
    assert chat.status() == 0
    chat.close()


def test_a_chat_takes_no_scripts_options(cli: Cli) -> None:
    for option in [["--print-ids"], ["--stats-json", "f"], ["--dump-logprobs", "f"], ["--dump-tokens"], ["--raw-prompt"]]:
        terminal = Terminal([cli.program, "-m", cli.model, *option])
        terminal.until("need a prompt")
        assert terminal.status() == 2
        terminal.close()


def test_a_pipe_sees_no_progress(cli: Cli) -> None:
    done = cli("-p", PROMPT * 200, "-n", 4)
    assert done.stderr == b"" and b"\x1b" not in done.stdout and b"\r" not in done.stdout


def test_a_terminal_sees_progress_and_then_only_the_text(cli: Cli) -> None:
    prompt = (PROMPT + " ") * 25
    args = ["-p", prompt, "-n", 4, "-t", 1, "--isa", "scalar", "--prefill-chunk", 8]
    terminal = Terminal([cli.program, "-m", cli.model, *args])
    terminal.until(r"\rprompt \[[#.]{30}\] +\d+% of \d+")
    shown = terminal.until(r"\r\x1b\[K[^\r\x1b]+\r\n$")
    assert shown and terminal.status() == 0
    terminal.close()
    quiet = Terminal([cli.program, "-m", cli.model, *args, "-q"])
    quiet.until("\n")
    assert quiet.status() == 0 and "[" not in quiet.seen
    quiet.close()
