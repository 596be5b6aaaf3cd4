"""Make DeepSeek-V4 GGUF files of any size with random but valid weights, to measure and to test with.

`python -m ds4.synth OUT.gguf --experts 64` writes the first four layers of a Flash-shaped target (4 GB), `--head` its
MTP head; every size and tensor type is an option. `python -m ds4.synth twin IN.gguf OUT.gguf` writes the same model
with every tensor dequantised to F32. Blocks of a quantised type are random bits but for their scales, which are set so
that a matrix with n inputs has a standard deviation of about 1/sqrt(n): activations stay as in a real model.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click
import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from ds4 import gguf_write as gw
from ds4.outputs import OutputFile, replacing

CHUNK = 1 << 24  # elements made at a time
PLAIN = (Type.F32, Type.F16, Type.BF16)


@dataclass(frozen=True)
class Scale:
    """Where a block keeps its f16 scale, and its f16 minimum as a multiple of it (chosen so that the mean is zero)."""

    at: int
    minimum_at: int | None = None
    minimum: float = 0.0


SCALES = {
    Type.Q8_0: Scale(0),
    Type.Q4_0: Scale(0),
    Type.Q4_K: Scale(0, 2, 7.5),
    Type.Q5_K: Scale(0, 2, 15.5),
    Type.Q6_K: Scale(208),
    Type.Q3_K: Scale(108),
    Type.Q2_K: Scale(80, 82, 1.5),
    Type.IQ2_XXS: Scale(0),
}
TYPES = [*PLAIN, *SCALES, Type.MXFP4]


@dataclass
class Types:
    """The tensor type of each group of tensors, by default as in Flash files; norms and other vectors are F32."""

    gate_up: Type = Type.IQ2_XXS  # routed experts
    down: Type = Type.Q2_K
    dense: Type = Type.Q8_0  # attention, shared expert
    output: Type = Type.Q8_0
    embd: Type = Type.F16
    aux: Type = Type.F16  # hyper-connections, compressors, indexer, router

    def of(self, name: str, shape: tuple[int, ...]) -> Type:
        """The type of one tensor."""
        if "tid2eid" in name:
            return Type.I32
        if len(shape) < 2:
            return Type.F32
        if "_exps" in name:
            return self.down if "down" in name else self.gate_up
        if name.startswith("token_embd"):
            return self.embd
        if name.startswith("output.weight"):
            return self.output
        small = gw.stays_f32(name, shape) or "compressor" in name or "indexer" in name
        return self.aux if small else self.dense

    @classmethod
    def all(cls, t: Type) -> Types:
        """One type for every matrix that real files quantise; the small ones stay F32 or F16."""
        return cls(t, t, t, t, t, Type.F32 if t == Type.F32 else Type.F16)


# ---------------------------------------------------------------- random blocks


def raw_blocks(t: Type, count: int, scale: float, rng: np.random.Generator) -> np.ndarray:
    """`count` random blocks of a quantised type, uint8 (count, bytes of a block), with `scale` in the scale fields."""
    size = gguf.GGML_QUANT_SIZES[t][1]
    blocks: np.ndarray = np.frombuffer(rng.bytes(count * size), np.uint8).reshape(count, size).copy()
    if t == Type.MXFP4:
        low = math.floor(math.log2(scale))  # powers of two either side, as often as gives the wanted variance
        blocks[:, 0] = 127 + low + (rng.random(count) < ((scale / 2.0**low) ** 2 - 1) / 3)
        return blocks
    s = SCALES[t]
    d = scale * rng.uniform(0.75, 1.25, (count, 1)).astype(np.float32)
    if t == Type.Q4_0:  # -8 has no positive counterpart: real files have scales of both signs
        d *= rng.choice(np.array([-1, 1], np.float32), (count, 1))
    if t == Type.Q8_0:  # no quantiser writes -128
        np.maximum(blocks.view(np.int8), -127, out=blocks.view(np.int8))
    blocks[:, s.at : s.at + 2] = d.astype(np.float16).view(np.uint8)
    if s.minimum_at is not None:
        blocks[:, s.minimum_at : s.minimum_at + 2] = (d * s.minimum).astype(np.float16).view(np.uint8)
    return blocks


def unit_std(t: Type, known: dict[Type, float] = {}) -> float:  # noqa: B006 - a cache
    """The standard deviation of random blocks whose scale is 1/64."""
    if t not in known:
        blocks = raw_blocks(t, 4096, 1 / 64, np.random.default_rng(0))
        known[t] = float(dequantize(blocks, t).std())
    return known[t]


def matrix_chunk(t: Type, count: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """`count` random weights of type t, as the array whose bytes go to the file."""
    if t in PLAIN:
        x = rng.standard_normal(count, np.float32)
        x *= std
        if t == Type.F16:
            return x.astype(np.float16)
        return gguf.quants.quantize(x, t) if t == Type.BF16 else x
    return raw_blocks(t, count // gguf.GGML_QUANT_SIZES[t][0], std / unit_std(t) / 64, rng)


def vector(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A norm, a bias, a base: F32, spread as in a trained model."""
    r = rng.standard_normal(shape, np.float32)
    if "norm" in name:
        return np.asarray(1 + np.float32(0.1) * r)
    if name.endswith("_scale.weight"):
        return np.asarray(np.float32(0.7) + np.float32(0.1) * r)
    if name.endswith("exp_probs_b.bias"):
        return np.asarray(np.float32(0.2) * r)
    return np.asarray(np.float32(0.3 if "_base" in name else 0.5) * r)


