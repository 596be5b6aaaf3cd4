"""Engines and sessions from Python: numbers, errors, life and death, threads, callbacks."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import built  # noqa: F401
import ds4
import numpy as np
import pytest
from conftest import ROOT, hear_interrupts
from ds4 import Engine, Session, registry
from engine import bits
from hypothesis import given, settings
from hypothesis import strategies as st

PAIR = (ROOT / "models/small.gguf", ROOT / "models/small-mtp.gguf")
TINY = (ROOT / "tests/data/tiny/target.gguf", ROOT / "tests/data/tiny/head-ds4.gguf")
TEXT = "And the LORD said"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(*PAIR, ctx=1024, threads=1, speculative_depth=2, margin=0) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny() -> Iterator[Engine]:
    """With f32 caches, as the reference logits were made."""
    with Engine(*TINY, kv_type="f32", threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompt(data: Path) -> list[int]:
    return np.load(data / "tiny/prompt.npy").tolist()


def run(program: str, **options: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "python")}, timeout=120
    )
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    return done.stdout


# ---- numbers ----


def test_logits(tiny: Engine, data: Path, prompt: list[int]) -> None:
    """Those of Hugging Face transformers, target and head; each way of asking gives the same bits."""
    with Session(tiny) as a, Session(tiny) as b:
        every = a.eval_logits(prompt)
        assert every.dtype == np.float32 and every.shape == (len(prompt), tiny.info.vocab)
        assert np.abs(every - np.load(data / "tiny/logits.npy")).max() < 1e-4
        assert np.abs(a.head_logits(0, len(prompt) - 1) - np.load(data / "tiny/head.npy")).max() < 1e-4
        b.eval(np.array(prompt, np.int64))
        assert np.array_equal(bits(b.logits()), bits(every[-1])) and b.argmax() == int(every[-1].argmax())
        kept = b.logits()
        b.eval([3])
        assert np.array_equal(bits(kept), bits(every[-1]))  # a copy
        b.rewind(len(prompt) - 10)
        assert np.array_equal(bits(b.logits()), bits(every[-11]))
        assert b.tokens == prompt[:-10] and b.position == len(prompt) - 10
        top = a.top_logprobs(5)
        assert [t for t, _ in top] == np.argsort(-every[-1], kind="stable")[:5].tolist()
        assert abs(a.logprob(top[1].token) - top[1].logprob) < 1e-6


def test_steps_are_plain_decoding(engine: Engine) -> None:
    with Session(engine) as a, Session(engine) as b:
        for s in (a, b):
            s.eval(engine.prompt(TEXT))
        rows = []
        while a.position < 60:
            block = a.step(a.argmax(), 60 - a.position)
            rows += [a.step_logits(i) for i in range(len(block))]
        b.set_speculation(0)
        for row in rows:
            assert b.step(b.argmax()) == [b.tokens[-1]]
            assert np.array_equal(bits(row), bits(b.logits()))
        assert a.tokens == b.tokens and sum(a.stats.accepted) > 10
        a.reset_stats()
        assert a.stats.emitted == 0 and len(a.stats.drafted) == 16


def test_fork_save_load(engine: Engine, tmp_path: Path) -> None:
    with Session(engine) as a:
        a.generate(TEXT, max_tokens=20)
        a.set_stops([7])
        snapshot = a.snapshot()
        a.save(tmp_path / "s")
        fork = a.fork()
        assert fork.is_stop(7)
        expected = a.generate(max_tokens=10)
        with Session(engine) as b, Session(engine) as c:
            b.restore(snapshot)
            c.load(tmp_path / "s")
            for s in (fork, b, c):
                assert s.generate(max_tokens=10) == expected and s.tokens == a.tokens
                assert np.array_equal(bits(s.logits()), bits(a.logits()))


def test_info(engine: Engine) -> None:
    info = engine.info
    assert (info.layers, info.vocab, info.has_head, info.kv_type, info.ctx) == (8, 2048, True, "f16", 1024)
    tensors = engine.tensors()
    assert sum(t.bytes for t in tensors if not t.head) == info.weight_bytes
    by_name = {t.name: t for t in tensors}
    assert by_name["token_embd.weight"].dims == (256, 2048) and by_name["mtp.0.norm.weight"].head
    assert engine.meta("deepseek4.block_count") == "8" and engine.meta("no.such.key") is None
    assert repr(engine).startswith("<ds4.Engine '") and "0 of 1024 tokens" in repr(Session(engine))


def test_new_settings_hold_for_the_next_token(engine: Engine) -> None:
    """A token that rejection has drawn in a draft's place is drawn anew when the settings change, the mask too; it stays in a fork,
    and when something else changes."""
    even, only = np.arange(engine.info.vocab) % 2 == 0, np.arange(engine.info.vocab) == 7
    sampling = {"temperature": 1.2, "scheme": "rejection", "mask": lambda ids: even}
    found = 0
    for seed in range(30):
        with Session(engine) as s:
            s.set_sampling(seed=seed, **sampling)
            s.set_speculation(3)
            s.eval(engine.prompt(TEXT))
            s.step(s.next(), 8)
            drawn = s.next()
            with s.fork() as copy:
                copy.set_speculation(1)
                s.set_speculation(0)
                assert copy.next() == drawn == s.next()
            s.set_sampling(seed=seed, **sampling | {"mask": lambda ids: even})  # another function, if an equal one
            found += s.next() != drawn
            s.set_sampling(seed=seed, **sampling | {"mask": lambda ids: only})
            assert s.next() == 7
            s.set_sampling(seed=seed, logit_bias={8: float("-inf"), 9: 50.0})
            assert s.next() == 9
    assert found > 3


# ---- text ----


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.text(), st.binary()))
def test_round_trip(engine: Engine, text: str | bytes) -> None:
    """tokenize, then detokenize: any text, any bytes; the control tokens' own texts too, which stay text."""
    ids = engine.tokenize(text)
    assert all(0 <= t < engine.info.vocab for t in ids)
    if isinstance(text, str):
        assert engine.detokenize(ids) == text
    else:
        assert engine.detokenize_bytes(ids) == text


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 2047), max_size=30))
def test_pieces_join(engine: Engine, tokens: list[int]) -> None:
    """Any ids: their bytes are those of each, one after another, and come again from the ids of these."""
    data = engine.detokenize_bytes(np.array(tokens, np.int32))
    assert data == b"".join(map(engine.piece, tokens))
    assert engine.detokenize_bytes(engine.tokenize(data)) == data
    assert engine.detokenize_bytes(engine.tokenize(data, control=True)) == data


