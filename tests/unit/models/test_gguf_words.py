"""The vocabulary of a GGUF file, and of what only looks like one: none, never an error."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from ollama_tiering.models import gguf_words, vocab
from ollama_tiering.models.gguf_words import Vocabulary, read_vocabulary
from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from tests.unit.models.vocabularies import (
    ARRAY,
    BYTE,
    CONTROL,
    INT32,
    NORMAL,
    STRING,
    array,
    gguf,
    string,
    vocabulary_file,
)


def text(vocabulary: Vocabulary | None, tokens: list[int]) -> str:
    assert vocabulary is not None
    return b"".join(vocabulary.piece(token) or b"" for token in tokens).decode()


def test_a_byte_level_vocabulary_gives_back_every_byte(tmp_path: Path) -> None:
    """Of a file that the gguf package wrote."""
    small = {"layers": 1, "embd": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96}
    make_model(make_shape("qwen3-tiny", **small), tmp_path / "m.gguf")
    found = read_vocabulary(tmp_path / "m.gguf")
    assert found is not None
    assert [found.piece(token) for token in range(256)] == [bytes((b,)) for b in range(256)]
    assert text(found, vocab.encode("<|im_start|>Grüße, 世界\n<|im_end|>")) == "Grüße, 世界\n"
    assert found.name(vocab.IM_START) == "<|im_start|>"


def test_sentencepiece(tmp_path: Path) -> None:
    tokens = [("<s>", CONTROL), ("▁Hello", NORMAL), ("<0xC3>", BYTE), ("<0xBC>", BYTE), ("Ġ", 1)]
    found = read_vocabulary(vocabulary_file(tmp_path / "m", tokens, model="llama"))
    assert text(found, [0, 1, 2, 3, 4]) == " HelloüĠ"


def test_marks_of_templates_and_ids_that_are_none_have_no_text(tmp_path: Path) -> None:
    """Also where the file gives a mark another type, as some do."""
    tokens = [("a", NORMAL), ("<|user|>", NORMAL), ("<\uff5cUser\uff5c>", NORMAL), ("<b>", NORMAL)]
    found = read_vocabulary(vocabulary_file(tmp_path / "m", tokens))
    assert found is not None
    assert [found.piece(n) for n in (-1, 0, 1, 2, 3, 4, 1 << 31)] == [
        *(None, b"a", None, None, b"<b>"),
        *(None, None),
    ]


def test_a_file_cut_anywhere_has_no_vocabulary(tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path / "m", [("a", NORMAL), ("b", CONTROL)])
    whole = path.read_bytes()
    assert read_vocabulary(path) is not None
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert read_vocabulary(path) is None, size


HUGE = struct.pack("<Q", 1 << 60)


@pytest.mark.parametrize(
    "content",
    [
        b"GGML" + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + HUGE + b"x",
        gguf({"tokenizer.ggml.tokens": struct.pack("<II", ARRAY, STRING) + HUGE}),
        gguf({"tokenizer.ggml.tokens": struct.pack("<IIQ", ARRAY, STRING, 1) + HUGE}),
        gguf({"tokenizer.ggml.tokens": array(INT32, [1])}),
        gguf({"x": struct.pack("<II", ARRAY, STRING) + HUGE}),
        gguf({"x": struct.pack("<II", ARRAY, ARRAY) + HUGE}),
        gguf({"x": struct.pack("<II", ARRAY, INT32) + HUGE}),
        gguf({"x": struct.pack("<I", 99)}),
        gguf({b"\xff".decode("latin-1"): struct.pack("<I", STRING) + string(b"\xff")}),
    ],
)
def test_what_contradicts_itself_has_no_vocabulary(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m").write_bytes(content + bytes(64))
    assert read_vocabulary(tmp_path / "m") is None


def test_more_tokens_than_any_model_has_are_not_read(tmp_path: Path) -> None:
    most = gguf_words._MAX_TOKENS
    for count, found in ((most, True), (most + 1, False)):
        kinds = struct.pack("<IIQ", ARRAY, INT32, count) + bytes(4 * count)
        tokens = array(STRING, ["a"])
        values = {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.tokens": tokens}
        (tmp_path / "m").write_bytes(gguf(values))
        assert (read_vocabulary(tmp_path / "m") is not None) == found


def test_what_is_no_file_has_no_vocabulary(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it to read would wait for a writer
    for name in ("fifo", "missing", "."):
        assert read_vocabulary(tmp_path / name) is None


def test_types_of_another_number_of_tokens_are_not_used(tmp_path: Path) -> None:
    values = {
        "tokenizer.ggml.model": struct.pack("<I", STRING) + string("gpt2"),
        "tokenizer.ggml.tokens": array(STRING, ["a", "b"]),
        "tokenizer.ggml.token_type": array(INT32, [CONTROL]),
    }
    (tmp_path / "m").write_bytes(gguf(values))
    assert text(read_vocabulary(tmp_path / "m"), [0, 1]) == "ab"
