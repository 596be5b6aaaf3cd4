"""Engines and sessions: an opened model, and a text of it.

Thin over ds4.h: tokens in, logits out as numpy float32, always a copy of yours. "V" is the vocabulary's size; positions count
tokens from 0. All calls that compute release the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from ds4 import errors, generation, registry
from ds4._ds4 import ffi, lib
from ds4._native import MAX_DRAFT, EngineHandle, Log, Mask, MaskCall, Progress, SessionHandle, check, last_error, owned, text_of
from ds4.generation import (
    AUTO,
    LOOKUP,
    Completion,
    Depth,
    Gen,
    Logprob,
    Options,
    Piece,
    Settings,
    depth_of,
    lookup_of,
    margin_of,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Path = str | os.PathLike[str]
Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
Message = Mapping[str, str | None]
Thinking = Literal["off", "on", "max"] | bool

_KV_TYPES = {"f32": lib.DS4_KV_F32, "f16": lib.DS4_KV_F16, "fp8": lib.DS4_KV_FP8}
_SCHEMES = {"coupled": lib.DS4_COUPLED, "rejection": lib.DS4_REJECTION}
_THINK = {"off": lib.DS4_THINK_OFF, "on": lib.DS4_THINK_ON, "max": lib.DS4_THINK_MAX}
_T = TypeVar("_T")


@dataclass(frozen=True)
class Info:
    """Sizes of an opened engine, as ds4_info."""

    model_path: str
    mtp_path: str
    """The head's file, the model's own for an internal head, "" without one."""
    name: str
    """general.name of the file."""
    isa: str
    """Kernels in use."""
    layers: int
    embd: int
    heads: int
    head_dim: int
    rope_dim: int
    vocab: int
    streams: int
    window: int
    experts: int
    experts_used: int
    expert_ff: int
    hash_layers: int
    context_length: int
    """The model's own."""
    ctx: int
    threads: int
    prefill_chunk: int
    max_rewind: int
    kv_type: str
    has_head: bool
    file_has_head: bool
    base_model: bool
    """The file has no chat template."""
    template_is_v4: bool
    bos: int
    """-1: none."""
    eos: int
    file_bytes: int
    head_file_bytes: int
    weight_bytes: int
    head_weight_bytes: int
    scratch_bytes: int
    """Allocated by the engine for its passes."""
    table_bytes: int
    """And for all else: vocabulary, names, small tensors as float32. The weights are used where the files are mapped."""
    session_bytes: int
    """Allocated by one session; what its context does not reach stays untouched."""
    batch_bytes: int
    """Allocated as batches grow, at most: logits of the rows of one pass. 0 until the first."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the target's file or of the head's."""

    name: str
    type: str
    """"Q8_0", ..."""
    dims: tuple[int, ...]
    """Fastest first, as GGUF has them."""
    bytes: int
    head: bool


@dataclass(frozen=True)
class Stats:
    """Counters of a session since it was opened or `reset_stats`, as ds4_stats. accepted + corrections + bonus = emitted."""

    prompt_tokens: int
    emitted: int
    """Tokens committed by steps."""
    cycles: int
    """Steps."""
    passes: int
    """Target passes, prompt included."""
    head_passes: int
    drafted: tuple[int, ...]
    """By position in the cycle, 16 of them."""
    accepted: tuple[int, ...]
    lookup_drafted: int
    """Of these, from lookups."""
    lookup_accepted: int
    pruned: int
    """Drafts made and not verified: not worth a row."""
    below_margin: int
    """Matches not committed because of the margin."""
    corrections: int
    bonus: int
    prompt_ms: float
    draft_ms: float
    verify_ms: float
    repair_ms: float


@dataclass(frozen=True)
class Work:
    """What an engine has computed, as ds4_work. The difference of two is what was computed between them.

    A pass serves all sessions of a batch, and reads a matrix once however many rows it has.
    """

    passes: int
    """Of the target."""
    rows: int
    """Of these."""
    head_passes: int
    """Of the head: draft steps, and the rows made again before them."""
    head_rows: int
    repaired_rows: int
    logit_rows: int
    """Rows of logits, of target and head."""
    weight_bytes: int
    """Of the matrices multiplied with; of experts those that a row chose, of a shortlist's logits its rows."""
    experts: int
    """Routed experts read: once a layer and pass."""
    kv_rows: int
    """Cached rows that rows attended to, raw and compressed, in all layers."""
    index_rows: int
    """Compressed rows that the indexer scored."""

    def __sub__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


def _plain(value: Any) -> Any:
    """A field of a C struct as Python has it."""
    if not isinstance(value, ffi.CData):
        return value
    return text_of(value) if ffi.typeof(value).kind == "pointer" else tuple(value)


def _from_c(cls: type[_T], struct: Any, **change: Any) -> _T:
    """A dataclass from the struct's fields of the same names."""
    names = [f.name for f in fields(cls) if f.name not in change]  # type: ignore[arg-type]
    return cls(**{name: _plain(getattr(struct, name)) for name in names}, **change)


