"""Hybrid models: of their layers only some have attention; most keep a state of fixed size instead,
which each token changes.

Names and shapes are those of Ollama's Go engine (v0.24.0 model/models/lfm2, qwen3next, nemotronh).
Pure: no numpy, no I/O.
"""

from collections.abc import Mapping

# R: a state; A: attention; F: a feed-forward network alone. After the last letter comes the first.
LAYOUTS: Mapping[str, str] = {"lfm2": "RRA", "qwen35": "RRRA", "nemotron_h": "RFRARF"}
_KERNEL: Mapping[str, int] = {"lfm2": 3, "qwen35": 4, "nemotron_h": 4}  # tokens a convolution sees

_HEADS, _GROUPS, _STATE = 4, 2, 64  # a head's state is 64 by 64 numbers; two heads share keys
_INNER = _HEADS * _STATE
_CHANNELS = _INNER + 2 * _GROUPS * _STATE  # that are convolved

# A head's state shrinks by e^(decay * softplus(step)) with each token: to a half after about 700,
# 140, 29 and 7 tokens here. So a wrong state is felt for long, and none grows without end.
_DECAY = (-0.02, -0.1, -0.5, -2.0)
_STEP = -3.0  # softplus of it is 0.049
_SKIP = 0.5  # of its input that a layer passes on beside the state

_SSM: Mapping[str, int] = {
    "ssm.conv_kernel": 4,
    "ssm.group_count": _GROUPS,
    "ssm.inner_size": _INNER,
    "ssm.state_size": _STATE,
    "ssm.time_step_rank": _HEADS,
}


def kind(arch: str, layer: int) -> str:
    """R, A or F; A in every architecture that is not listed."""
    layout = LAYOUTS.get(arch, "A")
    return layout[layer % len(layout)]


def least_layers(arch: str) -> int:
    """How many layers it takes until there is one with attention."""
    return LAYOUTS.get(arch, "A").index("A") + 1


def matrices(arch: str, embd: int) -> dict[str, tuple[int, ...]]:
    """The matrices of a layer with a state, by name without ".weight"."""
    if arch == "lfm2":
        return {"shortconv.in_proj": (3 * embd, embd), "shortconv.out_proj": (embd, embd)}
    if arch == "qwen35":
        return {
            "attn_qkv": (_CHANNELS, embd),
            "attn_gate": (_INNER, embd),
            "ssm_beta": (_HEADS, embd),
            "ssm_alpha": (_HEADS, embd),
            "ssm_out": (embd, _INNER),
        }
    return {"ssm_in": (_INNER + _CHANNELS + _HEADS, embd), "ssm_out": (embd, _INNER)}


def small(arch: str, embd: int) -> dict[str, tuple[int, ...]]:
    """The tensors of such a layer that stay f32, by their whole names."""
    if arch == "lfm2":
        return {"shortconv.conv.weight": (embd, _KERNEL[arch])}
    convolution = {"ssm_conv1d.weight": (_CHANNELS, _KERNEL[arch])}
    if arch == "qwen35":
        return convolution | {
            "ssm_dt": (_HEADS,),  # llama.cpp wants ssm_dt.bias, Ollama knows that from v0.17.5 on
            "ssm_a": (_HEADS,),
            "ssm_norm.weight": (_STATE,),
        }
    return convolution | {
        "ssm_conv1d.bias": (_CHANNELS,),
        "ssm_dt.bias": (_HEADS,),
        "ssm_a": (_HEADS, 1),
        "ssm_d": (_HEADS, 1),
        "ssm_norm.weight": (_GROUPS, _INNER // _GROUPS),
    }


def given(name: str) -> tuple[float, ...] | None:
    """The values of those of `small` that are not random: a value for each
    element, or one for all.
    """
    values = {
        "ssm_a": _DECAY,
        "ssm_dt": (_STEP,),
        "ssm_dt.bias": (_STEP,),
        "ssm_d": (_SKIP,),
        "ssm_norm.weight": (1.0,),
    }
    return values.get(name.split(".", 2)[-1])  # without the layer


def keys(arch: str, rope_dim: int) -> Mapping[str, int | float | list[int]]:
    """Metadata below the architecture's name."""
    if arch == "lfm2":
        return {"shortconv.l_cache": _KERNEL[arch]}
    if arch == "qwen35":
        pairs = rope_dim // 2  # shared out among the positions in time, height and width
        sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        return {
            **_SSM,
            "full_attention_interval": len(LAYOUTS[arch]),
            "rope.mrope_section": sections,
            "rope.dimension_sections": [*sections, 0],  # the same for llama.cpp
            "rope.mrope_interleaved": True,
        }
    # llama.cpp asks for an epsilon of a norm that nothing uses here.
    return {**_SSM, "attention.layer_norm_epsilon": 1e-5} if arch in LAYOUTS else {}
