"""The parts of a prompt: its turns, as far as the special tokens of well-known chat templates tell.

ChatML, Llama 3, Gemma, Mistral, DeepSeek, Phi, and the channels of gpt-oss. Without special tokens
all is one part without a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from ollama_tiering.models.gguf_words import Vocabulary

_HEADER_TOKENS: Final = 16  # a role's name and the end of its line
_OPENS: Final = ("imstart", "startheaderid", "startofturn", "start", "startofrole")
_CLOSES: Final = (
    *("imend", "eotid", "eomid", "endofturn", "end", "eot", "endoftext", "endofsentence", "eos"),
    *("s", "return", "call"),
)
_GOES_ON: Final = ("endheaderid", "message", "channel", "endofrole")  # behind a role's name
_TOOL_TEXT: Final = ("<tool_response>", "<tool_result>")
_TOOLS_TEXT: Final = re.compile(
    r'# Tools|<tools>|<available_tools>|"type": ?"function"|namespace functions'
)


class Role(StrEnum):
    SYSTEM = "system"
    TOOLS = "tools"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    NONE = ""


_NAMES: Final = {  # of roles, as templates write them
    **dict.fromkeys(("system", "developer", "systemprompt"), Role.SYSTEM),
    **dict.fromkeys(("user", "human", "inst"), Role.USER),
    **dict.fromkeys(("assistant", "model", "bot", "gpt", "toolcalls"), Role.ASSISTANT),
    **dict.fromkeys(("tool", "ipython", "toolresults", "function", "tooloutputs"), Role.TOOL),
    "availabletools": Role.TOOLS,
}


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens `start` to `stop`, the mark before them not among them. `number` counts the turns of
    the user up to this one.
    """

    role: Role
    number: int
    start: int
    stop: int
    header: int = 0  # tokens of it that only name the role


def turns(vocabulary: Vocabulary, tokens: Sequence[int]) -> list[Turn]:
    """All of them, in their order. Empty ones are left out."""
    found: list[Turn] = []
    role, number = Role.NONE, 0
    for mark, start, stop in _runs(vocabulary, tokens):
        header = 0
        letters = "".join(filter(str.isalpha, mark)).lower()
        if letters in _OPENS:
            role, header = _named(vocabulary, tokens, start, stop)
        elif "/" in mark and letters in _NAMES:  # [INST] … [/INST]
            role = Role.ASSISTANT if _NAMES[letters] is Role.USER else Role.NONE
        elif letters in _NAMES:
            role = _NAMES[letters]
        elif letters in _CLOSES:
            role = Role.NONE
        elif letters in _GOES_ON and found:
            found[-1] = _with(found[-1], stop)
            continue
        if role is Role.USER and _begins(vocabulary, tokens, start + header, stop, _TOOL_TEXT):
            role = Role.TOOL
        number += role is Role.USER
        if stop > start:
            found.append(Turn(role, number, start, stop, header))
    found = [one for one in found if one.role or _has_text(vocabulary, tokens, one)]
    if len(found) > 1 and not found[0].role:  # DeepSeek's system prompt has no mark
        found[0] = replace(found[0], role=Role.SYSTEM)
    return found


def turn_at(all_turns: Sequence[Turn], at: int) -> Turn:
    """The one that token `at` is in or belongs before."""
    nothing = Turn(Role.NONE, 0, 0, at)
    return next(
        (one for one in all_turns if at < one.stop), all_turns[-1] if all_turns else nothing
    )


def part_at(vocabulary: Vocabulary, tokens: Sequence[int], turn: Turn, at: int) -> Role:
    """The turn's role; of a system prompt, whether the tools have begun in it before token `at`."""
    if turn.role is not Role.SYSTEM:
        return turn.role
    before = text(vocabulary, tokens[turn.start : at])
    return Role.TOOLS if _TOOLS_TEXT.search(before) else Role.SYSTEM


def text(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    """Marks are shown by their names, bytes of a character that was cut are left out."""
    pieces = (vocabulary.piece(token) for token in tokens)
    named = zip(pieces, tokens, strict=True)
    raw = b"".join(
        vocabulary.name(token).encode() if piece is None else piece for piece, token in named
    )
    return raw.decode(errors="ignore")


def _runs(vocabulary: Vocabulary, tokens: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """Stretches without special tokens, each with the name of the one before it."""
    mark, start = "", 0
    for index, token in enumerate(tokens):
        if vocabulary.piece(token) is None:
            yield mark, start, index
            mark, start = vocabulary.name(token), index + 1
    yield mark, start, len(tokens)


def _named(
    vocabulary: Vocabulary, tokens: Sequence[int], start: int, stop: int
) -> tuple[Role, int]:
    """The role that its first line names, and how many tokens that takes. What may be cut off
    still counts: `assistant` at the end of a prompt.
    """
    header = 0
    line = b""
    for token in tokens[start : min(stop, start + _HEADER_TOKENS)]:
        header += 1
        line += vocabulary.piece(token) or b""
        if b"\n" in line:
            break
    name = line.partition(b"\n")[0].strip().lower().decode(errors="replace")
    role = _NAMES.get(name.replace("_", "").replace(" ", ""), Role.NONE)
    return role, header if role is not Role.NONE else 0


def _with(turn: Turn, stop: int) -> Turn:
    return replace(turn, stop=stop, header=turn.stop - turn.start + 1)


def _begins(
    vocabulary: Vocabulary, tokens: Sequence[int], start: int, stop: int, words: Sequence[str]
) -> bool:
    first = text(vocabulary, tokens[start : min(stop, start + 32)]).lstrip()
    return first.startswith(tuple(words))


def _has_text(vocabulary: Vocabulary, tokens: Sequence[int], turn: Turn) -> bool:
    return bool(text(vocabulary, tokens[turn.start : turn.stop]).strip())