def _ids(tokens: Tokens | Iterable[int]) -> npt.NDArray[np.int32]:
    """int32 [n], contiguous. Raises TypeError for what holds no integers, and for bytes, which are a text's."""
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        raise TypeError(
            f"token ids: expected a sequence of integers, not {type(tokens).__name__} (a text's ids: Engine.prompt)"
        )
    ids = np.asarray(tokens if isinstance(tokens, (np.ndarray, list, tuple)) else list(tokens))
    if ids.size == 0:
        return np.empty(0, np.int32)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise TypeError(f"token ids: expected a sequence of integers, not {ids.dtype} of shape {ids.shape}")
    if ids.min() < -(2**31) or ids.max() >= 2**31:
        raise errors.InvalidArgument(f"token ids from {ids.min()} to {ids.max()} are outside any vocabulary")
    return np.ascontiguousarray(ids, np.int32)


def utf8(text: str | bytes, what: str) -> bytes:
    """The bytes of a text. Raises InvalidArgument for half of a surrogate pair, which has none."""
    if not isinstance(text, str):
        return bytes(memoryview(text))
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise errors.InvalidArgument(f"{what}: {e.object[e.start]!r} at {e.start} is no character") from None


def c_text(text: str | bytes, what: str) -> bytes:
    """The same of a text that ends at a NUL in C, and so must hold none."""
    data = utf8(text, what)
    if b"\0" in data:
        raise errors.InvalidArgument(f"{what} holds a NUL character")
    return data


def _c_path(path: Path, what: str) -> bytes:
    try:
        return c_text(os.fsencode(path), what)
    except UnicodeEncodeError as e:
        raise errors.InvalidArgument(f"{what}: {e.object[e.start]!r} at {e.start} is no character") from None


def _int_array(ids: npt.NDArray[np.int32]) -> Any:
    return ffi.from_buffer("int[]", ids)


