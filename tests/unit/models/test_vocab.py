"""The test vocabulary: one printable character is one token, and any text comes back."""

import pytest

from ollama_tiering.models import vocab


def test_one_printable_character_is_one_token() -> None:
    text = "".join(chr(byte) for byte in vocab.PRINTABLE)
    assert len(vocab.encode(text)) == len(text) == 96
    assert vocab.decode(vocab.encode(text)) == text


@pytest.mark.parametrize("text", ["", "a b\nc", "naïve 日本 🙂", "\x00\x7f\xad"])
def test_any_text_round_trips(text: str) -> None:
    assert vocab.decode(vocab.encode(text)) == text


def test_specials_are_one_token_wherever_they_stand() -> None:
    assert vocab.encode("a<|im_end|><|im_start|>b<|im_") == [
        97, vocab.IM_END, vocab.IM_START, 98, *b"<|im_",
    ]  # fmt: skip


def test_byte_tokens_are_gpt2s_stand_ins() -> None:
    assert vocab.TOKENS[ord(" ")] == "Ġ"
    assert vocab.TOKENS[ord("\n")] == "Ċ"
    assert vocab.TOKENS[ord("A")] == "A"
    assert len(set(vocab.TOKENS)) == vocab.VOCAB_SIZE
    assert not any(char.isspace() for token in vocab.BYTE_TOKENS for char in token)


def test_no_merge_can_join_two_characters_of_a_text() -> None:
    nul = vocab.BYTE_TOKENS[0]
    assert list(vocab.MERGES) == [f"{nul} {nul}"]
