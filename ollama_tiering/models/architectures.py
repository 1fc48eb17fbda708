"""What sets the architectures of llama.cpp's engine apart from a llama: tensors and metadata.

Names and meanings are those of its loader (v0.16.3 llama.cpp/src/llama-arch.cpp, llama-model.cpp).
Pure: no numpy, no I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Architecture:
    """`keys` are metadata below the architecture's name: whole numbers as u32, others as f32."""

    tied: bool = False  # the embeddings are the output matrix, too
    scaled: bool = False  # embeddings are multiplied by the square root of their width
    fused: bool = False  # Q, K and V are one matrix; so are gate and up
    biases: bool = False  # of Q, K and V
    ffn_norm: bool = True  # else attention and feed-forward read the same normalised input
    post_norms: bool = False  # of what attention and feed-forward add
    long_rope: bool = False  # two tables of factors, for short and for long contexts
    keys: Mapping[str, int | float] = field(default_factory=dict)


ARCHITECTURES = {
    "gemma2": Architecture(
        tied=True, scaled=True, post_norms=True,
        keys={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "cohere2": Architecture(
        tied=True, ffn_norm=False,
        keys={"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.0625},
    ),
    "qwen2": Architecture(biases=True),
    "phi3": Architecture(
        fused=True, long_rope=True,
        keys={"rope.scaling.original_context_length": 1024, "rope.scaling.attn_factor": 1.19},
    ),
    "granite": Architecture(
        keys={"embedding_scale": 1.5, "residual_scale": 0.5, "attention.scale": 0.15,
              "logit_scale": 0.8},
    ),
}  # fmt: skip


def architecture(arch: str) -> Architecture:
    """That of GGUF's general.architecture; of one that is not listed what a llama has."""
    return ARCHITECTURES.get(arch, Architecture())
