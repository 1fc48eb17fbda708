"""Shapes: what is refused, and that sizes are what the file will hold."""

import pytest

from ollama_tiering.errors import UsageError
from ollama_tiering.models.shapes import SHAPES, make_shape


@pytest.mark.parametrize(
    ("overrides", "option"),
    [
        ({"kv_heads": 3}, "--kv-heads"),
        ({"heads": 0}, "--heads"),
        ({"layers": -1}, "--layers"),
        ({"head_dim": 63}, "--head-dim"),
        ({"embd": 100, "dtype": "q8_0"}, "--embd"),
        ({"ffn": 48, "dtype": "q8_0"}, "--ffn"),
        ({"heads": 2, "head_dim": 8, "dtype": "q8_0"}, "--head-dim"),
        ({"dtype": "q4_0"}, "--dtype"),
        ({"ctx": 1 << 30}, "--ctx"),
    ],
)
def test_a_shape_no_engine_could_load_is_refused_with_one_line_naming_the_option(
    overrides: dict[str, int | str], option: str
) -> None:
    with pytest.raises(UsageError) as caught:
        make_shape("qwen3-tiny", **overrides)
    assert option in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "layers"), [("lfm2-tiny", 2), ("qwen35-tiny", 3), ("nemotron-h-tiny", 3)]
)
def test_a_hybrid_has_attention(name: str, layers: int) -> None:
    assert make_shape(name, layers=layers + 1).kind(layers) == "A"
    with pytest.raises(UsageError, match=rf"--layers must be at least {layers + 1} for "):
        make_shape(name, layers=layers)


def test_k_and_v_are_counted_as_the_engine_caches_them() -> None:
    row = 2 * 2 * 64 * 2  # K and V of two heads in f16
    wanted = {"qwen3-tiny": 4 * row, "lfm2-tiny": 2 * row, "qwen35-tiny": row}
    wanted |= {"nemotron-h-tiny": row, "deepseek2-tiny": 4 * 4 * (96 + 64) * 2}
    wanted |= {"mla-tiny": 4 * (32 + 64) * 2}
    wanted |= {"gemma4-tiny": 2 * row + 2 * 1 * 128 * 2, "glm4moelite-tiny": 4 * (32 + 64 + 64) * 2}
    assert {name: make_shape(name).kv_bytes_per_token for name in wanted} == wanted


def test_layers_of_a_hybrid_are_of_several_kinds() -> None:
    kinds = {
        name: "".join(make_shape(name).kind(layer) for layer in range(8))
        for name in ("lfm2-tiny", "qwen35-tiny", "nemotron-h-tiny", "qwen3-tiny")
    }
    assert kinds == {
        "lfm2-tiny": "RRARRARR",
        "qwen35-tiny": "RRRARRRA",
        "nemotron-h-tiny": "RFRARFRF",
        "qwen3-tiny": "AAAAAAAA",
    }


def test_an_unknown_shape_names_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"qwen3-tiny, .*, llama-tiny"):
        make_shape("gpt-5")


def test_every_listed_shape_passes_its_own_check() -> None:
    for shape in SHAPES.values():
        shape.check()


def test_qwen3_0_6b_has_the_published_geometry() -> None:
    shape = make_shape("qwen3-0.6b")
    assert (shape.layers, shape.embd, shape.heads, shape.kv_heads) == (28, 1024, 16, 8)
    assert (shape.head_dim, shape.ffn, shape.dtype) == (128, 3072, "q8_0")
    assert shape.kv_bytes_per_token == 112 * 1024


def test_each_family_has_the_tensors_its_engine_reads() -> None:
    def names(shape: str) -> set[str]:
        return {t.name for t in make_shape(shape).tensors()}

    assert "blk.0.attn_q_norm.weight" in names("qwen3-tiny")
    assert "blk.0.post_ffw_norm.weight" in names("gemma3-tiny")
    assert "blk.0.ffn_down_exps.weight" in names("gptoss-tiny")
    assert not any("q_norm" in name for name in names("llama-tiny"))
    for shape in ("gemma2-tiny", "cohere2-tiny"):  # embeddings that are the output matrix, too
        assert "output.weight" not in names(shape)
    assert "blk.0.post_ffw_norm.weight" in names("gemma2-tiny")
    assert "blk.0.ffn_norm.weight" not in names("cohere2-tiny")
    assert "blk.0.attn_k.bias" in names("qwen2-tiny")
    assert "blk.0.ffn_gate_exps.weight" in names("mixtral-tiny")
    assert {"blk.0.attn_qkv.weight", "rope_factors_long.weight"} < names("phi-tiny")
    assert not any("attn_q." in name or "ffn_gate" in name for name in names("phi-tiny"))
    assert {"blk.0.shortconv.conv.weight", "blk.2.attn_k_norm.weight"} < names("lfm2-tiny")
    assert {"blk.0.ssm_dt", "blk.3.attn_k.weight"} < names("qwen35-tiny")
    assert {"blk.0.ssm_dt.bias", "blk.1.ffn_up.weight"} < names("nemotron-h-tiny")
    for shape, layer in (("lfm2-tiny", 0), ("qwen35-tiny", 0), ("nemotron-h-tiny", 1)):
        assert not any(f"blk.{layer}.attn_k" in name for name in names(shape))
    assert not any("ffn_gate" in name for name in names("nemotron-h-tiny"))
    assert {"blk.0.attn_q_norm.weight", "blk.0.post_ffw_norm.weight"} < names("olmo3-tiny")
    assert "blk.0.attn_norm.weight" not in names("olmo3-tiny")
    assert "blk.0.attn_kv_b.weight" in names("deepseek2-tiny")
    assert {"blk.2.attn_k.weight", "blk.3.attn_q_norm.weight"} < names("gemma4-tiny")
    assert not {f"blk.{n}.attn_{kv}.weight" for n in (3, 4, 5) for kv in "kv"} & names(
        "gemma4-tiny"
    )


@pytest.mark.parametrize(
    ("name", "weights", "kv_bytes_per_token"),
    [
        # Weights of the published models less those of their vocabularies: their cards, about.
        ("qwen3-0.6b", 0.44e9, 28 * 2 * 8 * 128 * 2),
        ("llama-3.2-1b", 0.97e9, 16 * 2 * 8 * 64 * 2),
        ("gemma3-4b", 3.2e9, 34 * 2 * 4 * 256 * 2),
    ],
)
def test_shapes_of_published_models_are_as_large_as_those(
    name: str, weights: float, kv_bytes_per_token: int
) -> None:
    shape = make_shape(name)
    elements = sum(tensor.elements for tensor in shape.tensors())
    assert elements == pytest.approx(weights, rel=0.02)
    assert shape.stored_bytes == pytest.approx(elements * 34 / 32, rel=0.001)
    assert shape.kv_bytes_per_token == kv_bytes_per_token


def test_the_words_for_a_record_say_that_the_vocabulary_is_cut() -> None:
    assert "16 layers of width 2,048, 32/8 heads of 64" in make_shape("llama-3.2-1b").words
    for name, window in (("gemma3-4b", True), ("llama-3.2-1b", False)):
        words = make_shape(name).words
        assert "vocabulary is cut to 259 tokens" in words
        assert ("windows of 1,024" in words) is window