class Engine:
    """An opened model: weights mapped read-only, its head, its threads.

    Args:
        model: target GGUF; any part of a split file will do.
        mtp: head GGUF, either layout; None: no head.
        mtp_internal: use the head inside the target's file.
        speculative_depth: tokens drafted a cycle, 0 to 16, or "auto": what pays, by measured times and acceptance.
        draft_lookup: draft also what followed the last time that up to so many tokens occurred, 0 to 64 (0: off).
        margin: lead in logits that a draft needs to be taken from the batch, 0 to 1000; None: 0 with "auto", 3 with a fixed
            depth. Changes the speed, never the text.
        ctx: most tokens of a session; None: the model's context, at most 32768.
        threads: None: the processors this process may use, by its affinity and its container's quota.
        kv_type: rows of the attention caches, "f32", "f16" or "fp8".
        prefill_chunk: most rows of one pass, 1 to 4096. A call is interrupted between passes.
        max_rewind: how many tokens a session can go back.
        shortlist: the head drafts the vocabulary's first so many ids and those of the text; 0: any; None: the default (32768).
        mlock: lock the mapped weights in memory.
        raw_vocab_ok: accept a file without a usable tokenizer: token ids only.
        isa: kernels, "auto", "scalar", "avx2", "avxvnni", "avx512", "amx" or "neon"; all give the same bits.
        temperature, top_k, top_p, min_p, seed: how a token is drawn when a call does not say (greedy).
        conf_log: a line to `log` for each draft: position, ids, leads, margin, verdict.
        log: called with messages worth showing.
        progress: called with what is being done ("load", "prompt"), how far it is, and of how much.

    Callbacks run in the thread that made the call, must not call ds4 (but `Session.cancel`), and may raise: the call then ends
    after the pass in work and raises it.

    Engines are context managers; closing one closes its sessions and ends their running calls. Without `close` it is closed when
    nothing refers to it or to its sessions. Threads may share an engine; different sessions compute by turns. An engine does
    not survive a fork.

    Raises LoadError, InvalidArgument or OutOfMemory, with file, key, tensor or option.
    """

    def __init__(
        self,
        model: Path,
        mtp: Path | None = None,
        *,
        mtp_internal: bool = False,
        speculative_depth: Depth = "auto",
        draft_lookup: int = 0,
        margin: float | None = None,
        ctx: int | None = None,
        threads: int | None = None,
        kv_type: str = "f16",
        prefill_chunk: int = 256,
        max_rewind: int = 64,
        shortlist: int | None = None,
        mlock: bool = False,
        raw_vocab_ok: bool = False,
        isa: str = "auto",
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        conf_log: bool = False,
        log: Log | None = None,
        progress: Progress | None = None,
    ) -> None:
        if kv_type not in _KV_TYPES:
            raise errors.InvalidArgument(f"kv_type is {kv_type!r}; expected one of {', '.join(map(repr, _KV_TYPES))}")
        cfg = ffi.new("ds4_cfg *", lib.ds4_default_cfg())
        paths = _c_path(model, "model"), _c_path(mtp or "", "mtp"), c_text(isa, "isa")
        texts = [ffi.new("char[]", t) for t in paths]
        cfg.model_path, cfg.isa = texts[0], texts[2]
        if mtp:
            cfg.mtp_path = texts[1]
        cfg.mtp_draft, cfg.draft_lookup = depth_of(speculative_depth), lookup_of(draft_lookup)
        if shortlist is not None:
            cfg.mtp_shortlist = shortlist
        cfg.mtp_internal, cfg.mtp_margin, cfg.kv_type = mtp_internal, margin_of(margin), _KV_TYPES[kv_type]
        cfg.ctx, cfg.threads, cfg.prefill_chunk, cfg.max_rewind = ctx or 0, threads or 0, prefill_chunk, max_rewind
        cfg.mlock, cfg.raw_vocab_ok, cfg.conf_log = mlock, raw_vocab_ok, conf_log
        gen = Gen(temperature, top_k, top_p, min_p, seed)
        texts.append(_fill_gen(cfg.gen, gen, 0))
        self._handle = EngineHandle(cfg, log, progress)
        owned(self, self._handle)
        info = self._handle.call(lib.ds4_engine_info)
        names = {v: k for k, v in _KV_TYPES.items()}
        self.info: Info = _from_c(Info, info, kv_type=names[info.kv_type])
        """Sizes; stays readable after `close`."""
        depth = int(cfg.mtp_draft) if self.info.has_head or draft_lookup else 0
        self._settings = Settings(depth, margin_of(margin), gen, lookup=draft_lookup)

    # ---- life ----

    def close(self) -> None:
        """Close the engine and its sessions; their running calls end after the pass in work. A second time does nothing."""
        self._handle.close()

    @property
    def closed(self) -> bool:
        return self._handle.pointer is None

    def __enter__(self) -> Self:
        self._handle.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        head = f", mtp={self.info.mtp_path!r}" if self.info.has_head else ""
        return f"<ds4.Engine {self.info.model_path!r}{head}{', closed' if self.closed else ''}>"

    @property
    def work(self) -> Work:
        """What the engine has computed since it was opened, for whatever sessions."""
        return _from_c(Work, self._handle.call(lib.ds4_engine_work))

    # ---- the file ----

    def tensors(self) -> list[TensorInfo]:
        """Tensors of the target's file, then of the head's."""
        out: list[TensorInfo] = []
        room = ffi.new("ds4_tensor_info *")
        while self._handle.call(lib.ds4_engine_tensor, len(out), room) == 0:
            dims = tuple(room.dims[0 : room.n_dims])
            out.append(TensorInfo(text_of(room.name), text_of(room.type), dims, room.bytes, bool(room.head)))
        return out

    def meta(self, key: str) -> str | None:
        """The value of a metadata key of the target's file as text (arrays of numbers with spaces), None if it has none."""
        room = ffi.new("char[]", 1 << 20)
        if self._handle.call(lib.ds4_engine_meta, c_text(key, "key"), room, len(room)):
            return None
        return text_of(room)

    # ---- tokens and text ----

    def _list(self, function: Any, *args: Any, guess: int) -> list[int]:
        """The ids of a call that says how many there are."""
        room, cap = ffi.new("int[]", guess), guess
        n = check(self._handle.call(function, *args, room, cap))
        if n > cap:
            room, cap = ffi.new("int[]", n), n
            n = check(self._handle.call(function, *args, room, cap))
        return list(room[0:n])

    def tokenize(self, text: str | bytes, *, control: bool = False) -> list[int]:
        """Ids of a text, without BOS. `control`: control tokens in the text are parsed (never do that with a user's text).

        Bytes need not be UTF-8: `detokenize_bytes` gives them back.
        """
        data = utf8(text, "text")
        return self._list(lib.ds4_tokenize, data, len(data), control, guess=len(data) + 1)

    def prompt(self, text: str | bytes, *, control: bool = False) -> list[int]:
        """The same with one BOS before it (none if the vocabulary has none, or the text is parsed and begins with one)."""
        data = utf8(text, "text")
        return self._list(lib.ds4_prompt, data, len(data), control, guess=len(data) + 2)

    def chat_template(self, messages: Iterable[Message], *, thinking: Thinking = "off") -> list[int]:
        """Ids of a conversation as DeepSeek-V4's published template renders it, ready to be continued by the assistant.

        A message is a mapping: "role" ("system", "user", "developer", "assistant", "tool"), "content", and of an assistant's
        turn "reasoning" if it had one. Their texts never become control tokens. thinking: "off" (False), "on" (True) or "max".
        A base model takes the texts after one BOS. Raises InvalidArgument for what is no such message.
        """
        think = {False: "off", True: "on"}.get(thinking, thinking) if isinstance(thinking, bool) else thinking
        if think not in _THINK:
            raise errors.InvalidArgument(f"thinking is {thinking!r}; expected 'off', 'on' or 'max'")
        turns = list(messages)
        keep: list[Any] = []

        def text(value: str | None) -> Any:
            if value is None:
                return ffi.NULL
            keep.append(ffi.new("char[]", c_text(value, "a chat message")))
            return keep[-1]

        room = ffi.new("ds4_message[]", len(turns) + 1)
        for i, turn in enumerate(turns):
            texts = turn if isinstance(turn, Mapping) else {}
            wrong = set(texts) - {"role", "content", "reasoning"} or not isinstance(texts.get("reasoning", ""), str | None)
            if wrong or not isinstance(texts.get("role"), str) or not isinstance(texts.get("content"), str):
                raise errors.InvalidArgument(
                    f"message {i}: expected a mapping with 'role' and 'content' (and 'reasoning'), each a text, not {turn!r}"
                )
            room[i].role, room[i].content = text(turn["role"]), text(turn["content"])
            room[i].reasoning = text(turn.get("reasoning"))
        size = sum(len(k) for k in keep) + 64 * len(turns) + 256
        return self._list(lib.ds4_chat, room, len(turns), _THINK[think], guess=size)

    def piece(self, token: int) -> bytes:
        """The bytes of a token, which may be part of a UTF-8 character; b"" for an id without text.

        Raises InvalidArgument for an id outside the vocabulary.
        """
        if not 0 <= token < self.info.vocab:
            raise errors.InvalidArgument(f"token {token} is outside the vocabulary (0 to {self.info.vocab - 1})")
        n = ffi.new("size_t *")
        pointer = self._handle.call(lib.ds4_token_piece, token, n)
        return b"" if pointer == ffi.NULL else bytes(ffi.buffer(pointer, n[0]))

    def detokenize_bytes(self, tokens: Tokens) -> bytes:
        """The bytes of tokens: of `tokenize(data)`, data. Raises InvalidArgument for an id outside the vocabulary."""
        return b"".join(self.piece(t) for t in _ids(tokens).tolist())

    def detokenize(self, tokens: Tokens, errors: str = "replace") -> str:
        """The text of tokens, `errors` as in bytes.decode."""
        return self.detokenize_bytes(tokens).decode("utf-8", errors)

    def token_id(self, text: str) -> int | None:
        """The id of the token that the file writes so (control tokens are their own text), None if there is none."""
        token = int(self._handle.call(lib.ds4_token_id, c_text(text, "text")))
        return None if token < 0 else token

    def is_eos(self, token: int) -> bool:
        return token >= 0 and token == self.info.eos

    # ---- generation ----

    def session(self, *, ctx: int | None = None) -> Session:
        """A new session: `Session(engine, ctx=ctx)`."""
        return Session(self, ctx=ctx)

    def generate(self, prompt: str | Tokens, **options: Unpack[Options]) -> Completion:
        """Text after a prompt, in a session of its own. A text gets a BOS; token ids are taken as they are.

        See `Options`. Raises ContextFull if the prompt does not fit, and what evaluation raises.
        """
        return generation.joined(self.stream(prompt, **options))

    def stream(self, prompt: str | Tokens, **options: Unpack[Options]) -> Iterator[Piece]:
        """The same, piece by piece. Closing the iterator frees all it used; options are checked at once."""
        ids = prompt_ids(self, prompt)
        session = Session(self)
        return _alone(session, ids, session._request(options))

    def chat(self, messages: Iterable[Message], *, thinking: Thinking = "off", **options: Unpack[Options]) -> Completion:
        """The assistant's answer to `chat_template(messages)`. What it thought is in the answer's `reasoning`."""
        ids = self.chat_template(messages, thinking=thinking)
        return split_reasoning(self, self.generate(ids, **options), thinking)

    async def agenerate(self, prompt: str | Tokens, **options: Unpack[Options]) -> Completion:
        """`generate` for asyncio: passes run in a worker thread. Cancelling the task ends it after the pass in work."""
        return generation.joined(iter([piece async for piece in self.astream(prompt, **options)]))

    async def astream(self, prompt: str | Tokens, **options: Unpack[Options]) -> AsyncIterator[Piece]:
        """`stream` for asyncio."""
        ids = prompt_ids(self, prompt)
        session = Session(self)
        try:
            async for piece in session._astream(ids, session._request(options)):
                yield piece
        finally:
            session.close()  # which waits for a pass in work, should the event loop end without

    async def achat(self, messages: Iterable[Message], *, thinking: Thinking = "off", **options: Unpack[Options]) -> Completion:
        """`chat` for asyncio."""
        ids = self.chat_template(messages, thinking=thinking)
        return split_reasoning(self, await self.agenerate(ids, **options), thinking)