def test_control_tokens(engine: Engine) -> None:
    bos = engine.info.bos
    name = engine.piece(bos).decode()
    assert engine.token_id(name) == bos and engine.token_id("no such token") is None
    assert bos not in engine.tokenize(name) and engine.tokenize(name, control=True) == [bos]
    assert engine.prompt("a") == [bos, *engine.tokenize("a")] and engine.prompt(name, control=True) == [bos]


def test_generate(engine: Engine) -> None:
    """All ways to the same text; what they say about it."""
    text = engine.generate(TEXT, max_tokens=50)
    plain = engine.generate(TEXT, max_tokens=50, speculative_depth=0)
    for depth, lookup in (("auto", 0), ("auto", 8), (3, 4)):
        again = engine.generate(TEXT, max_tokens=50, speculative_depth=depth, draft_lookup=lookup)
        assert again.tokens == plain.tokens
    assert text == plain and text.tokens == plain.tokens and len(text.tokens) == 50 and text.finish_reason == "length"
    assert engine.detokenize(text.tokens) == text == text.text and type(text.text) is str
    parts = list(engine.stream(TEXT, max_tokens=50))
    assert "".join(parts) == text and [t for p in parts for t in p.tokens] == text.tokens
    assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + ["length"]
    assert len(parts) < 50  # several tokens a pass
    with Session(engine) as session:
        assert session.generate(TEXT, max_tokens=20) + session.generate(max_tokens=30) == text
        assert session.tokens == engine.prompt(TEXT) + text.tokens
    assert engine.generate(engine.prompt(TEXT), max_tokens=50) == text
    assert asyncio.run(engine.agenerate(TEXT, max_tokens=50)) == text
    assert engine.generate(TEXT, max_tokens=0) == "" and list(engine.stream(TEXT, max_tokens=0))[-1].finish_reason == "length"


def test_logprobs(engine: Engine) -> None:
    """The same numbers at every depth, and those of the engine's own."""
    deep = engine.generate(TEXT, max_tokens=30, logprobs=3, speculative_depth=4)
    assert deep.logprobs == engine.generate(TEXT, max_tokens=30, logprobs=3, speculative_depth=0).logprobs
    with Session(engine) as session:
        session.eval(engine.prompt(TEXT))
        assert deep.logprobs and len(deep.logprobs) == 30
        for got in deep.logprobs:
            own = session.top_logprobs(3)
            assert [t for t, _ in got.top] == [t for t, _ in own] and got.token == got.top[0].token
            assert np.allclose([p for _, p in got.top], [p for _, p in own], atol=1e-6)
            session.eval([got.token])


@pytest.mark.parametrize("depth", [0, 1, 3, 16])
@pytest.mark.parametrize("back", [0, 1, 64])
def test_stops(depth: int, back: int) -> None:
    """The text ends before the stop text and the session where plain decoding would have, inside an accepted block too."""
    with Engine(*PAIR, threads=1, ctx=256, margin=0, max_rewind=back) as engine:
        full = engine.generate("In the beginning", max_tokens=60, speculative_depth=0)
        for stop in ("heaven and", "th", ".\nAnd", "deep. And"):
            with Session(engine) as session:
                parts = list(session.stream("In the beginning", max_tokens=60, stop=stop, speculative_depth=depth))
                text = "".join(parts)
                assert text == full[: full.index(stop)] and parts[-1].finish_reason == "stop"
                tokens = [t for p in parts for t in p.tokens]
                assert tokens == full.tokens[: len(tokens)] and session.tokens == engine.prompt("In the beginning") + tokens
                assert stop in engine.detokenize(tokens) and stop not in engine.detokenize(tokens[:-1])
        token = full.tokens[7]
        got = engine.generate("In the beginning", max_tokens=60, stop=[token, "zzz"], speculative_depth=depth)
        assert got.tokens == full.tokens[: full.tokens.index(token)] and got.finish_reason == "eos"


