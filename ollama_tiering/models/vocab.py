"""The test vocabulary: one token per byte in GPT-2's byte-level form, then three specials.

With no usable merge one printable character is one token, so a prompt's length is its token
count and any text round-trips. Pure: no numpy, no I/O.
"""

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIALS)
ENDOFTEXT, IM_START, IM_END = range(256, VOCAB_SIZE)

# Loaders want a non-empty list, and llama.cpp drops a merge result that is not a token, so the
# one merge joins two NULs, which no text contains.
MERGES = ("\u0100 \u0100",)

# v0.16.3 template/index.json: Ollama picks its "chatml" template by edit distance to this text.
CHAT_TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _byte_char(byte: int) -> str:
    """GPT-2's printable stand-in for a byte (v0.16.3 tokenizer/bytepairencoding.go)."""
    if byte == 0xAD:
        return chr(0x143)
    if byte <= 0x20:
        return chr(byte + 0x100)
    if 0x7F <= byte <= 0xA0:
        return chr(byte + 0xA2)
    return chr(byte)


BYTE_TOKENS = tuple(_byte_char(byte) for byte in range(256))
TOKENS = BYTE_TOKENS + SPECIALS
PRINTABLE = tuple(sorted({ord("\n"), *range(0x20, 0x7F)}))

# The same in SentencePiece's form: a character stands for itself, and a byte that is none has a
# token of its own kind.
_SPACE = "\u2581"
PIECES = tuple(
    _SPACE if byte == 0x20 else chr(byte) if 0x20 < byte < 0x7F else f"<0x{byte:02X}>"
    for byte in range(256)
)
PIECES += SPECIALS


def encode(text: str) -> list[int]:
    """Token ids of a text; specials are recognised in the text."""
    out: list[int] = []
    while text:
        hits = [(at, s) for s in SPECIALS if (at := text.find(s)) >= 0]
        at, special = min(hits) if hits else (len(text), "")
        out += text[:at].encode()
        if special:
            out.append(256 + SPECIALS.index(special))
        text = text[at + len(special) :]
    return out


def decode(tokens: list[int]) -> str:
    """Text of token ids. Bytes that are no UTF-8 become U+FFFD."""
    raw = b"".join(bytes([t]) if t < 256 else SPECIALS[t - 256].encode() for t in tokens)
    return raw.decode(errors="replace")
