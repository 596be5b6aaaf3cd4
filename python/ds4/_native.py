"""The border to C: calls, their errors, callbacks, and who owns what.

Every call goes through `Handle.call`, which keeps four promises: one thread at a time in a session; nothing is used after it was
closed; a callback that raises ends the call, and its exception reaches the caller; a failed call is an exception of `ds4.errors`
with the C message. The GIL is released inside (cffi's API mode), so other Python threads run meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4 import errors
from ds4._ds4 import ffi, lib

MAX_DRAFT: int = lib.DS4_MAX_DRAFT
"""The deepest speculation: 16."""

Log = Callable[[str], None]
Progress = Callable[[str, int, int], None]
Mask = Callable[[npt.NDArray[np.int32]], "npt.NDArray[np.bool_] | None"]

_KINDS: dict[int, type[errors.Error]] = {
    lib.DS4_INVALID: errors.InvalidArgument,
    lib.DS4_LOAD_FAILED: errors.LoadError,
    lib.DS4_NO_MEMORY: errors.OutOfMemory,
    lib.DS4_CONTEXT_FULL: errors.ContextFull,
    lib.DS4_CANNOT_REWIND: errors.RewindError,
    lib.DS4_CANCELLED: errors.Cancelled,
    lib.DS4_NON_FINITE: errors.NonFinite,
    lib.DS4_SNAPSHOT_FAILED: errors.SnapshotError,
}


def version() -> str:
    """DS4_VERSION of the engine."""
    return text_of(lib.ds4_version())


def text_of(pointer: Any) -> str:
    """A C string; "" for NULL."""
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode("utf-8", "replace")


def error_of(kind: int, message: str) -> errors.Error:
    """A failure of a ds4_error_kind as an exception."""
    return _KINDS.get(kind, errors.Error)(message)


def last_error() -> errors.Error:
    """This thread's last failure as an exception."""
    return error_of(lib.ds4_last_error_kind(), text_of(lib.ds4_last_error()))


def check(result: Any) -> Any:
    """The result of a call that answers a negative number or NULL when it fails. Raises what failed."""
    if result == ffi.NULL if isinstance(result, ffi.CData) else result < 0:
        raise last_error()
    return result


# ---- callbacks ----


class _Call:
    """A call that is running in this thread: whom its callbacks go to, and what they raised."""

    __slots__ = ("cancelled", "engine", "error", "log", "progress", "session")

    def __init__(self, engine: EngineHandle | None, session: Any, log: Log | None, progress: Progress | None) -> None:
        self.engine, self.session, self.log, self.progress = engine, session, log, progress
        self.error: BaseException | None = None
        self.cancelled = False

    def failed(self, error: BaseException) -> None:
        """Keep what a callback raised, and end the session's call after the pass in work."""
        self.error = self.error or error
        if self.session is not None and not lib.ds4_session_cancelled(self.session):
            self.cancelled = True
            lib.ds4_session_cancel(self.session)


class _Running(threading.local):
    call: _Call | None = None


_running = _Running()


def _callback_failed(_kind: Any, error: BaseException, _traceback: Any) -> None:
    """Also for KeyboardInterrupt, which Python raises in whatever Python code runs next: here, in the middle of a call."""
    if _running.call is not None:
        _running.call.failed(error)


@ffi.def_extern(onerror=_callback_failed)  # type: ignore[untyped-decorator]
def ds4_py_log(_ctx: Any, message: Any) -> None:
    call = _running.call
    if call is not None and call.log is not None and call.error is None:
        call.log(text_of(message))


@ffi.def_extern(onerror=_callback_failed)  # type: ignore[untyped-decorator]
def ds4_py_progress(_ctx: Any, what: Any, done: int, total: int) -> None:
    call = _running.call
    if call is not None and call.progress is not None and call.error is None:
        call.progress(text_of(what), done, total)


class MaskCall:
    """A mask as C sees it. What it raises is kept here, so that the call that fails for it can raise it."""

    def __init__(self, mask: Mask, vocab: int) -> None:
        self.mask, self.vocab = mask, vocab
        self.error: Exception | None = None
        self.handle = ffi.new_handle(self)

    def apply(self, tokens: Any, n: int, allowed: Any) -> int:
        try:
            text = np.frombuffer(ffi.buffer(tokens, 4 * n), np.int32).copy() if n else np.empty(0, np.int32)
            keep = self.mask(text)
            if keep is not None:
                keep = np.asarray(keep)
                if keep.dtype != np.bool_ or keep.shape != (self.vocab,):
                    raise TypeError(f"mask: expected bool [{self.vocab}] or None, not {keep.dtype} {list(keep.shape)}")
                ffi.buffer(allowed, self.vocab)[:] = keep.tobytes()
        except Exception as e:
            self.error = e
            return -1
        return 0


@ffi.def_extern(error=-1, onerror=_callback_failed)  # type: ignore[untyped-decorator]
def ds4_py_mask(ctx: Any, tokens: Any, n: int, allowed: Any) -> int:
    mask: MaskCall = ffi.from_handle(ctx)
    return mask.apply(tokens, n, allowed)


