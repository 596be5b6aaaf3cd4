"""Models by name: the bundled pair, what `ds4py models add` registered, and files with the head beside them.

Registered models are kept in `models.json` in the platform's folder for settings (`click.get_app_dir("ds4")`):

    {"deepseek_v4": {"model": "/models/flash.gguf", "mtp": "/models/flash-mtp.gguf"}}
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from ds4.errors import InvalidArgument, LoadError

BUNDLED = "small"
FLASH = "deepseek_v4"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class Entry:
    """A model's file, and its head's; `mtp` None: none is known, the folder is searched."""

    model: Path
    mtp: Path | None = None


def bundled() -> Entry:
    """The pair that comes with the package: inside it once installed, in the repository's `models/` before."""
    here = Path(__file__).resolve().parent
    for folder in (here / "models", here.parent.parent / "models"):
        if (folder / "small.gguf").is_file():
            return Entry(folder / "small.gguf", folder / "small-mtp.gguf")
    raise LoadError(f"{here / 'models' / 'small.gguf'}: the bundled model is missing; install the package again")


# ---- registered names ----


def store() -> Path:
    """The file that keeps registered models."""
    return Path(click.get_app_dir("ds4")) / "models.json"


def registered() -> dict[str, Entry]:
    """Registered models by name. Raises LoadError for a file that cannot be read or is not what `add` writes."""
    path = store()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise LoadError(f"{path}: {e}") from e
    if not isinstance(found, dict) or not all(_is_entry(e) for e in found.values()):
        raise LoadError(f'{path}: expected {{"NAME": {{"model": FILE, "mtp": FILE or null}}, ...}}')
    return {name: Entry(Path(e["model"]), Path(e["mtp"]) if e.get("mtp") else None) for name, e in found.items()}


def _is_entry(e: object) -> bool:
    return isinstance(e, dict) and isinstance(e.get("model"), str) and isinstance(e.get("mtp"), (str, type(None)))


def _write(entries: dict[str, Entry]) -> None:
    """Beside the old file, then renamed over it."""
    path = store()
    text = json.dumps({n: {"model": str(e.model), "mtp": e.mtp and str(e.mtp)} for n, e in sorted(entries.items())}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".models", delete=False, encoding="utf-8") as f:
            f.write(text + "\n")
        os.replace(f.name, path)
    except OSError as e:
        raise LoadError(f"{path}: {e}") from e


def add(name: str, model: str | os.PathLike[str], mtp: str | os.PathLike[str] | None = None, *, replace: bool = False) -> None:
    """Register files under a name, as absolute paths. What is in them is not looked at here.

    Raises InvalidArgument for a name that is taken (unless `replace`), reserved or no name, LoadError for a missing file.
    """
    if not _NAME.fullmatch(name) or name == BUNDLED:
        raise InvalidArgument(f"name is {name!r}; expected letters, digits, '.', '_' and '-', and not {BUNDLED!r}")
    entries = registered()
    if name in entries and not replace:
        raise InvalidArgument(f"{name!r} is registered already, as {entries[name].model}")
    for path in (model, mtp):
        if path is not None and not Path(path).is_file():
            raise LoadError(f"{path}: no such file")
    entries[name] = Entry(Path(model).resolve(), None if mtp is None else Path(mtp).resolve())
    _write(entries)


def remove(name: str) -> None:
    """Forget a registered name; the files stay. Raises InvalidArgument, which lists what is registered, for any other."""
    entries = registered()
    if name not in entries:
        raise InvalidArgument(f"{name!r} is not registered; registered are: {', '.join(entries) or 'none'}")
    del entries[name]
    _write(entries)


def names() -> list[str]:
    """All names that `find` knows."""
    return [BUNDLED, FLASH, *(n for n in registered() if n != FLASH)]


# ---- from a name or file to files ----


def find(name: str | os.PathLike[str]) -> tuple[Entry, str | None]:
    """The files behind a name, or a file itself, and a note for the user (None: nothing to say).

    A string that is a known name is that name ("./small" is a file). "deepseek_v4" is $DS4_MODEL, else what is registered
    under it, else the bundled pair, and the note says so. Raises LoadError, which lists the known names, for anything that is
    neither a name nor a file.
    """
    if isinstance(name, str):
        entries = registered()
        if name == BUNDLED:
            return bundled(), None
        if name == FLASH:
            return _flash(entries)
        if name in entries:
            return entries[name], None
    path = Path(name)
    if path.is_file():
        return Entry(path), None
    if (name and path.exists()) or path.suffix or len(path.parts) > 1 or not isinstance(name, str):
        raise LoadError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    raise LoadError(f"no model {name!r}: neither a file nor one of {', '.join(names())}")


def _flash(entries: dict[str, Entry]) -> tuple[Entry, str | None]:
    given = os.environ.get("DS4_MODEL")
    if given:
        if not Path(given).is_file():
            raise LoadError(f"DS4_MODEL is {given}: no such file")
        return Entry(Path(given)), None
    if FLASH in entries:
        return entries[FLASH], None
    return bundled(), (
        f"no {FLASH} model is known, so this is the small bundled one; set DS4_MODEL or run: ds4py models add {FLASH} FILE --mtp FILE"
    )


def heads_beside(model: Path) -> Iterator[Path]:
    """Files in the model's folder that may be its head: `NAME-mtp.gguf`, then others with "mtp" in their name."""
    named = model.with_name(_PART.sub("", model.stem) + "-mtp.gguf")
    if named.is_file():
        yield named
    for path in sorted(model.parent.glob("*.gguf")):
        if "mtp" in path.name.lower() and path not in (named, model):
            yield path
