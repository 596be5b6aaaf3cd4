"""Files that commands write: refused before the work when they cannot be written, and whole or not there after it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import click


def _is_device(path: Path) -> bool:
    """What is written as it stands: devices, pipes, and descriptors by their names."""
    special = path.is_relative_to("/proc") or (path.is_relative_to("/dev") and not path.is_relative_to("/dev/shm"))
    return special or (path.exists() and not path.is_file())


def _beside(path: Path) -> Path:
    """A new file beside what `path` leads to, with the same ending and mode."""
    handle, name = tempfile.mkstemp(suffix=path.suffix, prefix=f"{path.stem}.", dir=path.parent)
    os.close(handle)
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(name, 0o666 & ~umask)
    if path.exists():
        shutil.copymode(path, name)
    return Path(name)


class _Ended(BaseException):
    """A signal that ends the program."""


def _end(number: int, _frame: object) -> None:
    raise _Ended(number)


@contextlib.contextmanager
def _ending_after() -> Iterator[None]:
    """Signals that would end the program at once do so when the block has been left. Those that are ignored or heard stay so."""
    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        heard = []
    try:
        for number in heard:
            signal.signal(number, _end)
        yield
    except _Ended as e:
        signal.signal(e.args[0], signal.SIG_DFL)
        signal.raise_signal(e.args[0])
        raise
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to be written, which takes the place of `path` when the block ends and is removed when it fails. A device is itself."""
    path = Path(path)
    if _is_device(path):
        yield path
        return
    target = path.resolve()
    with _ending_after():
        file = _beside(target)
        try:
            yield file
            file.replace(target)
        finally:
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def text_output(path: Path) -> Iterator[IO[str]]:
    """The same for text. Raises OSError that names `path`. Standard output by its name goes on where it stands."""
    try:
        with replacing(path) as file, file.open("a", newline="", encoding="utf-8") as f:
            yield f
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e


def written_twice(paths: Iterable[Path]) -> Path | None:
    """The first that leads where one before it does. Devices may be named more than once."""
    places = set()
    for path in paths:
        place = path.resolve()
        if place in places and not _is_device(path):
            return path
        places.add(place)
    return None


def refusal(path: Path, models: bool = False) -> str | None:
    """Why `path` cannot be written, before the work that it waits for; afterwards all is as it was."""
    try:
        if _is_device(path):
            return None if os.access(path, os.W_OK) else "cannot be written"
        if path.is_file() and not models:
            with path.open("rb") as f:
                if f.read(4) == b"GGUF":
                    return "a GGUF file; choose another for output"
        _beside(path.resolve()).unlink()
    except FileNotFoundError:
        return "no such folder"
    except OSError as e:
        return str(e.strerror)
    return None


class OutputFile(click.Path):
    """A file that can be written. A model, which may be mapped, is not written over, unless `models` are what is written."""

    def __init__(self, models: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self.models = models

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or click's error that says why not."""
        if not value:
            self.fail("expected the name of a file", param, ctx)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if reason := refusal(path, self.models):
            self.fail(f"{path}: {reason}", param, ctx)
        return path


__all__ = ["OutputFile", "refusal", "replacing", "text_output", "written_twice"]
