"""Encoders of images with random weights, for test models of llama-server.

Names and keys are those of llama.cpp's loader (tools/mtmd/clip.cpp of August 2026).
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from ollama_tiering.models.pictures import AXES, BOTH_WAYS, PATCH_PX, PLAIN, ROWS, SIDE_PX

_WIDTH, _FFN, _HEADS = 32, 64, 2


def make_projector(path: Path, kind: str, embd: int, seed: int = 1) -> None:
    """An encoder of one layer for a model of the width `embd`."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_gelu", True)
    for key, value in {
        "image_size": SIDE_PX,
        "patch_size": PATCH_PX,
        "embedding_length": _WIDTH,
        "feed_forward_length": _FFN,
        "projection_dim": embd,
        "block_count": _blocks(kind),
        "attention.head_count": _HEADS,
        "projector.scale_factor": 1,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.25, 0.25, 0.25])
    for name, shape in _tensors(kind, embd).items():
        spread = 0.1 if len(shape) == 1 else float(np.prod(shape[1:])) ** -0.5
        values = rng.standard_normal(shape) * spread + (name.endswith(("ln1.weight", "ln2.weight")))
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(kind: str) -> int:
    return 2 if kind == PLAIN else 1  # LLaVA takes what comes out of the last but one


def _tensors(kind: str, embd: int) -> dict[str, tuple[int, ...]]:
    """Shapes by name."""
    patch = (_WIDTH, 3, PATCH_PX, PATCH_PX)
    found: dict[str, tuple[int, ...]] = {"v.patch_embd.weight": patch}
    if kind == AXES:
        found |= {"v.patch_embd.weight.1": patch}
        found |= {"mm.0.weight": (4 * _WIDTH, 4 * _WIDTH), "mm.0.bias": (4 * _WIDTH,)}
        found |= {"mm.2.weight": (embd, 4 * _WIDTH), "mm.2.bias": (embd,)}
    elif kind == BOTH_WAYS:
        found |= {"v.patch_embd.bias": (_WIDTH,), "v.position_embd.weight": (ROWS, _WIDTH)}
        found |= {"mm.input_projection.weight": (_WIDTH, embd)}
        found |= {"mm.soft_emb_norm.weight": (_WIDTH,)}
    else:
        found |= {"v.position_embd.weight": (ROWS + 1, _WIDTH), "v.class_embd": (_WIDTH,)}
        found |= {"mm.0.weight": (embd, _WIDTH), "mm.0.bias": (embd,)}
        found |= {"mm.2.weight": (embd, embd), "mm.2.bias": (embd,)}
    for block in range(_blocks(kind)):
        at = f"v.blk.{block}."
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            found |= {f"{at}{part}.weight": (_WIDTH, _WIDTH), f"{at}{part}.bias": (_WIDTH,)}
        found |= {f"{at}ffn_up.weight": (_FFN, _WIDTH), f"{at}ffn_up.bias": (_FFN,)}
        found |= {f"{at}ffn_down.weight": (_WIDTH, _FFN), f"{at}ffn_down.bias": (_WIDTH,)}
        for part in ("ln1", "ln2"):
            found |= {f"{at}{part}.weight": (_WIDTH,), f"{at}{part}.bias": (_WIDTH,)}
    return found
