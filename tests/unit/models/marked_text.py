"""A vocabulary of one token per byte, and one per mark of well-known chat templates."""

from __future__ import annotations

from ollama_tiering.models import vocab
from ollama_tiering.models.gguf_words import Vocabulary
from tests.unit.models.vocabularies import CONTROL, NORMAL, Token

MARKS = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>"),
    *("<|end_header_id|>", "[INST]", "[/INST]", "<s>", "</s>", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
    *("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("<start_of_turn>", "<end_of_turn>", "<bos>", "<|start|>", "<|message|>", "<|channel|>"),
    "<|end|>",
)
TOKENS: list[Token] = [(char, NORMAL) for char in vocab.BYTE_TOKENS]
TOKENS += [(mark, CONTROL) for mark in MARKS]
VOCABULARY = Vocabulary([name.encode() for name, _ in TOKENS], [k for _, k in TOKENS], True)


def encode(text: str) -> list[int]:
    """One token per byte, and one per mark."""
    out: list[int] = []
    while text:
        mark = next((mark for mark in MARKS if text.startswith(mark)), None)
        out += [256 + MARKS.index(mark)] if mark else text[0].encode()
        text = text[len(mark or "x") :]
    return out
