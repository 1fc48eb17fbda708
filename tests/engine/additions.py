"""What is loaded beside a model of the llama.cpp engine: LoRA adapters and projectors of images.

Random weights, for the width and depth of `llama-tiny`. Names and keys are those of llama.cpp's
loaders (v0.16.3 llama-adapter.cpp, tools/mtmd/clip.cpp).
"""

from __future__ import annotations

import base64
import random
from pathlib import Path

import gguf
import numpy as np

from ollama_tiering.models.shapes import ModelShape

RANK = 4
IMAGE_SIZE, PATCH_SIZE, WIDTH = 28, 14, 32  # four patches, each of which becomes an embedding
PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2


def make_adapter(path: Path, shape: ModelShape, seed: int) -> None:
    """A LoRA adapter of the K and V projections of every layer."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for layer in range(shape.layers):
        for part in ("attn_k", "attn_v"):
            name = f"blk.{layer}.{part}.weight"
            down, up = (RANK, shape.embd), (shape.kv_heads * shape.head_dim, RANK)
            _add(writer, rng, f"{name}.lora_a", down, 1 / shape.embd**0.5)
            _add(writer, rng, f"{name}.lora_b", up, 0.5 / RANK**0.5)
    _write(writer)


def make_projector(path: Path, shape: ModelShape, seed: int) -> None:
    """A CLIP encoder of one layer and LLaVA's projector of two matrices."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    for key, value in {
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "embedding_length": WIDTH,
        "feed_forward_length": 2 * WIDTH,
        "projection_dim": shape.embd,
        "block_count": 2,  # LLaVA takes what comes out of the last but one
        "attention.head_count": 2,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.25, 0.25, 0.25])
    matrices: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (WIDTH, 3, PATCH_SIZE, PATCH_SIZE),
        "v.position_embd.weight": (PATCHES + 1, WIDTH),
        "v.class_embd": (WIDTH,),
        "mm.0.weight": (shape.embd, WIDTH),
        "mm.2.weight": (shape.embd, shape.embd),
    }
    vectors = {"mm.0": shape.embd, "mm.2": shape.embd}
    for block in (0, 1):
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            matrices[f"v.blk.{block}.{part}.weight"] = (WIDTH, WIDTH)
        matrices[f"v.blk.{block}.ffn_up.weight"] = (2 * WIDTH, WIDTH)
        matrices[f"v.blk.{block}.ffn_down.weight"] = (WIDTH, 2 * WIDTH)
        for part in ("ln1", "ln2"):
            vectors[f"v.blk.{block}.{part}"] = WIDTH
            writer.add_tensor(f"v.blk.{block}.{part}.weight", np.ones(WIDTH, np.float32))
    for name, dims in matrices.items():
        _add(writer, rng, name, dims, float(np.prod(dims[1:])) ** -0.5)
    for name, size in vectors.items():
        _add(writer, rng, f"{name}.bias", (size,), 0.1)
    _write(writer)


def make_image(seed: int) -> str:
    """A PPM of random pixels, as the API takes it."""
    size = f"{IMAGE_SIZE} {IMAGE_SIZE}"
    pixels = random.Random(seed).randbytes(3 * IMAGE_SIZE**2)
    return base64.b64encode(f"P6 {size} 255\n".encode() + pixels).decode()


def _add(
    writer: gguf.GGUFWriter,
    rng: np.random.Generator,
    name: str,
    shape: tuple[int, ...],
    spread: float,
) -> None:
    writer.add_tensor(name, (rng.standard_normal(shape) * spread).astype(np.float32))


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
