"""The model maker: files that read back, the same bytes every time, all or nothing."""

import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest

from ollama_tiering.models import make as maker
from ollama_tiering.models import recurrent, vocab
from ollama_tiering.models.gguf_words import read_vocabulary
from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import SHAPES, ModelShape, make_shape
from ollama_tiering.models.tensors import Tensor

GOLDEN_NOISE = [
    [-0.8635146617889404, 0.29745838046073914, 1.074735164642334],
    [-0.47944843769073486, 1.2581523656845093, -0.16404478251934052],
]
SMALL = {"layers": 1, "embd": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96}


def small(name: str = "qwen3-tiny", **overrides: int | str) -> ModelShape:
    dtype = overrides.get("dtype", SHAPES[name].dtype)
    wider = {"embd": 256, "heads": 8, "ffn": 512} if dtype == "q4_k_m" else {}
    layers = {"layers": recurrent.least_layers(SHAPES[name].arch)}
    return make_shape(name, **{**SMALL, **layers, **wider, **overrides})


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_k_m"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_same_seed_and_options_give_the_same_bytes(tmp_path: Path, name: str, dtype: str) -> None:
    for file in ("a", "b"):
        make_model(small(name, dtype=dtype), tmp_path / file, seed=5)
    make_model(small(name, dtype=dtype), tmp_path / "c", seed=6)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(tmp_path / "a") != digest(tmp_path / "c")


def test_weights_do_not_depend_on_the_numpy_version() -> None:
    noise = maker._unit_noise(Tensor("blk.0.attn_q.weight", (2, 3), "f32"), seed=1)
    assert noise.tolist() == GOLDEN_NOISE


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_k_m"])
def test_the_file_reads_back_as_the_shape_says(tmp_path: Path, dtype: str) -> None:
    shape = small(dtype=dtype)
    stored_bytes = make_model(shape, tmp_path / "m.gguf")
    assert stored_bytes == (tmp_path / "m.gguf").stat().st_size
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert [t.name for t in reader.tensors] == [t.name for t in shape.tensors()]
    for got, want in zip(reader.tensors, shape.tensors(), strict=True):
        assert tuple(reversed(got.shape.tolist())) == want.shape
        assert got.tensor_type.name.lower() == want.dtype
        assert got.n_bytes == want.stored_bytes
        values = gguf.dequantize(got.data, got.tensor_type)
        wanted = maker.tensor_values(shape, want, 0)
        step = abs(wanted).max() / 12 if want.dtype == "q4_k" else 0.04
        np.testing.assert_allclose(values, wanted, atol=step)


@pytest.mark.parametrize("name", list(SHAPES))
def test_metadata_has_every_key_the_loaders_read(tmp_path: Path, name: str) -> None:
    make_model(small(name, dtype="q8_0"), tmp_path / "m.gguf")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    arch = SHAPES[name].arch
    values = {key: field.contents() for key, field in fields.items()}
    assert values["general.architecture"] == arch
    shape = small(name, dtype="q8_0")
    counts = {"feed_forward_length": 96, "attention.head_count_kv": 1}
    # With a latent cache that is the length of the row that K and V share.
    lengths = (shape.key_dim, shape.value_dim)
    if shape.latent_cache:
        lengths = (shape.latent + shape.rope_dim, shape.latent)
    for key, value in ({} if shape.hybrid else counts).items():
        assert values[f"{arch}.{key}"] == value
        assert [t.name for t in fields[f"{arch}.{key}"].types] == ["UINT32"]
    for key, value in {
        "block_count": shape.layers,
        "context_length": SHAPES[name].ctx,
        "embedding_length": 64,
        "attention.head_count": 2,
        "attention.key_length": lengths[0],
        "attention.value_length": lengths[1],
        "rope.dimension_count": shape.rope_dim,
        "rope.freq_base": SHAPES[name].rope_base,
    }.items():
        assert values[f"{arch}.{key}"] == value
        # Ollama reads counts as uint32 and nothing else (v0.16.3 fs/ggml/ggml.go keyValue).
        want = "FLOAT32" if key == "rope.freq_base" else "UINT32"
        assert [t.name for t in fields[f"{arch}.{key}"].types] == [want]
    if arch != "gemma4":
        assert values["tokenizer.ggml.model"] == "gpt2"
        assert tuple(values["tokenizer.ggml.tokens"]) == vocab.TOKENS
        assert values["tokenizer.ggml.token_type"] == [1] * 256 + [3] * 3
    assert values["tokenizer.ggml.merges"]
    assert values["tokenizer.ggml.add_bos_token"] is False
    assert values["tokenizer.ggml.eos_token_id"] == vocab.IM_END
    assert "<|im_start|>" in values["tokenizer.chat_template"]


@pytest.mark.parametrize(
    ("dtype", "number"), [("f16", 1), ("bf16", 32), ("q8_0", 7), ("q4_k_m", 15)]
)
def test_the_file_type_is_that_of_the_weights(tmp_path: Path, dtype: str, number: int) -> None:
    make_model(small(dtype=dtype), tmp_path / "m.gguf")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["general.file_type"].contents() == number


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("old")

    def fail(_: Tensor) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_model(small(), path, progress=fail)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert path.read_text() == "old"


def test_nothing_writes_to_the_constant_channel() -> None:
    shape = small()
    values = {t.name: maker.tensor_values(shape, t, 0) for t in shape.tensors()}
    assert (values["token_embd.weight"][:, 0] == maker.CONSTANT_CHANNEL).all()
    assert not values["blk.0.attn_output.weight"][0].any()
    assert not values["blk.0.ffn_down.weight"][0].any()


