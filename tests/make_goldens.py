"""Write tests/data/tokenizer_goldens.json: texts and their ids, by the tokenizers package, for tests/data/tokenizer.json.

Usage: python tests/make_goldens.py
"""

from __future__ import annotations

import json
from pathlib import Path

from tok_corpus import CODE, EMOJI, PROSE, texts
from tokenizers import Tokenizer

DATA = Path(__file__).parent / "data"


def main() -> None:
    """A text each of prose, code and emoji, and a couple of hundred mixed ones."""
    tok = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    tok.encode_special_tokens = True
    fixed = ["", " ", "\n", "Hello world", "In the beginning God created the heaven and the earth.", "12345678", " " * 40, "a" * 100]
    rows = [[s, tok.encode(s).ids] for s in [*fixed, *PROSE, *CODE, "".join(EMOJI), *texts(1, 200)]]
    lines = ",\n".join(json.dumps(row, ensure_ascii=True, separators=(",", ":")) for row in rows)
    (DATA / "tokenizer_goldens.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
