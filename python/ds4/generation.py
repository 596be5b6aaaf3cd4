"""From logits to text: the loop that generates, stop texts, whole characters, log-probabilities.

The loop is `pieces`; everything public on `Engine` and `Session` that generates is a thin layer over it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from ds4 import errors, registry
from ds4._native import Mask
from ds4.sampling import MAX_DEPTH, MAX_LOOKUP

if TYPE_CHECKING:
    from ds4.engine import Session

FinishReason = Literal["eos", "stop", "length", "error"]
Depth = int | Literal["auto"]

AUTO = -1  # DS4_DRAFT_AUTO
MARGIN_AUTO = -1.0  # DS4_MARGIN_AUTO
LOOKUP = 8  # tokens of the longest match, for the draft core "lookup" when nothing is said


class Options(TypedDict, total=False):
    """Keywords of everything that generates. What is not given is the session's, or the engine's.

    A wrong value raises InvalidArgument (or TypeError), before anything is evaluated.
    """

    max_tokens: int
    """Most tokens to generate (256). The end of the context ends the text as well."""
    stop: str | int | Sequence[str | int]
    """Texts and token ids that end the text. Neither they nor any part of them are in it."""
    logprobs: int
    """How many most likely tokens to report for each token (0: no log-probabilities)."""
    temperature: float
    """0: greedy, the largest logit, ties to the lowest id."""
    top_k: int
    """Keep the k most likely tokens (0: all)."""
    top_p: float
    """Keep the most likely tokens until their probabilities sum to top_p (1: all)."""
    min_p: float
    """Keep tokens at least min_p times as likely as the first (0: all)."""
    seed: int
    """The same seed gives the same text, 0 to 2**64 - 1."""
    presence_penalty: float
    """Taken off the logit of each token that was generated before, -100 to 100."""
    frequency_penalty: float
    """Taken off the logit of a token for each time that it was generated before, -100 to 100."""
    logit_bias: Mapping[int, float]
    """Token id -> addend to its logit; -inf bans it."""
    mask: Mask | None
    """Which tokens may follow: a function from the text's ids, int32 [n], to bool [V], or to None for all. It is called for each
    row that a token is chosen from, drafts too, and must depend on the text alone. It must not call ds4: what it needs of the
    vocabulary it takes before. What it raises ends the generation."""
    scheme: str
    """How sampled text is verified: "coupled" (a seed's text is the same with and without drafts) or "rejection"."""
    draft_core: str
    """Who drafts: a name of `ds4.registry` ("stock", the head). Changes the speed, never the text."""
    speculative_depth: Depth
    """Tokens drafted a cycle, 0 to 16 (0: no speculation), or "auto": what pays, by measured times and acceptance. Changes the
    speed, never the text."""
    draft_lookup: int
    """Draft also what followed the last time that up to so many tokens occurred, 0 to 64 (0: off); with a head, whichever is
    likelier to be accepted. Changes the speed, never the text."""
    margin: float | None
    """Lead in logits that a draft needs to be taken from the batch, 0 to 1000; None: 0 with "auto", 3 with a fixed depth. Changes
    the speed, never the text."""
    ignore_eos: bool
    """Go on after the end-of-sequence token."""


class Logprob(NamedTuple):
    """A token and its log-probability (natural logarithm, at temperature 1)."""

    token: int
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """Of a generated token: its log-probability, and the most likely tokens in its place, best first."""

    token: int
    logprob: float
    top: tuple[Logprob, ...]


class Piece(str):
    """Some text of a stream, a str: what a pass or several brought, in whole characters.

    `tokens` are the ids behind it, `logprobs` theirs if asked for. `finish_reason` is None but on the last piece, which may be
    empty.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None

    def __new__(
        cls,
        text: str = "",
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> Piece:
        self = super().__new__(cls, text)
        self.tokens, self.finish_reason = list(tokens), finish_reason
        self.logprobs = None if logprobs is None else list(logprobs)
        return self


class Completion(str):
    """A generated text, a str that knows how it came about.

    `tokens`: the ids generated (of a text ended by a stop text: up to the token that completed it).
    `logprobs`: one for each token if asked for, else None.
    `finish_reason`: "eos" (end of sequence, or a stop token), "stop" (a stop text), "length" (max_tokens, or the context is full) or,
    in a batch, "error".
    `reasoning`: what a chat's answer was thought over with, "" if nothing; `text` is the answer without it.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    reasoning: str

    def __new__(
        cls,
        text: str = "",
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: FinishReason = "length",
        reasoning: str = "",
    ) -> Completion:
        self = super().__new__(cls, text)
        self.tokens, self.finish_reason, self.reasoning = list(tokens), finish_reason, reasoning
        self.logprobs = None if logprobs is None else list(logprobs)
        return self

    @property
    def text(self) -> str:
        """The text as a plain str."""
        return str.__str__(self)


def joined(parts: Iterator[Piece]) -> Completion:
    """All pieces of a stream as one text."""
    text, tokens = [], []
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason = "length"
    for piece in parts:
        text.append(str(piece))
        tokens += piece.tokens
        if piece.logprobs is not None:
            logprobs = (logprobs or []) + piece.logprobs
        finish = piece.finish_reason or finish
    return Completion("".join(text), tokens, logprobs, finish)


# ---- settings ----


@dataclass(frozen=True)
class Gen:
    """How a token is chosen: ds4_gen."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    scheme: str = "coupled"
    penalty_from: int | None = None
    """The position that penalties count from; None: where the generation begins."""
    mask: Mask | None = None


@dataclass(frozen=True)
class Settings:
    """What a session generates with."""

    depth: int
    """Or AUTO."""
    margin: float
    """Or MARGIN_AUTO."""
    gen: Gen = Gen()
    draft_core: str = "stock"
    lookup: int = 0
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """`Options`, checked and filled up."""

    settings: Settings
    max_tokens: int = 256
    stops: tuple[str, ...] = ()
    logprobs: int = 0


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise errors.InvalidArgument(f"{name} is {value!r}; expected an integer, 0 or more")
    return int(value)


def depth_of(depth: Depth) -> int:
    """A depth as C has it."""
    if depth == "auto":
        return AUTO
    if isinstance(depth, bool) or not isinstance(depth, (int, np.integer)) or not 0 <= depth <= MAX_DEPTH:
        raise errors.InvalidArgument(f"speculative_depth is {depth!r}; expected 0 to {MAX_DEPTH} or 'auto'")
    return int(depth)


def margin_of(margin: float | None) -> float:
    """A margin as C has it."""
    if margin is None:
        return MARGIN_AUTO
    if not 0 <= margin <= 1000:
        raise errors.InvalidArgument(f"margin is {margin!r}; expected 0 to 1000")
    return margin


def lookup_of(longest: int) -> int:
    """The longest tail that a lookup looks for, as C has it."""
    if isinstance(longest, bool) or not isinstance(longest, (int, np.integer)) or not 0 <= longest <= MAX_LOOKUP:
        raise errors.InvalidArgument(f"draft_lookup is {longest!r}; expected 0 to {MAX_LOOKUP}")
    return int(longest)


def request_of(options: Options, base: Settings) -> Request:
    """Checks what C does not see."""
    known = set(Options.__annotations__)
    for name in options:
        if name not in known:
            raise TypeError(f"there is no option {name!r}; there are {', '.join(sorted(known))}")
    stop = options.get("stop", ())
    stops: list[object] = [stop] if isinstance(stop, (str, bytes, int)) or not isinstance(stop, Iterable) else list(stop)
    for s in stops:
        if isinstance(s, bool) or not isinstance(s, (str, int, np.integer)) or s == "":
            raise errors.InvalidArgument(f"stop holds {s!r}; expected texts that are not empty, and token ids")
    max_tokens = _count("max_tokens", options.get("max_tokens", 256))
    logprobs = _count("logprobs", options.get("logprobs", 0))
    given = {f.name: options[f.name] for f in fields(Gen) if f.name in options}  # type: ignore[literal-required]
    gen = replace(base.gen, **given)
    gen = replace(gen, logit_bias=tuple(sorted(dict(gen.logit_bias).items())))
    core = registry.draft_core(options.get("draft_core", base.draft_core))
    settings = replace(
        base,
        depth=depth_of(options["speculative_depth"]) if "speculative_depth" in options else base.depth,
        lookup=lookup_of(options.get("draft_lookup", base.lookup)),
        margin=margin_of(options["margin"]) if "margin" in options else base.margin,
        gen=gen,
        draft_core=core.name,
        stop_tokens=base.stop_tokens + tuple(int(s) for s in stops if isinstance(s, (int, np.integer))),
        ignore_eos=options.get("ignore_eos", base.ignore_eos),
    )
    return Request(settings, max_tokens, tuple(s for s in stops if isinstance(s, str)), logprobs)


# ---- text ----


class Text:
    """Bytes of tokens to text: whole characters (bytes that are no UTF-8 become U+FFFD), and nothing that is, or may become, a
    stop text. Character by character, so that where a stop falls does not depend on how tokens divide the text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.certain = self.held = ""
        self.stopped = False

    def feed(self, data: bytes, final: bool = False) -> None:
        """More bytes. After the first stop text to be complete nothing is taken any more."""
        for c in self.decoder.decode(data, final):
            if self.stopped:
                return
            self.held += c
            length = max((len(s) for s in self.stops if self.held.endswith(s)), default=0)
            self.stopped = length > 0
            keep = length or self._could_become_stop()
            self.certain += self.held[: len(self.held) - keep]
            self.held = self.held[len(self.held) - keep :]

    def _could_become_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        longest = max((len(s) for s in self.stops), default=1) - 1
        for n in range(min(longest, len(self.held)), 0, -1):
            if any(s.startswith(self.held[-n:]) for s in self.stops):
                return n
        return 0

    def release(self, final: bool = False) -> str:
        """The text that became certain since the last time. `final`: nothing more comes, and what was held back is no stop text."""
        if final:
            self.feed(b"", final=True)
            if not self.stopped:
                self.certain += self.held
            self.held = ""
        out, self.certain = self.certain, ""
        return out


# ---- log-probabilities ----


def logprobs_of(logits: npt.NDArray[np.float32], token: int, n: int) -> TokenLogprobs:
    """Of one token at logits float32 [V], in float64; ties go to the lower id."""
    z = logits.astype(np.float64)
    top = z.max()
    norm = top + np.log(np.exp(z - top).sum())
    n = min(n, len(z))
    best = np.flatnonzero(logits >= np.partition(logits, len(z) - n)[len(z) - n]) if n else np.empty(0, np.int64)
    best = best[np.argsort(-logits[best], kind="stable")][:n]
    return TokenLogprobs(token, float(z[token] - norm), tuple(Logprob(int(i), float(z[i] - norm)) for i in best))


# ---- the loop ----


def moved(position: int, expected: int) -> str:
    """The message of a session that something else moved."""
    return f"the session is at {position}, its text that is being generated at {expected}: something else moved it"


class Generation:
    """A text that is being generated after what a session holds: what to evaluate next, and what comes of it.

    Evaluate `token`, with drafts, at most `left` tokens in all, and give what was committed to `take`; until `finish` is set.
    """

    def __init__(self, session: Session, request: Request) -> None:
        self.session, self.request, self.settings = session, request, request.settings
        if self.settings.gen.penalty_from is None:
            self.settings = replace(self.settings, gen=replace(self.settings.gen, penalty_from=session.position))
        self.text = Text(request.stops)
        self.left = request.max_tokens
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self.token = -1
        self.at = session.position
        self.before: npt.NDArray[np.float32] | None = None
        self._choose()

    def _choose(self) -> None:
        """The token that follows, not evaluated yet, or why none does."""
        session, settings = self.session, self.settings
        self.at = session.position
        if self.left <= 0 or self.at >= session.ctx:
            self.finish = "length"
            return
        try:
            self.token = session._next(settings)
            self.before = session.logits() if self.request.logprobs else None
        except Exception as e:
            self.fail(e)
            return
        if self.token in settings.stop_tokens or (session.engine.is_eos(self.token) and not settings.ignore_eos):
            self.finish = "eos"

    def check_position(self) -> None:
        """Raises InvalidArgument if the session is not where `token` was chosen: it would stand behind another text."""
        if self.session.position != self.at:
            raise errors.InvalidArgument(moved(self.session.position, self.at))

    def take(self, block: Sequence[int]) -> None:
        """What a step committed."""
        session = self.session
        for i, token in enumerate(block):
            self.tokens.append(token)
            self.left -= 1
            if self.before is not None:
                row = session.step_logits(i - 1) if i else self.before
                self.logprobs.append(logprobs_of(row, token, self.request.logprobs))
            if not session.engine.is_eos(token):
                self.text.feed(session.engine.piece(token))
            if self.text.stopped:
                session.keep(i + 1)
                self.finish = "stop"
                return
        self._choose()

    def fail(self, error: Exception) -> None:
        """End with an error. What was committed before stays."""
        self.error, self.finish = error, "error"

    def piece(self) -> Piece | None:
        """The text that is certain since the last one, if any, or the last."""
        text = self.text.release(final=self.finish is not None)
        if not text and self.finish is None:
            return None
        piece = Piece(text, self.tokens, self.logprobs if self.request.logprobs else None, self.finish)
        self.tokens, self.logprobs = [], []
        return piece


def pieces(session: Session, request: Request) -> Iterator[Piece]:
    """Text after what the session holds, a piece for one pass or for several.

    Every token of a piece is evaluated. When the text ends at a stop text, the session ends at the token that completed it. When
    it ends with an error, a last piece has what was certain or held back, if anything; then the error is raised.
    """
    text = Generation(session, request)
    while True:
        piece = text.piece()
        if piece is not None and (piece.tokens or text.error is None):
            yield piece
        if text.error is not None:
            raise text.error
        if text.finish is not None:
            return
        try:
            text.check_position()
            text.take(session._step(text.token, text.left, text.settings))
        except Exception as e:
            text.fail(e)
