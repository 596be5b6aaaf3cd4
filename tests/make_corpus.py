"""Writes tests/corpus, what fuzzing starts from, and the models in tests/data/least, of which every broken file is tried. The files are small and change only when the formats do; run it again then."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import gguf
from ds4 import gguf_write as gw
from ds4 import synth
from engine import Engine
from hostile import Header, Meta, Parser
from tok_corpus import CODE, EMOJI, PROSE

CORPUS = Path(__file__).resolve().parent / "corpus"
F32 = synth.Types.all(gguf.GGMLQuantizationType.F32)
TOKENS = [*gw.CONTROL_TOKENS, *"abcdefgh", "Ġ", "Ċ", "ab", "abc"]
SMALL = gw.Shape(ratios=[4], vocab=len(TOKENS), width=4, heads=2, head_width=4, rotary=2, q_rank=2, o_groups=2, o_rank=1, experts=3, experts_used=2, expert_width=2, hash_layers=0,
                 window=3, index_heads=1, index_width=2, index_top_k=1, streams=2, sinkhorn=2, context=64, yarn_original=16)
LEAST = dataclasses.replace(SMALL, ratios=[0, 4, 3], width=8, hash_layers=1, window=6, index_top_k=2)
WITH_HEAD, INTERNAL, IDS_ONLY, KV_F32, SCALAR = 1, 2, 4, 16, 32     # options of fuzz_gguf.c
SEAL, PATCH = 1, 2                                                  # and of fuzz_snapshot.c


def write(target: str, name: str, content: bytes) -> None:
    """One seed."""
    path = CORPUS / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def model(path: Path, shape: gw.Shape, head: bool = False, tokenizer: bool = True) -> bytes:
    """A target, or a head in ds4's layout, of a few kilobytes."""
    writer = gguf.GGUFWriter(path, gw.HEAD_ARCHITECTURE if head else gw.ARCHITECTURE)
    if head:
        gw.add_head_keys(writer, shape)
    else:
        gw.add_model_keys(writer, shape)
        if tokenizer:
            gw.add_tokenizer_keys(writer, TOKENS, ["a b", "ab c"])
            writer.add_chat_template("<｜User｜><｜Assistant｜></think>")
    synth.stream(writer, synth.contents(gw.head_tensors(shape) if head else gw.target_tensors(shape), shape, F32, 1))
    return path.read_bytes()


def combined(target: bytes, head: bytes, shape: gw.Shape) -> bytes:
    """The head as the target's last block, as llama.cpp lays it out."""
    a, b = Parser(target).parse(), Parser(head).parse()
    block = f"blk.{shape.layers}.".encode()
    renamed = {b"norm": b"nextn.shared_head_norm"} | {stem: b"nextn." + stem for stem in (b"enorm", b"hnorm", b"hc_head_fn", b"hc_head_base", b"hc_head_scale")}
    tensors, start = list(a.tensors), len(a.data)
    offsets = {t.name: t.offset for t in b.tensors}
    both = b.data[offsets[b"mtp.0.e_proj.weight"] :][: 4 * shape.width**2] + b.data[offsets[b"mtp.0.h_proj.weight"] :][: 4 * shape.width**2]
    for t in b.tensors:
        name = t.name.removeprefix(b"mtp.0.")
        stem = name.removesuffix(b".weight")
        if stem == b"h_proj":
            continue
        if stem == b"e_proj":
            tensors.append(dataclasses.replace(t, name=block + b"nextn.eh_proj.weight", dims=(2 * shape.width, shape.width), offset=start + len(b.data)))
        else:
            tensors.append(dataclasses.replace(t, name=block + (renamed[stem] + b".weight" if stem in renamed else name), offset=start + t.offset))
    metas = [Meta(m.key, m.type, struct.pack("<I", shape.layers + 1)) if m.key == b"deepseek4.block_count" else m for m in a.metas]
    return Header(metas=metas, tensors=tensors).build(data=a.data + b.data + both)


