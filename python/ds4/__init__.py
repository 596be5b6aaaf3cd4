"""DeepSeek-V4 models from GGUF files, with exact multi-token-prediction speculation.

    import ds4

    with ds4.Engine("target.gguf", "head.gguf", speculative_depth=2) as engine:
        print(engine.generate("Why is the sky blue?", max_tokens=100))

`Engine` is an opened model, `Session` one text of it; `Model` finds models by name and has the calls that drafting and
verification are made of. Failures are `Error`s. docs/python.md is a tour.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds4.batch import Batch as Batch
    from ds4.batch import BatchText as BatchText
    from ds4.engine import Engine as Engine
    from ds4.engine import Info as Info
    from ds4.engine import Session as Session
    from ds4.engine import Stats as Stats
    from ds4.engine import TensorInfo as TensorInfo
    from ds4.engine import Work as Work
    from ds4.errors import Cancelled as Cancelled
    from ds4.errors import Closed as Closed
    from ds4.errors import ContextFull as ContextFull
    from ds4.errors import Error as Error
    from ds4.errors import InvalidArgument as InvalidArgument
    from ds4.errors import LoadError as LoadError
    from ds4.errors import NonFinite as NonFinite
    from ds4.errors import OutOfMemory as OutOfMemory
    from ds4.errors import RewindError as RewindError
    from ds4.errors import SnapshotError as SnapshotError
    from ds4.generation import Completion as Completion
    from ds4.generation import Logprob as Logprob
    from ds4.generation import Piece as Piece
    from ds4.generation import TokenLogprobs as TokenLogprobs
    from ds4.model import Model as Model
    from ds4.sampling import SamplerConfig as SamplerConfig

    __version__: str

_HOME = {
    "ds4.batch": ["Batch", "BatchText"],
    "ds4.engine": ["Engine", "Info", "Session", "Stats", "TensorInfo", "Work"],
    "ds4.errors": [
        "Cancelled", "Closed", "ContextFull", "Error", "InvalidArgument", "LoadError", "NonFinite", "OutOfMemory", "RewindError",
        "SnapshotError",
    ],
    "ds4.generation": ["Completion", "Logprob", "Piece", "TokenLogprobs"],
    "ds4.model": ["Model"],
    "ds4.sampling": ["SamplerConfig"],
}  # fmt: skip
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted([*_WHERE, "__version__"])  # noqa: PLE0605


if not TYPE_CHECKING:  # or a type checker would believe in any name

    def __getattr__(name: str) -> Any:
        """Names are imported when they are first used: tools that need no engine start without it."""
        if name == "__version__":
            from ds4._native import version

            value: Any = version()
        elif name in _WHERE:
            value = getattr(importlib.import_module(_WHERE[name]), name)
        else:
            raise AttributeError(f"module 'ds4' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
