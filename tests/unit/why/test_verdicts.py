"""What is said of two prompts that part, from their tokens alone."""

from __future__ import annotations

import pytest

from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.books.tree import common_rows
from ollama_tiering.store.tools.resync import resync
from ollama_tiering.why.recipes import all_recipes, fitting
from ollama_tiering.why.turns import text
from ollama_tiering.why.verdicts import Judgement, Sides, judge
from tests.unit.why.clients import CASES, VOCABULARY, Case, encode


def sides_of(stored: str, asked: str, **more: int) -> Sides:
    mine, other = encode(asked), encode(stored)
    at = common_rows(tokens_to_bytes(mine), tokens_to_bytes(other))
    same = resync(tokens_to_bytes(mine[at:]), tokens_to_bytes(other[at:]))
    return Sides(
        before=mine[:at],
        asked=mine[at:],
        stored=other[at:],
        skipped=(same.skipped_asked, same.skipped_stored) if same else None,
        lost_tokens=same.same_tokens if same else 0,
        prompt_tokens=len(mine),
        **more,
    )


def judged(stored: str, asked: str, **more: int) -> Judgement:
    return judge(VOCABULARY, sides_of(stored, asked, **more))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_known_client_is_told_what_it_does(case: Case) -> None:
    found = judged(case.stored, case.asked)
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