def gguf_seeds() -> None:
    path = CORPUS / "model.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    target, head = model(path, SMALL), model(path, SMALL, head=True)
    other = model(path, dataclasses.replace(SMALL, ratios=[0, 2], hash_layers=1, streams=1), tokenizer=False)
    path.unlink()
    write("gguf", "target", bytes([0, 0]) + target)
    write("gguf", "ids", bytes([IDS_ONLY | KV_F32 | SCALAR, 0]) + other)
    write("gguf", "head", bytes([WITH_HEAD, 0]) + struct.pack("<I", len(target)) + target + head)
    write("gguf", "internal", bytes([INTERNAL, 0]) + combined(target, head, SMALL))
    write("gguf", "memory", bytes([0, 128 + 40]) + target)


def chat_seeds() -> None:
    def turns(*messages: tuple[str, ...]) -> bytes:
        return "\x1e".join(field for m in messages for field in (*m, *[""] * (7 - len(m)))).encode()

    talk = turns(("0", "You are terse."), ("1", PROSE[0]), ("3", PROSE[8], "Let me think.\n"), ("1", "".join(EMOJI)))
    tools = turns(("0", "s", "", '{"name":"f"}'), ("1", "<｜User｜> and </think>"), ("3", "", "why", "", "f", "x", "<think>"), ("4", "4"), ("2", "d"))
    for name, options in (("v4", 4), ("base", 1), ("think", 4 | 16), ("effort", 4 | 8 | 32), ("no-dsml", 2 | 128)):
        write("chat", f"talk-{name}", bytes([options, 0]) + talk)
        write("chat", f"tools-{name}", bytes([options, 0]) + tools)
    write("chat", "role", bytes([4, 0]) + turns(("poet", "x")))
    write("chat", "memory", bytes([4, 128 + 5]) + tools)


def tokenizer_seeds() -> None:
    vocabulary = "ab\nabc\nĠa\n12\n<x>\n<0x41>\nthe\n\na b\nab c\nĠ a\n1 2\ne f\n\n".encode()
    texts = [*PROSE[:4], PROSE[8], PROSE[9], *CODE[:3], "".join(EMOJI), "<s><｜User｜>ab</s>" * 3]
    for i, text in enumerate([*(text.encode() for text in texts), b"a\r\n\r\n  b\t 12345678 \xff\xe4\xb8"]):
        write("tokenizer", f"text-{i}", bytes([(i * 37 + 32) % 256, 0]) + vocabulary + text)
    write("tokenizer", "memory", bytes([32 | 64, 128 + 9]) + vocabulary + CODE[0].encode())


def snapshot_seeds() -> None:
    least = CORPUS.parent / "data" / "least"
    least.mkdir(parents=True, exist_ok=True)
    target, head = model(least / "target.gguf", LEAST), model(least / "head-ds4.gguf", LEAST, head=True)
    (least / "combined.gguf").write_bytes(combined(target, head, LEAST))
    with Engine(least / "target.gguf", least / "head-ds4.gguf", ctx=40, prefill_chunk=4, max_rewind=4, threads=1) as engine:
        session = engine.session()
        write("snapshot", "empty", bytes([0]) + session.save())
        session.eval([3, 4, 5])
        write("snapshot", "whole", bytes([4]) + session.save())
    for position in (0, 1, 9, 40):
        for at in (0, 8, 16, 32, 36, 40, 48, 56, 68, 240):
            write("snapshot", f"patch-{position}-{at}", bytes([SEAL | PATCH | (at & 4), position]) + struct.pack("<I", at)[:3] + b"\x01")
    write("snapshot", "damaged", bytes([PATCH, 9]) + struct.pack("<I", 900)[:3] + b"\x55")


def main() -> None:
    gguf_seeds()
    chat_seeds()
    tokenizer_seeds()
    snapshot_seeds()


if __name__ == "__main__":
    main()
