"""A small vision tower and what joins it to the text, as mistral3's in one file with it (v0.16.3
model/models/mistral3/model_vision.go). Pure: no numpy, no I/O.
"""

PATCH = 14  # pixels along the side of a patch
IMAGE = 8 * PATCH  # the longest side that an image is given
MERGED = 2  # patches along the side of what becomes one input
_LAYERS, _EMBD, _HEADS, _FFN = 1, 64, 2, 128

KEYS = {
    "vision.block_count": _LAYERS,
    "vision.embedding_length": _EMBD,
    "vision.attention.head_count": _HEADS,
    "vision.attention.key_length": _EMBD // _HEADS,
    "vision.feed_forward_length": _FFN,
    "vision.image_size": IMAGE,
    "vision.longest_edge": IMAGE,
    "vision.patch_size": PATCH,
    "vision.num_channels": 3,
    "spatial_merge_size": MERGED,
}


def weights(embd: int) -> dict[str, tuple[int, ...]]:
    """Shapes by name without ".weight". `embd` is the width of the text model."""
    found: dict[str, tuple[int, ...]] = {
        "v.patch_conv": (_EMBD, 3, PATCH, PATCH),
        "v.encoder_norm": (_EMBD,),
    }
    for layer in range(_LAYERS):
        blk = f"v.blk.{layer}."
        found |= {blk + name: (_EMBD,) for name in ("attn_norm", "ffn_norm")}
        found |= {
            blk + name: (_EMBD, _EMBD) for name in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        found |= {blk + name: (_FFN, _EMBD) for name in ("ffn_gate", "ffn_up")}
        found[blk + "ffn_down"] = (_EMBD, _FFN)
    found |= {
        "mm.norm": (_EMBD,),
        "mm.patch_merger.merging_layer": (_EMBD, MERGED * MERGED * _EMBD),
        "mm.linear_1": (embd, _EMBD),
        "mm.linear_2": (embd, embd),
    }
    return found
