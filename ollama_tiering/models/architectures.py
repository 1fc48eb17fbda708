"""What sets architectures apart from a llama: tensors and metadata.

Names and meanings are those of the loaders (v0.16.3 llama.cpp/src/llama-arch.cpp, llama-model.cpp;
of olmo3, llama4 and deepseek2 model/models/).
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
    attn_norm: bool = True  # else attention reads the residual stream as it is
    qk_norm: bool = False  # of all heads' Q together, and of all heads' K
    ffn_norm: bool = True  # else attention and feed-forward read the same normalised input
    post_norms: bool = False  # of what attention and feed-forward add
    grown: float = 0.5  # the mean square that each layer adds to the residual stream, about
    full_every: int = 0  # every N-th layer has no sliding window, and the file says which
    long_rope: bool = False  # two tables of factors, for short and for long contexts
    keys: Mapping[str, int | float | list[int]] = field(default_factory=dict)


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
    "qwen2vl": Architecture(  # of a head of 64
        biases=True, keys={"rope.dimension_sections": [12, 10, 10, 0]},
    ),
    "phi3": Architecture(
        fused=True, long_rope=True,
        keys={"rope.scaling.original_context_length": 1024, "rope.scaling.attn_factor": 1.19},
    ),
    "granite": Architecture(
        keys={"embedding_scale": 1.5, "residual_scale": 0.5, "attention.scale": 0.15,
              "logit_scale": 0.8},
    ),
    "gemma3": Architecture(grown=2.0),
    "olmo3": Architecture(
        attn_norm=False, ffn_norm=False, qk_norm=True, post_norms=True, grown=2.0, full_every=4,
    ),
    # Layers after the third use the K/V of the last one before that is of their kind.
    "gemma4": Architecture(
        scaled=True, post_norms=True, grown=2.0, full_every=3,
        keys={"final_logit_softcapping": 30.0, "rope.freq_base_swa": 1e4},
    ),
    # No layer has experts: it is each 1024th that would. Chunks are 8,192 tokens in the published.
    "llama4": Architecture(
        keys={"interleave_moe_layer_step": 1024, "attention.chunk_size": 512},
    ),
    "deepseek2": Architecture(
        keys={"rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 4096},
    ),
}  # fmt: skip


def architecture(arch: str) -> Architecture:
    """The entry for GGUF's general.architecture; an architecture that is not listed is like a
    llama.
    """
    return ARCHITECTURES.get(arch, Architecture())
