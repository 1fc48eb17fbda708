"""A gemma 4 and its assistant, which drafts by the target's own rows: as llama.cpp's loaders read
them (August 2026, src/models/gemma4.cpp and gemma4-assistant.cpp), with random weights.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import gguf
import numpy as np

from ollama_tiering.models import make, vocab
from ollama_tiering.models.shapes import make_shape

_WIDTH, _SMALL, _FFN, _HEADS, _KV_HEADS, _HEAD = 256, 128, 512, 4, 2, 64
_WINDOW = 256
_TARGET = [True, True, False, True, True, False]  # layers with a window
_ASSISTANT = [True, False]  # they read the rows of the target's last two


def make_target(path: Path) -> None:
    tensors = {"token_embd.weight": (vocab.VOCAB_SIZE, _WIDTH)}
    for layer in range(len(_TARGET)):
        kv = (_KV_HEADS * _HEAD, _WIDTH)
        tensors |= _layer(layer, _WIDTH)
        tensors |= {f"blk.{layer}.attn_k.weight": kv, f"blk.{layer}.attn_v.weight": kv}
        tensors |= {f"blk.{layer}.attn_k_norm.weight": (_HEAD,)}
    _write(path, "gemma4", _TARGET, _WIDTH, tensors)


def make_assistant(path: Path) -> None:
    tensors = {
        "token_embd.weight": (vocab.VOCAB_SIZE, _SMALL),
        "nextn.pre_projection.weight": (_SMALL, 2 * _WIDTH),
        "nextn.post_projection.weight": (_WIDTH, _SMALL),
    }
    for layer in range(len(_ASSISTANT)):
        tensors |= _layer(layer, _SMALL) | {f"blk.{layer}.layer_output_scale.weight": (1,)}
    _write(path, "gemma4-assistant", _ASSISTANT, _SMALL, tensors)


def _layer(layer: int, width: int) -> dict[str, tuple[int, ...]]:
    queries = _HEADS * _HEAD
    norms = "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"
    found: dict[str, tuple[int, ...]] = {f"{norm}.weight": (width,) for norm in norms}
    found |= {"attn_q.weight": (queries, width), "attn_output.weight": (width, queries)}
    found |= {"attn_q_norm.weight": (_HEAD,), "ffn_down.weight": (width, _FFN)}
    found |= {"ffn_gate.weight": (_FFN, width), "ffn_up.weight": (_FFN, width)}
    return {f"blk.{layer}.{name}": shape for name, shape in found.items()}


def _write(
    path: Path, arch: str, windows: list[bool], width: int, tensors: dict[str, tuple[int, ...]]
) -> None:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type("model")
    writer.add_block_count(len(windows))
    writer.add_context_length(32768)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(_FFN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_sliding_window(_WINDOW)
    writer.add_array(f"{arch}.attention.sliding_window_pattern", windows)
    for key, value in {
        "attention.key_length_swa": _HEAD,
        "attention.value_length_swa": _HEAD,
        "rope.dimension_count_swa": _HEAD,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
    }.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base_swa", 1e4)
    if width != _WIDTH:
        writer.add_uint32(f"{arch}.embedding_length_out", _WIDTH)
        writer.add_uint32(f"{arch}.nextn_predict_layers", len(windows))
    make._add_tokenizer(writer, make_shape("gemma3-tiny"))
    whole = {**tensors, "output_norm.weight": (width,), "rope_freqs.weight": (_HEAD // 2,)}
    for name, shape in whole.items():
        rng = np.random.default_rng(zlib.crc32(f"{arch} {name}".encode()))
        values = (
            rng.standard_normal(shape) * shape[-1] ** -0.5 if len(shape) > 1 else np.ones(shape)
        )
        if name == "token_embd.weight":  # which is the output's, too: only text is likely
            values *= np.isin(np.arange(shape[0]), sorted(vocab.PRINTABLE))[:, None] / 4
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
