"""What kind of parting it is, told from both sides' tokens. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ollama_tiering.models.gguf_words import Vocabulary
from ollama_tiering.why.difference import Difference, difference
from ollama_tiering.why.turns import Role, Turn, part_at, text, turn_at, turns
from ollama_tiering.why.values import changed_value

LEAST_LOST: Final = 64  # tokens: fewer are not restored, so nothing is lost with them
_LEAST_SHARE: Final = 0.25  # of what comes behind; less is the same in other conversations, too
_SHORT: Final = 200  # characters: what is longer is no value
_FIRST_TOKENS: Final = 8  # that Ollama keeps of a prompt it cuts in the middle of a message
_CUT_TOKENS: Final = 16  # fewer are no message
_HEAD: Final = (Role.SYSTEM, Role.TOOLS, Role.NONE)  # before the first message
_WORDS: Final = re.compile(r"\w+|[^\w\s]")
_REASONING: Final = re.compile(
    r"</?think(?:ing)?>|\[/?THINK\]|</?thought>|analysis<\|message\|>|<unused94>|◁/?think▷"
)
_TOOL_CALL: Final = re.compile(
    r"<tool_call|\[TOOL_CALLS\]|<\|python_tag\|>|<function=|tool▁call|\"arguments\":|\"parameters\":"
)


class PartingVerdict(StrEnum):
    VALUE = "value"
    ORDER = "order"
    REWRITTEN = "rewritten_history"
    CUT = "cut_prompt"
    CHANGED = "changed_text"
    OTHER_PROMPT = "other_prompt"
    EVICTED = "evicted"
    DAMAGED = "damaged"
    OTHER_BUILD = "other_build"
    OTHER_SETTINGS = "other_settings"
    NO_TEXT = "no_text"  # nobody can say: the vocabulary was not found, or a rule forbids it


@dataclass(frozen=True, slots=True)
class Place:
    """The part of the prompt in which it parts. `number` is 0 if the turns before are not known."""

    role: Role
    number: int

    @property
    def words(self) -> str:
        of = f"turn {self.number} of" if self.number else "a turn of"
        return {
            Role.SYSTEM: "the system prompt",
            Role.TOOLS: "the tools",
            Role.USER: f"{of} the user",
            Role.ASSISTANT: f"{of} the assistant",
            Role.TOOL: f"a tool's result in turn {self.number}"
            if self.number
            else "a tool's result",
            Role.NONE: "the prompt",
        }[self.role]


@dataclass(frozen=True, slots=True)
class Sides:
    """Token ids before the place, and behind it on both sides. `skipped`: up to where both are the
    same again. `whole`: `before` begins with the prompt's first token.
    """

    before: Sequence[int]
    asked: Sequence[int]
    stored: Sequence[int]
    skipped: tuple[int, int] | None
    lost_tokens: int
    prompt_tokens: int
    whole: bool = True
    num_ctx: int = 0

    @property
    def at(self) -> int:
        """How many tokens come before, as far as they are known."""
        return len(self.before)


@dataclass(frozen=True, slots=True)
class Judgement:
    """`what` is the verdict in words."""

    verdict: PartingVerdict
    what: str
    place: Place
    difference: Difference | None = None


def place_of(vocabulary: Vocabulary, sides: Sides) -> Place:
    """Says where the prompt parts."""
    tokens = [*sides.before, *sides.asked]
    at = len(sides.before)
    turn = turn_at(turns(vocabulary, tokens), at)
    return _place(vocabulary, tokens, turn, sides)


def judge(vocabulary: Vocabulary, sides: Sides) -> Judgement:
    """Judges a prompt that differs from what is stored."""
    at = len(sides.before)
    asked, stored = [*sides.before, *sides.asked], [*sides.before, *sides.stored]
    mine, other = turns(vocabulary, asked), turns(vocabulary, stored)
    turn, stored_turn = turn_at(mine, at), turn_at(other, at)
    place = _place(vocabulary, asked, turn, sides)
    skipped = sides.skipped if sides.lost_tokens >= LEAST_LOST else None
    differing = difference(vocabulary, sides.before, sides.asked, sides.stored, skipped)

    def judged(verdict: PartingVerdict, what: str) -> Judgement:
        return Judgement(verdict, what, place, differing)

    if _same_words(vocabulary, asked[at : turn.stop], stored[at : stored_turn.stop], place):
        differing = difference(vocabulary, sides.before, sides.asked, sides.stored, None)
        return Judgement(
            PartingVerdict.ORDER, f"{place.words}: the same in another order", place, differing
        )
    if skipped is None:
        return judged(PartingVerdict.OTHER_PROMPT, "another prompt that begins alike")
    removed = skipped[1] - skipped[0]
    whole = any(
        at < other_turn.start <= at + skipped[1] for other_turn in other
    )  # messages are gone
    first = all(
        other_turn.role in _HEAD or other_turn.stop > at
        for other_turn in mine
        if other_turn.start < at
    )
    cut = whole and first and place.role not in _HEAD
    cut = cut or _is_cut_inside(vocabulary, sides, at, skipped)
    if removed >= _CUT_TOKENS and cut:
        return judged(PartingVerdict.CUT, _cut_words(sides, removed))
    if len(differing.prompt.differs) <= _SHORT and len(differing.stored.differs) <= _SHORT:
        sides_of_it = differing.prompt.whole, differing.stored.whole
        if kind := changed_value(*sides_of_it, differing.prompt.differs, differing.stored.differs):
            return judged(PartingVerdict.VALUE, f"{kind} that changes, in {place.words}")
    answered = place.role in (Role.ASSISTANT, Role.TOOL)
    if not answered and sides.lost_tokens < (sides.prompt_tokens - sides.at) * _LEAST_SHARE:
        return judged(PartingVerdict.OTHER_PROMPT, "another prompt that has some text in common")
    if answered or _is_past(mine, turn):
        around = text(vocabulary, stored[max(0, stored_turn.start - 2) : at + skipped[1]])
        around += text(vocabulary, asked[max(0, turn.start - 2) : at + skipped[0]])
        return judged(PartingVerdict.REWRITTEN, _rewritten_words(around, place, removed))
    return judged(PartingVerdict.CHANGED, f"a text that changed, in {place.words}")


def _place(vocabulary: Vocabulary, tokens: Sequence[int], turn: Turn, sides: Sides) -> Place:
    role = part_at(vocabulary, tokens, turn, len(sides.before))
    return Place(role, turn.number if sides.whole else 0)


def _same_words(
    vocabulary: Vocabulary, asked: Sequence[int], stored: Sequence[int], place: Place
) -> bool:
    """Whether the rest of the part has the same words on both sides, and so in another order."""
    if place.role in (Role.ASSISTANT, Role.TOOL):
        return False
    mine, other = (_WORDS.findall(text(vocabulary, side)) for side in (asked, stored))
    return len(mine) > 3 and mine != other and Counter(mine) == Counter(other)


def _is_cut_inside(vocabulary: Vocabulary, sides: Sides, at: int, skipped: tuple[int, int]) -> bool:
    """Whether all but a few tokens at the beginning were cut off up to some place inside of a line,
    as Ollama does where one message is too long. What people leave out are whole lines.
    """
    if (
        at > _FIRST_TOKENS
        or skipped[0]
        or (sides.num_ctx and sides.prompt_tokens < sides.num_ctx / 2)
    ):
        return False
    return not text(vocabulary, sides.stored[: skipped[1]]).endswith(("\n", ". "))


def _is_past(mine: Sequence[Turn], turn: Turn) -> bool:
    """Whether it is a message of the user that was answered already."""
    later = any(
        later_turn.role is Role.ASSISTANT and later_turn.start >= turn.stop
        for later_turn in mine[:-1]
    )
    return turn.role is Role.USER and later


def _cut_words(sides: Sides, removed: int) -> str:
    needed = sides.prompt_tokens + removed
    if sides.num_ctx >= needed:
        return f"the client left out its first messages ({removed:,} tokens)"
    if not sides.num_ctx:
        left = f"{sides.prompt_tokens:,} of {needed:,} tokens were left"
        return f"Ollama cut the prompt (or its client did): {left}; is num_ctx too small?"
    return f"Ollama cut the prompt: num_ctx {sides.num_ctx:,} is too small for {needed:,} tokens"


def _rewritten_words(around: str, place: Place, removed: int) -> str:
    if place.role is Role.ASSISTANT and _REASONING.search(around):
        return f"{place.words}: the reasoning of an earlier answer is not in the prompt any more"
    if place.role is Role.ASSISTANT and _TOOL_CALL.search(around):
        return f"{place.words}: a tool call is not written as the model wrote it"
    if place.role is Role.USER and removed > 0:
        return f"{place.words}: some text is not in that message any more"
    return f"{place.words}: it is not written as it was"
