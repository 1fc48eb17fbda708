"""What a llama-server is given beside one file of a model: parts, adapters, control vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

EMBD, K_V, LAYERS, RANK = 256, 128, 4, 2  # the first three are llama-tiny's
_ARRAY, _STRING = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING


def split(model: Path, folder: Path, count: int) -> list[Path]:
    """Into so many files, as llama-gguf-split does it: the first one has all that is no tensor."""
    reader = gguf.GGUFReader(model)
    folder.mkdir()
    size = -(-len(reader.tensors) // count)
    paths = []
    for number in range(count):
        path = folder / f"{model.stem}-{number + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(path, _text(reader, "general.architecture"))
        if number == 0:
            _copy_values(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number * size : (number + 1) * size]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        _close(writer)
        paths.append(path)
    return paths


def place_in(path: Path) -> int:
    """A byte of the weights in this file, of the largest tensor: a prompt goes through all of them
    but those of the vocabulary.
    """
    tensors = [one for one in gguf.GGUFReader(path).tensors if one.name.startswith("blk.")]
    largest = max(tensors, key=lambda one: int(one.n_bytes))
    return int(largest.data_offset) + int(largest.n_bytes) // 2 + 1


def make_adapter(
    path: Path,
    *,
    invocation: list[int] | None = None,
    seed: int = 3,
    arch: str = "llama",
    layers: Sequence[int] = range(LAYERS),
) -> Path:
    """K and V of these layers, with seeded weights that move each logit. `invocation`: tokens from
    which on it is applied.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    if invocation:
        unsigned = gguf.GGUFValueType.UINT32
        writer.add_key_value("adapter.alora.invocation_tokens", invocation, _ARRAY, unsigned)
    for layer in layers:
        for name in ("attn_k", "attn_v"):
            a = rng.standard_normal((RANK, EMBD), dtype=np.float32) / 4
            b = rng.standard_normal((K_V, RANK), dtype=np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_a", a)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_b", b)
    _close(writer)
    return path


def make_control_vector(path: Path, *, seed: int = 5) -> Path:
    """A direction for each layer: the first has none."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "controlvector")
    for layer in range(1, LAYERS):
        writer.add_tensor(f"direction.{layer}", rng.standard_normal(EMBD, dtype=np.float32))
    _close(writer)
    return path


def _text(reader: gguf.GGUFReader, key: str) -> str:
    field = reader.get_field(key)
    assert field is not None
    return str(field.contents())


def _copy_values(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == _ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