def _fill_gen(target: Any, gen: Gen, vocab: int) -> tuple[Any, MaskCall | None]:
    """Returns what the struct refers to: the bias list, and the mask, which C does not copy."""
    if not 0 <= gen.seed < 2**64:
        raise errors.InvalidArgument(f"seed is {gen.seed}; expected 0 to 2**64 - 1")
    if gen.scheme not in _SCHEMES:
        raise errors.InvalidArgument(f"scheme is {gen.scheme!r}; expected one of {', '.join(map(repr, _SCHEMES))}")
    if gen.mask is not None and not callable(gen.mask):
        raise errors.InvalidArgument(f"mask is {gen.mask!r}; expected a function or None")
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty"):
        try:
            setattr(target, name, getattr(gen, name))
        except TypeError:
            raise TypeError(f"{name} is {getattr(gen, name)!r}; expected a number") from None
    target.penalty_from, target.scheme = gen.penalty_from or 0, _SCHEMES[gen.scheme]
    bias = ffi.new("ds4_bias[]", list(gen.logit_bias))
    target.bias, target.n_bias = bias, len(bias)
    mask = MaskCall(gen.mask, vocab) if gen.mask is not None else None
    if mask:
        target.mask, target.mask_ctx = lib.ds4_py_mask, mask.handle
    return bias, mask


