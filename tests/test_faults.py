"""Every allocation, open, map, read, write and thread start fails once: one message, nothing leaked, the rest usable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Runs in a process whose library was built with -DDS4_FAULTS.
CHECK = """
import os, sys
sys.path[:0] = [{tests!r}, {python!r}]
from pathlib import Path
import numpy as np
import engine
from engine import Engine, Failed, Session, ffi, lib

tiny, out = Path({tests!r}) / "data" / "tiny", Path({out!r})
prompt = np.load(tiny / "prompt.npy")[:50].tolist()
open_files = lambda: len(os.listdir("/proc/self/fd"))
threads = lambda: len(os.listdir("/proc/self/task"))
expected = None
failures = set()


def attempt(f):
    "The result, or None after a failure that left a message."
    global failed
    try:
        return f()
    except Failed as e:
        assert str(e) and chr(10) not in str(e)
        failures.add(str(e))
        failed = True
        return None


def text_calls(e):
    message = ffi.new("ds4_message *")
    role, content = ffi.new("char[]", b"user"), ffi.new("char[]", b"hello")
    message.role, message.content = role, content
    room = ffi.new("int[]", 200)
    for call in (lambda: lib.ds4_tokenize(e.p, b"some words 123", 14, False, room, 200), lambda: lib.ds4_chat(e.p, message, 1, 0, room, 200)):
        attempt(lambda: engine.check(call()))


def scenario():
    "All that a user does; after a failure of a call the others go on and must give what they always give."
    e = attempt(lambda: Engine(tiny / "target.gguf", tiny / "head-ds4.gguf", mtp_draft=2, mtp_margin=0.0, threads=2, ctx=128, prefill_chunk=32))
    if e is None:
        return
    text_calls(e)
    s = attempt(e.session)
    if s is not None:
        s.eval(prompt)
        tokens = s.generate(12)
        attempt(lambda: s.set_stops([3, 4]))
        attempt(lambda: engine.check(lib.ds4_session_save(s.p, str(out).encode())))
        before = s.tokens
        if out.exists():
            attempt(lambda: engine.check(lib.ds4_session_load(s.p, str(out).encode())))
        assert s.tokens == before
        f = attempt(s.fork)
        for x in (s, f):
            if x is not None:
                x.set_mtp(0, 0.0)
                tokens_after = x.generate(6)
                assert expected is None or (tokens, tokens_after) == expected
    e.close()
    assert s is None or not list(out.parent.glob(out.name + ".*")), "a temporary file was left"
    return (tokens, tokens_after) if s is not None else None


expected = scenario()
held, files = lib.hook_blocks(), open_files()
assert held == 0, held
n = 0
while True:
    failed = False
    lib.hook_fault_set(n)
    scenario()
    left = lib.hook_fault_left()
    lib.hook_fault_set(-1)
    assert lib.hook_blocks() == 0, (n, lib.hook_blocks())
    assert open_files() == files and threads() == 1, n
    if left >= 0:
        break
    assert failed, f"request {{n}} failed and nothing said so"
    n += 1
print("requests", n)
print("kinds", sorted(failures))
"""


def test_every_request_fails_once(root: Path, tmp_path: Path) -> None:
    code = CHECK.format(tests=str(root / "tests"), python=str(root / "python"), out=str(tmp_path / "s.ds4"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "DS4_TEST_FAULTS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[1]) > 200  # the scenario really asks the system for that much
    for kind in ("out of memory", "cannot start thread", "cannot open", "cannot map", "cannot read", "cannot write"):
        assert kind in done.stdout, done.stdout
