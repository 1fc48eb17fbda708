"""Prompts that are kept for the server's start: private, replaced whole, and no harm if damaged."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ollama_tiering.errors import ConfigError, TieringError, UsageError
from ollama_tiering.warm import at_start
from ollama_tiering.warm.prompt import WarmPrompt, of_parts
from tests.unit.warm.conftest import FakeServer


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_what_is_kept_comes_back_and_nobody_else_may_read_it() -> None:
    first, second = of_parts("m", system="geheim ü"), of_parts("n", text="x")
    at_start.keep("home", second)
    at_start.keep("agent", first)
    at_start.keep("home", first)
    assert list(at_start.kept()) == [("agent", first), ("home", first)]
    file = at_start.directory() / "home.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert at_start.forget("home")
    assert not at_start.forget("home")
    assert at_start.names() == ["agent"]


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "x" * 65, "a b", "-f"])
def test_a_name_is_no_path(name: str) -> None:
    with pytest.raises(UsageError, match="no name"):
        at_start.keep(name, of_parts("m", text="x"))
    with pytest.raises(UsageError, match="no name"):
        at_start.forget(name)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": "m"}', "\xff"])
def test_a_damaged_file_is_said_and_the_others_are_computed(content: str) -> None:
    good = of_parts("m", text="x")
    at_start.keep("bad", good)
    at_start.keep("good", good)
    (at_start.directory() / "bad.json").write_text(content, encoding="latin-1")
    kept = dict(at_start.kept())
    assert isinstance(kept["bad"], TieringError)
    assert kept["good"] == good


def test_a_link_is_not_followed(home: Path) -> None:
    at_start.keep("good", of_parts("m", text="x"))
    (home / "elsewhere").write_text('{"model": "m", "prompt": "x"}')
    (at_start.directory() / "link.json").symlink_to(home / "elsewhere")
    assert isinstance(dict(at_start.kept())["link"], ConfigError)


def test_at_start_each_is_computed_and_what_goes_wrong_is_a_line(
    server: FakeServer, home: Path
) -> None:
    said: list[str] = []
    assert at_start.begin(server.address, home / "none", said.append, said.append) is None
    at_start.keep("one", of_parts("m", text="x"))
    at_start.keep("two", of_parts("m", text="y"))
    (at_start.directory() / "one.json").write_text("{")
    thread = at_start.begin(server.address, home / "none", said.append, said.append)
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()
    assert [text.partition(":")[0] for text in said] == [
        "the prompt one is not computed",
        "the prompt two is not computed",  # there is no sidecar here
    ]
    assert server.asked == [], "a prompt is computed that nobody stores"


def test_a_kept_prompt_is_the_same_request() -> None:
    prompt = of_parts("m", system="s", tools="[1]", options={"num_ctx": 3})
    at_start.keep("p", prompt)
    ((_, again),) = at_start.kept()
    assert isinstance(again, WarmPrompt)
    assert again.request == prompt.request