def chunks(name: str, shape: tuple[int, ...], t: Type, s: gw.Shape, seed: int) -> Iterator[np.ndarray]:
    """The tensor's contents in pieces of at most CHUNK elements. They depend on seed, name, shape and type only."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    if t == Type.I32:
        order = rng.random((shape[0], s.experts), np.float32).argsort(-1)[:, : shape[1]]
        yield np.ascontiguousarray(order, np.int32)
    elif len(shape) < 2:
        yield vector(name, shape, rng)
    else:
        std = 0.5 if "_ape" in name else shape[-1] ** -0.5
        total = math.prod(shape)
        for at in range(0, total, CHUNK):
            yield matrix_chunk(t, min(CHUNK, total - at), std, rng)


# ---------------------------------------------------------------- files


Contents = tuple[str, tuple[int, ...], Type, Callable[[], Iterator[np.ndarray]]]


def byte_size(name: str, shape: tuple[int, ...], t: Type) -> int:
    """Bytes of a tensor in a file. Raises ValueError if its rows are not whole blocks."""
    block, size = gguf.GGML_QUANT_SIZES[t]
    if shape[-1] % block:
        raise ValueError(f"{name}: rows of {shape[-1]} are not a multiple of {t.name}'s block of {block}")
    return math.prod(shape) // block * size


def stream(w: gguf.GGUFWriter, tensors: list[Contents]) -> None:
    """Write the file's keys and then its tensors one piece after the other; progress on a terminal."""
    sizes = [byte_size(*t[:3]) for t in tensors]
    for (name, shape, t, _), size in zip(tensors, sizes, strict=True):
        w.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=t)
    assert w.path is not None
    with replacing(w.path) as file:
        _stream(w, tensors, sizes, file)


def _stream(w: gguf.GGUFWriter, tensors: list[Contents], sizes: list[int], file: Path) -> None:
    w.write_header_to_file(file)
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    assert w.fout is not None
    out: IO[bytes] = w.fout[0]
    w.write_padding(out, out.tell())
    done, total = 0, sum(sizes)
    for (name, _, _, make), size in zip(tensors, sizes, strict=True):
        start = out.tell()
        for piece in make():
            out.write(piece.data if piece.flags.c_contiguous else piece.tobytes())
            if sys.stderr.isatty():
                now = done + out.tell() - start
                click.echo(f"\r{now / total:4.0%}  {name:<45}", nl=now == total, err=True)
        if out.tell() - start != size:
            raise RuntimeError(f"{name}: wrote {out.tell() - start} bytes, expected {size}")
        w.write_padding(out, size)
        done += size
    w.close()


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def tokenizer(vocab: int) -> tuple[list[str], list[str]]:
    """Tokens and merges: control tokens, bytes, a few common pieces of English, fillers up to `vocab`."""
    if vocab < len(gw.CONTROL_TOKENS) + 258:
        raise ValueError(f"a vocabulary of {vocab} has no room for bytes and control tokens")
    space = byte_alphabet()[32]
    pairs = ["t h", "i n", "e r", "a n", f"{space} a", f"{space} th", f"{space}th e", "in g", "an d", f"{space}a nd"]
    tokens = [*gw.CONTROL_TOKENS, *byte_alphabet()]
    merges = pairs[: vocab - len(tokens)]
    tokens += [m.replace(" ", "") for m in merges]
    return [*tokens, *(f"<filler_{i}>" for i in range(vocab - len(tokens)))], merges


def contents(named: Iterable[gw.Named], s: gw.Shape, types: Types, seed: int) -> list[Contents]:
    """What `stream` is to write: every tensor with its type and the maker of its pieces."""
    out: list[Contents] = []
    for name, shape in named:
        t = types.of(name, shape)
        out.append((name, shape, t, lambda n=name, d=shape, t=t: chunks(n, d, t, s, seed)))  # type: ignore[misc]
    return out


def make_target(path: str | Path, s: gw.Shape, types: Types, seed: int = 0) -> None:
    """Write a random target; the same seed gives the same bytes. ValueError: sizes that a type cannot hold."""
    tensors = contents(gw.target_tensors(s), s, types, seed)
    tokens, merges = tokenizer(s.vocab)
    w = gguf.GGUFWriter(path, gw.ARCHITECTURE)
    w.add_string("general.name", f"random weights, {s.layers} layers")
    gw.add_model_keys(w, s)
    gw.add_tokenizer_keys(w, tokens, merges)
    stream(w, tensors)


