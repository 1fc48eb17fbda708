"""The words a person knows a conversation by, out of the templates of well-known models."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from ollama_tiering.cli.first_words import MAX_CHARACTERS, Words, telling_words
from ollama_tiering.models.gguf_words import Vocabulary
from ollama_tiering.store.tools.parting import BEFORE_TOKENS
from ollama_tiering.why import vocabularies
from tests.unit.models.marked_text import TOKENS, VOCABULARY, encode
from tests.unit.models.vocabularies import vocabulary_file
from tests.unit.sidecar.ollama_models import blob


def words(text: str) -> str:
    """`^` is where it parts from other conversations."""
    before, parts, after = text.partition("^")
    if not parts:
        before, after = "", text
    return telling_words(VOCABULARY, encode(before) + encode(after), len(encode(before)))


@pytest.mark.parametrize(
    "text",
    [
        "Why is it so?",
        "<|im_start|>user\nWhy is it so?<|im_end|>\n<|im_start|>assistant\nBecause.<|im_end|>\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy is it so?<|im_end|>\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n^Why is it so?<|im_end|>\n",
        "<|im_start|>system\nBe ^brief.<|im_end|>\n<|im_start|>user\nWhy is it so?<|im_end|>\n",
        "<|im_start|>user\nWhy is^ it so?<|im_end|>\n<|im_start|>assistant\nBecause.",
        "<|im_start|>user\nWhy is it so?<|im_end|>\n<|im_start|>assistant\nBec^ause.<|im_end|>\n",
        "<|im_start|>user\nWhy is it so?<|im_end|>\n^<|im_start|>assistant\nBecause.<|im_end|>\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n^Why is it so?<|eot_id|>",
        "<s>[INST] Why is it so?[/INST] Because it is.",
        "<s>[INST] Why is it so?[/INST] Bec^ause it is.",
        "<\uff5cUser\uff5c>Why is it so?<\uff5cAssistant\uff5c>Becau^se.",
        "<bos><start_of_turn>user\nBe brief, always.\n\n^Why is it so?<end_of_turn>\n",
        "<|start|>system<|message|>Be brief.<|start|>user<|message|>Why is it so?"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.",
    ],
)
def test_what_the_user_wrote_shows(text: str) -> None:
    assert words(text).removeprefix("…") == "Why is it so?"


def test_two_turns_show_the_one_in_which_they_part() -> None:
    first = "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
    assert words(first + "<|im_start|>user\n^Two?<|im_end|>\n") == "Two?"
    assert words(first + "<|im_start|>user\nTwo?<|im_end|>\n") == "One?"
    assert words(first + "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n^2") == "Two?"


def test_a_long_turn_shows_where_they_part_from_the_start_of_the_line_or_a_whole_word() -> None:
    start = "<|im_start|>user\nAlways be brief and kind. "
    assert words(f"{start}\nTell ^me<|im_end|>") == "…Tell me"
    assert words(f"{start}What about c^ats<|im_end|>") == "…about cats"
    answer = "<|im_start|>assistant\nThey purr.<|im_end|>\n<|im_start|>user\nThanks!<|im_end|>"
    assert words(f"{start}What about c^ats<|im_end|>\n{answer}") == "…about cats"


def test_what_began_before_the_tokens_that_are_known_says_so() -> None:
    assert words("x" * BEFORE_TOKENS + " ^Why?").startswith("…")
    assert words(f"{'x' * (BEFORE_TOKENS - 9)}^<|im_start|>user\nWhy?") == "Why?"
    answer = "<|im_start|>assistant\n^Because."
    assert words(f"{'x' * BEFORE_TOKENS}{answer}") == "…" + "x" * BEFORE_TOKENS
    assert words(f"{'x' * 100}{answer}") == "x" * 100


def test_a_user_who_writes_a_roles_name_is_shown() -> None:
    assert words("<|im_start|>user\nuser\nof what?<|im_end|>") == "user of what?"
    assert words("user\nof what?") == "user of what?"


def test_nothing_reaches_a_terminal_but_words() -> None:
    nasty = "\x1b]0;owned\x07a\tb\r\n\x9b31mc\u202ed\u2028e\x00f\u200bg"
    shown = words(f"<|im_start|>user\n{nasty}<|im_end|>")
    assert shown == "]0;owned a b 31mc d e f g"
    assert telling_words(VOCABULARY, [0xFF, 0xC3, ord("a"), 9999, -5], 0) == "a"
    assert len(words("word " * 1000)) == MAX_CHARACTERS


@pytest.mark.parametrize("text", ["", "<|im_start|>", "<|im_start|>user\n<|im_end|>\n", " \n"])
def test_no_words_are_no_text(text: str) -> None:
    assert words(text) == ""


def test_each_vocabulary_is_read_once_from_the_first_directory_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    real = vocabularies.read_vocabulary

    def noted(path: Path) -> Vocabulary | None:
        read.append(path)
        return real(path)

    monkeypatch.setattr(vocabularies, "read_vocabulary", noted)
    file = vocabulary_file(tmp_path / "b/blobs" / blob(1), TOKENS)
    found = Words([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    tokens = array("i", encode("hello")).tobytes()
    assert [found.of(blob(1), tokens, 0) for _ in range(3)] == ["hello"] * 3
    assert [found.of(blob(2), tokens, 0) for _ in range(3)] == [""] * 3
    assert read[:2] == [tmp_path / "a/blobs" / blob(1), file]
    assert len(read) == 2 + 3
    assert found.of("../b/blobs/" + blob(1), tokens, 0) == ""  # only a blob's name is a path here
    assert found.of(blob(1), b"", 0) == found.of(blob(1), b"abc", 0) == ""
    assert len(read) == 5
