"""Memory: what the engine states is what it asks for, to the byte; files are mapped, neither copied nor read through."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from engine import Engine
from fixtures import FIXTURES, copy_metadata, tensors_of

# Runs in a process whose library was built with -DDS4_FAULTS and counts bytes.
STATED = """
import sys
sys.path[:0] = [{tests!r}, {python!r}]
from engine import Engine, batch_step, lib

for options in (
    dict(ctx=512), dict(ctx=200, threads=2, prefill_chunk=1, max_rewind=0), dict(ctx=1000, kv_type="f32", draft_lookup=5),
    dict(ctx=64, mtp_shortlist=20, prefill_chunk=300, max_rewind=500, raw_vocab_ok=True),
    dict(ctx=128, gen=dict(temperature=1.0, top_p=1, presence_penalty=1.0, scheme=lib.DS4_REJECTION)),
):
    for head in ({head!r}, None):
        held = lib.hook_bytes()
        with Engine({target!r}, head, **options) as engine:
            info = engine.info
            assert lib.hook_bytes() - held == info.scratch_bytes + info.table_bytes, (options, head)
            first, held = engine.session(), lib.hook_bytes()
            second = engine.session()
            assert lib.hook_bytes() - held == info.session_bytes, (options, head)
            for s in (first, second):
                s.set_stops([], True)
                s.eval(range(50))
                s.generate(10)
            used = lib.hook_bytes() - held - info.session_bytes
            assert used == 0, used                  # nothing is asked for while it runs
            both, rows = lib.hook_bytes(), lib.ds4_engine_batch_rows(engine.p)
            for n in (2, min(rows, 17)):            # but for batches: their rows of logits
                sessions = [first, second, *(engine.session() for _ in range(n - 2))]
                for s in sessions:
                    s.rewind(0)
                assert batch_step(engine, [(s, [1], 1) for s in sessions]) == [[1]] * n
                assert lib.hook_bytes() - both == info.batch_bytes * (n - 1) // (rows - 1) + (n - 2) * info.session_bytes
                del sessions
print("true")
"""


@pytest.mark.parametrize("name", [*FIXTURES, "models"])
def test_what_is_stated_is_what_is_allocated(root: Path, name: str) -> None:
    folder = root / "models" if name == "models" else root / "tests/data" / name
    names = ("small.gguf", "small-mtp.gguf") if name == "models" else ("target.gguf", "head-ds4.gguf")
    target, head = (str(folder / n) for n in names)
    code = STATED.format(tests=str(root / "tests"), python=str(root / "python"), target=target, head=head)
    environment = {**os.environ, "DS4_TEST_FAULTS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0 and done.stdout == "true\n", done.stdout + done.stderr


def test_inspect_says_it(root: Path, ds4: Path) -> None:
    """The lines of --inspect are those numbers, and their sum."""
    model, head = root / "models/small.gguf", root / "models/small-mtp.gguf"
    options = ["-m", model, "--mtp", head, "-c", "700", "-t", "1", "--prefill-chunk", "32"]
    text = subprocess.run([ds4, *options, "--inspect"], capture_output=True, text=True, check=True).stdout
    said = {line[2:24].strip(): int(line[24:].split()[0]) for line in text.split("memory\n")[1].splitlines() if line[0] == " "}
    with Engine(model, head, ctx=700, threads=1, prefill_chunk=32) as engine:
        i = engine.info
        own = {"scratch of a pass": i.scratch_bytes, "tables": i.table_bytes, "session of 700": i.session_bytes}
        assert said["model file, mapped"] == model.stat().st_size
        assert said["for batches, at most"] == i.batch_bytes == i.vocab * 4 * (32 - 1)
        assert own.items() <= said.items() and said["in all, beside files"] == sum(own.values())


LOADED = """
import sys
sys.path[:0] = [{tests!r}, {python!r}]
from pathlib import Path
from engine import Engine

def memory(what):
    "Bytes of the file that are mapped into this process and were touched; bytes that no file backs."
    inside, touched, anonymous = False, 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()
        if "-" in word[0] and not word[0].endswith(":"):
            inside = line.endswith(what)
        elif word[0] == "Rss:":
            touched += 1024 * int(word[1]) * inside
        elif word[0] == "Anonymous:":
            anonymous += 1024 * int(word[1]) * (not inside)
    return touched, anonymous

before = memory({target!r})[1]
with Engine({target!r}, ctx=128, threads=1) as engine:
    touched, anonymous = memory({target!r})
    print(touched, anonymous - before, engine.info.file_bytes)
"""


def test_loading_does_not_read_the_weights(data: Path, root: Path, tmp_path: Path) -> None:
    """A file with a quarter of a gigabyte of experts (a hole on the disk) is opened by touching a small part of it."""
    path, experts = tmp_path / "wide.gguf", 4096
    writer = gguf.GGUFWriter(path, "deepseek4")
    copy_metadata(data / "tiny/target.gguf", writer, {"deepseek4.expert_count": experts})
    for name, t in tensors_of(data / "tiny/target.gguf").items():
        array = np.asarray(t.data)
        if "_exps" in name:
            array = np.broadcast_to(np.zeros(1, np.float32), (experts, *array.shape[1:]))
        elif "ffn_gate_inp" in name or "exp_probs_b" in name:
            array = np.resize(array, (experts, *array.shape[1:]))
        writer.add_tensor_info(name, array.shape, array.dtype, array.size * array.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + 6 * 3 * experts * 64 * 32 * 4 + (64 << 20))
    code = LOADED.format(tests=str(root / "tests"), python=str(root / "python"), target=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    touched, own, size = map(int, done.stdout.split())
    assert size > 200 << 20 and touched < size // 8 and own < 64 << 20, done.stdout
