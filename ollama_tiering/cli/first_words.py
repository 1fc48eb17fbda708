"""The text by which a person recognises a stored conversation.

It is what the user wrote in the turn in which the conversation first differs from the others of its
model; if it differs in an answer, what the user wrote before that. Control tokens and role words of
chat templates separate the turns. Without them all is one turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.models.gguf_words import Vocabulary
from ollama_tiering.sidecar.manifests import is_blob
from ollama_tiering.store.tools.parting import BEFORE_TOKENS
from ollama_tiering.why.vocabularies import Vocabularies

MAX_CHARACTERS: Final = 200
_LEAD_TOKENS: Final = 12  # shown of what comes before the parting, in a turn that began earlier
_HEADER_TOKENS: Final = 16  # a role's name and the end of its line
_USER: Final = ("user", "human", "inst", "")
_SYSTEM: Final = ("system", "developer")
_ROLES: Final = (*_USER[:3], *_SYSTEM, "assistant", "model", "tool", "ipython", "bot")
_ELLIPSIS: Final = "…"

_Pieces = Sequence[bytes | None]  # of tokens; None for a control token


class Words:
    """Reads the vocabulary of each model once, from the given models directories."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._vocabularies = Vocabularies(directories)

    def of(self, model: str, tokens: bytes, before: int) -> str:
        """One line of at most MAX_CHARACTERS; empty if the model's vocabulary is not found. `model`
        is a blob's file name, `tokens` are int32 ids; `before` of them precede the difference.
        """
        if not tokens or len(tokens) % 4 or not is_blob(model):
            return ""
        vocabulary = self._vocabularies.of(model)
        return telling_words(vocabulary, array("i", tokens), before) if vocabulary else ""


@dataclass(frozen=True, slots=True)
class _Turn:
    """Tokens from `start` to `stop`. `role` is empty if no template names it."""

    role: str
    start: int
    stop: int


def telling_words(vocabulary: Vocabulary, tokens: Sequence[int], before: int) -> str:
    """See `Words.of`."""
    pieces = [vocabulary.piece(token) for token in tokens]
    marks = [vocabulary.name(t) if p is None else "" for t, p in zip(tokens, pieces, strict=True)]
    turns = [turn for turn in _turns(pieces, marks) if _text(pieces, turn.start, turn.stop).strip()]
    if not turns:
        return ""
    last = len(turns) - 1
    at = next((n for n, turn in enumerate(turns) if turn.stop > before), last)
    chosen = _users_turn(turns, at)
    begin, lead = chosen.start, b""
    if chosen is turns[at] and begin < before < chosen.stop:
        begin = max(begin, before - _LEAD_TOKENS)
    if cut := begin > chosen.start:
        lead = _text(pieces, begin, before)
        lead = lead[_beginning(lead) :]
        begin = before
    began_earlier = chosen.start == 0 and before >= BEFORE_TOKENS
    raw = lead + _text(pieces, begin, chosen.stop)
    return _one_line(raw, _ELLIPSIS if cut or began_earlier else "")


def _users_turn(turns: Sequence[_Turn], at: int) -> _Turn:
    """The turn with the difference if the user wrote it; else the nearest one of the user before
    it, else after it.
    """
    if turns[at].role in _USER:
        return turns[at]
    before = [] if turns[at].role in _SYSTEM else turns[:at][::-1]
    mine = (turn for turn in (*before, *turns[at + 1 :]) if turn.role in _USER)
    return next(mine, turns[at])


def _beginning(lead: bytes) -> int:
    """Offset at which its last line begins; without a line, its first whole word."""
    return (lead.rfind(b"\n") if b"\n" in lead else lead.find(b" ")) + 1


def _turns(pieces: _Pieces, marks: Sequence[str]) -> Iterator[_Turn]:
    role = ""
    for mark, start, stop in _runs(pieces, marks):
        line, newline, _ = _text(pieces, start, min(stop, start + _HEADER_TOKENS)).partition(b"\n")
        marked = "".join(filter(str.isalpha, mark)).lower()
        if mark and _role(line) and (newline or stop - start < _HEADER_TOKENS):
            role = _role(line)
            start = _after_line(pieces, start, stop)
        elif marked in _ROLES:
            role = "assistant" if "/" in mark else marked  # [INST] … [/INST]
        yield _Turn(role, start, stop)


def _runs(pieces: _Pieces, marks: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Stretches without control tokens, each with the name of the control token before it."""
    mark, start = "", 0
    for index, piece in enumerate(pieces):
        if piece is None:
            yield mark, start, index
            mark, start = marks[index], index + 1
    yield mark, start, len(pieces)


def _role(line: bytes) -> str:
    word = line.strip().lower().decode(errors="replace")
    return word if word in _ROLES else ""


def _after_line(pieces: _Pieces, start: int, stop: int) -> int:
    ends = (index + 1 for index in range(start, stop) if b"\n" in (pieces[index] or b""))
    return next(ends, stop)


def _text(pieces: _Pieces, start: int, stop: int) -> bytes:
    return b"".join(piece for piece in pieces[start:stop] if piece)


def _one_line(raw: bytes, beginning: str) -> str:
    """Control, format and private characters become blanks, so that none reaches a terminal. Bytes
    of a character that was cut are left out.
    """
    text = raw[: 8 * MAX_CHARACTERS].decode(errors="ignore")[: 2 * MAX_CHARACTERS]
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return (beginning + words)[:MAX_CHARACTERS] if words else ""
