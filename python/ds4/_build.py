"""Builds the extension `ds4._ds4`: ds4.c compiled in, its declarations read from ds4.h.

Used by setup.py. The flags that bits depend on are the Makefile's own (its EXACT), so that the package's text is the text of
`./ds4`.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import cffi

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["ds4.c"]
DEPENDS = ["ds4.h", "ds4_tables.inc", "ds4_unicode.inc", "Makefile", "python/ds4/_build.py"]

CALLBACKS = """
extern "Python" void ds4_py_log(void *, const char *);
extern "Python" void ds4_py_progress(void *, const char *, int64_t, int64_t);
extern "Python" int ds4_py_mask(void *, const int *, int, uint8_t *);
"""


def version(root: Path = ROOT) -> str:
    """DS4_VERSION of ds4.h."""
    found = re.search(r'#define DS4_VERSION "([^"]+)"', (root / "ds4.h").read_text(encoding="utf-8"))
    if not found:
        raise RuntimeError(f"{root / 'ds4.h'}: DS4_VERSION is missing")
    return found[1]


def declarations(root: Path = ROOT) -> str:
    """What lies between ds4.h's marks, without the version, which is no number."""
    text = (root / "ds4.h").read_text(encoding="utf-8")
    body = text.split("/* binding: begin */")[1].split("/* binding: end */")[0]
    return re.sub(r"#define DS4_VERSION .*", "", body)


def exact_flags(root: Path = ROOT) -> list[str]:
    """The Makefile's EXACT."""
    found = re.search(r"^EXACT = (.*)$", (root / "Makefile").read_text(encoding="utf-8"), re.M)
    if not found:
        raise RuntimeError(f"{root / 'Makefile'}: EXACT is missing")
    return shlex.split(found[1])


def make_ffi() -> cffi.FFI:
    """The builder: -O3 unless $CFLAGS says otherwise; nothing of ds4.c is visible to other libraries of the process."""
    optimise = [] if "CFLAGS" in os.environ else ["-O3", "-g0"]
    ffi = cffi.FFI()
    ffi.cdef(declarations())
    ffi.cdef(CALLBACKS)
    ffi.set_source(
        "ds4._ds4",
        '#include "ds4.h"',
        sources=SOURCES,
        depends=DEPENDS,
        include_dirs=["."],
        libraries=["m"],
        extra_compile_args=[*optimise, *exact_flags(), "-fvisibility=hidden"],
        extra_link_args=["-pthread"],
        py_limited_api=True,
    )
    return ffi


ffi = make_ffi()