def test_end_of_context(engine: Engine) -> None:
    with Session(engine, ctx=20) as session:
        text = session.generate(TEXT, max_tokens=100)
        assert session.position == 20 and text.finish_reason == "length"
        with pytest.raises(ds4.ContextFull, match="context is full: 20"):
            session.step(5)
        with pytest.raises(ds4.ContextFull, match="1 tokens at position 20"):
            session.eval([5])
        with pytest.raises(ds4.SnapshotError, match="does not fit a context of 10"), Session(engine, ctx=10) as small:
            small.restore(session.snapshot())


def test_snapshots_between_contexts(engine: Engine) -> None:
    """A session of a short context goes on in a longer one, and back, with the same bits."""
    with Session(engine, ctx=40) as short, Session(engine) as long:
        short.generate(TEXT, max_tokens=20)
        long.restore(short.snapshot())
        assert long.generate(max_tokens=10) == short.generate(max_tokens=10)
        short.restore(long.snapshot())
        assert np.array_equal(bits(long.logits()), bits(short.logits()))


def test_seeds(engine: Engine) -> None:
    """A seed's text is the same at every depth."""
    options = {"max_tokens": 30, "temperature": 1.5, "top_p": 0.95}
    texts = {
        (seed, depth): engine.generate(TEXT, seed=seed, speculative_depth=depth, **options)
        for seed in (1, 2**64 - 1)
        for depth in (0, 2, 5)
    }
    assert len({t.text for (s, _), t in texts.items() if s == 1}) == 1 and len({t.text for t in texts.values()}) == 2


def test_chat(data: Path) -> None:
    """The template's ids; reasoning and answer apart."""
    with Engine(TINY[0], threads=1) as engine:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <\uff5cUser\uff5c>"}]
        plain, thinking = engine.chat_template(messages), engine.chat_template(messages, thinking=True)
        assert plain != thinking or engine.info.base_model
        answer = engine.chat(messages, max_tokens=5)
        assert answer.tokens == engine.generate(plain, max_tokens=5).tokens
        for bad, why in (
            ([{"role": "cat", "content": "x"}], "role"),
            ([{"role": "user"}], "expected a mapping with 'role' and 'content'"),
            ([{"role": "user", "content": "x", "name": "y"}], "expected a mapping with 'role'"),
            ([{"role": "user", "content": "a\0b"}], "NUL"),
        ):
            with pytest.raises(ds4.InvalidArgument, match=why):
                engine.chat_template(bad)
        with pytest.raises(ds4.InvalidArgument, match="'off', 'on' or 'max'"):
            engine.chat_template(messages, thinking="yes")  # type: ignore[arg-type]


# ---- errors ----


def test_every_kind_has_its_exception(root: Path) -> None:
    from ds4._ds4 import lib
    from ds4._native import _KINDS

    body = re.search(r"typedef enum \{([^}]*)\} ds4_error_kind;", (root / "ds4.h").read_text())
    assert body
    kinds = {getattr(lib, name) for name in re.findall(r"^ +(DS4_\w+)", body[1], re.M)} - {lib.DS4_OK}
    assert kinds == set(_KINDS) and len(set(_KINDS.values())) == len(kinds)
    assert all(issubclass(e, ds4.Error) for e in _KINDS.values())


