"""Writes a GGUF of a Shape with seeded random weights, as many tensors at a time as processors.

The same shape and seed give the same bytes: weights come from PCG64's raw stream (stable
across NumPy versions, unlike its distributions), one stream per tensor name. The file appears
whole or not at all.

Scales are chosen so that the numbers say something: attention is moderately peaked (one changed
bit of an early K or V row moves later logits), the logits are neither flat nor saturated, and
only printable characters are likely, so a generation runs to its limit and reads as text.
Channel 0 of the residual stream makes the last part: every embedding sets it to a constant,
nothing writes to it, and the output rows of all other tokens point away from it. Output rows
also point away from their own token's embedding: v0.16.3 llm/server.go ends an answer that
repeats one token 30 times, and a random model would. Where the embeddings are the output matrix,
the last norm has negative weights: that turns the output rows round, and those of the tokens that
should not appear have a large channel 0.
"""

import math
import os
import secrets
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from ollama_tiering.models import blocks, kquant, recurrent, vision, vocab
from ollama_tiering.models.shapes import ModelShape
from ollama_tiering.models.tensors import Tensor

ATTENTION_SHARPNESS = 2.0  # standard deviation of the attention scores
LOGIT_SPREAD = 2.5  # standard deviation of the logits
CONSTANT_CHANNEL = 4.0  # value of channel 0 in every embedding
NO_REPEAT = 8.0  # how much the logit of the token just seen is lowered, about
BIAS_SPREAD = 0.5  # standard deviation of the biases
LONGEST_FACTOR = 4.0  # of LongRoPE's long table; those of the short one are 1
UNLIKELY = 60.0  # minus this in channel 0 of the output row of a token that should not appear

_FILE_TYPE = {"f32": 0, "f16": 1, "q8_0": 7, "q4_k_m": 15, "bf16": 32}  # enum llama_ftype
_PRE = {"qwen3": "qwen2", "llama": "llama-bpe", "gemma3": "default", "gptoss": "gpt-4o",
        "mistral3": "tekken", "glm4moelite": "glm4", "qwen3vl": "qwen2", "qwen2vl": "qwen2",
        "qwen35": "qwen2",
        "deepseek2": "deepseek-v3", "gemma4": "gemma4"}  # fmt: skip

Progress = Callable[[Tensor], None]
Values = Callable[[Tensor], NDArray[np.float32]]


def make_model(
    shape: ModelShape, path: Path, seed: int = 0, progress: Progress | None = None
) -> int:
    """Writes the model atomically, replacing an existing file; returns its size in bytes."""
    name = f"{shape.name} random weights, seed {seed}"
    return write_model(shape, path, name, lambda t: tensor_values(shape, t, seed), progress)


def write_model(
    shape: ModelShape, path: Path, name: str, values: Values, progress: Progress | None = None
) -> int:
    """Works as `make_model`, with the caller's weights: `values` gives each tensor of the shape."""
    shape.check()
    tmp = path.with_name(f".{secrets.token_hex(8)}.tmp")  # whatever the length of the name
    try:
        _write(shape, tmp, name, values, progress)
        with tmp.open("rb+") as written:
            os.fsync(written.fileno())
        stored_bytes = tmp.stat().st_size
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)
    return stored_bytes


def _write(
    shape: ModelShape, path: Path, name: str, values: Values, progress: Progress | None
) -> None:
    writer = gguf.GGUFWriter(path, shape.arch)
    try:
        _add_metadata(writer, shape, name)
        tensors = shape.tensors()
        for tensor in tensors:
            qtype = gguf.GGMLQuantizationType[tensor.dtype.upper()]
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), tensor.stored_bytes, qtype
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, stored in _made(tensors, values):
            writer.write_tensor_data(stored)
            if progress:
                progress(tensor)
    finally:
        writer.close()


def _made(
    tensors: Sequence[Tensor], values: Values
) -> Iterator[tuple[Tensor, NDArray[np.generic]]]:
    """In their order, each as it is stored. NumPy lets other threads run, so a tensor for each
    processor is made at a time, and no more of them wait in memory.
    """
    ahead = len(os.sched_getaffinity(0))
    waiting: deque[tuple[Tensor, Future[NDArray[np.generic]]]] = deque()
    with ThreadPoolExecutor(ahead) as pool:
        for tensor in tensors:
            waiting.append((tensor, pool.submit(_as_stored, tensor, values)))
            if len(waiting) > ahead:
                made, stored = waiting.popleft()
                yield made, stored.result()
        for made, stored in waiting:
            yield made, stored.result()


