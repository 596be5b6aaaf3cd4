"""Models by name, and speculation taken apart into calls.

    from ds4 import Model, SamplerConfig

    model = Model.from_pretrained("deepseek_v4")
    output = model.generate("Explain speculative decoding.", sampler_cfg=SamplerConfig(speculative_depth=2))

What `generate` does can also be written down call by call; the tokens are the same:

    ids = model.encode("Explain speculative decoding.")
    draft_cache = model.make_mtp_cache()
    while len(ids) < 100:
        draft_logits = model.mtp_forward(draft_cache, ids, depth=3)
        verified = model.mtp_update_cache(draft_cache, ids, draft_logits)
        if verified.accepted: model.commit(draft_cache)
        else: draft_cache.trim()
        ids += verified.tokens

`ids` is the whole text so far. Its last token is chosen but not evaluated: the head drafts what follows it, and one pass of the
target evaluates it together with the drafts.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from ds4 import names, registry
from ds4._native import MAX_DRAFT
from ds4.engine import Engine, Message, Session, Thinking, Tokens, prompt_ids
from ds4.errors import InvalidArgument, LoadError
from ds4.generation import Completion, Options, Piece
from ds4.sampling import SamplerConfig

if TYPE_CHECKING:
    from typing_extensions import Self

Ids = Tokens | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Verified:
    """What a pass of the target said about drafts."""

    accepted: int
    """How many of the drafts were accepted, from the first on: true in an `if` when at least one was."""
    tokens: list[int]
    """What follows the text: the accepted drafts, then one token of the target's own (in place of the first draft that was refused,
    or after the last). At least that one; append them all to the text."""
    logits: npt.NDArray[np.float32]
    """float32 [V]: the target's logits that the last of `tokens` was chosen from."""


class MTPCache:
    """A text as target and head remember it, for `Model.mtp_forward` and its companions. From `Model.make_mtp_cache`.

    It holds committed tokens, whose rows later tokens look back on, and after `mtp_update_cache` the accepted drafts, which count
    only once they are committed.
    """

    def __init__(self, session: Session, config: SamplerConfig) -> None:
        self.session = session
        self.config = config
        self._drafts: int | None = None  # accepted, neither committed nor trimmed; None: nothing was verified
        self._prompt: int | None = None

    @property
    def position(self) -> int:
        """How many tokens are committed."""
        return self.session.position - (self._drafts or 0)

    @property
    def tokens(self) -> list[int]:
        """The committed tokens."""
        return self.session.tokens[: self.position]

    def trim(self, n: int = 0) -> None:
        """Drop the drafts that are not committed, then the last n committed tokens.

        `trim()` can always be done; with an n, RewindError is raised, with nothing changed, if the session cannot go back so far
        (`max_rewind` below the highest position it ever held, the drafts included). InvalidArgument for a negative n.
        """
        if n < 0:
            raise InvalidArgument(f"n is {n}; expected 0 or more")
        if n:
            self.session.rewind(self.position - n)
        elif self._drafts:
            self.session.keep(1)
        self._drafts = None

    def close(self) -> None:
        """Free the session. A second time does nothing."""
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        drafts = f", {self._drafts} drafts not committed" if self._drafts else ""
        return f"<ds4.MTPCache of {self.position} tokens{drafts}>"

    def _hold(self, text: list[int]) -> None:
        """Make the session hold all of the text but its last token."""
        if self._prompt is None:
            self._prompt = len(text)
            self.session.set_sampling(penalty_from=self._prompt, **_sampling(self.config))
        hold(self.session, text[:-1])
        self._drafts = None


def hold(session: Session, ids: list[int]) -> None:
    """Make a session hold exactly these tokens: the longest common prefix is kept, the rest evaluated.

    A prefix that the session cannot go back to is evaluated again from its beginning. Raises what `Session.eval` raises.
    """
    held = session.tokens
    common = next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
    if common < len(held):
        session.rewind(common if common >= session.rewind_floor else 0)
    if session.position < len(ids):
        session.eval(ids[session.position :])


def _text(engine: Engine, input_ids: Ids) -> list[int]:
    """The ids as a list; an array of shape [1, n] counts as [n]."""
    if isinstance(input_ids, np.ndarray) and input_ids.ndim == 2 and len(input_ids) == 1:
        input_ids = input_ids[0]
    ids: list[int] = prompt_ids(engine, input_ids).tolist()
    if not ids:
        raise InvalidArgument("input_ids is empty; expected the text so far, at least one token")
    return ids


