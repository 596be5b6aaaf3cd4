"""Broken GGUF files, made from good ones by a small parser of its own that knows where everything in the header lies.

`python tests/hostile.py tests/data/tiny/target.gguf LABEL OUT.gguf` writes one of them, `python tests/hostile.py FILE` lists them.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMAT = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
EXTREMES = (0, 1, 2**31, 2**31 - 1, 2**32 - 1, 2**63, 2**63 - 1, 2**64 - 1, 2**64 - 32)


@dataclass(frozen=True)
class Case:
    """A broken file: the good one with bytes replaced at offsets, or (when `content` is set) other bytes altogether."""

    label: str
    patches: tuple[tuple[int, bytes], ...] = ()
    content: bytes | None = None

    def apply(self, good: bytes) -> bytes:
        """The file's bytes."""
        if self.content is not None:
            return self.content
        data = bytearray(good)
        for at, new in self.patches:
            data[at : at + len(new)] = new
        return bytes(data)


@dataclass(frozen=True)
class Field:
    """A number in the header: what it says, where it lies, how many bytes it has."""

    label: str
    offset: int
    width: int


@dataclass(frozen=True)
class Meta:
    """A metadata key and its value's bytes as they stand in the file."""

    key: bytes
    type: int
    value: bytes


@dataclass(frozen=True)
class Tensor:
    """A tensor's description; the type is GGUF's number, the offset counts from the start of the data."""

    name: bytes
    dims: tuple[int, ...]
    type: int
    offset: int


@dataclass
class Header:
    """A parsed file: every number's place, and the parts to put together anew."""

    fields: list[Field] = field(default_factory=list)
    metas: list[Meta] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""

    def build(self, *, metas: list[Meta] | None = None, tensors: list[Tensor] | None = None, data: bytes | None = None, alignment: int = 32) -> bytes:
        """A file of these parts, some of them replaced."""
        metas = self.metas if metas is None else metas
        tensors = self.tensors if tensors is None else tensors
        out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metas)))
        for m in metas:
            out += string(m.key) + struct.pack("<I", m.type) + m.value
        for t in tensors:
            out += string(t.name) + struct.pack("<I", len(t.dims)) + b"".join(struct.pack("<Q", d) for d in t.dims) + struct.pack("<IQ", t.type, t.offset)
        out += bytes(-len(out) % alignment)
        return bytes(out) + (self.data if data is None else data)


def string(text: bytes) -> bytes:
    """A string as GGUF writes it: its length, then its bytes."""
    return struct.pack("<Q", len(text)) + text


def array(kind: int, count: int, elements: bytes) -> bytes:
    """An array's value: its elements' type, their count, their bytes."""
    return struct.pack("<IQ", kind, count) + elements


