"""Broken and hostile GGUF files under ASan and UBSan: one message, no crash, no hang, no memory beyond what the file is worth."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import hostile
import numpy as np
import pytest
from conftest import make
from ds4 import gguf_write as gw
from ds4 import synth
from engine import Engine, Failed, bits, check, lib
from hostile import Case, Meta, Parser, Tensor

DEEP = bool(os.environ.get("DS4_DEEP"))
SLOW_MS = 2000.0    # of CPU time, in a normal build


@dataclass
class Result:
    """What the program of hostile.c said of a file."""

    verdict: str
    ms: float
    peak: int
    message: str


class Prober:
    """build/hostile, asked about one file at a time; it is started again after a crash."""

    def __init__(self, program: Path, log: Path) -> None:
        self.program, self.log = program, log
        self.process: subprocess.Popen[str] | None = None

    def ask(self, *paths: Path) -> Result:
        """How opening and using (target, head) went. A crash or a hang is the verdict "died", with what was printed."""
        if self.process is None:
            with self.log.open("w") as errors:
                self.process = subprocess.Popen([self.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8", errors="replace")
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\t".join(map(str, paths)) + "\n")
        self.process.stdin.flush()
        parts = self.process.stdout.readline().rstrip("\n").split("\t")
        if len(parts) == 4:
            return Result(parts[0], float(parts[1]), int(parts[2]), parts[3])
        code = self.process.wait()
        self.process = None
        return Result("died", 0, 0, f"exit code {code}: {self.log.read_text(errors='replace')[-3000:]}")

    def close(self) -> None:
        """Ends the program, which must find nothing leaked."""
        if self.process is not None:
            assert self.process.stdin
            self.process.stdin.close()
            assert self.process.wait() == 0, self.log.read_text(errors="replace")[-3000:]


class MemoryFile:
    """A file that is never written to a disk; other processes open it by its path."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("case")
        self.path = Path(f"/proc/{os.getpid()}/fd/{self.fd}")
        self.dirty: tuple[tuple[int, bytes], ...] | None = None     # what was patched; None: other content altogether

    def hold(self, case: Case, good: bytes) -> None:
        """Makes the file what the case says; of a patched copy of the good file only the patches are written."""
        if case.content is not None or self.dirty is None:
            content = good if case.content is None else case.content
            os.pwrite(self.fd, content, 0)
            os.truncate(self.fd, len(content))
        else:
            for at, new in self.dirty:
                os.pwrite(self.fd, good[at : at + len(new)], at)
        for at, new in case.patches:
            os.pwrite(self.fd, new, at)
        self.dirty = case.patches if case.content is None else None

    def close(self) -> None:
        os.close(self.fd)


def slow_in_a_normal_build(tmp: Path, paths: tuple[Path, ...]) -> bool:
    prober = Prober(make("build/hostile_plain"), tmp / "plain.log")
    result = prober.ask(*paths)
    prober.close()
    return result.ms > SLOW_MS


def probe(tmp: Path, good: Path, cases: Iterable[Case], pair: Callable[[Path], tuple[Path, ...]]) -> dict[str, int]:
    """Asks about every case, a file in memory; returns how often each verdict was given."""
    file, bytes_of_good = MemoryFile(), good.read_bytes()
    prober = Prober(make("build/hostile"), tmp / "hostile.log")
    failures, verdicts = [], {"opened": 0, "refused": 0, "broken": 0, "died": 0}
    for case in cases:
        file.hold(case, bytes_of_good)
        result = prober.ask(*pair(file.path))
        verdicts[result.verdict] += 1
        if result.verdict not in ("opened", "refused"):
            failures.append(f"{case.label[:100]}: {result.verdict}: {result.message}")
        elif result.ms > SLOW_MS and slow_in_a_normal_build(tmp, pair(file.path)):
            failures.append(f"{case.label}: {result.ms:.0f} ms")
    prober.close()
    file.close()
    assert not failures, f"{len(failures)} of {sum(verdicts.values())}:\n" + "\n".join(failures[:40])
    return verdicts


def sample(cases: Iterable[Case], step: int) -> Iterable[Case]:
    """Every step-th case; all of them when DS4_DEEP is set."""
    return (case for i, case in enumerate(cases) if DEEP or i % step == 0)


@pytest.mark.parametrize("name, step", [("least", 1), ("tiny", 8), ("edge", 8)])
def test_targets(data: Path, tmp_path: Path, name: str, step: int) -> None:
    good = data / name / "target.gguf"
    verdicts = probe(tmp_path, good, sample(hostile.cases(good.read_bytes()), step), lambda path: (path,))
    assert verdicts["refused"] > verdicts["opened"] > 0