FAILURES: list[tuple[type[BaseException], str, Callable[[Engine], object]]] = [
    (ds4.LoadError, "nowhere.gguf: cannot open", lambda e: Engine("nowhere.gguf")),
    (ds4.LoadError, "pyproject.toml: not a GGUF file", lambda e: Engine(ROOT / "pyproject.toml")),
    (ds4.LoadError, "is an MTP head", lambda e: Engine(PAIR[1])),
    (ds4.LoadError, "made for another target|expected", lambda e: Engine(PAIR[0], TINY[1])),
    (ds4.InvalidArgument, "ctx is 5000; .* made for at most 4096", lambda e: Engine(PAIR[0], ctx=5000)),
    (ds4.InvalidArgument, "threads is -1", lambda e: Engine(PAIR[0], threads=-1)),
    (ds4.InvalidArgument, "kv_type is 'f8'; expected one of 'f32', 'f16', 'fp8'", lambda e: Engine(PAIR[0], kv_type="f8")),
    (ds4.InvalidArgument, "no kernels called mmx", lambda e: Engine(PAIR[0], isa="mmx")),
    (ds4.InvalidArgument, "ctx is 2000; a session of this engine has 1 to 1024", lambda e: Session(e, ctx=2000)),
    (ds4.InvalidArgument, "ctx is 0", lambda e: Session(e, ctx=0)),
    (ds4.ContextFull, "2000 tokens at position 0 do not fit a context of 1024", lambda e: e.generate([5] * 2000)),
    (ds4.RewindError, "cannot rewind to 3: the session is at 0", lambda e: Session(e).rewind(3)),
    (ds4.InvalidArgument, "session is empty", lambda e: Session(e).logits()),
    (ds4.InvalidArgument, "token 2048 is outside the vocabulary", lambda e: Session(e).eval([1, 2048])),
    (ds4.InvalidArgument, "token -1 is outside", lambda e: Session(e).step(-1)),
    (ds4.InvalidArgument, "outside any vocabulary", lambda e: Session(e).eval([2**40])),
    (ds4.InvalidArgument, "token 2048 is outside", lambda e: e.detokenize([2048])),
    (ds4.InvalidArgument, "speculative_depth is 17", lambda e: Session(e).set_speculation(17)),
    (ds4.InvalidArgument, "margin is nan; expected 0 to 1000$", lambda e: Session(e).set_speculation(1, float("nan"))),
    (ds4.InvalidArgument, "margin is 1001; expected 0 to 1000$", lambda e: e.generate("a", margin=1001)),
    (ds4.InvalidArgument, "draft_lookup is -1; expected 0 to 64$", lambda e: e.generate("a", draft_lookup=-1)),
    (ds4.InvalidArgument, "draft_lookup is 65; expected 0 to 64$", lambda e: Session(e).set_speculation(1, draft_lookup=65)),
    (ds4.InvalidArgument, "draft_lookup is True; expected 0 to 64$", lambda e: Engine(*PAIR, draft_lookup=True)),
    (ds4.InvalidArgument, "temperature is -1", lambda e: e.generate("a", temperature=-1)),
    (ds4.InvalidArgument, "seed is -1", lambda e: e.generate("a", seed=-1)),
    (ds4.InvalidArgument, "draft is 2, but no", lambda e: Engine(PAIR[0]).generate("a", speculative_depth=2)),
    (ds4.SnapshotError, "not a snapshot", lambda e: Session(e).restore(b"x" * 100)),
    (ds4.SnapshotError, "/nowhere/s: cannot", lambda e: Session(e).save("/nowhere/s")),
    (ds4.SnapshotError, "name of the file to write is empty", lambda e: Session(e).save("")),
    (ds4.SnapshotError, "cannot open", lambda e: Session(e).load("/nowhere/s")),
    (ds4.ContextFull, "do not fit", lambda e: Session(e).eval_logits(np.full(1 << 24, 5, np.int32))),
    (ds4.InvalidArgument, "rows 0 to 2147483647: expected rows below 0, whose next token is known", lambda e: Session(e).head_logits(0, 2**31 - 1)),
    (ds4.InvalidArgument, r"path: '\\ud800' at 0 is no character", lambda e: Session(e).save("\ud800")),
    (ds4.InvalidArgument, r"model: '\\ud800' at 1 is no character", lambda e: Engine("a\ud800")),
    (TypeError, "sequence of integers, not float64", lambda e: Session(e).eval([1.5])),
    (TypeError, r"of shape \(1, 2\)", lambda e: Session(e).eval(np.zeros((1, 2), np.int32))),
    (OverflowError, "int", lambda e: Engine(PAIR[0], threads=2**40)),
    (TypeError, "not bytes", lambda e: Session(e).eval(b"a")),
    (TypeError, "not bytes", lambda e: e.generate(b"a")),
    (TypeError, "temperature is 'a'; expected a number", lambda e: e.generate("a", temperature="a")),
    (TypeError, "seed is 1.5; expected a number", lambda e: Session(e).set_sampling(seed=1.5)),
    (ds4.InvalidArgument, "mask is 5; expected a function", lambda e: e.generate("a", mask=5)),
    (ds4.InvalidArgument, "model holds a NUL", lambda e: Engine(f"{PAIR[0]}\0x")),
    (ds4.InvalidArgument, "mtp holds a NUL", lambda e: Engine(PAIR[0], f"{PAIR[1]}\0x")),
    (ds4.InvalidArgument, "isa holds a NUL", lambda e: Engine(PAIR[0], isa="auto\0x")),
    (ds4.InvalidArgument, "path holds a NUL", lambda e: Session(e).save("a\0x")),
    (ds4.InvalidArgument, "path holds a NUL", lambda e: Session(e).load("a\0x")),
    (ds4.InvalidArgument, "key holds a NUL", lambda e: e.meta("general.name\0x")),
    (ds4.InvalidArgument, "text holds a NUL", lambda e: e.token_id("<think>\0x")),
    (ds4.InvalidArgument, r"text: '\\ud800' at 1 is no character", lambda e: e.generate("a\ud800")),
    (ds4.InvalidArgument, "message 0: expected a mapping .*, not 'h'", lambda e: e.chat("hello")),
    (ds4.InvalidArgument, "message 0: expected a mapping", lambda e: e.chat({"role": "user", "content": "a"})),
    (ds4.InvalidArgument, "message 0: .*'reasoning': 5", lambda e: e.chat([{"role": "user", "content": "a", "reasoning": 5}])),
]

WRONG_OPTIONS: list[dict[str, object]] = [
    {"temperature": -1},
    {"temperature": "1"},
    {"top_p": float("nan")},
    {"seed": 1.5},
    {"stop": [99999]},
    {"speculative_depth": 17},
    {"margin": -1},
    {"max_tokens": 1.5},
    {"logit_bias": {5: "x"}},
    {"logit_bias": {99999: 1.0}},
    {"scheme": "x"},
    {"draft_core": "x"},
    {"mask": 5},
]