class Model:
    """An engine with a way to find its files, and the calls that speculation is made of.

    A context manager; `close` closes the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        """What it runs on: tokenizer, sessions, sizes."""

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], mtp: str | os.PathLike[str] | Literal[False] | None = None, **options: Any
    ) -> Self:
        """Open a model by name or file, with its head.

        Args:
            name: a file (any part of a split one), or a name: "small" is the pair that comes with the package; "deepseek_v4" is
                $DS4_MODEL, else what `ds4py models add deepseek_v4 FILE` registered, else the small pair with a warning; any other
                name is one that was registered.
            mtp: the head's file; False: no head; None: the registered one, else the one inside the model's file, else the first of
                the files beside it that fits: NAME-mtp.gguf, then other *.gguf with "mtp" in their names.
            options: `Engine`'s.

        Raises LoadError, which lists the known names for an unknown one, and what `Engine` raises.
        """
        entry, note = names.find(name)
        if note:
            warnings.warn(note, stacklevel=2)
        if mtp is False:
            return cls(Engine(entry.model, **options))
        head = mtp if mtp is not None else entry.mtp
        if head is not None:
            return cls(Engine(entry.model, head, **options))
        return cls(_with_head_found(entry.model, options))

    def close(self) -> None:
        """Close the engine, its sessions and caches. A second time does nothing."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ds4.Model {self.engine!r}>"

    # ---- text ----

    def encode(self, text: str, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt, as `generate` takes it: a user turn, ready to be answered, if the model has a chat template; with
        `raw`, or without one, BOS and the text."""
        if raw or self.engine.info.base_model:
            return self.engine.prompt(text)
        return self.engine.chat_template([{"role": "user", "content": text}])

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens."""
        return self.engine.detokenize(tokens)

    def generate(
        self,
        prompt: str | Tokens,
        *,
        sampler_cfg: SamplerConfig | None = None,
        max_tokens: int = 256,
        stop: str | int | Sequence[str | int] = (),
        logprobs: int = 0,
        ignore_eos: bool = False,
        raw: bool = False,
    ) -> Completion:
        """Text after a prompt: a text as `encode` takes it, or token ids as they are.

        sampler_cfg: how tokens are drawn and speculated on (None: `SamplerConfig()`, greedy). max_tokens, stop, logprobs and
        ignore_eos as in `ds4.generation.Options`. Returns a `Completion`, a str. Raises what `Engine.generate` raises.
        """
        options = _options(sampler_cfg, max_tokens, stop, logprobs, ignore_eos)
        return self.engine.generate(self._ids(prompt, raw), **options)

    def stream(
        self,
        prompt: str | Tokens,
        *,
        sampler_cfg: SamplerConfig | None = None,
        max_tokens: int = 256,
        stop: str | int | Sequence[str | int] = (),
        logprobs: int = 0,
        ignore_eos: bool = False,
        raw: bool = False,
    ) -> Iterator[Piece]:
        """`generate`, piece by piece. Closing the iterator frees everything."""
        options = _options(sampler_cfg, max_tokens, stop, logprobs, ignore_eos)
        return self.engine.stream(self._ids(prompt, raw), **options)

    def chat(
        self,
        messages: Iterable[Message],
        *,
        thinking: Thinking = "off",
        sampler_cfg: SamplerConfig | None = None,
        max_tokens: int = 256,
        stop: str | int | Sequence[str | int] = (),
        logprobs: int = 0,
        ignore_eos: bool = False,
    ) -> Completion:
        """The assistant's answer to a conversation; see `Engine.chat`."""
        options = _options(sampler_cfg, max_tokens, stop, logprobs, ignore_eos)
        return self.engine.chat(messages, thinking=thinking, **options)

    def _ids(self, prompt: str | Tokens, raw: bool) -> Tokens:
        return self.encode(prompt, raw=raw) if isinstance(prompt, str) else prompt

    # ---- speculation, call by call ----

    def make_mtp_cache(self, sampler_cfg: SamplerConfig | None = None, *, ctx: int | None = None) -> MTPCache:
        """An empty cache: a session of this model (ctx: most tokens, None: the engine's), and how its tokens are chosen.

        Of sampler_cfg (None: greedy) everything counts but draft_core, draft_lookup and speculative_depth: the caller drafts. The first text
        that the cache is given is its prompt: penalties count the tokens behind it. Raises InvalidArgument for a verify core
        other than "target".
        """
        config = sampler_cfg or SamplerConfig()
        if config.verify_core != "target":
            raise InvalidArgument(f"verify_core is {config.verify_core!r}; these calls verify with 'target'")
        session = Session(self.engine, ctx=ctx)
        session.set_speculation(0, config.margin, draft_core="stock", draft_lookup=0)
        return MTPCache(session, config)

    def mtp_forward(self, draft_cache: MTPCache, input_ids: Ids, depth: int = 1) -> npt.NDArray[np.float32]:
        """The head's logits for the tokens after input_ids: float32 [depth, V].

        input_ids, int [n] (or [1, n]), is the whole text so far, the last token chosen but not evaluated. What the cache holds
        of it is kept, the longest common prefix; the rest, up to the last token, is evaluated first. So a text that goes on costs
        nothing here, and a text that was changed is right all the same (one that was changed further back than the session can
        rewind is evaluated from its beginning). Drafts that were not committed are dropped, as by `trim()`.

        Row j is the head's guess at the token at position n + j, made as if the rows before it had the tokens that the cache's
        sampler draws from them (greedy: the most likely ones); ids outside the engine's shortlist have -FLT_MAX.
        Fewer rows than depth at the end of the context and behind a stop token, which nothing follows; none for a text of one
        token, which the head cannot go on from. Nothing is committed.

        Raises InvalidArgument without a head, for a depth outside 0 to 16 and for ids outside the vocabulary, TypeError for ids
        that are no integers, ContextFull if the text does not fit.
        """
        ids = _text(self.engine, input_ids)
        if not 0 <= depth <= MAX_DRAFT:
            raise InvalidArgument(f"depth is {depth}; expected 0 to {MAX_DRAFT}")
        draft_cache._hold(ids)
        return draft_cache.session.draft(ids[-1], depth)

    def mtp_update_cache(self, draft_cache: MTPCache, input_ids: Ids, draft_logits: npt.NDArray[np.floating[Any]]) -> Verified:
        """Verify drafts in one pass of the target; see `Verified`.

        input_ids as for `mtp_forward`. draft_logits, [k, V] with k up to 16: the draft at position n + j is what the cache's
        sampler draws from row j, as `generate` draws its drafts (greedy: the most likely token, the lowest id of equal ones; -inf
        rules a token out). They need not come from `mtp_forward`: whatever is drafted, the law of the text is the target's, and
        nothing is drafted behind a stop token.

        Afterwards the cache holds input_ids, the last token too, and the accepted drafts, not yet committed: `commit` keeps them,
        `trim` drops them. Either is right: what is kept is not evaluated again.

        Raises InvalidArgument for another shape, NaN, +inf and ids outside the vocabulary, ContextFull if the text does not fit; nothing
        is verified then.
        """
        ids, rows = _text(self.engine, input_ids), np.asarray(draft_logits)
        vocab = self.engine.info.vocab
        if rows.ndim != 2 or rows.shape[1] != vocab or len(rows) > MAX_DRAFT:
            raise InvalidArgument(f"draft_logits has shape {rows.shape}; expected [up to {MAX_DRAFT}, {vocab}]")
        if not (rows < np.inf).all():
            raise InvalidArgument(f"draft_logits holds {'NaN' if np.isnan(rows).any() else 'inf'}")
        draft_cache._hold(ids)
        session = draft_cache.session
        done = session.verify_logits(ids[-1], rows, len(rows) + 1)
        draft_cache._drafts = len(done) - 1
        return Verified(len(done) - 1, [*done[1:], session.next()], session.logits())

    def commit(self, draft_cache: MTPCache) -> None:
        """Keep the accepted drafts: the cache's text is input_ids and they. Raises InvalidArgument if nothing was verified since
        the last commit or trim."""
        if draft_cache._drafts is None:
            raise InvalidArgument("nothing to commit: mtp_update_cache comes first")
        draft_cache._drafts = None


def _sampling(config: SamplerConfig) -> dict[str, Any]:
    """The part of a config that says how tokens are chosen, as keywords of `Session.set_sampling`."""
    fields = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "scheme", "mask")
    return {name: getattr(config, name) for name in fields} | {"logit_bias": dict(config.bias_pairs)}


