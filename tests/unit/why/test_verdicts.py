"""What is said of two prompts that part, from their tokens alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from ollama_tiering.models import vocab
from ollama_tiering.models.gguf_words import Vocabulary
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.books.tree import common_rows
from ollama_tiering.store.tools.resync import resync
from ollama_tiering.why.recipes import all_recipes, fitting
from ollama_tiering.why.turns import text
from ollama_tiering.why.verdicts import Judgement, Sides, judge
from tests.unit.models.marked_text import MARKS, VOCABULARY, encode
from tests.unit.models.vocabularies import CONTROL, NORMAL
from tests.unit.why.clients import ANSWER, CASES, RULES, SOUND, Case, chatml

_SPLIT = re.compile("|".join(map(re.escape, MARKS)) + r"| ?[^\W\d_]+|\d|.", re.DOTALL)


@dataclass(frozen=True)
class Tokenizer:
    vocabulary: Vocabulary
    encode: Callable[[str], list[int]]


def words_tokenizer() -> Tokenizer:
    """A token for each word with the blank before it, as large vocabularies have them."""
    texts = [side for case in CASES for side in (case.stored, case.asked)]
    texts += [side for both in SOUND.values() for side in both]
    pieces = sorted({piece for one in texts for piece in _SPLIT.findall(one)})
    ids = {piece: number for number, piece in enumerate(pieces)}
    names = [
        piece if piece in MARKS else "".join(vocab.BYTE_TOKENS[byte] for byte in piece.encode())
        for piece in pieces
    ]
    kinds = [CONTROL if piece in MARKS else NORMAL for piece in pieces]
    vocabulary = Vocabulary([name.encode() for name in names], kinds, True)
    return Tokenizer(vocabulary, lambda one: [ids[piece] for piece in _SPLIT.findall(one)])


BYTES, WORDS = Tokenizer(VOCABULARY, encode), words_tokenizer()


def sides_of(stored: str, asked: str, tokenizer: Tokenizer = BYTES, num_ctx: int = 0) -> Sides:
    mine, other = tokenizer.encode(asked), tokenizer.encode(stored)
    at = common_rows(tokens_to_bytes(mine), tokens_to_bytes(other))
    same = resync(tokens_to_bytes(mine[at:]), tokens_to_bytes(other[at:]))
    return Sides(
        before=mine[:at],
        asked=mine[at:],
        stored=other[at:],
        skipped=(same.skipped_asked, same.skipped_stored) if same else None,
        lost_tokens=same.same_tokens if same else 0,
        prompt_tokens=len(mine),
        num_ctx=num_ctx,
    )


def judged(stored: str, asked: str, tokenizer: Tokenizer = BYTES, num_ctx: int = 0) -> Judgement:
    return judge(tokenizer.vocabulary, sides_of(stored, asked, tokenizer, num_ctx))


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "words"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_known_client_is_told_what_it_does(case: Case, tokenizer: Tokenizer) -> None:
    found = judged(case.stored, case.asked, tokenizer)
    assert (found.verdict, found.place.role, found.place.number or None) == (
        *(case.verdict, case.part),
        case.turn,
    ), found
    assert case.what in found.what
    assert found.difference is not None
    assert case.shown[0] in found.difference.stored.marked()
    assert case.shown[1] in found.difference.prompt.marked()
    around = f"{found.difference.prompt.whole}\n{found.difference.stored.whole}"
    prompt = text(VOCABULARY, encode(case.asked))
    recipe = fitting(all_recipes(None), found.verdict, found.place.role, around, prompt)
    assert (case.cure in recipe.cure) if recipe and case.cure else not (recipe or case.cure)


def test_whether_ollama_cut_the_prompt_or_its_client_did_is_told_by_num_ctx() -> None:
    case = next(case for case in CASES if case.name == "a chat that outgrew num_ctx")
    left, whole = len(encode(case.asked)), len(encode(case.asked)) + 304
    for num_ctx, said in (
        (0, f"(or its client did): {left:,} of {whole:,} tokens were left; is num_ctx too small?"),
        (
            left + 10,
            f"Ollama cut the prompt: num_ctx {left + 10:,} is too small for {whole:,} tokens",
        ),
        (whole, "the client left out its first messages (304 tokens)"),
    ):
        found = judged(case.stored, case.asked, num_ctx=num_ctx)
        assert found.verdict == "cut_prompt"
        assert said in found.what


def test_a_first_line_that_is_gone_is_no_cut_prompt() -> None:
    rest = "".join(f"Rule {n}: be polite.\n" for n in range(30))
    stored = chatml(
        ("system", f"x-anthropic-billing-header: cc_version=2.1.36; cch=36ee5;\n{rest}")
    )
    found = judged(stored, chatml(("system", rest)), BYTES)
    assert found.verdict == "changed_text"
    assert found.place.role == "system"


def test_messages_that_are_gone_from_the_middle_are_not_cut_by_ollama() -> None:
    turns = [one for n in range(8) for one in (("user", f"Question {n}?"), ("assistant", ANSWER))]
    found = judged(chatml(*turns), chatml(*turns[:4], *turns[6:]))
    assert found.verdict == "rewritten_history"


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "words"])
def test_nothing_is_wrong_with_what_only_begins_alike(name: str, tokenizer: Tokenizer) -> None:
    stored, asked = SOUND[name]
    assert judged(stored, asked, tokenizer).verdict == "other_prompt"


def test_text_that_other_conversations_have_too_is_no_history_of_this_one() -> None:
    footer = "Answer in one sentence, and never tell a lie to anybody who asks you. "
    questions = [f"{'Why is it so? ' * 60}{footer}", f"{'How do birds fly? ' * 60}{footer}"]
    mine, other = (
        chatml(("system", RULES), ("user", one), ("assistant", "Hm."), ("user", "And?"))
        for one in questions
    )
    assert judged(mine, other).verdict == "other_prompt"


def test_the_number_of_a_turn_is_left_out_where_its_beginning_is_not_known() -> None:
    case = next(case for case in CASES if case.name == "a template that drops old reasoning")
    sides = replace(sides_of(case.stored, case.asked), whole=False)
    found = judge(VOCABULARY, sides)
    assert found.place.number == 0
    assert found.what.startswith("a turn of the assistant: ")


def test_no_tokens_are_no_fault_of_ours() -> None:
    for before, asked, stored in (([], [], []), ([-1, 1 << 30], [5], []), ([], [], [1] * 99)):
        sides = Sides(before, asked, stored, None, 0, len(before) + len(asked))
        assert judge(VOCABULARY, sides).verdict == "other_prompt"


def harmony(*turns: tuple[str, str]) -> str:
    return "".join(f"<|start|>{role}<|message|>{said}<|end|>" for role, said in turns)


def test_the_channels_of_gpt_oss_are_turns_with_reasoning() -> None:
    head = harmony(("system", RULES), ("user", "Why?"))
    stored = (
        f"{head}<|start|>assistant<|channel|>analysis<|message|>They ask why.<|end|>"
        f"<|start|>assistant<|channel|>final<|message|>{ANSWER}<|end|>"
    )
    asked = f"{head}<|start|>assistant<|channel|>final<|message|>{ANSWER}<|end|>" + harmony(
        ("user", "And then?")
    )
    found = judged(stored, asked)
    assert (found.verdict, found.place.role, found.place.number) == (
        *("rewritten_history", "assistant"),
        1,
    )
    assert "reasoning" in found.what


def test_an_answer_of_a_tool_that_changed_is_history_too() -> None:
    turns = [("user", "Look."), ("assistant", "Yes."), ("tool", f"1 file. {ANSWER}")]
    mine = chatml(("system", RULES), *turns)
    found = judged(mine, mine.replace("1 file", "2 of the files"))
    assert (found.verdict, found.place.role) == ("rewritten_history", "tool")
