"""What pyproject.toml cannot say: the extension, and the version, which is ds4.h's."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "python"))
from ds4._build import version  # noqa: E402

setup(
    version=version(),
    cffi_modules=["python/ds4/_build.py:ffi"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