@pytest.mark.parametrize("options", WRONG_OPTIONS)
def test_wrong_options_evaluate_nothing(engine: Engine, options: dict[str, object]) -> None:
    """They are refused when the stream is made, and the session goes on as if they had not been tried."""
    kinds = (ds4.InvalidArgument, TypeError)
    with pytest.raises(kinds):
        engine.stream(TEXT, **options)
    with Session(engine) as session:
        for prompt in (TEXT, "", [5]):
            with pytest.raises(kinds):
                session.stream(prompt, **options)
        with pytest.raises(kinds):
            session.generate(TEXT, **options)
        with pytest.raises(kinds):
            asyncio.run(session.agenerate(TEXT, **options))
        assert session.position == 0
        assert session.generate(TEXT, max_tokens=5) == engine.generate(TEXT, max_tokens=5)


@pytest.mark.parametrize("case", range(len(FAILURES)))
def test_failures(engine: Engine, case: int) -> None:
    kind, message, call = FAILURES[case]
    with pytest.raises(kind, match=message) as raised:
        call(engine)
    assert raised.type is kind


def test_non_finite(tmp_path: Path) -> None:
    from fixtures import rewrite, tensors_of

    norm = np.array(tensors_of(TINY[0])["output_norm.weight"].data)
    norm[:] = np.nan
    with Engine(rewrite(TINY[0], tmp_path / "nan.gguf", tensors={"output_norm.weight": norm})) as engine:
        with pytest.raises(ds4.NonFinite, match="position 1"):
            Session(engine).eval([5, 6])


# ---- life and death ----


def test_close(prompt: list[int]) -> None:
    engine = Engine(*TINY, threads=1)
    a, b = Session(engine), engine.session()
    a.eval(prompt)
    a.close()
    a.close()
    with pytest.raises(ds4.Closed, match="the session is closed"):
        a.eval([1])
    b.eval(prompt)
    engine.close()
    engine.close()
    for use in (b.logits, lambda: b.position, b.fork, b.snapshot, lambda: b.__enter__(), lambda: b.generate(max_tokens=2)):
        with pytest.raises(ds4.Closed, match="the session's engine is closed"):
            use()
    for use in (engine.session, lambda: engine.tokenize("a"), lambda: engine.generate("a"), engine.__enter__, engine.tensors):
        with pytest.raises(ds4.Closed, match="the engine is closed"):
            use()
    b.cancel()
    b.close()
    assert engine.closed and b.closed and "closed" in repr(engine) + repr(b) and engine.info.layers > 0


def test_sessions_keep_their_engine(prompt: list[int]) -> None:
    session = Session(Engine(*TINY, threads=1))
    gc.collect()
    session.eval(prompt)
    assert session.engine.info.has_head


def test_stream_closed_early(engine: Engine) -> None:
    """Its session goes with it; a session of yours holds what was yielded."""
    stream = engine.stream(TEXT, max_tokens=1000)
    next(stream)
    before = len(engine._handle.sessions)
    stream.close()
    assert len(engine._handle.sessions) == before - 1
    unstarted = engine.stream(TEXT)
    del unstarted
    with Session(engine) as session:
        tokens = []
        for piece in session.stream(TEXT, max_tokens=100):
            tokens += piece.tokens
            if len(tokens) > 10:
                break
        assert session.tokens == engine.prompt(TEXT) + tokens
        rest = session.generate(max_tokens=100 - len(tokens))
        assert tokens + rest.tokens == engine.generate(TEXT, max_tokens=100).tokens


def anonymous_kib() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def test_flat_memory() -> None:
    """50 rounds of open, generate, close, in every way an engine or a session ends."""

    def round_trip(i: int) -> None:
        engine = Engine(*PAIR, threads=2, ctx=256)
        engine.generate(TEXT, max_tokens=4)
        session = engine.session()
        session.generate(TEXT, max_tokens=2)
        stream = session.stream(max_tokens=10)
        next(stream)
        if i % 3 == 0:
            engine.close()
        elif i % 3 == 1:
            session.close()

    for i in range(10):
        round_trip(i)
    gc.collect()
    before = anonymous_kib()
    for i in range(50):
        round_trip(i)
    gc.collect()
    assert anonymous_kib() - before < 3000  # one session alone takes more


def test_exit_without_close() -> None:
    """At the end of the program, with a stream in the middle, a cycle of references, and a thread that still computes."""
    out = run(
        f"""
import threading, ds4
engine = ds4.Engine({str(PAIR[0])!r}, {str(PAIR[1])!r}, ctx=512)
session = ds4.Session(engine)
session.eval([1, 2, 3])
session.me = session
stream = engine.stream("In", max_tokens=100)
next(stream)
started = threading.Event()
def work():
    try:
        for piece in engine.stream("And", max_tokens=400):
            started.set()
    except ds4.Error:
        pass
threading.Thread(target=work, daemon=True).start()
started.wait()
print("end")
"""
    )
    assert out == "end\n"


