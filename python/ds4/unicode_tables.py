"""Write ds4_unicode.inc, the Unicode classes that the tokenizer's splitting rules name.

Usage: python python/ds4/unicode_tables.py [--check] [ds4_unicode.inc]

The vocabularies ds4 reads were made with the ``tokenizers`` package, so the classes are asked of its own regex engine:
what it calls a letter is a letter, whatever Unicode version it carries.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

CLASSES = (
    (1, "L", r"\p{L}"),
    (2, "M", r"\p{M}"),
    (3, "N", r"\p{N}"),
    (4, "P", r"\p{P}"),
    (5, "S", r"\p{S}"),
    (6, "space", r"\s"),
)
LAST = 0x110000
PAGES = 0x200  # pages of 256 code points that have an index entry: the first two planes


def runs() -> list[tuple[int, int]]:
    """(first code point, class) of every run of equal class, in order; class 0 is none of them."""
    points = [c for c in range(LAST) if not 0xD800 <= c < 0xE000]  # surrogates are no characters and never looked up
    cut = pre_tokenizers.Split(Regex("|".join(f"{pattern}+" for _, _, pattern in CLASSES)), "isolated")
    holds = [(number, pre_tokenizers.Split(Regex(pattern), "removed")) for number, _, pattern in CLASSES]
    found: list[tuple[int, int]] = []
    for _, (first, _) in cut.pre_tokenize_str("".join(map(chr, points))):
        c = points[first]
        classes = [number for number, split in holds if not split.pre_tokenize_str(chr(c))]
        if len(classes) > 1:
            raise ValueError(f"U+{c:04X} is in the classes {classes}")
        found.append((c, classes[0] if classes else 0))
    return found


def ascii_classes(found: list[tuple[int, int]]) -> list[int]:
    """The classes of the first 128 code points, which text holds most of."""
    return [max(run for run in found if run[0] <= c)[1] for c in range(128)]


def lines(numbers: list[str], width: int = 118) -> str:
    """Comma-separated numbers, wrapped and indented."""
    out, line = [], "   "
    for n in numbers:
        if len(line) + len(n) + 2 > width:
            out.append(line)
            line = "   "
        line += f" {n},"
    return "\n".join([*out, line])


def table() -> str:
    """The text of ds4_unicode.inc."""
    found = runs()
    pages, at = [], 0
    for page in range(PAGES + 1):
        while at + 1 < len(found) and found[at + 1][0] <= page * 256:
            at += 1
        pages.append(at)
    names = ", ".join(f"{number} {name}" for number, name, _ in CLASSES)
    return f"""// Written by python/ds4/unicode_tables.py from tokenizers {version("tokenizers")}; not to be edited.
// A run of code points of one class is (first code point << 4) | class; the next run ends it. Classes: 0 none, {names}.
enum {{ UNICODE_RUNS = {len(found)}, UNICODE_PAGES = {PAGES} }};
static const uint32_t unicode_run[UNICODE_RUNS] = {{
{lines([f"0x{c << 4 | k:x}" for c, k in found])}
}};
// The run that holds the first code point of each page of 256, so that a search stays inside its page.
static const uint16_t unicode_page[UNICODE_PAGES + 1] = {{
{lines([str(p) for p in pages])}
}};
static const uint8_t unicode_ascii[128] = {{
{lines([str(k) for k in ascii_classes(found)])}
}};
"""


def main() -> int:
    """Write the table, or with --check say whether the file holds it."""
    ap = argparse.ArgumentParser(description="write ds4_unicode.inc")
    ap.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file differs")
    ap.add_argument("path", nargs="?", type=Path, default=Path(__file__).resolve().parents[2] / "ds4_unicode.inc")
    a = ap.parse_args()
    text = table()
    if not a.check:
        a.path.write_text(text, encoding="utf-8")
        return 0
    if a.path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{a.path} is not what this script writes", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
