"""Names of draft cores and verify cores: what `SamplerConfig.draft_core` and `verify_core` may say.

A *draft core* guesses the tokens that come next; a *verify core* decides how many of them are taken. Whatever a draft core
guesses, the "target" verify core takes only what the target chooses itself, so a draft core changes speed and never the text.

    draft cores     "stock"   the model's MTP head (needs one)
                    "lookup"  prompt lookup: what followed the last tokens when they occurred before
                    "none"    no drafts: plain decoding
    verify cores    "target"  one pass of the target over all drafts, as engine and command line do it

Your own draft core is a function of a session that returns an object with `propose`:

    class Echo:
        def __init__(self, session): self.session = session
        def propose(self, token, k): return [token] * k

    ds4.registry.register_draft_core("echo", Echo, "the last token again")
    model.generate(prompt, sampler_cfg=SamplerConfig(draft_core="echo", speculative_depth=2))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ds4.errors import InvalidArgument


class Proposer(Protocol):
    """What a draft core makes for one session."""

    def propose(self, token: int, k: int) -> Sequence[int]:
        """At most k guesses at the tokens that follow `token`, in order.

        `token` stands at the session's position: it is chosen, but not evaluated yet. The session's text
        (`session.tokens`) may have grown or been rewound since the last call; nothing may be evaluated here. Ids outside
        the vocabulary are refused by the verifying pass.
        """
        ...


class Verifier(Protocol):
    """What a verify core makes for one session."""

    def verify(self, token: int, drafts: Sequence[int], most: int) -> list[int]:
        """Evaluate `token` and the drafts at the session's position; keep a prefix of them.

        Returns what was committed, `token` first, at most `most` tokens (at least 1); the session's position has grown by
        as many and its logits are those after the last one.
        """
        ...


@dataclass(frozen=True)
class DraftCore:
    """A registered draft core. `make` is None for those that run inside the engine."""

    name: str
    description: str
    make: Callable[[Any], Proposer] | None
    needs_head: bool = False


@dataclass(frozen=True)
class VerifyCore:
    """A registered verify core. `make` is None for the engine's own."""

    name: str
    description: str
    make: Callable[[Any], Verifier] | None


_drafts: dict[str, DraftCore] = {
    c.name: c
    for c in (
        DraftCore("stock", "the model's MTP head", None, needs_head=True),
        DraftCore("lookup", "prompt lookup: what followed the last tokens before", None),
        DraftCore("none", "no drafts: plain decoding", None),
    )
}
_verifiers: dict[str, VerifyCore] = {"target": VerifyCore("target", "one pass of the target over all drafts", None)}

_Core = TypeVar("_Core", DraftCore, VerifyCore)


def _find(kind: str, known: dict[str, _Core], name: str) -> _Core:
    if name not in known:
        raise InvalidArgument(f"{kind} is {name!r}; expected one of {', '.join(map(repr, known))}")
    return known[name]


def _add(kind: str, known: dict[str, _Core], core: _Core) -> None:
    if not isinstance(core.name, str) or not core.name:
        raise InvalidArgument(f"{kind} is {core.name!r}; expected a name")
    if not callable(core.make):
        raise TypeError(f"{kind} {core.name!r}: expected a function of a session, not {type(core.make).__name__}")
    if core.name in known:
        raise InvalidArgument(f"{kind} {core.name!r} is registered already")
    known[core.name] = core


def draft_core(name: str) -> DraftCore:
    """The draft core of this name. Raises InvalidArgument, which lists the known names."""
    return _find("draft_core", _drafts, name)


def verify_core(name: str) -> VerifyCore:
    """The verify core of this name. Raises InvalidArgument, which lists the known names."""
    return _find("verify_core", _verifiers, name)


def draft_cores() -> list[str]:
    """Names of the known draft cores, the engine's own first."""
    return list(_drafts)


def verify_cores() -> list[str]:
    """Names of the known verify cores, the engine's own first."""
    return list(_verifiers)


def register_draft_core(name: str, make: Callable[[Any], Proposer], description: str = "") -> None:
    """Add a draft core: `make(session)` returns a `Proposer` for that session.

    Raises InvalidArgument for a name that is taken, TypeError if `make` cannot be called.
    """
    _add("draft_core", _drafts, DraftCore(name, description, make))


def register_verify_core(name: str, make: Callable[[Any], Verifier], description: str = "") -> None:
    """Add a verify core: `make(session)` returns a `Verifier` for that session. With it the text is what it decides.

    Raises InvalidArgument for a name that is taken, TypeError if `make` cannot be called.
    """
    _add("verify_core", _verifiers, VerifyCore(name, description, make))


def unregister(name: str) -> None:
    """Forget a core that was registered. Raises InvalidArgument for the engine's own and for unknown names."""
    for known in (_drafts, _verifiers):
        if name in known and known[name].make is not None:
            del known[name]
            return
    raise InvalidArgument(f"{name!r} is not a registered core")