def options_of(config: SamplerConfig | None) -> Options:
    """A config as the engine's options. Raises InvalidArgument for cores that are not registered any more."""
    config = config or SamplerConfig()
    registry.verify_core(config.verify_core)
    fields = ("draft_core", "speculative_depth", "draft_lookup", "margin")
    return cast(Options, {name: getattr(config, name) for name in fields} | _sampling(config))


def _options(
    config: SamplerConfig | None, max_tokens: int, stop: str | int | Sequence[str | int], logprobs: int, ignore_eos: bool
) -> Options:
    """All of it as the engine's options."""
    text: Options = {"max_tokens": max_tokens, "stop": stop, "logprobs": logprobs, "ignore_eos": ignore_eos}
    return {**options_of(config), **text}


def _with_head_found(model: Path, options: dict[str, Any]) -> Engine:
    """An engine with the head inside the file, or with the first file beside it that fits, or without."""
    engine = Engine(model, **options)
    if engine.info.file_has_head:
        engine.close()
        return Engine(model, mtp_internal=True, **options)
    refused: list[str] = []
    for head in names.heads_beside(model):
        try:
            found = Engine(model, head, **options)
        except LoadError as e:
            refused.append(str(e))
            continue
        engine.close()
        return found
    if refused:
        warnings.warn(f"no head is used: {'; '.join(refused)}", stacklevel=4)
    return engine
