"""Tensors of a model file: their names and shapes, how they are stored. Pure: no numpy, no I/O."""

from dataclasses import dataclass

_BLOCK_BYTES = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34),
                "q4_k": (256, 144), "q6_k": (256, 210)}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One tensor as written; the last dimension is a row of weights that meet one input."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count

    @property
    def stored_bytes(self) -> int:
        elements, nbytes = _BLOCK_BYTES[self.dtype]
        return self.elements // elements * nbytes


def matrix(dtype: str, name: str, *shape: int, more_bits: bool = False) -> Tensor:
    """Weights of a model of this dtype; in Q4_K_M some have more bits than others."""
    mixed = "q6_k" if more_bits else "q4_k"
    return Tensor(name + ".weight", shape, mixed if dtype == "q4_k_m" else dtype)


def vector(name: str, elements: int, suffix: str = ".weight") -> Tensor:
    """f32 always."""
    return Tensor(name + suffix, (elements,), "f32")


def use_more_bits(layer: int, layers: int) -> bool:
    """Whether `attn_v` and `ffn_down` of a layer are Q6_K in Q4_K_M (llama.cpp, llama-quant.cpp);
    so is `output`, and every other matrix is Q4_K.
    """
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