def prompt_ids(engine: Engine, prompt: str | Tokens) -> npt.NDArray[np.int32]:
    """int32 [n] of a prompt: a text gets a BOS."""
    return _ids(engine.prompt(prompt) if isinstance(prompt, str) else prompt)


def _alone(session: Session, ids: npt.NDArray[np.int32], request: generation.Request) -> Iterator[Piece]:
    """A stream in a session of its own. One that is never begun leaves it to the finaliser."""
    try:
        session.eval(ids)
        yield from generation.pieces(session, request)
    finally:
        session._handle.discard()


def split_reasoning(engine: Engine, text: Completion, thinking: Thinking) -> Completion:
    """A chat's answer with what it was thought over with apart: the mark between them is a token."""
    if thinking in (False, "off"):
        return text
    mark = engine.token_id("</think>")
    thought, answer = text.text, ""
    if mark in text.tokens:
        thought = engine.detokenize(text.tokens[: text.tokens.index(mark)])
        answer = text.text[len(thought) + len("</think>") :]
    return Completion(answer, text.tokens, text.logprobs, text.finish_reason, thought)


class Session:
    """One text of an engine: its tokens, caches and logits.

    Args:
        engine: kept open as long as the session is referred to (unless it is closed).
        ctx: most tokens; None: the engine's.

    A context manager. One thread uses it at a time (others wait for their turn); `cancel` may come from any. A call that fails
    changes nothing unless it says so.
    """

    def __init__(self, engine: Engine, *, ctx: int | None = None) -> None:
        call = engine._handle.call
        pointer = call(lib.ds4_engine_open_session) if ctx is None else call(lib.ds4_engine_open_session_ctx, ctx)
        self._start(engine, engine._handle.adopt(check(pointer)), engine._settings)

    def _start(self, engine: Engine, handle: SessionHandle, settings: Settings) -> None:
        self._handle = handle
        owned(self, handle)
        self.engine = engine
        """The engine it belongs to."""
        self.ctx = int(handle.call(lib.ds4_session_ctx))
        """Most tokens it can hold."""
        self._settings = settings
        self._used: Settings | None = None
        self._gen: Gen | None = None
        self._mask: MaskCall | None = None
        self._proposer: registry.Proposer | None = None
        self._proposer_of = ""
        self._drafters: tuple[bool, int] | None = None
        self._room = ffi.new("int[]", lib.DS4_MAX_DRAFT + 1)

    # ---- life ----

    def close(self) -> None:
        """Free the session; a call in another thread ends after the pass in work. A second time does nothing."""
        self._handle.close()

    @property
    def closed(self) -> bool:
        return self._handle.pointer is None

    def __enter__(self) -> Self:
        self._handle.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.position} of {self.ctx} tokens"
        return f"<ds4.Session of {self.engine.info.model_path!r}, {state}>"

    def fork(self) -> Session:
        """An independent copy, settings included."""
        handle = self.engine._handle.adopt(check(self._handle.call(lib.ds4_session_fork)))
        copy = Session.__new__(Session)
        copy._start(self.engine, handle, self._settings)
        copy._mask, copy._gen = self._mask, self._gen
        return copy

    # ---- tokens in, logits out ----

    @property
    def position(self) -> int:
        """How many tokens are committed."""
        return int(self._handle.call(lib.ds4_session_position))

    @property
    def tokens(self) -> list[int]:
        """The committed tokens, a copy."""
        with self._handle.lock:
            n = self.position
            return list(self._handle.call(lib.ds4_session_tokens)[0:n]) if n else []

    def eval(self, tokens: Tokens) -> None:
        """Evaluate tokens at the session's position, in passes of at most prefill_chunk rows.

        Raises ContextFull (nothing evaluated); Cancelled, NonFinite, KeyboardInterrupt or what a callback raised: the rows of
        earlier passes stay committed, so that the rest can be evaluated later.
        """
        ids = _ids(tokens)
        check(self._handle.call(lib.ds4_session_eval, _int_array(ids), len(ids)))

    def eval_logits(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """The same, and the logits after every token: float32 [n, V]."""
        ids = _ids(tokens)
        out = np.empty((min(len(ids), self.ctx), self.engine.info.vocab), np.float32)  # more than ctx are refused
        check(self._handle.call(lib.ds4_session_eval_logits, _int_array(ids), len(ids), ffi.from_buffer("float[]", out)))
        return out

    def head_logits(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """The head's logits of rows start to stop - 1: float32 [stop - start, V].

        Row q comes from the target's streams at q and the token at q + 1: its guess at the token at q + 2. Raises
        InvalidArgument without a head, for rows whose next token is not known, and for rows too far back.
        """
        rows = max(0, min(stop, self.ctx) - max(start, 0))  # others are refused
        out = np.empty((rows, self.engine.info.vocab), np.float32)
        check(self._handle.call(lib.ds4_session_head_logits, start, stop, ffi.from_buffer("float[]", out)))
        return out

    def _copy_logits(self, function: Any, *args: Any) -> npt.NDArray[np.float32]:
        with self._handle.lock:
            pointer = check(self._handle.call(function, *args))
            out = np.empty(self.engine.info.vocab, np.float32)
            ffi.memmove(ffi.from_buffer(out), pointer, out.nbytes)
            return out

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits of the next token: float32 [V], a copy. Raises InvalidArgument at position 0."""
        return self._copy_logits(lib.ds4_session_logits)

    def argmax(self) -> int:
        """The token with the largest logit, the lowest id of equal ones."""
        return int(check(self._handle.call(lib.ds4_session_argmax)))

    def sample(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0) -> int:
        """A token drawn from the logits: argmax of log p + Gumbel noise of (seed, position, id), so that a seed gives one text.

        p is the softmax of logits / temperature, of the top_k, then the top_p, then the min_p most likely.
        """
        gen = ffi.new("ds4_gen *")
        keep = _fill_gen(gen, Gen(temperature, top_k, top_p, min_p, seed), 0)  # noqa: F841 - what gen refers to
        return int(check(self._handle.call(lib.ds4_session_sample, gen)))

    def top_logprobs(self, n: int) -> list[Logprob]:
        """The n most likely next tokens, best first, with natural logarithms of their probabilities."""
        room = ffi.new("ds4_logprob[]", max(1, min(n, self.engine.info.vocab)))
        found = check(self._handle.call(lib.ds4_session_top_logprobs, n, room))
        return [Logprob(room[i].token, room[i].logprob) for i in range(found)]

    def logprob(self, token: int) -> float:
        """The natural logarithm of a token's probability as the next one."""
        value = float(self._handle.call(lib.ds4_session_logprob, token))
        if value != value:
            raise last_error()
        return value

    # ---- steps ----

    def set_speculation(
        self, depth: Depth, margin: float | None = None, *, draft_core: str | None = None, draft_lookup: int | None = None
    ) -> None:
        """Tokens drafted a cycle, 0 (off) to 16 or "auto"; the margin, who drafts, and lookups as in `Options` (None: as it is).
        More than 0 needs a head, or something else that drafts."""
        lookup = None if draft_lookup is None else lookup_of(draft_lookup)
        change: dict[str, Any] = {"margin": None if margin is None else margin_of(margin), "draft_core": draft_core, "lookup": lookup}
        settings = replace(self._settings, depth=depth_of(depth), **{k: v for k, v in change.items() if v is not None})
        self._use(settings)
        self._settings = settings

    def set_sampling(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        *,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = (),
        scheme: str = "coupled",
        penalty_from: int = 0,
        mask: Mask | None = None,
    ) -> None:
        """How `next` and `step` choose tokens from now on, as in `Options`. Penalties count the tokens from position penalty_from on."""
        bias = tuple(sorted(dict(logit_bias).items()))
        gen = Gen(temperature, top_k, top_p, min_p, seed, presence_penalty, frequency_penalty, bias, scheme, penalty_from, mask)
        settings = replace(self._settings, gen=gen)
        self._use(settings)
        self._settings = settings

    def set_stops(self, tokens: Iterable[int], *, ignore_eos: bool = False) -> None:
        """Stop tokens besides EOS: replaces the set. ignore_eos: EOS is a token like any other."""
        settings = replace(self._settings, stop_tokens=tuple(int(t) for t in tokens), ignore_eos=ignore_eos)
        self._use(settings)
        self._settings = settings

    def is_stop(self, token: int) -> bool:
        """Whether a generation ends before this token."""
        s = self._settings
        return token in s.stop_tokens or (self.engine.is_eos(token) and not s.ignore_eos)

    def _use(self, settings: Settings) -> None:
        """Tell C, if it does not know. A generation may have its own settings, and may be left without an end."""
        if self._used == settings:
            return
        with self._handle.lock:
            self._used = None
            stops = _ids(settings.stop_tokens)
            if self._gen != settings.gen:  # to C a mask that is given again may be another
                self._gen = None
                gen = ffi.new("ds4_gen *")
                _bias, mask = _fill_gen(gen, settings.gen, self.engine.info.vocab)
                check(self._handle.call(lib.ds4_session_set_gen, gen))
                self._mask, self._gen = mask, settings.gen
            self._drafts_by(settings)
            check(self._handle.call(lib.ds4_session_set_stops, _int_array(stops), len(stops), settings.ignore_eos))
            self._used = settings

    def _check(self, result: int) -> int:
        """As `check`; what the mask raised comes before that it failed."""
        error = self._mask_error()
        if error:
            raise error
        return int(check(result))

    def _mask_error(self) -> Exception | None:
        """What the mask raised since the last time."""
        if self._mask is None:
            return None
        error, self._mask.error = self._mask.error, None
        return error

    def _drafts_by(self, settings: Settings) -> None:
        """Drafts of this core and depth from now on."""
        core, call = registry.draft_core(settings.draft_core), self._handle.call
        if core.make and settings.depth == AUTO:
            raise errors.InvalidArgument(f"speculative_depth is 'auto'; draft_core {core.name!r} needs a number")
        if core.name != self._proposer_of:
            self._proposer, self._proposer_of = core.make(self) if core.make else None, core.name
        head, lookup, depth = False, 0, 0
        if core.name in ("stock", "lookup"):
            head = core.needs_head and self.engine.info.has_head
            lookup = settings.lookup or (0 if core.needs_head else LOOKUP)
            depth = settings.depth if head or lookup or settings.depth != AUTO else 0
        if (head, lookup) != self._drafters:
            check(call(lib.ds4_session_set_head, head))
            check(call(lib.ds4_session_set_lookup, lookup))
            self._drafters = head, lookup
        check(call(lib.ds4_session_set_mtp, depth, settings.margin))

    def _step(self, token: int, most: int, settings: Settings) -> list[int]:
        with self._handle.lock:
            self._use(settings)
            most = min(most, len(self._room))
            if self._proposer:
                room = min(settings.depth, most - 1, self.ctx - self.position - 1)
                drafts = self._proposer.propose(token, room) if room > 0 else ()
                return self._verify(token, list(drafts)[:room], most)
            n = self._check(self._handle.call(lib.ds4_session_step, token, most, self._room))
            return list(self._room[0:n])

    def _next(self, settings: Settings) -> int:
        with self._handle.lock:
            self._use(settings)
            return int(self._check(self._handle.call(lib.ds4_session_next)))

    def next(self) -> int:
        """The next token as the session chooses it (see `set_sampling`); the same until the session moves."""
        return self._next(self._settings)

    def step(self, token: int, most: int = 1) -> list[int]:
        """One cycle: evaluates `token` together with drafts of what follows; commits it and the drafts that are accepted.

        At most `most` tokens are committed: what was, `token` first. The next token is `next()`. Drafts never cross a stop
        token. Raises ContextFull, Cancelled, NonFinite: nothing is committed.
        """
        return self._step(token, most, self._settings)

    def draft(self, token: int, k: int) -> npt.NDArray[np.float32]:
        """The head's logits for the k tokens after `token`, which stands at the session's position: float32 [k, V].

        Each row follows the one before by the token that the session's sampling draws from it, as a step would draft; ids outside
        the engine's shortlist get -FLT_MAX. Commits nothing. Fewer rows behind a stop token and at the context's end, none at
        position 0. Raises InvalidArgument without a head.
        """
        out = np.empty((max(0, min(k, MAX_DRAFT)), self.engine.info.vocab), np.float32)
        with self._handle.lock:
            self._use(self._settings)
            return out[: self._check(self._handle.call(lib.ds4_session_draft, token, k, ffi.from_buffer("float[]", out)))]

    def verify(self, token: int, drafts: Tokens, most: int = MAX_DRAFT + 1) -> list[int]:
        """`step` with your drafts, at most 16, in place of the session's. Whatever they are, the text is the target's."""
        with self._handle.lock:
            self._use(self._settings)
            return self._verify(token, drafts, min(most, len(self._room)))

    def _verify(self, token: int, drafts: Tokens, most: int) -> list[int]:
        ids = _ids(drafts)
        n = self._check(self._handle.call(lib.ds4_session_verify, token, _int_array(ids), len(ids), most, self._room))
        return list(self._room[0:n])

    def verify_logits(self, token: int, logits: npt.NDArray[np.floating[Any]], most: int = MAX_DRAFT + 1) -> list[int]:
        """`step` with drafts drawn from your logits for the tokens after `token`, [n, V] with n up to 16, as the session's sampling
        says: of `draft`'s rows the drafts that `step` would make. Raises InvalidArgument for NaN and +inf."""
        rows = np.ascontiguousarray(np.maximum(logits, np.finfo(np.float32).min), np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.engine.info.vocab:
            raise errors.InvalidArgument(
                f"logits have shape {rows.shape}; expected [up to {MAX_DRAFT}, {self.engine.info.vocab}]"
            )
        with self._handle.lock:
            self._use(self._settings)
            most = min(most, len(self._room))
            pointer = ffi.from_buffer("float[]", rows)
            call = lib.ds4_session_verify_logits
            return list(self._room[0 : self._check(self._handle.call(call, token, pointer, len(rows), most, self._room))])

    def keep(self, n: int) -> None:
        """Keep the first n tokens of those that the last step committed: all is as if it had committed no more."""
        check(self._handle.call(lib.ds4_session_keep, n))

    def step_logits(self, i: int) -> npt.NDArray[np.float32]:
        """Logits after the i-th token that the last step committed: float32 [V], a copy."""
        return self._copy_logits(lib.ds4_session_step_logits, i)

    def rewind(self, position: int) -> None:
        """Go back to a position: 0, or at most max_rewind below the highest ever committed. Raises RewindError."""
        check(self._handle.call(lib.ds4_session_rewind, position))

    @property
    def rewind_floor(self) -> int:
        """The lowest position above 0 that `rewind` accepts now."""
        return int(self._handle.call(lib.ds4_session_rewind_floor))

    def cancel(self) -> None:
        """Make the running call, and every later one until `clear_cancel`, raise Cancelled after the pass in work.

        Any thread; also from a callback or a signal handler.
        """
        self._handle.cancelling(lib.ds4_session_cancel)

    def clear_cancel(self) -> None:
        """Let the session go on."""
        self._handle.cancelling(lib.ds4_session_clear_cancel)

    @property
    def cancelled(self) -> bool:
        """Whether a cancel waits or ended the last call."""
        return bool(self._handle.cancelling(lib.ds4_session_cancelled))

    # ---- generation ----

    def generate(self, prompt: str | Tokens = (), **options: Unpack[Options]) -> Completion:
        """Evaluate a prompt after what the session holds, then generate. See `Engine.generate`; the session goes on after it.

        A text gets a BOS at position 0 only.
        """
        return generation.joined(self.stream(prompt, **options))

    def stream(self, prompt: str | Tokens = (), **options: Unpack[Options]) -> Iterator[Piece]:
        """The same, piece by piece. The session holds what was yielded (and what is held back, as it may become a stop text)."""
        ids = self._ids_after(prompt)
        return self._stream(ids, self._request(options))

    async def agenerate(self, prompt: str | Tokens = (), **options: Unpack[Options]) -> Completion:
        """`generate` for asyncio: passes run in a worker thread. Cancelling the task ends it after the pass in work."""
        return generation.joined(iter([piece async for piece in self.astream(prompt, **options)]))

    async def astream(self, prompt: str | Tokens = (), **options: Unpack[Options]) -> AsyncIterator[Piece]:
        """`stream` for asyncio."""
        ids = self._ids_after(prompt)
        async for piece in self._astream(ids, self._request(options)):
            yield piece

    def _request(self, options: Options) -> generation.Request:
        """The options, checked by Python and by C, with nothing evaluated yet."""
        request = generation.request_of(options, self._settings)
        self._use(request.settings)
        return request

    def _ids_after(self, prompt: str | Tokens) -> npt.NDArray[np.int32]:
        if not isinstance(prompt, str):
            return _ids(prompt)
        return _ids(self.engine.tokenize(prompt) if self.position else self.engine.prompt(prompt))

    def _stream(self, ids: npt.NDArray[np.int32], request: generation.Request) -> Iterator[Piece]:
        if len(ids):
            self.eval(ids)
        yield from generation.pieces(self, request)

    async def _astream(self, ids: npt.NDArray[np.int32], request: generation.Request) -> AsyncIterator[Piece]:
        """Each piece is made in a worker thread; whoever is cancelled waits for the pass in work."""
        stream = self._stream(ids, request)
        while True:
            work = asyncio.ensure_future(asyncio.to_thread(next, stream, None))
            try:
                piece = await asyncio.shield(work)
            except asyncio.CancelledError:
                before = self.cancelled
                self.cancel()
                while not work.done():  # whatever else is cancelled: the pass has to end before anything is freed
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([work])
                work.exception()  # seen: that it was cancelled
                if not before:
                    self.clear_cancel()
                raise
            if piece is None:
                return
            yield piece

    # ---- statistics, save and load ----

    @property
    def stats(self) -> Stats:
        """Counters since the session was opened or `reset_stats`."""
        return _from_c(Stats, self._handle.call(lib.ds4_session_stats))

    def reset_stats(self) -> None:
        self._handle.call(lib.ds4_session_reset_stats)

    def snapshot(self) -> bytes:
        """The session's state: tokens, caches, and how far it can rewind."""
        with self._handle.lock:
            room = bytearray(self._handle.call(lib.ds4_session_save_size))
            if not self._handle.call(lib.ds4_session_save_mem, ffi.from_buffer(room), len(room)):
                raise last_error()
            return bytes(room)

    def restore(self, snapshot: bytes) -> None:
        """Take the state of a snapshot. Raises SnapshotError, the session as it was: another model, kv type or version, damage,
        or more tokens than its context."""
        check(self._handle.call(lib.ds4_session_load_mem, ffi.from_buffer(snapshot), len(snapshot)))

    def save(self, path: Path) -> None:
        """`snapshot` into a file: written beside it, then renamed over it. Raises SnapshotError."""
        check(self._handle.call(lib.ds4_session_save, _c_path(path, "path")))

    def load(self, path: Path) -> None:
        """`restore` from a file."""
        check(self._handle.call(lib.ds4_session_load, _c_path(path, "path")))