def test_after_a_fork() -> None:
    """A child process must open its own; the parent goes on."""
    out = run(
        f"""
import os, warnings, ds4
warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads
engine = ds4.Engine({str(TINY[0])!r}, threads=2)
session = engine.session()
session.eval([1, 2, 3])
if os.fork() == 0:
    try:
        session.eval([4])
    except ds4.Closed as e:
        print("child:", e, flush=True)
    engine.close()
    print("child:", ds4.Engine({str(TINY[0])!r}).info.layers, flush=True)
else:
    assert os.wait()[1] == 0
    session.eval([4])
    print("parent:", session.position)
"""
    )
    assert re.fullmatch(r"child: the engine was opened before a fork.*\nchild: \d+\nparent: 4\n", out)


# ---- threads ----


def test_threads_equal_solo(engine: Engine) -> None:
    """8 threads, a session each: the texts of solo runs."""
    starts = ["In the beginning", "And it came", "The LORD", "Now", "Behold", "And God", "Then", "For"]
    solo = [engine.generate(s, max_tokens=25).tokens for s in starts]
    together: dict[int, list[int]] = {}

    def work(i: int) -> None:
        together[i] = engine.generate(starts[i], max_tokens=25).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [together[i] for i in range(8)] == solo


def test_the_callers_rounding_changes_nothing() -> None:
    """A thread may have set how its processor rounds, before the engine's threads are made or after; that stays its own."""
    libm, up = ctypes.CDLL("libm.so.6"), {"x86_64": 0x800, "aarch64": 0x400000}[platform.machine()]

    def everything(opened_with: int, used_with: int) -> list[object]:
        try:
            assert libm.fesetround(opened_with) == 0
            with Engine(*PAIR, threads=2, ctx=256, prefill_chunk=32) as engine:
                assert libm.fesetround(used_with) == 0
                session = Session(engine)
                out: list[object] = [session.generate(TEXT * 4, max_tokens=20, temperature=0.8, seed=5, speculative_depth=2).tokens]
                out += [session.logits().tobytes(), session.argmax(), session.logprob(7), session.top_logprobs(4), session.sample()]
                out += [session.draft(7, 3).tobytes(), session.snapshot()]
                session.rewind(session.position - 1)
                out += [session.logits().tobytes(), session.head_logits(session.position - 4, session.position - 2).tobytes()]
                assert libm.fegetround() == used_with
                return out
        finally:
            libm.fesetround(0)

    plain = everything(0, 0)
    assert everything(0, up) == plain and everything(up, 0) == plain


@pytest.mark.parametrize("threads", [1, 2])
def test_half_a_megabyte_of_stack_is_enough(threads: int) -> None:
    """As ds4.h promises; workers get theirs whatever the system gives a thread."""
    out = run(
        f"""
import threading, ds4
def read():
    with ds4.Engine({str(PAIR[0])!r}, {str(PAIR[1])!r}, threads={threads}) as engine, ds4.Session(engine) as session:
        session.eval(range(5, 105))
        session.generate(max_tokens=8)
        print(session.position)
threading.stack_size(512 << 10)
thread = threading.Thread(target=read)
thread.start()
thread.join()
"""
    )
    assert int(out) == 108


def blocked_signals(task: Path) -> int:
    """Bit n - 1 for signal n."""
    return int(re.findall(r"SigBlk:\s*([0-9a-f]+)", (task / "status").read_text())[0], 16)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux alone lists a process's threads")
def test_signals_stay_with_the_callers_threads() -> None:
    """The engine's own threads take none but those for their own faults; the caller's mask is what it was."""
    tasks = Path("/proc/self/task")
    before, mask = {t.name for t in tasks.iterdir()}, signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with Engine(PAIR[0], threads=3):
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
        own = [t for t in tasks.iterdir() if t.name not in before]
        assert len(own) == 2
        for task in own:
            # a thread that has not begun yet has everything blocked
            until = time.monotonic() + 20
            while (blocked := blocked_signals(task)) >> signal.SIGSEGV - 1 & 1 and time.monotonic() < until:
                time.sleep(0.01)
            assert all(blocked >> number - 1 & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1))
            assert not any(blocked >> number - 1 & 1 for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGPROF))