def make_head(path: str | Path, s: gw.Shape, types: Types, seed: int = 0) -> None:
    """Write a random MTP head for such a target, in ds4's layout."""
    tensors = contents(gw.head_tensors(s), s, types, seed)
    w = gguf.GGUFWriter(path, gw.HEAD_ARCHITECTURE)
    w.add_string("general.name", "random MTP head")
    gw.add_head_keys(w, s)
    stream(w, tensors)


def plain_pieces(data: np.ndarray, t: Type) -> Iterator[np.ndarray]:
    """A tensor's contents in F32 (integers as they are), a few rows at a time."""
    rows = data.reshape(-1, data.shape[-1])
    step = max(1, CHUNK // data.shape[-1])
    for at in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[at : at + step])
        yield part if part.dtype == np.int32 else dequantize(part, t).astype(np.float32, copy=False)


def twin(source: str | Path, path: str | Path) -> None:
    """Write the model of `source` with every tensor dequantised to F32: the same numbers, the same keys."""
    reader = gguf.GGUFReader(source)
    keys = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    w = gguf.GGUFWriter(path, keys.pop("general.architecture").contents())
    for key, f in keys.items():
        if key != "general.alignment":
            w.add_key_value(key, f.contents(), f.types[0], f.types[-1] if len(f.types) > 1 else None)
    tensors: list[Contents] = []
    for t in reader.tensors:
        shape = tuple(int(n) for n in t.shape[::-1])
        kind = Type.I32 if t.tensor_type == Type.I32 else Type.F32
        tensors.append((t.name, shape, kind, lambda t=t: plain_pieces(t.data, t.tensor_type)))  # type: ignore[misc]
    stream(w, tensors)


# ---------------------------------------------------------------- command line


class TypeName(click.ParamType):  # type: ignore[type-arg]
    """A tensor type by its name."""

    name = "type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Type:
        """The type, or click's error that lists what there is."""
        if isinstance(value, Type):
            return value
        names = {t.name: t for t in TYPES}
        if value.upper() not in names:
            self.fail(f"{value!r} is not one of {', '.join(names)}", param, ctx)
        return names[value.upper()]


class TargetByDefault(click.Group):
    """A group whose `target` command need not be named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `target` before arguments that name no command."""
        if args and args[0] not in (*self.commands, "--help"):
            args = ["target", *args]
        return super().parse_args(ctx, args)


def size_options(f: Callable[..., None]) -> Callable[..., None]:
    """One option for every size of gw.Shape and every group of Types."""
    for t in reversed(dataclasses.fields(Types)):
        option = f"--{t.name.replace('_', '-')}-type"
        f = click.option(option, type=TypeName(), help=f"[default: {t.default.name}]")(f)
    for size in reversed(dataclasses.fields(gw.Shape)):
        if size.name != "ratios":
            option = f"--{size.name.replace('_', '-')}"
            f = click.option(option, default=size.default, show_default=True)(f)
    return f


@click.group(cls=TargetByDefault, help=__doc__.split("\n\n")[0])
def main() -> None:
    """The command line."""


@main.command(short_help="Write a random target (may be left out).")
@click.argument("out", type=OutputFile(models=True))
@click.option("--head", type=OutputFile(models=True), help="Write an MTP head for it too.")
@click.option("--layers", default=4, show_default=True, help="Ratios 0, 0, 4, 128, 4, 128, ...")
@click.option("--ratios", help="Compression ratios of the layers, such as 0,4,128; instead of --layers.")
@click.option("--type", "every", type=TypeName(), help="One type for all matrices that real files quantise.")
@click.option("--head-experts-type", type=TypeName(), default="Q4_K", show_default=True)
@click.option("--seed", default=0, show_default=True)
@size_options
def target(
    out: Path,
    head: Path | None,
    layers: int,
    ratios: str | None,
    every: Type | None,
    head_experts_type: Type,
    seed: int,
    **options: Any,
) -> None:
    """Write a target with random weights to OUT. The sizes are Flash's unless given."""
    names = [f.name for f in dataclasses.fields(Types)]
    types = dataclasses.replace(
        Types.all(every) if every is not None else Types(),
        **{n: v for n in names if (v := options.pop(f"{n}_type")) is not None},
    )
    pattern = [0, 0, *[4, 128] * layers][:layers]
    s = gw.Shape(ratios=[int(r) for r in ratios.split(",")] if ratios else pattern, **options)
    s.hash_layers = min(s.hash_layers, s.layers)
    try:
        make_target(out, s, types, seed)
        if head:
            inside = every if every is not None else head_experts_type
            make_head(head, s, dataclasses.replace(types, gate_up=inside, down=inside), seed + 1)
    except ValueError as e:
        raise click.ClickException(str(e)) from e


@main.command("twin", short_help="Dequantise a file to F32.")
@click.argument("source", metavar="IN", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=OutputFile(models=True))
def twin_command(source: Path, out: Path) -> None:
    """Write the model of IN to OUT with every tensor in F32."""
    twin(source, out)


if __name__ == "__main__":
    main()
