"""The model shapes that can be made, and the checks a shape must pass. Pure: no numpy, no I/O."""

from dataclasses import dataclass, replace

from ollama_tiering.errors import UsageError
from ollama_tiering.models import vision
from ollama_tiering.models.architectures import Architecture, architecture
from ollama_tiering.models.vocab import VOCAB_SIZE

DTYPES = ("f32", "f16", "q8_0", "q4_k_m")  # q4_k_m is a mixture, as llama.cpp makes it
ROW_MULTIPLES = {"q8_0": 32, "q4_k_m": 256}  # a row is whole blocks

_BLOCK_BYTES = {"f32": (1, 4), "f16": (1, 2), "q8_0": (32, 34), "q4_k": (256, 144),
                "q6_k": (256, 210)}  # fmt: skip
_LIMITS = {"layers": 512, "heads": 512, "kv_heads": 512, "head_dim": 1024, "embd": 65536,
           "ffn": 262144, "ctx": 1 << 24}  # fmt: skip


class ShapeError(UsageError):
    """A shape no engine could load; the message names the option at fault."""


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


@dataclass(frozen=True)
class Shape:
    """Geometry of one dense transformer; `arch` is GGUF's general.architecture."""

    name: str
    arch: str
    layers: int
    embd: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    ctx: int
    dtype: str
    rope_base: float
    norm_eps: float
    about: str
    window: int = 0  # of the sliding-window layers; 0 when there are none
    experts: int = 0
    images: bool = False  # a vision tower is in the file
    latent: int = 0  # of multi-head latent attention: the width of a row that all heads share

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim // 2 if self.latent else self.head_dim

    @property
    def own(self) -> Architecture:
        """What sets it apart from a llama."""
        return architecture(self.arch)

    @property
    def qk_norm(self) -> bool:
        return self.arch in ("qwen3", "qwen3vl", "gemma3")

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers in f16, the dtype Ollama caches by default."""
        row = 2 * self.kv_heads * self.head_dim
        if self.latent:
            row = self.rope_dim + 2 * self.latent
        return self.layers * row * 2

    def tensors(self) -> list[Tensor]:
        """Every tensor in file order. Vectors stay f32: ggml's RMSNorm wants them so."""
        out = [self._matrix("token_embd", VOCAB_SIZE, self.embd)]
        for layer in range(self.layers):
            blk = f"blk.{layer}."
            out += [replace(tensor, name=blk + tensor.name) for tensor in self._block(layer)]
        out.append(self._vector("output_norm", self.embd))
        if not self.own.tied:
            out.append(self._matrix("output", VOCAB_SIZE, self.embd, more_bits=True))
        if self.own.long_rope:
            out.append(self._vector("rope_factors_long", self.head_dim // 2))
            out.append(self._vector("rope_factors_short", self.head_dim // 2))
        if self.images:
            out += [
                Tensor(name + ".weight", shape, "f32")
                for name, shape in vision.weights(self.embd).items()
            ]
        return out

    def _block(self, layer: int) -> list[Tensor]:
        more = use_more_bits(layer, self.layers)
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out = [
            self._vector("attn_norm", self.embd),
            self._matrix("attn_q", q_dim, self.embd),
        ]
        if self.latent:  # the product with K's matrix is done to the query, V's to the answer
            nope = self.head_dim - self.rope_dim
            plain = self.dtype if self.dtype in ("f32", "f16") else "f16"  # rows are short
            out += [
                self._matrix("attn_kv_a_mqa", self.latent + self.rope_dim, self.embd),
                self._vector("attn_kv_a_norm", self.latent),
                Tensor("attn_k_b.weight", (self.heads, self.latent, nope), plain),
                Tensor("attn_v_b.weight", (self.heads, self.head_dim, self.latent), plain),
            ]
        else:
            out += [
                self._matrix("attn_k", kv_dim, self.embd),
                self._matrix("attn_v", kv_dim, self.embd, more_bits=more),
            ]
        out += [
            self._matrix("attn_output", self.embd, q_dim),
            self._vector("ffn_norm", self.embd),
        ]
        if self.own.fused:
            out[1:4] = [self._matrix("attn_qkv", q_dim + 2 * kv_dim, self.embd)]
        if self.own.biases:
            out += [self._vector("attn_q", q_dim, ".bias")]
            out += [self._vector(name, kv_dim, ".bias") for name in ("attn_k", "attn_v")]
        if not self.own.ffn_norm:
            out = [tensor for tensor in out if tensor.name != "ffn_norm.weight"]
        experts = (self.experts,) if self.experts else ()
        suffix = "_exps" if self.experts else ""
        gate_up = [
            self._matrix("ffn_gate" + suffix, *experts, self.ffn, self.embd),
            self._matrix("ffn_up" + suffix, *experts, self.ffn, self.embd),
        ]
        if self.own.fused:
            gate_up = [self._matrix("ffn_up", 2 * self.ffn, self.embd)]
        out += [
            *gate_up,
            self._matrix("ffn_down" + suffix, *experts, self.embd, self.ffn, more_bits=more),
        ]
        if self.experts:
            out.append(Tensor("ffn_gate_inp.weight", (self.experts, self.embd), "f32"))
        if self.qk_norm:
            out.append(self._vector("attn_q_norm", self.head_dim))
            out.append(self._vector("attn_k_norm", self.head_dim))
        if self.arch == "gemma3" or self.own.post_norms:
            out.append(self._vector("post_attention_norm", self.embd))
            out.append(self._vector("post_ffw_norm", self.embd))
        if self.arch == "gptoss":
            out.append(self._vector("attn_sinks", self.heads))
        return out

    def _matrix(self, name: str, *shape: int, more_bits: bool = False) -> Tensor:
        mixed = "q6_k" if more_bits else "q4_k"
        return Tensor(name + ".weight", shape, mixed if self.dtype == "q4_k_m" else self.dtype)

    def _vector(self, name: str, elements: int, suffix: str = ".weight") -> Tensor:
        return Tensor(name + suffix, (elements,), "f32")

    def check(self) -> None:
        """Raises ShapeError naming the first option that no engine would accept."""
        for field, limit in _LIMITS.items():
            value = getattr(self, field)
            if not 1 <= value <= limit:
                raise ShapeError(f"{_option(field)} must be 1 to {limit}, not {value}")
        if self.dtype not in DTYPES:
            raise ShapeError(f"--dtype must be one of {', '.join(DTYPES)}, not {self.dtype}")
        if self.heads % self.kv_heads:
            raise ShapeError(
                f"--heads ({self.heads}) must be a multiple of --kv-heads ({self.kv_heads})"
            )
        if self.head_dim % 2:
            raise ShapeError(f"--head-dim must be even for RoPE, not {self.head_dim}")
        if self.embd < 2:
            raise ShapeError("--embd must be at least 2")
        multiple = ROW_MULTIPLES.get(self.dtype, 1)
        for option, row in (
            ("--embd", self.embd),
            ("--ffn", self.ffn),
            ("--heads times --head-dim", self.heads * self.head_dim),
        ):
            if row % multiple:
                raise ShapeError(
                    f"{option} ({row}) must be a multiple of {multiple} for {self.dtype}"
                )


def use_more_bits(layer: int, layers: int) -> bool:
    """Whether `attn_v` and `ffn_down` of a layer are Q6_K in Q4_K_M (llama.cpp, llama-quant.cpp);
    so is `output`, and every other matrix is Q4_K.
    """
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-tiny", "qwen3", 4, 256, 4, 2, 64, 768, 32768, "f16", 1e6, 1e-6,
              "fast on a CPU; Ollama's Go engine"),
        Shape("qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, 40960, "q8_0", 1e6, 1e-6,
              "Qwen3-0.6B's geometry; Ollama's Go engine"),
        Shape("qwen3-0.6b-q4km", "qwen3", 28, 1024, 16, 8, 128, 3072, 40960, "q4_k_m", 1e6, 1e-6,
              "the same in Q4_K_M, which most downloads are"),
        Shape("llama-tiny", "llama", 4, 256, 4, 2, 64, 768, 32768, "f16", 5e5, 1e-5,
              "llama.cpp runner, or the Go engine with OLLAMA_NEW_ENGINE=1"),
        Shape("gemma3-tiny", "gemma3", 6, 256, 4, 2, 64, 768, 32768, "f16", 1e6, 1e-6,
              "window of 128 in 5 of 6 layers; Go engine", window=128),
        Shape("gptoss-tiny", "gptoss", 4, 256, 4, 2, 64, 256, 131072, "f16", 1.5e5, 1e-5,
              "window of 128 in every other layer, 4 experts, sinks; Go engine",
              window=128, experts=4),
        Shape("mistral3-tiny", "mistral3", 4, 256, 4, 2, 64, 768, 32768, "f16", 1e9, 1e-5,
              "takes images, by a small vision tower in the same file; Go engine", images=True),
        Shape("glm4moelite-tiny", "glm4moelite", 4, 256, 4, 4, 64, 768, 32768, "f16", 1e6, 1e-5,
              "multi-head latent attention: K's row is longer than V's; Go engine", latent=64),
        Shape("qwen3vl-tiny", "qwen3vl", 4, 256, 4, 2, 128, 768, 32768, "f16", 1e6, 1e-6,
              "the text half of a model with images, positions of several dimensions; Go engine"),
    )
}  # fmt: skip

SHAPES |= {
    shape.name: shape
    for shape in (
        Shape("gemma2-tiny", "gemma2", 4, 256, 4, 2, 64, 768, 8192, "f16", 1e4, 1e-6,
              "window of 128 in every other layer; llama.cpp runner", window=128),
        Shape("cohere2-tiny", "cohere2", 4, 256, 4, 2, 64, 768, 8192, "f16", 5e4, 1e-5,
              "window of 128 in 3 of 4 layers; llama.cpp runner", window=128),
        Shape("qwen2-tiny", "qwen2", 4, 256, 4, 2, 64, 768, 32768, "f16", 1e6, 1e-6,
              "biases; llama.cpp runner, or the Go engine with OLLAMA_NEW_ENGINE=1"),
        # Not phi3: of models called so llama.cpp wants a token </s>.
        Shape("phi-tiny", "phi3", 4, 256, 4, 2, 64, 768, 32768, "f16", 1e4, 1e-5,
              "LongRoPE from 1024 tokens on; llama.cpp runner"),
        Shape("granite-tiny", "granite", 4, 256, 4, 2, 64, 768, 32768, "f16", 1e4, 1e-5,
              "scales of its own; llama.cpp runner"),
        Shape("mixtral-tiny", "llama", 4, 256, 4, 2, 64, 256, 32768, "f16", 1e6, 1e-5,
              "4 experts; llama.cpp runner", experts=4),
    )
}  # fmt: skip


def make_shape(name: str, **overrides: int | str | None) -> Shape:
    """The named shape with every override that is not None, checked."""
    if name not in SHAPES:
        raise ShapeError(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    given = {field: value for field, value in overrides.items() if value is not None}
    shape = replace(SHAPES[name], **given)  # type: ignore[arg-type]
    shape.check()
    return shape


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")