class Parser:
    """Walks a header and notes the place of every number in it; of long arrays the first, middle and last element's."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.header = data, 0, Header()

    def number(self, label: str, kind: int) -> int | float:
        width = struct.calcsize(FORMAT[kind])
        if label:
            self.header.fields.append(Field(label, self.at, width))
        value: int | float = struct.unpack_from("<" + FORMAT[kind], self.data, self.at)[0]
        self.at += width
        return value

    def count(self, label: str, kind: int = U64) -> int:
        return int(self.number(label, kind))

    def string(self, label: str) -> bytes:
        n = self.count(label and f"{label} length")
        self.at += n
        return self.data[self.at - n : self.at]

    def value(self, label: str, kind: int) -> None:
        if kind == STRING:
            self.string(label)
        elif kind == ARRAY:
            inner, n = self.count(f"{label} element type", U32), self.count(f"{label} count")
            noted = {0, n // 2, n - 1}
            for i in range(n):
                self.value(f"{label}[{i}]" if i in noted else "", inner)
        else:
            self.number(label, kind)

    def parse(self) -> Header:
        self.count("magic", U32)
        self.count("version", U32)
        n_tensors, n_metas = self.count("tensor count"), self.count("key count")
        for _ in range(n_metas):
            start = self.at
            key = self.string("")
            name = key.decode()
            self.header.fields.append(Field(f"{name}: key length", start, 8))
            kind = self.count(f"{name}: type", U32)
            start = self.at
            self.value(name, kind)
            self.header.metas.append(Meta(key, kind, self.data[start : self.at]))
        sample = {0, n_tensors // 2, n_tensors - 1}
        for i in range(n_tensors):
            say = f"tensor {i}" if i in sample else ""
            name_bytes = self.string(say and f"{say} name")
            n_dims = self.count(say and f"{say} dimension count", U32)
            dims = tuple(self.count(say and f"{say} dimension {k}") for k in range(n_dims))
            self.header.tensors.append(Tensor(name_bytes, dims, self.count(say and f"{say} type", U32), self.count(say and f"{say} offset")))
        self.header.data = self.data[(self.at + 31) // 32 * 32 :]
        return self.header


def numbers(header: Header) -> Iterator[Case]:
    """Every count, length, type, dimension, offset and number of the header at each extreme that fits it."""
    for f in header.fields:
        for value in EXTREMES:
            if value < 1 << (8 * f.width):
                yield Case(f"{f.label} = {value:#x}", ((f.offset, value.to_bytes(f.width, "little")),))


def truncations(good: bytes) -> Iterator[Case]:
    """The first n bytes: n up to 200, and each 64th part."""
    for n in [*range(200), *(len(good) * part // 64 for part in range(1, 64))]:
        yield Case(f"truncated to {n}", content=good[:n])


BAD_NAMES = {
    "byte ff": b"\xff", "overlong": b"a\xc0\xaf", "overlong of three": b"a\xe0\x80\xafb", "overlong of four": b"\xf0\x80\x80\xaf", "surrogate": b"\xed\xa0\x80", "beyond Unicode": b"\xf4\x90\x80\x80",
    "cut short": b"abc\xe4\xb8", "newline": b"two\nlines", "escape": b"\x1b[2J", "C1 control": b"a\xc2\x9b2J", "NUL": b"a\0b", "format": b"%s%n%1000000d", "long": b"n" * 100000, "long of characters": "字".encode() * 5000,
    "empty": b"",
}


def names(header: Header) -> Iterator[Case]:
    """Keys, tensors and texts whose bytes a message must not repeat as they are."""
    quoted = [b"general.architecture", b"general.name", b"deepseek4.rope.scaling.type", b"deepseek4.expert_gating_func",
              b"tokenizer.ggml.model", b"tokenizer.ggml.pre", b"tokenizer.chat_template"]
    for label, text in BAD_NAMES.items():
        yield Case(f"a key named {label}", content=header.build(metas=[*header.metas, Meta(text, U32, bytes(4))]))
        yield Case(f"a key named {label}, twice", content=header.build(metas=[*header.metas, *[Meta(text + b"x", U32, bytes(4))] * 2]))
        yield Case(f"a key named {label} of an unknown type", content=header.build(metas=[*header.metas, Meta(text, 99, bytes(4))]))
        yield Case(f"a tensor named {label}", content=header.build(tensors=[*header.tensors, Tensor(text, (8,), 0, 0)]))
        yield Case(f"a tensor named {label} that ends beyond the file", content=header.build(tensors=[*header.tensors, Tensor(text, (8,), 0, 2**40)]))
        for key in quoted:
            metas = [m for m in header.metas if m.key != key]
            yield Case(f"{key.decode()} is {label}", content=header.build(metas=[*metas, Meta(key, STRING, string(text))]))


def structures(header: Header) -> Iterator[Case]:
    """Duplicates, nested arrays, overlaps, offsets and products that overflow, odd alignments, nothing at all."""
    metas, tensors, build = header.metas, header.tensors, header.build
    yield Case("first key twice", content=build(metas=[*metas, metas[0]]))
    yield Case("last key twice", content=build(metas=[*metas, metas[-1]]))
    yield Case("first tensor twice", content=build(tensors=[*tensors, tensors[0]]))
    yield Case("a tensor's name twice", content=build(tensors=[*tensors[:-1], replace(tensors[-1], name=tensors[0].name)]))
    yield Case("no keys", content=build(metas=[]))
    yield Case("no tensors", content=build(tensors=[]))
    yield Case("nothing", content=build(metas=[], tensors=[], data=b""))
    yield Case("no data", content=build(data=b""))
    for depth in (1, 3, 4, 5, 6, 1000, 100000):
        yield Case(f"arrays {depth} deep", content=build(metas=[*metas, Meta(b"x.deep", ARRAY, array(ARRAY, 1, b"") * depth + array(U8, 0, b""))]))
    for n in (1000, 100000):
        yield Case(f"{n} empty arrays", content=build(metas=[*metas, Meta(b"x.wide", ARRAY, array(ARRAY, n, array(U8, 0, b"") * n))]))
        yield Case(f"{n} empty strings", content=build(metas=[*metas, Meta(b"x.wide", ARRAY, array(STRING, n, string(b"") * n))]))
        yield Case(f"{n} keys", content=build(metas=[*metas, *(Meta(b"x.%d" % i, U8, b"\1") for i in range(n))]))
        yield Case(f"{n} tensors without data", content=build(tensors=[*tensors, *(Tensor(b"x.%d" % i, (1,), 99, 0) for i in range(n))]))
    for kind in (U16, U32, U64, STRING, ARRAY):
        for count in (2**60, 2**61, 2**62, 2**63, 2**64 - 1, 2**64 // 12 + 1):
            yield Case(f"an array of {count:#x} of type {kind}", content=build(metas=[*metas, Meta(b"x", ARRAY, array(kind, count, bytes(64)))]))
    yield Case("all tensors at 0", content=build(tensors=[replace(t, offset=0) for t in tensors]))
    yield Case("a tensor over the next", content=build(tensors=[replace(tensors[0], offset=tensors[1].offset), *tensors[1:]]))
    hidden = [Tensor(b"x.a", (4096,), 0, 0), Tensor(b"x.b", (8,), 99, 64), Tensor(b"x.c", (8,), 0, 128)]
    yield Case("an overlap behind a tensor without data", content=build(tensors=[*(replace(t, offset=t.offset + 16384) for t in tensors), *hidden], data=bytes(16384) + header.data))
    for offset in (2**63, 2**64 - 32, 2**64 - 64, 2**64 - 4096, 2**40):
        yield Case(f"every tensor at {offset:#x}", content=build(tensors=[replace(t, offset=offset) for t in tensors]))
    products = [(2**32, 2**32), (2**31, 2**31, 4), (2**37, 2**22), (2**63, 2), (2**64 - 1,), (1, 1, 1, 2**63), (2**35, 2**24), (0,), (64, 0), (2**36,), (2**30,) * 4]
    for dims in products:
        for kind in (0, 1, 8, 10, 16, 99):
            yield Case(f"dimensions {dims} of type {kind}", content=build(tensors=[replace(tensors[0], dims=dims, type=kind), *tensors[1:]]))
    for kind in [*range(48), 255, 2**16]:
        yield Case(f"first tensor's type {kind}", content=build(tensors=[replace(tensors[0], type=kind), *tensors[1:]]))
    for i in (0, len(tensors) // 2, len(tensors) - 1):
        yield Case(f"without tensor {i}", content=build(tensors=tensors[:i] + tensors[i + 1 :]))
        yield Case(f"tensor {i} turned", content=build(tensors=[*tensors[:i], replace(tensors[i], dims=tensors[i].dims[::-1]), *tensors[i + 1 :]]))
        yield Case(f"tensor {i} in four dimensions", content=build(tensors=[*tensors[:i], replace(tensors[i], dims=(*tensors[i].dims, 1, 1, 1)[:4]), *tensors[i + 1 :]]))
    for a in (0, 1, 7, 8, 12, 16, 64, 4096, 2**30, 2**31, 2**32 - 32):
        yield Case(f"alignment {a}", content=build(metas=[*metas, Meta(b"general.alignment", U32, struct.pack("<I", a))], alignment=max(1, min(a, 1 << 16))))
    odd = [("2^63", U64, struct.pack("<Q", 2**63)), ("-32", I32, struct.pack("<i", -32)), ("NaN", F32, struct.pack("<f", math.nan)),
           ("text", STRING, string(b"32")), ("array", ARRAY, array(U32, 1, bytes(4)))]
    for label, kind, value in odd:
        yield Case(f"alignment {label}", content=build(metas=[*metas, Meta(b"general.alignment", kind, value)]))


def variants() -> Iterator[tuple[str, int, bytes]]:
    """(label, type, bytes) of values that a key may have in a hostile file."""
    for whole in (0, 1, 2, 3, 5, 16, 100, 255, 1000, 2**12, 2**16, 2**20, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 1):
        yield str(whole), U32, struct.pack("<I", whole)
    for whole in (-1, -(2**31)):
        yield str(whole), I32, struct.pack("<i", whole)
    for whole in (-(2**63), 2**63 - 1, 2**32 + 4):
        yield str(whole), I64, struct.pack("<q", whole)
    yield "2^64 - 1", U64, struct.pack("<Q", 2**64 - 1)
    for real in (math.nan, math.inf, -math.inf, 1e38, 1e-38, 0.5, -0.0, 4.5):
        yield f"float {real}", F32, struct.pack("<f", real)
    for real in (math.nan, math.inf, 1e300, 5e-324):
        yield f"double {real}", F64, struct.pack("<d", real)
    yield "true", BOOL, b"\1"
    yield "byte 255", BOOL, b"\xff"
    yield "text", STRING, string(b"4")
    yield "no text", STRING, string(b"")
    yield "an empty array", ARRAY, array(U32, 0, b"")
    yield "an array of 0", ARRAY, array(U32, 1, bytes(4))
    yield "an array of texts", ARRAY, array(STRING, 2, string(b"a") * 2)
    yield "an array of arrays", ARRAY, array(ARRAY, 1, array(U32, 1, bytes(4)))
    yield "an array of NaN", ARRAY, array(F32, 600, struct.pack("<f", math.nan) * 600)
    yield "an array of 4", ARRAY, array(I32, 600, struct.pack("<i", 4) * 600)
    yield "an array of 3", ARRAY, array(I32, 600, struct.pack("<i", 3) * 600)
    yield "an array of -1", ARRAY, array(I32, 600, struct.pack("<i", -1) * 600)


def values(header: Header) -> Iterator[Case]:
    """Each key absent, of another type, and at extremes that its type allows."""
    for i, m in enumerate(header.metas):
        rest = header.metas[:i] + header.metas[i + 1 :]
        yield Case(f"without {m.key.decode()}", content=header.build(metas=rest))
        for label, kind, value in variants():
            yield Case(f"{m.key.decode()} is {label}", content=header.build(metas=[*rest, Meta(m.key, kind, value)]))


def cases(good: bytes) -> Iterator[Case]:
    """Every broken file that is made from a good one."""
    header = Parser(good).parse()
    yield Case("as it was", content=header.build())
    yield from numbers(header)
    yield from truncations(good)
    yield from names(header)
    yield from structures(header)
    yield from values(header)


def main(arguments: list[str]) -> None:
    good = Path(arguments[0]).read_bytes()
    for case in cases(good):
        if len(arguments) == 1:
            print(case.label)
        elif case.label == arguments[1]:
            Path(arguments[2]).write_bytes(case.apply(good))


if __name__ == "__main__":
    main(sys.argv[1:])