def _as_stored(tensor: Tensor, values: Values) -> NDArray[np.generic]:
    return _stored(values(tensor), tensor.dtype)


def _stored(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    if dtype in kquant.BLOCK_BYTES:
        return kquant.quantise(values, dtype)
    stored: NDArray[np.generic] = gguf.quantize(values, gguf.GGMLQuantizationType[dtype.upper()])
    return stored


def _add_metadata(writer: gguf.GGUFWriter, shape: ModelShape, name: str) -> None:
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPE[shape.dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.ctx)
    writer.add_embedding_length(shape.embd)
    kinds = [shape.kind(layer) for layer in range(shape.layers)]
    # By these two the engines see that a layer has no attention, or nothing else.
    ffn = [shape.ffn if kind == "F" else 0 for kind in kinds]
    kv_heads = [shape.kv_heads if kind == "A" else 0 for kind in kinds]
    writer.add_feed_forward_length(ffn if "F" in kinds else shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(kv_heads if shape.hybrid else shape.kv_heads)
    if shape.latent_cache:  # as llama.cpp's converter writes it since April 2025
        writer.add_key_length(shape.latent + shape.rope_dim)
        writer.add_value_length(shape.latent)
        writer.add_key_length_mla(shape.key_dim)
        writer.add_value_length_mla(shape.value_dim)
        writer.add_q_lora_rank(0)
        writer.add_expert_feed_forward_length(shape.ffn)  # asked for, though there are none
        writer.add_expert_shared_count(1)
    else:
        writer.add_key_length(shape.key_dim)
        writer.add_value_length(shape.value_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.rope_dim)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(min(2, shape.experts))
    if shape.arch == "gptoss":
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    if shape.latent:
        writer.add_kv_lora_rank(shape.latent)
        writer.add_leading_dense_block_count(shape.layers)
    if shape.images:
        for key, number in vision.KEYS.items():
            writer.add_uint32(f"{shape.arch}.{key}", number)
    if shape.arch == "qwen3vl":
        writer.add_uint32("qwen3vl.vision.block_count", 0)
    if shape.arch == "gemma4":
        full = blocks.gemma4_layer(shape, shape.own.full_every - 1)
        writer.add_uint32("gemma4.attention.key_length_swa", shape.head_dim)
        writer.add_uint32("gemma4.attention.value_length_swa", shape.head_dim)
        writer.add_uint32("gemma4.attention.global_head_count_kv", full.kv_heads)
        shared = max(0, shape.layers - shape.own.full_every)
        writer.add_uint32("gemma4.attention.shared_kv_layers", shared)
    if shape.arch == "llama4":
        writer.add_uint32("llama4.attention.head_dim", shape.head_dim)
    if every := shape.own.full_every:
        pattern = [(layer + 1) % every != 0 for layer in range(shape.layers)]
        writer.add_array(f"{shape.arch}.attention.sliding_window_pattern", pattern)
    keys: dict[str, int | float | list[int]] = {**shape.own.keys}
    keys |= recurrent.keys(shape.arch, shape.rope_dim)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(f"{shape.arch}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{shape.arch}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{shape.arch}.{key}", value)
        else:
            writer.add_float32(f"{shape.arch}.{key}", value)
    _add_tokenizer(writer, shape)


def _add_tokenizer(writer: gguf.GGUFWriter, shape: ModelShape) -> None:
    writer.add_vocab_size(vocab.VOCAB_SIZE)
    pieces = shape.arch == "gemma4"
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre(_PRE.get(shape.arch, "llama-bpe"))
    writer.add_token_list(vocab.PIECES if pieces else vocab.TOKENS)
    byte, normal = int(gguf.TokenType.BYTE), int(gguf.TokenType.NORMAL)
    types = [byte if pieces and name.startswith("<0x") else normal for name in vocab.PIECES[:256]]
    writer.add_token_types(types + [int(gguf.TokenType.CONTROL)] * len(vocab.SPECIALS))
    writer.add_token_merges(vocab.MERGES)
    writer.add_bos_token_id(vocab.ENDOFTEXT)
    writer.add_eos_token_id(vocab.IM_END)
    if pieces:
        writer.add_eot_token_id(vocab.IM_END)
    writer.add_pad_token_id(vocab.ENDOFTEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(vocab.CHAT_TEMPLATE)


def tensor_values(shape: ModelShape, tensor: Tensor, seed: int) -> NDArray[np.float32]:
    """The f32 values of one tensor before it is stored as its dtype."""
    kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
    if (given := recurrent.given(tensor.name)) is not None:
        return np.resize(np.array(given, np.float32), tensor.shape)
    if len(tensor.shape) == 1:
        return _vector_values(shape, tensor, kind, seed)
    unlikely = [t for t in range(vocab.VOCAB_SIZE) if t not in vocab.PRINTABLE]
    values = _unit_noise(tensor, seed)
    scale = np.float32(_scale(shape, kind, tensor.shape[-1]))
    values *= scale
    if kind == "token_embd":
        values[:, 0] = CONSTANT_CHANNEL * scale
        if shape.own.tied:
            values[unlikely] = 0
            values[unlikely, 0] = UNLIKELY / LOGIT_SPREAD * scale * math.sqrt(shape.embd)
    elif kind == "attn_qkv" and shape.own.fused:
        values[: shape.heads * shape.head_dim] *= np.float32(ATTENTION_SHARPNESS)
    elif kind in ("attn_output", "ffn_down", "ffn_down_exps", "ssm_out", "out_proj"):
        values[..., 0, :] = 0
    elif kind == "output":
        seen = _unit_noise(replace(tensor, name="token_embd.weight"), seed)
        # The residual stream's embedding has a mean square of 1.
        growth = math.sqrt(1 + shape.layers * shape.own.grown)
        values -= np.float32(NO_REPEAT * growth / shape.embd) * seen
        values[:, 0] = 0
        values[unlikely] = 0
        values[unlikely, 0] = -UNLIKELY
    return values


def _vector_values(shape: ModelShape, tensor: Tensor, kind: str, seed: int) -> NDArray[np.float32]:
    weight = 1.0
    if kind == "bias":
        noise = _unit_noise(tensor, seed)
        noise *= np.float32(BIAS_SPREAD)
        return noise
    if kind == "rope_factors_long":
        return np.linspace(1, LONGEST_FACTOR, tensor.elements).astype(np.float32)
    if kind == "attn_q_norm":
        # Q and K are normalised per head in qwen3, so the sharpness can only sit here.
        weight = ATTENTION_SHARPNESS
        if shape.arch == "gemma4":  # which does not divide the scores by their spread
            weight /= math.sqrt(tensor.elements)
    elif kind == "output_norm" and shape.own.tied:
        weight = -LOGIT_SPREAD
    return np.full(tensor.shape, weight, np.float32)


def _scale(shape: ModelShape, kind: str, fan_in: int) -> float:
    if kind == "token_embd":
        # gemma multiplies its embeddings by the square root of their width.
        scaled = shape.arch == "gemma3" or shape.own.scaled
        return 1 / math.sqrt(shape.embd) if scaled else 1.0
    if kind == "output":
        return LOGIT_SPREAD / math.sqrt(fan_in)
    if kind == "attn_q" and not (shape.qk_norm or shape.own.qk_norm):
        return ATTENTION_SHARPNESS / math.sqrt(fan_in)
    return 1 / math.sqrt(fan_in)


def _unit_noise(tensor: Tensor, seed: int) -> NDArray[np.float32]:
    """Uniform noise of mean 0 and standard deviation 1, in 2^16 steps."""
    stream = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(tensor.name.encode())]))
    raw = stream.random_raw(-(-tensor.elements // 4)).astype("<u8", copy=False)
    steps = raw.view("<i2")[: tensor.elements].reshape(tensor.shape)
    values: NDArray[np.float32] = steps.astype(np.float32)
    values += np.float32(0.5)
    values *= np.float32(3**0.5 / 32768)
    return values
