"""The extension that _build.py makes: cffi in API mode, so that every call into it runs without the GIL."""

from typing import Any

ffi: Any
lib: Any