@pytest.mark.parametrize("name, layout, step", [("least", "ds4", 1), ("tiny", "ds4", 8), ("tiny", "llama", 8), ("edge", "ds4", 16), ("edge", "llama", 16)])
def test_heads(data: Path, tmp_path: Path, name: str, layout: str, step: int) -> None:
    good = data / name / f"head-{layout}.gguf"
    verdicts = probe(tmp_path, good, sample(hostile.cases(good.read_bytes()), step), lambda path: (data / name / "target.gguf", path))
    assert verdicts["refused"] and verdicts["opened"]


@pytest.mark.parametrize("name, step", [("least", 1), ("edge", 16)])
def test_a_head_inside(data: Path, tmp_path: Path, name: str, step: int) -> None:
    good = data / name / "combined.gguf"
    verdicts = probe(tmp_path, good, sample(hostile.cases(good.read_bytes()), step), lambda path: (path, Path("=")))
    assert verdicts["refused"] and verdicts["opened"]


def ask_once(tmp: Path, *paths: Path) -> Result:
    """One file, asked about in the sanitised program and, for the time it takes, in a normal one."""
    plain, checked = (Prober(make(f"build/{name}"), tmp / f"{name}.log") for name in ("hostile_plain", "hostile"))
    assert plain.ask(*paths).ms < SLOW_MS
    result = checked.ask(*paths)
    plain.close()
    checked.close()
    return result


def test_what_is_no_file(tmp_path: Path) -> None:
    """A FIFO has no writer to wait for; a device has no size; a directory and a broken link have no bytes."""
    fifo, link = tmp_path / "fifo.gguf", tmp_path / "link.gguf"
    os.mkfifo(fifo)
    link.symlink_to(link)
    for path, message in ((fifo, "not a file"), (Path("/dev/zero"), "not a file"), (tmp_path, "not a file"), (link, "cannot open")):
        result = ask_once(tmp_path, path)
        assert result.verdict == "refused" and message in result.message, result


