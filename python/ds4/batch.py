"""Batches: many texts of one engine, a step of all of them in one pass of the target.

    batch = ds4.Batch(engine)
    for question in questions:
        batch.add(question, max_tokens=100)
    while batch:
        for text, piece in batch.step():
            print(text.number, piece)

Each text has the tokens it would have alone, whatever its company, depth, sampler and stops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds4 import errors, generation, registry
from ds4._ds4 import ffi, lib
from ds4._native import MAX_DRAFT, check, error_of, text_of
from ds4.engine import Engine, Session, Tokens, prompt_ids
from ds4.generation import Completion, Generation, Options, Piece

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack


class BatchText:
    """A text of a batch.

    `number` counts the batch's texts from 0. `session` holds the text; one that `Batch.add` opened is closed when the text ends
    or is removed. `error` is what ended it, if it failed.
    """

    def __init__(
        self, number: int, session: Session, owns: bool, prompt: npt.NDArray[np.int32], request: generation.Request
    ) -> None:
        self.number, self.session = number, session
        self.error: Exception | None = None
        self._owns, self._prompt, self._request = owns, prompt, request
        self._start = session.position
        self._fed = 0  # tokens of the prompt that were evaluated
        self._text: Generation | None = None
        self._pieces: list[Piece] = []

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self._pieces) and self._pieces[-1].finish_reason is not None

    def result(self) -> Completion:
        """The text so far. Raises `error` if it failed."""
        if self.error is not None:
            raise self.error
        return generation.joined(iter(self._pieces))

    def __repr__(self) -> str:
        state = self._pieces[-1].finish_reason if self.done else f"{self._fed} of {len(self._prompt)} prompt tokens evaluated"
        return f"<ds4.BatchText {self.number}, {state}>"

    # ---- what the batch does with it ----

    def _begin(self) -> None:
        """The prompt is evaluated: choose the first token."""
        self._text = Generation(self.session, self._request)

    def _check(self) -> None:
        """Fail if the session cannot go on where this text is."""
        if self._text is not None and self._text.finish is not None:
            return
        try:
            if self.session.closed:
                raise errors.Closed("the session is closed")
            position = self.session.position
            if self._text is not None:
                self._text.check_position()
            elif position != self._start + self._fed:
                raise errors.InvalidArgument(generation.moved(position, self._start + self._fed))
        except errors.Error as e:
            self._fail(e)

    def _fill(self, item: Any) -> Any:
        """Its part of the next pass. Returns the memory that the item refers to."""
        item.session = self.session._handle.pointer
        if self._text is None:
            tokens, item.max, item.out = ffi.from_buffer("int[]", self._prompt[self._fed :]), 0, ffi.NULL
        else:
            tokens, item.max = ffi.new("int[]", [self._text.token]), min(self._text.left, MAX_DRAFT + 1)
            item.out = self.session._room
        item.tokens, item.n_tokens = tokens, len(tokens)
        return tokens

    def _take(self, item: Any) -> None:
        """What the pass made of its part."""
        if item.n < 0:
            self._fail(self.session._mask_error() or error_of(item.kind, text_of(item.error)))
        elif self._text is not None:
            if item.n:
                self._text.take(list(self.session._room[0 : item.n]))
        else:
            self._fed += item.n
            if self._fed == len(self._prompt):
                self._begin()

    def _fail(self, error: Exception) -> None:
        if self._text is None:
            self.error = error
        else:
            self._text.fail(error)

    def _piece(self) -> Piece | None:
        """What is new, if anything."""
        piece = self._text.piece() if self._text else None
        if self._text:
            self.error = self._text.error
        elif self.error:
            piece = Piece("", finish_reason="error")
        if piece is not None:
            self._pieces.append(piece)
        return piece


class Batch:
    """Texts that are generated together: `add` them at any time, `step` until there are none, `remove` whom you will.

    A context manager: leaving it removes what is left. len() is how many texts have not ended. A batch is for one thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._texts: list[BatchText] = []
        self._count = 0

    @property
    def capacity(self) -> int:
        """The most texts at a time: the rows of a pass."""
        return int(self.engine._handle.call(lib.ds4_engine_batch_rows))

    def add(self, prompt: str | Tokens = (), *, session: Session | None = None, **options: Unpack[Options]) -> BatchText:
        """A new text: after the prompt, in a session of its own; or after what `session` holds and the prompt.

        Nothing is evaluated before the next step. Raises ContextFull for a prompt that does not fit, InvalidArgument for wrong
        options, a full batch, a session that is in it already or of another engine, and a draft core outside the engine.
        """
        if len(self) >= self.capacity:
            raise errors.InvalidArgument(f"the batch is full: {self.capacity} texts (see prefill_chunk)")
        if session is not None and (session.engine is not self.engine or any(t.session is session for t in self._texts)):
            raise errors.InvalidArgument("expected a session of the batch's engine that is not in the batch")
        request = generation.request_of(options, (session or self.engine)._settings)
        core = request.settings.draft_core
        if registry.draft_core(core).make is not None:
            raise errors.InvalidArgument(f"draft_core {core!r} runs outside the engine; a batch drafts with the engine's own")
        ids = session._ids_after(prompt) if session else prompt_ids(self.engine, prompt)
        text = BatchText(self._count, session or Session(self.engine), session is None, ids, request)
        try:
            left = text.session.ctx - text.session.position
            if len(ids) > left:
                raise errors.ContextFull(f"{len(ids)} tokens do not fit: the session has room for {left}")
            text.session._use(request.settings)
            if not len(ids):
                text._begin()
        except BaseException:
            self._leave(text)
            raise
        self._count += 1
        self._texts.append(text)
        return text

    def remove(self, text: BatchText) -> None:
        """Take a text out; it stays as it is. One that has left already is fine."""
        if text in self._texts:
            self._texts.remove(text)
            self._leave(text)

    def _leave(self, text: BatchText) -> None:
        if text._owns:
            text.session.close()

    def step(self) -> list[tuple[BatchText, Piece]]:
        """One pass: prompts go on, each text grows by a token and the drafts that are accepted. Returns what is new.

        The last piece of a text has a `finish_reason`; the text has then left the batch. A text that fails (its mask raised, its
        logits are not finite, its session was cancelled, closed or moved by something else) ends with "error" and does not disturb
        the others. Raises what a log callback raised, KeyboardInterrupt too, after the pass; what is new then comes with the next
        step.
        """
        for text in self._texts:
            text._check()
        going = [t for t in self._texts if t.error is None and (t._text is None or t._text.finish is None)]
        items = ffi.new("ds4_batch_item[]", len(going))
        keep = [text._fill(items[i]) for i, text in enumerate(going)]
        try:
            if going:
                call = self.engine._handle.call_together
                check(call([t.session._handle for t in going], lib.ds4_batch_step, items, len(going)))
        finally:  # the pass was made, or no item has tokens
            for i, text in enumerate(going):
                text._take(items[i])
            del keep
        out = [(text, piece) for text in list(self._texts) if (piece := text._piece()) is not None]
        for text, piece in out:
            if piece.finish_reason is not None:
                self.remove(text)
        return out

    def run(self) -> None:
        """Step until no text is left."""
        while self:
            self.step()

    def __len__(self) -> int:
        return len(self._texts)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        for text in list(self._texts):
            self.remove(text)
