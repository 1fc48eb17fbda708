"""Rules for models by name: what a file may say, and what several rules come to for one model."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ollama_tiering.config import ModelRule, load, ruling
from ollama_tiering.errors import ConfigError

GIB = 1 << 30


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path / "config.toml"


def test_rules_are_read_from_the_file(file: Path) -> None:
    file.write_text(
        '[models."private"]\nstore = false\n'
        '[models."qwen3:*"]\nttl_days = 0.5\nbudget = "4GiB"\n[models."*"]\nbudget = 8192\n'
        '[models."diary"]\ntext = false\n'
    )
    assert load(path=file).sidecar.model_rules == (
        ModelRule("private", store=False),
        ModelRule("qwen3:*", ttl_days=0.5, budget_bytes=4 * GIB),
        ModelRule("*", budget_bytes=8192),
        ModelRule("diary", text=False),
    )


def test_without_a_file_there_are_no_rules_and_a_month_is_the_limit(file: Path) -> None:
    file.write_text("")
    sidecar = load(path=file).sidecar
    assert sidecar.model_rules == ()
    assert sidecar.ttl_days == 30
    file.write_text("[sidecar]\nttl_days = 0\n")
    assert load(path=file).sidecar.ttl_days == 0


def test_the_models_directory_is_ollamas_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("")
    assert load(path=file).sidecar.models_dir is None
    monkeypatch.setenv("OLLAMA_MODELS", "/srv/models")
    assert load(path=file).sidecar.models_dir == Path("/srv/models")


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        (
            '\n[models."a"]\nstroe = false\n',
            ":3: no such key in [models.\"a\"]: stroe; did you mean 'store'?",
            "keys are",
        ),
        ('[models."a"]\nstore = 0\n', ":2: store: 0 is neither true nor false", "correct"),
        ('[models."a"]\nttl_days = -1\n', ":2: ttl_days: -1 is not between", "correct"),
        ('[models."a"]\nttl_days = true\n', ":2: ttl_days: True is not between", "correct"),
        ('[models."a"]\nttl_days = nan\n', ":2: ttl_days: nan is not between", "correct"),
        ('[models."a"]\nttl_days = []\n', ":2: ttl_days: ", "correct"),
        ('[models."a"]\n\nbudget = "lots"\n', ":3: budget: 'lots' is not a size", "correct"),
        ('[models."a"]\nbudget = 0\n', ":2: budget: 0 could mean all or nothing", "correct"),
        ("[models.llama3.2]\nstore = false\n", ": 2", '[models."llama3.2"]'),
        ('[sidecar]\n[models."a b"]\n', ":2: no model has a name like 'a b'", "ollama ls"),
        ('[models."\\u001b"]\n', ":1: no model has a name like", "ollama ls"),
        ('[models.""]\n', ":1: no model has a name like", "ollama ls"),
        ("[models]\nttl_days = 3\n", ":2: ttl_days in [models] is no rule", '[models."*"]'),
        ("models = 3\n", ":1: models is no table of rules", '[models."llama3.2"]'),
        (
            '[model."a"]\nstore = false\n',
            ":1: no such section: model; did you mean 'models'?",
            "sections are",
        ),
    ],
)
def test_a_wrong_rule_is_named_with_its_line(file: Path, text: str, said: str, hint: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path=file)
    assert str(file) in caught.value.message
    assert said in caught.value.message
    assert caught.value.message.isprintable()
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("qwen3", "qwen3:0.6b", True),
        ("qwen3", "qwen3-coder:30b", False),
        ("qwen3*", "qwen3-coder:30b", True),
        ("qwen3:0.6b", "qwen3:0.6b", True),
        ("qwen3:0.6b", "qwen3:8b", False),
        ("qwen3:*", "qwen3:8b", True),
        ("QWEN3:8B", "qwen3:8b", True),
        ("library/qwen3", "qwen3:8b", True),
        ("registry.ollama.ai/library/qwen3", "qwen3:8b", True),
        ("me/private", "me/private:latest", True),
        ("private", "me/private:latest", False),
        ("me/*", "me/private:latest", True),
        ("hf.co:443/me/private", "hf.co:443/me/private:q4", True),
        ("*", "anything/at/all:x", True),
        ("*", "model.gguf", True),
        ("model.gguf", "model.gguf", True),
        ("qwen?:[04].*", "qwen3:0.6b", True),
    ],
)
def test_a_pattern_fits_names_as_people_write_them(pattern: str, name: str, fits: bool) -> None:
    assert ModelRule(pattern).matches(name) is fits


RULES = (
    ModelRule("*", ttl_days=20, budget_bytes=9),
    ModelRule("qwen3", ttl_days=10),
    ModelRule("qwen3:8b", store=False),
    ModelRule("secret*", store=False, ttl_days=1),
    ModelRule("secretary", store=True),
)


def test_of_the_rules_that_set_a_value_the_most_specific_counts() -> None:
    assert ruling(["llama:1b"], RULES, 30) == ruling(["x:y"], RULES, 30)
    assert ruling(["llama:1b"], RULES, 30).ttl_days == 20
    small = ruling(["qwen3:1b"], RULES, 30)
    assert (small.store, small.ttl_days, small.budget_bytes) == (True, 10, 9)
    assert not ruling(["qwen3:8b"], RULES, 30).store
    assert ruling(["qwen3:8b"], RULES, 30).ttl_days == 10
    assert ruling(["secretary:latest"], RULES, 30).store
    assert ruling(["secretary:latest"], RULES, 30).ttl_days == 1


def test_without_a_word_the_settings_for_all_hold() -> None:
    assert ruling(["a:b"], (), 30).ttl_days == 30
    assert ruling(["a:b"], (ModelRule("c"),), 30).ttl_days == 30
    assert ruling(["a:b"], (ModelRule("a", ttl_days=0),), 30).ttl_days == 0


def test_of_several_names_the_strictest_counts() -> None:
    rules = (
        ModelRule("a", ttl_days=0, budget_bytes=5),
        ModelRule("b", ttl_days=7, budget_bytes=3),
        ModelRule("c", store=False),
        ModelRule("d", store=True, ttl_days=9),
    )
    found = ruling(["a:1", "b:1", "c:1", "d:1"], rules, 30)
    assert (found.store, found.ttl_days, found.budget_bytes) == (False, 7, 3)
    assert found.by == rules[2]
    assert ruling(["a:1", "d:1"], rules, 30).ttl_days == 9
    assert ruling(["a:1", "d:1"], rules, 30).store


def test_of_two_rules_as_specific_as_each_other_the_stricter_counts() -> None:
    rules = (ModelRule("ab*", store=True, ttl_days=9), ModelRule("*ab:*", store=False, ttl_days=0))
    both = ruling(["ab:"], (ModelRule("ab", store=True), ModelRule("ab:*", store=False)), 30)
    assert not both.store
    assert ruling(["abab:x"], rules, 30).store is False  # one more character: the colon


NAMES = st.lists(st.sampled_from(["a:1", "a:2", "b:1", "c:x"]), min_size=1, max_size=4)
ONE = st.builds(
    ModelRule,
    st.sampled_from(["*", "a", "a:1", "?:1", "b", "c:*"]),
    st.sampled_from([None, True, False]),
    st.sampled_from([None, 0.0, 1.0, 2.0]),
    st.sampled_from([None, 1, 2]),
)


@given(NAMES, st.lists(ONE, max_size=5))
def test_another_name_never_makes_it_less_strict(names: list[str], rules: list[ModelRule]) -> None:
    few, many = ruling(names[:1], rules, 3), ruling(names, rules, 3)
    assert few.store or not many.store
    assert 0 < many.ttl_days <= few.ttl_days or not few.ttl_days
    assert 0 < many.budget_bytes <= few.budget_bytes or not few.budget_bytes


def test_text_is_shown_unless_the_most_specific_rule_says_otherwise() -> None:
    rules = [
        ModelRule("*", text=False),
        ModelRule("qwen3", text=True),
        ModelRule("me/*", ttl_days=1),
    ]
    assert not ruling(["llama3.2:latest"], rules, 30).text
    assert ruling(["qwen3:8b"], rules, 30).text
    assert not ruling(["me/qwen:8b"], rules, 30).text
    assert not ruling(["qwen3:8b", "mine:latest"], rules, 30).text  # one of its names
    assert ruling(["llama3.2:latest"], rules[1:], 30).text
