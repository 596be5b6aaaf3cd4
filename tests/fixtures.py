"""The random models in tests/data and how to make other files of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

FIXTURES = ["tiny", "odd", "edge"]


def tensors_of(path: Path) -> dict[str, Any]:
    """name -> the reader's tensor (its `data` is a numpy array in C order: slowest dimension first)."""
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


def copy_metadata(path: Path, writer: gguf.GGUFWriter, change: dict[str, Any] | None = None) -> None:
    """Every key of a file into a writer; `change` replaces values, or drops the key with None."""
    change = change or {}
    for field in gguf.GGUFReader(path).fields.values():
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue
        value = change.get(field.name, field.contents())
        if value is None:
            continue
        kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, kind, sub)


def rewrite(
    source: Path,
    out: Path,
    *,
    arch: str = "deepseek4",
    meta: dict[str, Any] | None = None,
    extra: dict[str, tuple[Any, gguf.GGUFValueType]] | None = None,
    drop: set[str] = frozenset(),
    tensors: dict[str, np.ndarray] | None = None,
    more: dict[str, np.ndarray] | None = None,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A copy of a GGUF file with keys changed (None: dropped) or added, tensors dropped, replaced, added or retyped."""
    writer = gguf.GGUFWriter(out, arch)
    copy_metadata(source, writer, meta)
    for name, (value, kind) in (extra or {}).items():
        writer.add_key_value(
            name, value, kind, gguf.GGUFValueType.get_type(value[0]) if kind == gguf.GGUFValueType.ARRAY else None
        )
    for t in gguf.GGUFReader(source).tensors:
        if t.name in drop:
            continue
        array = (tensors or {}).get(t.name, np.asarray(t.data))
        kind = (types or {}).get(t.name)
        if kind is not None:
            writer.add_tensor(t.name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        elif array.dtype == np.uint8:
            writer.add_tensor(t.name, array, raw_dtype=t.tensor_type)
        else:
            writer.add_tensor(t.name, array)
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def combined(directory: Path, out: Path) -> Path:
    """Target and head in one file, as llama.cpp's converter lays them out, from target.gguf and head-llama.gguf."""
    head = tensors_of(directory / "head-llama.gguf")
    layers = int(gguf.GGUFReader(directory / "target.gguf").fields["deepseek4.block_count"].contents())
    block = f"blk.{layers}."
    more = {name: np.asarray(t.data) for name, t in head.items() if name.startswith(block)}
    more |= {
        f"{block}nextn.hc_head_{part}.weight": np.asarray(head[f"output_hc_{part}.weight"].data)
        for part in ("fn", "base", "scale")
    }
    return rewrite(directory / "target.gguf", out, meta={"deepseek4.block_count": layers + 1}, more=more)


def head_forms(directory: Path, tmp: Path) -> Iterator[tuple[Path, Path | None, bool]]:
    """(target, head file, internal) for the three forms a head comes in."""
    yield directory / "target.gguf", directory / "head-ds4.gguf", False
    yield directory / "target.gguf", directory / "head-llama.gguf", False
    ready = directory / "combined.gguf"
    yield ready if ready.exists() else combined(directory, tmp / "combined.gguf"), None, True


def anti_head(source: Path, out: Path) -> Path:
    """A head in ds4's layout that is always wrong: its last norm's weights are negated, and so are its logits."""
    norm = "mtp.0.norm.weight"
    arch = gguf.GGUFReader(source).fields[gguf.Keys.General.ARCHITECTURE].contents()
    return rewrite(source, out, arch=arch, tensors={norm: -np.asarray(tensors_of(source)[norm].data)})