def test_one_session_from_two_threads(engine: Engine) -> None:
    """They take turns: nothing is lost or torn."""
    with Session(engine) as session:
        threads = [threading.Thread(target=lambda: [session.eval([7]) for _ in range(20)]) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert session.tokens == [7] * 40


def test_two_engines(engine: Engine, tiny: Engine, prompt: list[int]) -> None:
    """In one process, step by step in turn, each as if alone."""
    alone = engine.generate(TEXT, max_tokens=12), tiny.generate(prompt, max_tokens=12, ignore_eos=True)
    both = engine.stream(TEXT, max_tokens=12), tiny.stream(prompt, max_tokens=12, ignore_eos=True)
    texts: list[list[int]] = [[], []]
    for pieces in itertools.zip_longest(*both):
        for text, piece in zip(texts, pieces, strict=True):
            text += piece.tokens if piece else []
    assert texts == [a.tokens for a in alone]


def test_gil_is_released(engine: Engine) -> None:
    """Python runs while a prompt is evaluated."""
    with Session(engine) as session:
        thread = threading.Thread(target=session.eval, args=([5] * 1000,))
        turns, at_once = 0, threading.Event()
        thread.start()
        while thread.is_alive():
            turns += 1
            at_once.wait(0.001)
        assert turns > 20


def test_close_ends_what_runs() -> None:
    """Closing from another thread: the running prompt ends after a pass, with Cancelled."""
    begun, raised = threading.Event(), []
    engine = Engine(PAIR[0], threads=1, prefill_chunk=16, progress=lambda *_: begun.set())
    session = Session(engine)
    begun.clear()

    def work() -> None:
        try:
            session.eval([5] * 4000)
        except ds4.Error as e:
            raised.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    engine.close()
    thread.join()
    assert [type(e) for e in raised] == [ds4.Cancelled] and session.closed


@pytest.mark.parametrize("what", ["session", "engine"])
def test_close_meets_a_drafter_that_asks_the_engine(what: str) -> None:
    """Closing from another thread waits for the session's call, which may wait for the engine."""
    begun, closing, raised = threading.Event(), threading.Event(), []

    class Asks:
        def __init__(self, session: Session) -> None:
            self.session = session

        def propose(self, token: int, k: int) -> list[int]:
            begun.set()
            while not (self.session.cancelled or closing.wait(0.01)):
                pass
            assert self.session.engine.piece(token)
            return [token]

    registry.register_draft_core("asks", Asks)
    try:
        engine = Engine(PAIR[0], threads=1)
        session = Session(engine)

        def work() -> None:
            try:
                session.generate(TEXT, max_tokens=20, draft_core="asks", speculative_depth=2)
            except ds4.Error as e:
                raised.append(type(e))

        threads = [threading.Thread(target=work, daemon=True)]
        threads[0].start()
        begun.wait()
        closer = session if what == "session" else engine
        threads.append(threading.Thread(target=closer.close, daemon=True))
        threads[1].start()
        for thread in threads:
            thread.join(30)
        closing.set()
        assert not any(t.is_alive() for t in threads)
        assert raised[0] in (ds4.Cancelled, ds4.Closed) and session.closed
        engine.close()
    finally:
        registry.unregister("asks")


def test_cancel(engine: Engine) -> None:
    with Session(engine) as session:
        expected = engine.generate(TEXT, max_tokens=20)
        stream = session.stream(TEXT, max_tokens=20)
        first = next(stream)
        session.cancel()
        assert session.cancelled
        with pytest.raises(ds4.Cancelled):
            next(stream)
        session.clear_cancel()
        assert not session.cancelled
        assert first.tokens + session.generate(max_tokens=20 - len(first.tokens)).tokens == expected.tokens


# ---- asyncio ----


def test_async_together(engine: Engine) -> None:
    starts = ["In the beginning", "And it came", "The LORD", "Now"]

    async def main() -> list[ds4.Completion]:
        return await asyncio.gather(*(engine.agenerate(s, max_tokens=15) for s in starts))

    assert [t.tokens for t in asyncio.run(main())] == [engine.generate(s, max_tokens=15).tokens for s in starts]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_async_cancelled(times: int) -> None:
    """The task ends after the pass in work, however often it is cancelled; its own session is freed, yours is usable."""

    async def cancelled_soon(work: Coroutine[object, object, object]) -> None:
        task = asyncio.create_task(work)
        await asyncio.sleep(0.02)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    async def main() -> None:
        await cancelled_soon(engine.agenerate([5] * 4000, max_tokens=90))
        assert len(engine._handle.sessions) == 1
        await cancelled_soon(session.agenerate([5] * 4000, max_tokens=90))
        assert not session.cancelled and session.position < 4000
        session.rewind(0)
        tokens = []
        async for piece in session.astream(TEXT, max_tokens=30):
            tokens += piece.tokens
            if len(tokens) > 5:
                break
        rest = await session.agenerate(max_tokens=30 - len(tokens))
        assert tokens + rest.tokens == engine.generate(TEXT, max_tokens=30).tokens
        with pytest.raises(ds4.InvalidArgument):
            await engine.agenerate("a", max_tokens=-1)

    with Engine(*PAIR, prefill_chunk=64, speculative_depth=1) as engine:
        session = Session(engine)
        asyncio.run(main())


# ---- callbacks ----


class Boom(Exception):
    pass


def test_progress_raises(prompt: list[int]) -> None:
    """The call ends after the pass in work; the session goes on behind it."""
    seen: list[tuple[str, int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        seen.append((what, done, total))
        if what == "prompt" and (done, total) == (32, len(prompt)):
            raise Boom

    with Engine(*TINY, threads=1, prefill_chunk=16, progress=progress) as engine, Session(engine) as session:
        with pytest.raises(Boom):
            session.eval(prompt)
        assert session.position == 32 and not session.cancelled
        assert seen == [("load", 0, 1), ("load", 1, 1), ("prompt", 16, len(prompt)), ("prompt", 32, len(prompt))]
        session.eval(prompt[32:])
        whole = session.logits()
    with Engine(*TINY, threads=1) as engine, Session(engine) as session:
        session.eval(prompt)
        assert np.array_equal(bits(whole), bits(session.logits()))


def test_load_callback_raises() -> None:
    def progress(what: str, done: int, total: int) -> None:
        raise Boom

    with pytest.raises(Boom):
        Engine(*TINY, progress=progress)


def test_log_raises() -> None:
    """In the middle of a generation: what was committed stays, and the session is usable."""
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        if len(lines) == 5:
            raise Boom

    with (
        Engine(*PAIR, threads=1, ctx=256, margin=0, speculative_depth=1, conf_log=True, log=log) as engine,
        Session(engine) as session,
    ):
        with pytest.raises(Boom):
            session.generate(TEXT, max_tokens=40)
        held = session.position - len(engine.prompt(TEXT))
        assert 0 < held < 40 and lines[0].startswith("mtp: position")
        session.generate(max_tokens=40 - held)
        assert session.tokens == engine.prompt(TEXT) + engine.generate(TEXT, max_tokens=40).tokens


def test_callbacks_must_not_call(prompt: list[int]) -> None:
    """But for a cancel. What they try is refused, not waited for."""
    tried: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        if what == "load":
            return
        for use in (lambda: session.position, session.close, engine.close, lambda: engine.tokenize("a")):
            try:
                use()
            except ds4.InvalidArgument as e:
                tried.append(str(e))
        gc.collect()
        session.cancel()

    with Engine(*TINY, threads=1, prefill_chunk=16, progress=progress) as engine, Session(engine) as session:
        other = Session(engine)
        other.me = other  # type: ignore[attr-defined]
        del other
        with pytest.raises(ds4.Cancelled):
            session.eval(prompt)
        assert len(tried) == 4 and all(re.match(r"a callback \(.*\) must not", t) for t in tried)
        assert session.position == 16 and session.cancelled
        session.clear_cancel()
        session.eval([1])
        assert len(engine._handle.sessions) == 1 and not engine._handle.unfreed


# ---- Ctrl+C ----


def interrupted(program: str) -> list[str]:
    """Run a program and send it SIGINT when it says "now"."""
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT / "python")},
        preexec_fn=hear_interrupts,
    )
    lines = []
    assert child.stdout and child.stderr
    for line in child.stdout:
        lines.append(line.rstrip("\n"))
        if line == "now\n":
            child.send_signal(signal.SIGINT)
    errors = child.stderr.read()
    assert child.wait() == 0 and not errors, errors
    return lines


