"""patches/architectures.toml says something of everything once, and names tests that exist."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from scripts import models_page
from tests.unit.docs.pages import ROOT

FOUND = models_page.load()
IDS = [f"{one.engine}-{one.names[0]}" for one in FOUND]


def test_every_architecture_is_named_once_for_an_engine() -> None:
    named = Counter((one.engine, name) for one in FOUND for name in one.names)
    assert [who for who, times in named.items() if times > 1] == []
    assert {engine for engine, _ in named} == set(models_page.ENGINES)


@pytest.mark.parametrize("one", FOUND, ids=IDS)
def test_what_is_tiered_is_shown_and_what_is_not_has_a_reason(
    one: models_page.Architecture,
) -> None:
    assert one.tiered in models_page.TIERED
    assert one.why or one.tiered == "yes"
    shown = [claim for claim in (one.test, one.same_as) if claim]
    assert len(shown) == (0 if one.tiered == "no" else 1)


@pytest.mark.parametrize("one", [one for one in FOUND if one.test], ids=lambda one: one.names[0])
def test_the_test_that_shows_it_exists(one: models_page.Architecture) -> None:
    file, _, name = one.test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("one", [one for one in FOUND if one.same_as], ids=lambda o: o.names[0])
def test_what_it_is_treated_as_has_a_test_itself(one: models_page.Architecture) -> None:
    assert any(one.same_as in other.names and other.test for other in FOUND)


def test_a_word_that_is_not_known_is_an_error() -> None:
    with pytest.raises(ValueError, match="teird"):
        models_page.Architecture.of({"names": ["a"], "engine": "go", "teird": "yes"})
