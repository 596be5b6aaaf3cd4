"""Import this before anything of the package that needs the engine: it builds the extension in place."""

from __future__ import annotations

from conftest import make

make("extension")