def _run(call: _Call, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`. Raises what its callbacks raised."""
    if _running.call is not None:
        raise errors.InvalidArgument("a callback (log, progress, mask) must not call ds4")
    try:
        _running.call = call
        result = function(*args)
    finally:
        _running.call = None
        if call.cancelled:
            lib.ds4_session_clear_cancel(call.session)
    if call.error is not None:
        raise call.error
    return result


# ---- handles ----

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class EngineHandle:
    """A ds4_engine and its open sessions. It never refers to the object that owns it.

    Locks: a session's calls hold the session's lock, the engine's own calls the engine's. A session's call may ask the engine, as a
    drafter does; so who holds the engine's lock waits for no session's. A finaliser may run anywhere, so it waits for none.
    """

    def __init__(self, cfg: Any, log: Log | None, progress: Progress | None) -> None:
        self.log, self.progress, self.forks = log, progress, _forks
        self.lock = threading.RLock()
        self.sessions: dict[int, SessionHandle] = {}
        self.unfreed: list[Any] = []
        self.pointer = None
        self.closing = False
        cfg.log, cfg.progress = lib.ds4_py_log, lib.ds4_py_progress
        pointer = check(_run(_Call(self, None, log, progress), lib.ds4_engine_new, cfg))
        self.pointer = pointer

    def check_open(self) -> None:
        if self.pointer is None:
            raise errors.Closed("the engine is closed")
        if self.forks != _forks:
            raise errors.Closed("the engine was opened before a fork, which its threads do not survive; open it in the child")

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(engine, *args)`."""
        self.check_open()
        with self.lock:
            self.check_open()
            return _run(_Call(self, None, self.log, self.progress), function, self.pointer, *args)

    def call_together(self, sessions: list[SessionHandle], function: Callable[..., Any], *args: Any) -> Any:
        """`function(engine, *args)` of a function that moves these sessions."""
        with contextlib.ExitStack() as stack:
            for session in sorted(sessions, key=id):  # one order for all
                stack.enter_context(session.lock)
            for session in sessions:
                session.check_open()
            self.check_open()
            return _run(_Call(self, None, self.log, self.progress), function, self.pointer, *args)

    def adopt(self, pointer: Any) -> SessionHandle:
        """The handle of a session that was just opened."""
        self.free_dead()
        with self.lock:
            self.check_open()
            if self.closing:
                raise errors.Closed("the engine is closed")
            handle = SessionHandle(self, pointer)
            self.sessions[id(handle)] = handle
            return handle

    def free_dead(self) -> None:
        """Free sessions that nothing refers to any more, unless this cannot be done here and now; then a later call does it."""
        if not self.unfreed or _inside(self) or not self.lock.acquire(blocking=False):
            return
        try:
            while self.pointer is not None:
                lib.ds4_session_free(self.unfreed.pop())
        except IndexError:
            pass
        finally:
            self.lock.release()

    def close(self) -> None:
        """End the sessions' running calls after the pass in work, then free all. A second time does nothing."""
        if _inside(self):
            raise errors.InvalidArgument("a callback (log, progress, mask) must not close its engine")
        if self.pointer is None or self.forks != _forks:
            return
        with self.lock:
            self.closing = True
            sessions = list(self.sessions.values())
        for session in sessions:
            session.cancelling(lib.ds4_session_cancel)
        for session in sessions:
            with session.lock:
                session.take()
        with self.lock:
            self.sessions.clear()
            pointer, self.pointer = self.pointer, None
            if pointer is not None:  # else another thread was here first
                lib.ds4_engine_free(pointer)

    discard = close


class SessionHandle:
    """A ds4_session. It keeps its engine's handle."""

    def __init__(self, engine: EngineHandle, pointer: Any) -> None:
        self.engine, self.pointer = engine, pointer
        self.lock = threading.RLock()  # held by a running call
        self.alive = threading.RLock()  # held for a moment, so that a cancel does not meet a freed session

    def check_open(self) -> None:
        if self.pointer is None:
            raise errors.Closed(
                "the session is closed" if self.engine.pointer is not None else "the session's engine is closed"
            )
        self.engine.check_open()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(session, *args)`; a call from another thread waits for its turn."""
        self.check_open()
        self.engine.free_dead()
        with self.lock:
            self.check_open()
            engine = self.engine
            return _run(_Call(engine, self.pointer, engine.log, engine.progress), function, self.pointer, *args)

    def cancelling(self, function: Callable[[Any], Any]) -> Any:
        """`function(session)` of a function that may come from any thread at any time; None when the session is closed."""
        with self.alive:
            return None if self.pointer is None else function(self.pointer)

    def close(self) -> None:
        """End a call that runs in another thread after the pass in work, then free. A second time does nothing."""
        engine = self.engine
        if _inside(engine):
            raise errors.InvalidArgument("a callback (log, progress, mask) must not close a session of its engine")
        if self.pointer is None or engine.forks != _forks:
            return
        self.cancelling(lib.ds4_session_cancel)
        with self.lock:
            self.discard()

    def take(self) -> Any:
        """The pointer, which the handle gives up."""
        with self.alive:
            pointer, self.pointer = self.pointer, None
            return pointer

    def discard(self) -> None:
        """Close a session that nothing else uses, without waiting for a lock."""
        engine = self.engine
        engine.sessions.pop(id(self), None)
        pointer = self.take()
        if pointer is not None and engine.pointer is not None and engine.forks == _forks:
            engine.unfreed.append(pointer)
            engine.free_dead()


def _inside(engine: EngineHandle) -> bool:
    """Whether this thread is in a callback of a call of this engine, which may hold its locks."""
    return _running.call is not None and _running.call.engine is engine


def owned(owner: object, handle: EngineHandle | SessionHandle) -> None:
    """Close the handle when its owner is collected, an engine's also when the program ends: then threads may still compute in its
    sessions, which a close ends and waits for."""
    weakref.finalize(owner, handle.discard).atexit = isinstance(handle, EngineHandle)