def test_snapshot_that_is_no_file(data: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.ds4"
    os.mkfifo(fifo)
    with Engine(data / "tiny" / "target.gguf", ctx=16) as engine:
        session = engine.session()
        for path in (fifo, tmp_path, Path("/dev/zero")):
            with pytest.raises(Failed, match="not a file"):
                check(lib.ds4_session_load(session.p, str(path).encode()))
        session.eval([3])


BASE = gw.Shape(ratios=[0, 4, 128], vocab=266, width=1, heads=1, head_width=2, rotary=2, q_rank=1, o_groups=1, o_rank=1, experts=1, experts_used=1, expert_width=1, hash_layers=0, window=3,
                index_heads=1, index_width=2, index_top_k=1, streams=1, sinkhorn=1, context=64, yarn_original=16)


@pytest.mark.parametrize("sizes", [
    {}, {"experts": 4096, "experts_used": 64}, {"ratios": [4] * 100, "streams": 16, "sinkhorn": 100}, {"heads": 4096, "o_groups": 4096}, {"index_heads": 4096}, {"ratios": [1, 2, 3, 5, 1024]},
    {"window": 1 << 20, "index_top_k": 1 << 24, "context": 1 << 30}, {"expert_width": 1 << 16}, {"vocab": 1 << 17},
], ids=lambda sizes: " ".join(sizes) or "ones")
def test_extreme_sizes(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """Sizes far from any model's that the file's tensors bear out: they open, at no more than the usual price."""
    path = tmp_path / "x.gguf"
    synth.make_target(path, dataclasses.replace(BASE, **sizes), synth.Types.all(gguf.GGMLQuantizationType.F32))
    assert ask_once(tmp_path, path).verdict == "opened"


@pytest.mark.parametrize(
    "sizes",
    [{"expert_width": 1 << 18}, {"head_width": 1 << 12, "ratios": [4] * 20}, {"index_width": 1 << 12, "ratios": [4] * 40}, {"vocab": 1 << 19}],
    ids=lambda sizes: " ".join(sizes),
)
def test_out_of_proportion(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """Thin, wide tensors that would make passes and sessions of far more bytes than the file has: refused before they are asked for."""
    path = tmp_path / "x.gguf"
    kind = gguf.GGMLQuantizationType.F16
    synth.make_target(path, dataclasses.replace(BASE, **sizes), synth.Types.all(kind))
    result = ask_once(tmp_path, path)
    assert result.verdict == "refused" and "out of proportion" in result.message, result


@pytest.mark.parametrize("changes, expected", [
    ({"hyper_connection.sinkhorn_iterations": 101}, "1 to 100"), ({"expert_count": 4097}, "1 to 4096"), ({"attention.compress_ratios": 1025}, "0 to 1024"), ({"rope.freq_base": 1.0}, "2 to 1e"),
    ({"attention.compress_rope_freq_base": 1.0}, "2 to 1e"), ({"vocab_size": 1 << 21}, "1 to 1.04858e"), ({"attention.sliding_window": 0}, "1 to"), ({"hyper_connection.count": 17}, "1 to 16"),
    ({"attention.head_count": 65536, "attention.key_length": 512, "attention.value_length": 512}, "at most 16777216"),
    ({"attention.indexer.head_count": 65536, "attention.indexer.key_length": 512}, "at most 16777216"),
    ({"attention.output_lora_rank": 1 << 20, "attention.output_group_count": 32, "attention.head_count": 32}, "at most 16777216"),
], ids=lambda value: " ".join(value) if isinstance(value, dict) else "")
def test_bounds(data: Path, tmp_path: Path, changes: dict[str, float], expected: str) -> None:
    """What no tensor's size confirms has a bound of its own; the message says the key and the bound."""
    header = Parser((data / "edge" / "target.gguf").read_bytes()).parse()
    new = {f"deepseek4.{key}".encode(): value for key, value in changes.items()}
    metas = [m for m in header.metas if m.key not in new]
    metas += [Meta(key, hostile.F32, struct.pack("<f", v)) if isinstance(v, float) else Meta(key, hostile.U32, struct.pack("<I", v)) for key, v in new.items()]
    path = tmp_path / "x.gguf"
    path.write_bytes(header.build(metas=metas))
    result = ask_once(tmp_path, path)
    assert result.verdict == "refused" and next(iter(changes)) in result.message and expected in result.message, result


def test_overlap_behind_a_tensor_without_data(data: Path, tmp_path: Path) -> None:
    good = (data / "tiny" / "target.gguf").read_bytes()
    case = next(c for c in hostile.structures(Parser(good).parse()) if c.label == "an overlap behind a tensor without data")
    path = tmp_path / "x.gguf"
    path.write_bytes(case.apply(good))
    assert "tensors x.a and x.c overlap" in ask_once(tmp_path, path).message


def test_a_file_of_a_head_alone(data: Path, tmp_path: Path) -> None:
    """A block that is the head's, numbered 0: a target of no layers is none."""
    header = Parser((data / "tiny" / "target.gguf").read_bytes()).parse()
    metas = [replace(m, value=struct.pack("<I", 1)) if m.key == b"deepseek4.block_count" else m for m in header.metas]
    path = tmp_path / "x.gguf"
    path.write_bytes(header.build(metas=metas, tensors=[*header.tensors, Tensor(b"blk.0.nextn.enorm.weight", (8,), 0, len(header.data) // 32 * 32)], data=header.data + bytes(64)))
    result = ask_once(tmp_path, path)
    assert result.verdict == "refused" and "holds an MTP head only" in result.message, result


def test_split_files(data: Path, tmp_path: Path) -> None:
    """Two parts: as one file when they fit, else a message that names the part."""
    header = Parser((data / "tiny" / "target.gguf").read_bytes()).parse()
    half = len(header.tensors) // 2
    first, second = tmp_path / "x-00001-of-00002.gguf", tmp_path / "x-00002-of-00002.gguf"
    first.write_bytes(header.build(tensors=header.tensors[:half]))
    with pytest.raises(Failed, match=r"x-00002-of-00002.gguf: cannot open"):
        Engine(first)
    good = header.build(metas=[], tensors=header.tensors[half:])
    second.write_bytes(good)
    with Engine(second) as engine, Engine(data / "tiny" / "target.gguf") as whole:
        a, b = engine.session(), whole.session()
        assert np.array_equal(bits(a.eval_logits(range(2, 40))), bits(b.eval_logits(range(2, 40))))
    broken = [(header.build(metas=[], tensors=header.tensors[half - 1 :]), "is there twice"), (header.build(metas=[], tensors=header.tensors[half + 1 :]), "is missing"),
              (good[: len(good) // 2], "00002-of-00002.gguf: truncated"), (good[:23], "00002-of-00002.gguf: not a GGUF")]
    for content, message in broken:
        second.write_bytes(content)
        with pytest.raises(Failed, match=message):
            Engine(first)


def test_sizes_beyond_the_context(data: Path) -> None:
    """A window or a top-k that the context cannot fill costs no memory and changes no bit, snapshots included."""
    options: dict[str, Any] = {"max_rewind": 4, "prefill_chunk": 5}
    tokens = list(range(2, 14))
    with Engine(data / "tiny" / "target.gguf", ctx=12, **options) as small, Engine(data / "tiny" / "target.gguf", ctx=4096, **options) as large:
        a, b = small.session(), large.session()
        assert np.array_equal(bits(a.eval_logits(tokens)), bits(b.eval_logits(tokens)))
        assert a.save() == b.save()
        c, d = small.session(), large.session()
        c.load(b.save())
        d.load(a.save())
        for session in (a, b, c, d):
            session.rewind(8)
            session.eval([20, 21, 22, 23])
            assert np.array_equal(bits(session.logits()), bits(a.logits()))
        more = list(range(40, 70))
        assert np.array_equal(bits(b.eval_logits(more)), bits(d.eval_logits(more)))
