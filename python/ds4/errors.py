"""What can go wrong: one hierarchy, each with the engine's message, which names file, key, tensor or option and what was expected."""

from __future__ import annotations


class Error(Exception):
    """Any failure of the engine. Catch this to catch them all."""


class InvalidArgument(Error, ValueError):
    """An argument or option out of its range, or a call that cannot be made now (as logits of an empty session)."""


class LoadError(Error):
    """A model or head that cannot be opened, is damaged, is not what ds4 reads, or does not fit its target."""


class OutOfMemory(Error, MemoryError):
    """Memory or threads that the system does not give."""


class ContextFull(Error):
    """More tokens than the session can hold."""


class RewindError(Error):
    """A position that the session cannot go back to. Nothing was changed."""


class Cancelled(Error):
    """`Session.cancel` was called."""


class NonFinite(Error, ArithmeticError):
    """Logits that are not numbers: the weights, or what they compute at this position, are not finite."""


class SnapshotError(Error):
    """A snapshot that cannot be written or read, is damaged, or is of another model, kv type or version."""


class Closed(Error):
    """An engine or session that was closed, or that belongs to the process before a fork."""
