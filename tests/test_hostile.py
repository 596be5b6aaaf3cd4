"""Broken and hostile GGUF files under ASan and UBSan: one message, no crash, no hang, no memory beyond what the file is worth."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import hostile
import pytest
from conftest import make
from hostile import Case

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


@pytest.mark.parametrize("name, step", [("tiny", 1), ("edge", 4)])
def test_targets(data: Path, tmp_path: Path, name: str, step: int) -> None:
    good = data / name / "target.gguf"
    verdicts = probe(tmp_path, good, sample(hostile.cases(good.read_bytes()), step), lambda path: (path,))
    assert verdicts["refused"] > verdicts["opened"] > 0


@pytest.mark.parametrize("name, layout, step", [("tiny", "ds4", 1), ("tiny", "llama", 4), ("edge", "ds4", 8), ("edge", "llama", 8)])
def test_heads(data: Path, tmp_path: Path, name: str, layout: str, step: int) -> None:
    good = data / name / f"head-{layout}.gguf"
    verdicts = probe(tmp_path, good, sample(hostile.cases(good.read_bytes()), step), lambda path: (data / name / "target.gguf", path))
    assert verdicts["refused"] and verdicts["opened"]
