"""The model shapes that can be made, and the checks that a shape must pass.
Pure: no numpy, no I/O.
"""

from dataclasses import dataclass, replace

from ollama_tiering.errors import UsageError
from ollama_tiering.models import blocks, recurrent, vision
from ollama_tiering.models.architectures import Architecture, architecture
from ollama_tiering.models.tensors import Tensor, matrix, vector
from ollama_tiering.models.vocab import VOCAB_SIZE

DTYPES = ("f32", "f16", "bf16", "q8_0", "q4_k_m")  # q4_k_m is a mixture, as llama.cpp makes it
ROW_MULTIPLES = {"q8_0": 32, "q4_k_m": 256}  # a row is whole blocks

_LIMITS = {"layers": 512, "heads": 512, "kv_heads": 512, "head_dim": 1024, "embd": 65536,
           "ffn": 262144, "ctx": 1 << 24}  # fmt: skip


class ShapeError(UsageError):
    """No engine could load this shape; the message names the option at fault."""


@dataclass(frozen=True)
class ModelShape:
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
    latent_cache: bool = False  # of a deepseek2: the cache has that row alone, no K or V of heads

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        if self.arch == "gemma4":
            return self.key_dim
        return self.head_dim // 2 if self.latent or self.arch == "qwen35" else self.head_dim

    @property
    def own(self) -> Architecture:
        """What distinguishes its architecture from a llama."""
        return architecture(self.arch)

    @property
    def key_dim(self) -> int:
        """Length of a head's K. In deepseek2 a part of it has a position and the rest has none."""
        return self.head_dim + self.rope_dim if self.arch == "deepseek2" else self.value_dim

    @property
    def value_dim(self) -> int:
        """Length of a head's V; in gemma4 it is longer in layers that see everything."""
        return 2 * self.head_dim if self.arch == "gemma4" else self.head_dim

    @property
    def qk_norm(self) -> bool:
        """Whether each head's Q and K are normalised."""
        return self.arch in ("qwen3", "qwen3vl", "gemma3", "gemma4", "lfm2", "qwen35")

    @property
    def hybrid(self) -> bool:
        """Whether there are layers without attention."""
        return self.arch in recurrent.LAYOUTS

    def kind(self, layer: int) -> str:
        """Kind of the layer: A, attention; R, a state; F, a feed-forward network alone."""
        return recurrent.kind(self.arch, layer)

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers in f16, the dtype in which Ollama caches by default."""
        if self.arch == "gemma4":
            own = [blocks.gemma4_layer(self, layer) for layer in range(self.layers)]
            return sum(2 * one.kv_heads * one.head_dim * 2 for one in own if not one.shared)
        row = self.kv_heads * (self.key_dim + self.head_dim)
        if self.latent and self.arch != "deepseek2":
            row = self.rope_dim + 2 * self.latent
        if self.latent_cache:
            row = self.rope_dim + self.latent
        return [self.kind(layer) for layer in range(self.layers)].count("A") * row * 2

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors; the file is a little longer."""
        return sum(tensor.stored_bytes for tensor in self.tensors())

    @property
    def words(self) -> str:
        """What a record says about the model."""
        window = f", windows of {self.window:,}" if self.window else ""
        return (
            f"random weights in {self.dtype.upper()}, {self.layers} layers of width {self.embd:,}, "
            f"{self.heads}/{self.kv_heads} heads of {self.head_dim}, feed-forward {self.ffn:,}"
            f"{window}; its vocabulary is cut to {VOCAB_SIZE} tokens, so that the output matrix, "
            "which each new token needs, costs next to nothing"
        )

    def tensors(self) -> list[Tensor]:
        """Every tensor in file order. Vectors stay f32, because ggml's RMSNorm requires it."""
        out = [matrix(self.dtype, "token_embd", VOCAB_SIZE, self.embd)]
        for layer in range(self.layers):
            blk = f"blk.{layer}."
            out += [replace(one, name=blk + one.name) for one in blocks.block(self, layer)]
        # llama.cpp knows the last norm of an lfm2 by this name only.
        last = "token_embd_norm" if self.arch == "lfm2" else "output_norm"
        out.append(vector(last, self.embd))
        if not self.own.tied:
            out.append(matrix(self.dtype, "output", VOCAB_SIZE, self.embd, more_bits=True))
        if self.own.long_rope:
            out.append(vector("rope_factors_long", self.head_dim // 2))
            out.append(vector("rope_factors_short", self.head_dim // 2))
        if self.images:
            out += [
                Tensor(name + ".weight", shape, "f32")
                for name, shape in vision.weights(self.embd).items()
            ]
        return out

    def check(self) -> None:
        """ShapeError names the first option that no engine would accept."""
        for field, limit in _LIMITS.items():
            value = getattr(self, field)
            if not 1 <= value <= limit:
                raise ShapeError(f"{_option(field)} must be 1 to {limit}, not {value}")
        if self.layers < recurrent.least_layers(self.arch):
            least = recurrent.least_layers(self.arch)
            raise ShapeError(
                f"--layers must be at least {least} for {self.arch}, not {self.layers}"
            )
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


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("qwen3-tiny", "qwen3", 4, 256, 4, 2, 64, 768, 32768, "f16", 1e6, 1e-6,
                   "fast on a CPU; Ollama's Go engine"),
        ModelShape("qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, 40960, "q8_0", 1e6, 1e-6,
                   "Qwen3-0.6B's geometry; Ollama's Go engine"),
        ModelShape("qwen3-0.6b-q4km", "qwen3", 28, 1024, 16, 8, 128, 3072, 40960, "q4_k_m", 1e6,
                   1e-6,
                   "the same in Q4_K_M, which most downloads are"),
        ModelShape("llama-3.2-1b", "llama", 16, 2048, 32, 8, 64, 8192, 131072, "q8_0", 5e5, 1e-5,
                   "Llama-3.2-1B's geometry; llama.cpp runner"),
        ModelShape("gemma3-4b", "gemma3", 34, 2560, 8, 4, 256, 10240, 131072, "q8_0", 1e6, 1e-6,
                   "text half of Gemma-3-4B, window of 1024 in 5 of 6 layers; Go engine",
                   window=1024),
        ModelShape("llama-tiny", "llama", 4, 256, 4, 2, 64, 768, 32768, "f16", 5e5, 1e-5,
                   "llama.cpp runner, or the Go engine with OLLAMA_NEW_ENGINE=1"),
        ModelShape("kv-wide", "llama", 8, 256, 16, 16, 128, 256, 32768, "f16", 5e5, 1e-5,
                   "64 KiB of K/V for each token, and little else to compute"),
        ModelShape("gemma3-tiny", "gemma3", 6, 256, 4, 2, 64, 768, 32768, "f16", 1e6, 1e-6,
                   "window of 128 in 5 of 6 layers; Go engine", window=128),
        ModelShape("gptoss-tiny", "gptoss", 4, 256, 4, 2, 64, 256, 131072, "f16", 1.5e5, 1e-5,
                   "window of 128 in every other layer, 4 experts, sinks; Go engine",
                   window=128, experts=4),
        ModelShape("mistral3-tiny", "mistral3", 4, 256, 4, 2, 64, 768, 32768, "f16", 1e9, 1e-5,
                   "takes images, by a small vision tower in the same file; Go engine",
                   images=True),
        ModelShape("glm4moelite-tiny", "glm4moelite", 4, 256, 4, 4, 64, 768, 32768, "f16", 1e6,
                   1e-5,
                   "multi-head latent attention: K's row is longer than V's; Go engine", latent=64),
        ModelShape("qwen3vl-tiny", "qwen3vl", 4, 256, 4, 2, 128, 768, 32768, "f16", 1e6, 1e-6,
              "the text half of a model with images, positions of several dimensions; Go engine"),
    )
}  # fmt: skip

SHAPES |= {
    shape.name: shape
    for shape in (
        ModelShape("lfm2-tiny", "lfm2", 6, 256, 4, 2, 64, 768, 32768, "f16", 1e6, 1e-5,
                   "short convolutions in 2 of 3 layers; Go engine"),
        ModelShape("qwen35-tiny", "qwen35", 4, 256, 4, 2, 64, 768, 32768, "f16", 1e6, 1e-6,
                   "gated delta rule in 3 of 4 layers; Go engine, from v0.17.1"),
        ModelShape("nemotron-h-tiny", "nemotron_h", 6, 256, 4, 2, 64, 768, 32768, "f16", 1e4, 1e-5,
                   "Mamba 2 in 3 layers, attention in one; Go engine, from v0.17.1"),
        ModelShape("olmo3-tiny", "olmo3", 4, 256, 4, 4, 64, 768, 32768, "f16", 5e5, 1e-6,
                   "window of 128 in 3 of 4 layers; Go engine", window=128),
        ModelShape("gemma4-tiny", "gemma4", 6, 256, 4, 2, 64, 768, 131072, "f16", 1e6, 1e-6,
              "window of 128 in 2 of 3 layers, the last 3 have no K/V; Go engine, from v0.20.0",
                   window=128),
        ModelShape("llama4-tiny", "llama4", 4, 256, 4, 2, 64, 768, 32768, "f16", 5e5, 1e-5,
                   "chunks of 512 in 3 of 4 layers; Go engine"),
        ModelShape("deepseek2-tiny", "deepseek2", 4, 256, 4, 4, 64, 768, 32768, "f16", 1e4, 1e-6,
                   "heads of K longer than those of V; Go engine", latent=64),
        ModelShape("mla-tiny", "deepseek2", 4, 256, 4, 1, 64, 768, 32768, "f16", 1e4, 1e-6,
                   "multi-head latent attention: K and V share rows; llama-server",
                   latent=64, latent_cache=True),
    )
}  # fmt: skip

SHAPES |= {
    shape.name: shape
    for shape in (
        ModelShape("gemma2-tiny", "gemma2", 4, 256, 4, 2, 64, 768, 8192, "f16", 1e4, 1e-6,
                   "window of 128 in every other layer; llama.cpp runner", window=128),
        ModelShape("cohere2-tiny", "cohere2", 4, 256, 4, 2, 64, 768, 8192, "f16", 5e4, 1e-5,
                   "window of 128 in 3 of 4 layers; llama.cpp runner", window=128),
        ModelShape("qwen2-tiny", "qwen2", 4, 256, 4, 2, 64, 768, 32768, "f16", 1e6, 1e-6,
                   "biases; llama.cpp runner, or the Go engine with OLLAMA_NEW_ENGINE=1"),
        ModelShape("qwen2vl-tiny", "qwen2vl", 4, 256, 4, 2, 64, 768, 32768, "f16", 1e6, 1e-6,
                   "the text half of a model with images, positions of several dimensions; "
                   "llama-server"),
        # Not phi3: of models called so llama.cpp wants a token </s>.
        ModelShape("phi-tiny", "phi3", 4, 256, 4, 2, 64, 768, 32768, "f16", 1e4, 1e-5,
                   "LongRoPE from 1024 tokens on; llama.cpp runner"),
        ModelShape("granite-tiny", "granite", 4, 256, 4, 2, 64, 768, 32768, "f16", 1e4, 1e-5,
                   "scales of its own; llama.cpp runner"),
        ModelShape("mixtral-tiny", "llama", 4, 256, 4, 2, 64, 256, 32768, "f16", 1e6, 1e-5,
                   "4 experts; llama.cpp runner", experts=4),
    )
}  # fmt: skip


def make_shape(name: str, **overrides: int | str | None) -> ModelShape:
    """The named shape with every override that is not None, checked."""
    if name not in SHAPES:
        raise ShapeError(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    given = {field: value for field, value in overrides.items() if value is not None}
    shape = replace(SHAPES[name], **given)  # type: ignore[arg-type]
    shape.check()
    return shape


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")