def test_interrupt_a_prompt() -> None:
    """KeyboardInterrupt after the pass in work, long before the prompt's end; the session has whole passes and goes on."""
    lines = interrupted(
        f"""
import ds4
seen = []
def progress(what, done, total):
    if what == "prompt":
        seen.append(done)
        if len(seen) == 3:
            print("now")
with ds4.Engine({str(PAIR[0])!r}, threads=1, prefill_chunk=16, progress=progress) as engine:
    session = engine.session()
    try:
        session.eval([5] * 4000)
    except KeyboardInterrupt:
        at = session.position
        print(at, at - seen[-1], session.cancelled)
        session.eval([6])
        print(session.tokens == [5] * at + [6])
"""
    )
    at, unseen, cancelled = lines[1].split()
    assert lines[0] == "now" and int(unseen) in (0, 16) and int(at) < 2000 and cancelled == "False" and lines[2] == "True"


def test_interrupt_a_generation() -> None:
    """The same inside a token loop, with the engine's own head; the rest of the text is as without the interrupt."""
    lines = interrupted(
        f"""
import ds4
with ds4.Engine({str(PAIR[0])!r}, {str(PAIR[1])!r}, threads=1, speculative_depth=2) as engine:
    session = engine.session()
    count = 0
    try:
        for piece in session.stream("And the LORD said", max_tokens=3000):
            count += 1
            if count == 5:
                print("now")
    except KeyboardInterrupt:
        prompt = engine.prompt("And the LORD said")
        held = session.tokens[len(prompt):]
        held += session.generate(max_tokens=20).tokens
        print(len(held) < 2000, held == engine.generate("And the LORD said", max_tokens=len(held)).tokens)
"""
    )
    assert lines == ["now", "True True"]


def test_margin_follows_the_depth() -> None:
    """Unless it is given: 0 with "auto", 3 with a fixed depth, in an engine, a session and a call; below 0 it is refused."""
    held = {}
    with Engine(*PAIR, threads=1, ctx=256, speculative_depth=2) as engine, Engine(*PAIR, threads=1, ctx=256, margin=0) as eager:
        for name, options in {
            "engine": {}, "none": {"margin": None}, "3": {"margin": 3}, "0": {"margin": 0}, "auto": {"speculative_depth": "auto"},
        }.items():  # fmt: skip
            with Session(engine) as session:
                session.generate("My son, hear the king", max_tokens=60, ignore_eos=True, **options)
                held[name] = session.stats.below_margin
        with Session(eager) as session:
            session.set_speculation(2)
            session.generate("My son, hear the king", max_tokens=60, ignore_eos=True)
            held["eager"] = session.stats.below_margin
        with pytest.raises(ds4.InvalidArgument, match="margin is -1"):
            Engine(*PAIR, margin=-1)
    assert held["engine"] == held["none"] == held["3"] > 0 == held["0"] == held["auto"] == held["eager"]
