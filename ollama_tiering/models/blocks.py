"""The tensors of one layer, by architecture. Pure: no numpy, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ollama_tiering.models import recurrent
from ollama_tiering.models.tensors import Tensor, matrix, use_more_bits, vector

if TYPE_CHECKING:
    from ollama_tiering.models.shapes import ModelShape


def block(shape: ModelShape, layer: int) -> list[Tensor]:
    """The tensors in file order, without the layer in their names."""
    if shape.arch == "gemma4":
        return _gemma4(shape, layer)
    return _hybrid(shape, layer) if shape.hybrid else _plain(shape, layer)


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    """Layers that see everything: their heads are twice as long, and half as many have K/V."""

    head_dim: int
    kv_heads: int
    shared: bool  # it has no K/V of its own


def gemma4_layer(shape: ModelShape, layer: int) -> Gemma4Layer:
    """Which of the three kinds the layer is."""
    every = shape.own.full_every
    if (layer + 1) % every:
        return Gemma4Layer(shape.head_dim, shape.kv_heads, layer >= every)
    return Gemma4Layer(2 * shape.head_dim, max(1, shape.kv_heads // 2), layer >= every)


def _gemma4(shape: ModelShape, layer: int) -> list[Tensor]:
    more, own = use_more_bits(layer, shape.layers), gemma4_layer(shape, layer)
    q_dim, kv_dim = shape.heads * own.head_dim, own.kv_heads * own.head_dim
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    out = [vector(name, shape.embd) for name in norms]
    out += [matrix(shape.dtype, "attn_q", q_dim, shape.embd), vector("attn_q_norm", own.head_dim)]
    if not own.shared:
        out += [
            matrix(shape.dtype, "attn_k", kv_dim, shape.embd),
            vector("attn_k_norm", own.head_dim),
            matrix(shape.dtype, "attn_v", kv_dim, shape.embd, more_bits=more),
        ]
    return [
        *out,
        matrix(shape.dtype, "attn_output", shape.embd, q_dim),
        matrix(shape.dtype, "ffn_gate", shape.ffn, shape.embd),
        matrix(shape.dtype, "ffn_up", shape.ffn, shape.embd),
        matrix(shape.dtype, "ffn_down", shape.embd, shape.ffn, more_bits=more),
    ]


def _plain(shape: ModelShape, layer: int) -> list[Tensor]:
    more = use_more_bits(layer, shape.layers)
    q_dim, kv_dim = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    out = [
        vector("attn_norm", shape.embd),
        matrix(shape.dtype, "attn_q", shape.heads * shape.key_dim, shape.embd),
    ]
    # One row for all heads, from which K and V of each are made.
    if shape.arch == "deepseek2" and not shape.latent_cache:
        plain = shape.dtype if shape.dtype in ("f32", "f16", "bf16") else "f16"  # rows are short
        out += [
            matrix(shape.dtype, "attn_kv_a_mqa", shape.latent + shape.rope_dim, shape.embd),
            vector("attn_kv_a_norm", shape.latent),
            Tensor("attn_kv_b.weight", (2 * kv_dim, shape.latent), plain),
        ]
    elif shape.latent:  # the product with K's matrix is done to the query, V's to the answer
        nope = (shape.key_dim if shape.latent_cache else shape.head_dim) - shape.rope_dim
        plain = shape.dtype if shape.dtype in ("f32", "f16", "bf16") else "f16"  # rows are short
        out += [
            matrix(shape.dtype, "attn_kv_a_mqa", shape.latent + shape.rope_dim, shape.embd),
            vector("attn_kv_a_norm", shape.latent),
            Tensor("attn_k_b.weight", (shape.heads, shape.latent, nope), plain),
            Tensor("attn_v_b.weight", (shape.heads, shape.head_dim, shape.latent), plain),
        ]
    else:
        out += [
            matrix(shape.dtype, "attn_k", kv_dim, shape.embd),
            matrix(shape.dtype, "attn_v", kv_dim, shape.embd, more_bits=more),
        ]
    out += [
        matrix(shape.dtype, "attn_output", shape.embd, q_dim),
        vector("ffn_norm", shape.embd),
    ]
    if shape.own.fused:
        out[1:4] = [matrix(shape.dtype, "attn_qkv", q_dim + 2 * kv_dim, shape.embd)]
    if shape.own.biases:
        out += [vector("attn_q", q_dim, ".bias")]
        out += [vector(name, kv_dim, ".bias") for name in ("attn_k", "attn_v")]
    absent = {
        name + ".weight"
        for name, there in (("attn_norm", shape.own.attn_norm), ("ffn_norm", shape.own.ffn_norm))
        if not there
    }
    out = [tensor for tensor in out if tensor.name not in absent]
    experts = (shape.experts,) if shape.experts else ()
    suffix = "_exps" if shape.experts else ""
    gate_up = [
        matrix(shape.dtype, "ffn_gate" + suffix, *experts, shape.ffn, shape.embd),
        matrix(shape.dtype, "ffn_up" + suffix, *experts, shape.ffn, shape.embd),
    ]
    if shape.own.fused:
        gate_up = [matrix(shape.dtype, "ffn_up", 2 * shape.ffn, shape.embd)]
    out += [
        *gate_up,
        matrix(shape.dtype, "ffn_down" + suffix, *experts, shape.embd, shape.ffn, more_bits=more),
    ]
    if shape.experts:
        out.append(Tensor("ffn_gate_inp.weight", (shape.experts, shape.embd), "f32"))
    if shape.qk_norm:
        out.append(vector("attn_q_norm", shape.head_dim))
        out.append(vector("attn_k_norm", shape.head_dim))
    if shape.own.qk_norm:
        out += [vector("attn_q_norm", q_dim), vector("attn_k_norm", kv_dim)]
    if shape.arch == "gemma3" or shape.own.post_norms:
        out.append(vector("post_attention_norm", shape.embd))
        out.append(vector("post_ffw_norm", shape.embd))
    if shape.arch == "gptoss":
        out.append(vector("attn_sinks", shape.heads))
    return out


def _hybrid(shape: ModelShape, layer: int) -> list[Tensor]:
    more, kind = use_more_bits(layer, shape.layers), shape.kind(layer)
    q_dim, kv_dim = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    out = [vector("attn_norm", shape.embd)]
    if kind == "A":
        gates = 2 if shape.arch == "qwen35" else 1  # beside each head's query one of its answer
        out += [
            matrix(shape.dtype, "attn_q", gates * q_dim, shape.embd),
            matrix(shape.dtype, "attn_k", kv_dim, shape.embd),
            matrix(shape.dtype, "attn_v", kv_dim, shape.embd, more_bits=more),
            matrix(shape.dtype, "attn_output", shape.embd, q_dim),
        ]
        if shape.qk_norm:
            out += [vector(f"attn_{one}_norm", shape.head_dim) for one in "qk"]
    elif kind == "R":
        for name, dims in recurrent.matrices(shape.arch, shape.embd).items():
            out.append(matrix(shape.dtype, name, *dims))
        for name, dims in recurrent.small(shape.arch, shape.embd).items():
            out.append(Tensor(name, dims, "f32"))
    if shape.arch != "nemotron_h":  # its feed-forward networks are layers of their own
        norm = "post_attention_norm" if shape.arch == "qwen35" else "ffn_norm"
        out += [vector(norm, shape.embd), matrix(shape.dtype, "ffn_gate", shape.ffn, shape.embd)]
    if kind == "F" or shape.arch != "nemotron_h":
        out.append(matrix(shape.dtype, "ffn_up", shape.ffn, shape.embd))
        out.append(matrix(shape.dtype, "ffn_down", shape.embd, shape.ffn, more_bits=more))
    return out
