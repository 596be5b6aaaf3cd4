"""The C API for tests: cffi over build/hooks.so, declarations from ds4.h itself."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import cffi
import numpy as np
from conftest import ROOT, make

KV = {"f32": 0, "f16": 1, "fp8": 2}


def declarations() -> str:
    """The part of ds4.h between its marks, without the preprocessor lines that cffi does not read."""
    text = (ROOT / "ds4.h").read_text()
    body = text.split("/* binding: begin */")[1].split("/* binding: end */")[0]
    body = re.sub(r'#define \w+ ".*"', "", body)
    return body.replace("bool ", "_Bool ")


ffi = cffi.FFI()
ffi.cdef(declarations())
ffi.cdef(
    """
    typedef struct hook_script hook_script;
    hook_script *hook_script_new(ds4_session *s, const int *text, int n, int wrong);
    void hook_script_free(ds4_session *s, hook_script *script);
    void hook_raw_row(const ds4_session *s, int layer, int position, float *out);
    void hook_stretch(ds4_session *s, int position);
    typedef struct hook_pace hook_pace;
    hook_pace *hook_pace_new(void);
    void hook_pace_free(hook_pace *h);
    void hook_pace_cost(hook_pace *h, int slot, double ms);
    double hook_pace_pass(const hook_pace *h, int rows);
    int hook_pace_depth(hook_pace *h, int limit);
    int hook_pace_cycle(hook_pace *h, int limit, const float *leads, const int *hits, int *made, int *verified);
    void hook_costs(ds4_session *s, double one, double row, double first, double more);
    typedef struct hook_lookup hook_lookup;
    hook_lookup *hook_lookup_new(int longest, int ctx);
    void hook_lookup_free(hook_lookup *l);
    void hook_lookup_add(hook_lookup *l, const int *tokens, int n);
    void hook_lookup_drop(hook_lookup *l, int n);
    int hook_lookup_find(const hook_lookup *l, const int *tokens, int last, int k, int *out);
    double hook_cpu_quota(const char *groups, const char *root);
    """
)
FAULTS = os.environ.get("DS4_TEST_FAULTS") == "1"
if FAULTS:
    ffi.cdef("void hook_fault_set(long n); long hook_fault_left(void); long hook_blocks(void); long hook_bytes(void);")
lib: Any = ffi.dlopen(str(make("build/hooks_faults.so" if FAULTS else "build/hooks.so")))


SCHEMES = {"coupled": 0, "rejection": 1}


def gen_of(**options: Any) -> tuple[Any, list[Any]]:
    """A ds4_gen from its fields, and what must live as long. bias: dict; mask: a function (tokens, allowed uint8 [V])."""
    gen, keep = ffi.new("ds4_gen *"), []
    gen.top_p = 1
    for name, value in options.items():
        if name == "bias":
            keep.append(ffi.new("ds4_bias[]", [{"token": t, "bias": b} for t, b in value.items()]))
            gen.bias, gen.n_bias = keep[-1], len(value)
        elif name == "scheme":
            gen.scheme = SCHEMES.get(value, value)
        elif name != "mask":
            setattr(gen, name, value)
    return gen, keep


SHARE = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
"""Threads unless told otherwise: workers that test side by side share the processors, or their threads would wait for each other."""


class Failed(Exception):
    """A call failed; the text is ds4_last_error()."""


def check(result: Any) -> Any:
    if result == ffi.NULL or (isinstance(result, int) and result < 0):
        raise Failed(ffi.string(lib.ds4_last_error()).decode())
    return result


class Engine:
    """An engine; options are the fields of ds4_cfg (paths as Path or str, kv_type by name)."""

    def __init__(self, model: Path | str, mtp: Path | str | None = None, **options: Any) -> None:
        cfg = ffi.new("ds4_cfg *", lib.ds4_default_cfg())
        self.keep = [ffi.new("char[]", str(p).encode()) for p in (model, mtp or "", options.get("isa") or "auto")]
        cfg.model_path, cfg.isa = self.keep[0], self.keep[2]
        if mtp:
            cfg.mtp_path = self.keep[1]
        self.lines: list[str] = []
        self.log = ffi.callback("void(void *, const char *)", lambda _, text: self.lines.append(ffi.string(text).decode()))
        cfg.log = self.log
        cfg.threads = SHARE
        for name, value in options.items():
            if name != "isa":
                setattr(cfg, name, KV[value] if name == "kv_type" else value)
        self.p = check(lib.ds4_engine_new(cfg))
        self.vocab = int(lib.ds4_engine_info(self.p).vocab)

    @property
    def info(self) -> Any:
        return lib.ds4_engine_info(self.p)

    def session(self) -> Session:
        return Session(self, check(lib.ds4_engine_open_session(self.p)))

    def prompt(self, text: str) -> list[int]:
        raw = text.encode()
        out = ffi.new("int[]", len(raw) + 1)
        return list(out[0 : check(lib.ds4_prompt(self.p, raw, len(raw), False, out, len(out)))])

    def close(self) -> None:
        lib.ds4_engine_free(self.p)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session:
    """A session of an engine. Its engine closes it at the latest."""

    def __init__(self, engine: Engine, p: Any) -> None:
        self.engine, self.p = engine, p
        self.scripts: list[Any] = []
        self.gen: list[Any] = []
        self.room = ffi.new("int[]", 1 << 15)

    def close(self) -> None:
        for script in self.scripts:
            lib.hook_script_free(self.p, script)
        self.scripts = []
        lib.ds4_session_free(self.p)

    def eval(self, tokens: Any) -> None:
        ids = np.ascontiguousarray(tokens, np.int32)
        check(lib.ds4_session_eval(self.p, ffi.from_buffer("int[]", ids), len(ids)))

    def eval_logits(self, tokens: Any) -> np.ndarray:
        """float32 [n, V]: logits after each token."""
        ids = np.ascontiguousarray(tokens, np.int32)
        out = np.empty((len(ids), self.engine.vocab), np.float32)
        check(lib.ds4_session_eval_logits(self.p, ffi.from_buffer("int[]", ids), len(ids), ffi.from_buffer("float[]", out)))
        return out

    def head_logits(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, V]: the head's logits of rows start to stop - 1."""
        out = np.empty((stop - start, self.engine.vocab), np.float32)
        check(lib.ds4_session_head_logits(self.p, start, stop, ffi.from_buffer("float[]", out)))
        return out

    def logits(self) -> np.ndarray:
        """float32 [V], a copy."""
        p = check(lib.ds4_session_logits(self.p))
        out: np.ndarray = np.frombuffer(ffi.buffer(p, 4 * self.engine.vocab), np.float32).copy()
        return out

    def argmax(self) -> int:
        return int(check(lib.ds4_session_argmax(self.p)))

    def step(self, token: int, most: int) -> list[int]:
        n = check(lib.ds4_session_step(self.p, token, most, self.room))
        return list(self.room[0:n])

    def draft(self, token: int, k: int) -> np.ndarray:
        """float32 [rows, V]: the head's logits for the k tokens after `token`."""
        out = np.empty((k, self.engine.vocab), np.float32)
        return out[: check(lib.ds4_session_draft(self.p, token, k, ffi.from_buffer("float[]", out)))]

    def verify(self, token: int, drafts: list[int], most: int) -> list[int]:
        n = check(lib.ds4_session_verify(self.p, token, drafts, len(drafts), most, self.room))
        return list(self.room[0:n])

    def verify_logits(self, token: int, logits: np.ndarray, most: int) -> list[int]:
        rows = np.ascontiguousarray(logits, np.float32)
        pointer = ffi.from_buffer("float[]", rows)
        n = check(lib.ds4_session_verify_logits(self.p, token, pointer, len(rows), most, self.room))
        return list(self.room[0:n])

    def generate(self, n: int) -> list[int]:
        """n greedy tokens by steps, evaluated all of them (fewer at a stop token or the end of the context)."""
        out: list[int] = []
        while len(out) < n and self.position < lib.ds4_session_ctx(self.p):
            token = self.argmax()
            if lib.ds4_session_is_stop(self.p, token):
                break
            out += self.step(token, n - len(out))
        return out

    def set_mtp(self, draft: int, margin: float) -> None:
        check(lib.ds4_session_set_mtp(self.p, draft, margin))

    def set_lookup(self, longest: int) -> None:
        check(lib.ds4_session_set_lookup(self.p, longest))

    def costs(self, one: float, row: float, first: float = 0.1, more: float = 0.1) -> None:
        """What passes and head steps cost, for `auto`, until they are measured."""
        lib.hook_costs(self.p, one, row, first, more)

    def set_gen(self, **options: Any) -> None:
        gen, keep = gen_of(**options)
        mask = options.get("mask")
        if mask:

            def call(_: Any, tokens: Any, n: int, allowed: Any) -> int:
                try:
                    mask(list(tokens[0:n]), np.frombuffer(ffi.buffer(allowed, self.engine.vocab), np.uint8))
                except ValueError:
                    return -1
                return 0

            keep.append(ffi.callback("int(void *, const int *, int, uint8_t *)", call))
            gen.mask = keep[-1]
        check(lib.ds4_session_set_gen(self.p, gen))
        self.gen = keep

    def next(self) -> int:
        return int(check(lib.ds4_session_next(self.p)))

    def sample(self, **options: Any) -> int:
        gen, keep = gen_of(**options)
        token = int(check(lib.ds4_session_sample(self.p, gen)))
        del keep
        return token

    def set_stops(self, tokens: list[int], ignore_eos: bool = False) -> None:
        check(lib.ds4_session_set_stops(self.p, tokens, len(tokens), ignore_eos))

    def script(self, text: Any, wrong: int = -1) -> None:
        """Draft from a given text from now on, the wrong-th draft of each cycle spoiled."""
        ids = np.ascontiguousarray(text, np.int32)
        self.scripts.append(lib.hook_script_new(self.p, ffi.from_buffer("int[]", ids), len(ids), wrong))

    def keep(self, n: int) -> None:
        check(lib.ds4_session_keep(self.p, n))

    def rewind(self, position: int) -> None:
        check(lib.ds4_session_rewind(self.p, position))

    def fork(self) -> Session:
        return Session(self.engine, check(lib.ds4_session_fork(self.p)))

    def save(self) -> bytes:
        n = int(lib.ds4_session_save_size(self.p))
        buf = bytearray(n)
        check(int(lib.ds4_session_save_mem(self.p, ffi.from_buffer(buf), n)) or -1)
        return bytes(buf)

    def load(self, snapshot: bytes) -> None:
        check(lib.ds4_session_load_mem(self.p, ffi.from_buffer(snapshot), len(snapshot)))

    def raw_row(self, layer: int, position: int, width: int) -> np.ndarray:
        """float32 [width]: the kv row that the layer keeps of a position."""
        out = np.empty(width, np.float32)
        lib.hook_raw_row(self.p, layer, position, ffi.from_buffer("float[]", out))
        return out

    def stretch(self, position: int) -> None:
        """On to a position without reading: the compressed rows there are those that it has, over and over."""
        assert 0 < self.position <= position <= lib.ds4_session_ctx(self.p)
        lib.hook_stretch(self.p, position)

    @property
    def position(self) -> int:
        return int(lib.ds4_session_position(self.p))

    @property
    def tokens(self) -> list[int]:
        return list(lib.ds4_session_tokens(self.p)[0 : self.position]) if self.position else []

    @property
    def stats(self) -> Any:
        return lib.ds4_session_stats(self.p)


def batch_step(engine: Engine, asked: list[tuple[Session, list[int], int]]) -> list[Any]:
    """One ds4_batch_step of (session, tokens, max); for each what was committed, or its Failed. Raises if the call is refused."""
    items = ffi.new("ds4_batch_item[]", len(asked) + 1)
    keep = [(ffi.new("int[]", tokens), ffi.new("int[]", max(most, 1))) for _, tokens, most in asked]
    for item, (s, tokens, most), (ids, out) in zip(items, asked, keep, strict=False):
        item.session, item.tokens, item.n_tokens, item.max, item.out = s.p, ids, len(tokens), most, out
    check(lib.ds4_batch_step(engine.p, items, len(asked)))
    return [
        Failed(ffi.string(item.error).decode()) if item.n < 0 else list(out[0 : item.n]) if most else tokens[: item.n]
        for item, (_, tokens, most), (_, out) in zip(items, asked, keep, strict=False)
    ]


def bits(a: np.ndarray) -> np.ndarray:
    """float32 as its bits, for exact comparison."""
    return np.ascontiguousarray(a, np.float32).view(np.int32)