def test_an_embedding_that_is_the_output_too_lowers_its_own_token_and_those_that_are_none() -> None:
    """The last norm turns it round."""
    shape = small("gemma2-tiny", embd=256)
    values = {t.name: maker.tensor_values(shape, t, 0) for t in shape.tensors()}
    rows = values["token_embd.weight"] * np.sqrt(shape.embd)
    logits = values["output_norm.weight"] * rows @ values["token_embd.weight"].T
    text, others = list(vocab.PRINTABLE), [t for t in range(256) if t not in vocab.PRINTABLE]
    seen = logits[text][:, text]
    assert (seen.argmin(1) == np.arange(len(text))).all()
    assert (logits[text][:, others].max(1) < seen.min(1)).all()


def test_the_vectors_of_an_architecture_are_not_all_ones() -> None:
    values = {
        t.name: maker.tensor_values(small(name), t, 0)
        for name in ("qwen2-tiny", "phi-tiny")
        for t in small(name).tensors()
    }
    assert values["blk.0.attn_v.bias"].std() > 0.1
    assert values["rope_factors_long.weight"].tolist() != [1.0] * 16
    assert values["rope_factors_short.weight"].tolist() == [1.0] * 16
    q, k = np.split(values["blk.0.attn_qkv.weight"], [64])
    assert q.std() > 1.5 * k.std()


def test_every_byte_has_a_token_in_either_form(tmp_path: Path) -> None:
    for name, bytes_alone in (("qwen3-tiny", 0), ("gemma4-tiny", 256 - 95)):
        make_model(small(name), tmp_path / "m.gguf")
        words = read_vocabulary(tmp_path / "m.gguf")
        assert words is not None
        assert [words.piece(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
        assert list(words.kinds).count(int(gguf.TokenType.BYTE)) == bytes_alone


def test_states_last_and_do_not_grow() -> None:
    """What a head of a state keeps of itself from token to token."""
    for name in ("qwen35-tiny", "nemotron-h-tiny"):
        values = {t.name: maker.tensor_values(small(name), t, 0) for t in small(name).tensors()}
        step = values.get("blk.0.ssm_dt", values.get("blk.0.ssm_dt.bias"))
        kept = np.exp(np.log1p(np.exp(step)) * values["blk.0.ssm_a"].ravel())
        assert (kept < 1).all()
        assert kept.max() ** 500 > 0.5
        assert kept.min() ** 100 < 1e-3
        assert not values["blk.0.ssm_out.weight"][0].any()
        assert (values["blk.0.ssm_norm.weight"] == 1).all()
        assert values["blk.0.ssm_conv1d.weight"].std() > 0.1
    assert values["blk.0.ssm_conv1d.bias"].std() > 0.1
    assert values["blk.0.ssm_d"].tolist() == [[0.5]] * 4


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gemma3-tiny", {"gemma3.attention.sliding_window": 128}),
        ("gptoss-tiny", {"gptoss.attention.sliding_window": 128, "gptoss.expert_count": 4}),
        (
            "gemma2-tiny",
            {"gemma2.attention.sliding_window": 128, "gemma2.attn_logit_softcapping": 50},
        ),
        ("cohere2-tiny", {"cohere2.attention.sliding_window": 128, "cohere2.logit_scale": 0.0625}),
        ("phi-tiny", {"phi3.rope.scaling.original_context_length": 1024}),
        ("granite-tiny", {"granite.residual_scale": 0.5}),
        (
            "olmo3-tiny",
            {
                "olmo3.attention.sliding_window": 128,
                "olmo3.attention.sliding_window_pattern": [True, True, True, False, True],
            },
        ),
        (
            "gemma4-tiny",
            {
                "gemma4.attention.key_length": 64,
                "gemma4.attention.key_length_swa": 32,
                "gemma4.attention.shared_kv_layers": 2,
                "gemma4.attention.sliding_window_pattern": [True, True, False, True, True],
                "tokenizer.ggml.eot_token_id": vocab.IM_END,
            },
        ),
        ("llama4-tiny", {"llama4.attention.chunk_size": 512, "llama4.attention.head_dim": 32}),
        ("deepseek2-tiny", {"deepseek2.attention.key_length": 48}),
        (
            "mla-tiny",
            {
                "deepseek2.attention.key_length_mla": 48,
                "deepseek2.attention.value_length_mla": 32,
            },
        ),
        (
            "lfm2-tiny",
            {"lfm2.attention.head_count_kv": [0, 0, 1, 0, 0], "lfm2.shortconv.l_cache": 3},
        ),
        (
            "qwen35-tiny",
            {
                "qwen35.attention.head_count_kv": [0, 0, 0, 1, 0],
                "qwen35.rope.mrope_section": [4, 2, 2],
                "qwen35.rope.mrope_interleaved": True,
                "qwen35.ssm.inner_size": 256,
            },
        ),
        (
            "nemotron-h-tiny",
            {
                "nemotron_h.attention.head_count_kv": [0, 0, 0, 1, 0],
                "nemotron_h.feed_forward_length": [0, 96, 0, 0, 0],
                "nemotron_h.ssm.conv_kernel": 4,
            },
        ),
    ],
)
def test_what_sets_a_family_apart_is_in_its_metadata(
    tmp_path: Path, name: str, keys: dict[str, object]
) -> None:
    make_model(small(name, layers=5), tmp_path / "m.gguf")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert {key: fields[key].contents() for key in keys} == keys
