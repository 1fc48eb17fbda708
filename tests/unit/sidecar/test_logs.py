"""Log lines as a program reads them: one object each, the arguments as fields."""

from __future__ import annotations

import io
import json
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ollama_tiering.sidecar import logs

SOURCES = Path(logs.__file__).parents[1]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger(logs.ROOT)
    kept = (root.handlers[:], root.level, own.level)
    yield
    root.handlers[:], root.level = kept[0], kept[1]
    own.setLevel(kept[2])


def written(log_format: str, message: str, *args: Any, level: int = logging.WARNING) -> str:
    stream = io.StringIO()
    logs.configure(log_format, "info", stream)
    logging.getLogger("ollama_tiering.store.books.state").log(level, message, *args)
    return stream.getvalue()


def test_json_has_one_object_a_line_with_every_field() -> None:
    text = written(
        "json",
        "tier failed: tier=%s op=%s error=%s rest_seconds=%g",
        "local",
        "copy",
        OSError(5, "Input/output error"),
        2.5,
    )
    assert text.endswith("\n")
    assert text.count("\n") == 1
    line = json.loads(text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "warning",
        "logger": "ollama_tiering.store.books.state",
        "message": "tier failed: tier=local op=copy error=[Errno 5] Input/output error "
        "rest_seconds=2.5",
        "tier": "local",
        "op": "copy",
        "error": "[Errno 5] Input/output error",
        "rest_seconds": 2.5,
    }


def test_a_value_with_spaces_quotes_and_line_breaks_stays_one_value_and_one_line() -> None:
    path = Path('/a b/"c"\n= d=1')
    text = written("json", "unfinished write removed: path=%s", path)
    assert text.count("\n") == 1
    line = json.loads(text)
    assert line["path"] == str(path)
    assert "d" not in line


def test_conversions_without_a_name_are_no_fields_and_shift_nothing() -> None:
    line = json.loads(written("json", "%d %% of %s done: blocks=%d size=%.1f", 50, "it", 7, 1.25))
    assert line["message"] == "50 % of it done: blocks=7 size=1.2"
    assert (line["blocks"], line["size"]) == (7, 1.25)
    assert set(line) == {"time", "level", "logger", "message", "blocks", "size"}


def test_a_field_never_replaces_what_every_line_has() -> None:
    line = json.loads(written("json", "x: level=%s time=%s", "remote", 3))
    assert (line["level"], line["field_level"], line["field_time"]) == ("warning", "remote", 3)


def test_a_traceback_is_a_field() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", stream)
    try:
        raise ZeroDivisionError("oops")
    except ZeroDivisionError:
        logging.getLogger("ollama_tiering.x").exception("mover failed")
    line = json.loads(stream.getvalue())
    assert line["message"] == "mover failed"
    assert "ZeroDivisionError: oops" in line["exception"]


def test_text_stays_a_line_of_text() -> None:
    text = written("text", "dead socket removed: path=%s", "/run/s")
    logger = r"ollama_tiering\.store\.books\.state"
    pattern = rf"\S+ \S+ WARNING {logger} dead socket removed: path=/run/s\n"
    assert re.fullmatch(pattern, text)


def test_the_level_is_ours_only_and_may_change() -> None:
    stream = io.StringIO()
    logs.configure("text", "error", stream)
    logging.getLogger("ollama_tiering.a").warning("too quiet")
    logs.set_level("debug")
    logging.getLogger("ollama_tiering.a").debug("now heard")
    logging.getLogger("grpc").info("never heard")
    assert "now heard" in stream.getvalue()
    assert "too quiet" not in stream.getvalue()
    assert "never heard" not in stream.getvalue()


def test_no_message_of_ours_names_a_field_that_every_line_has() -> None:
    calls = re.compile(r"log\.\w+\(\s*((?:f?\"[^\"]*\"\s*)+)")
    found = [
        match[1] for path in SOURCES.rglob("*.py") for match in calls.finditer(path.read_text())
    ]
    assert len(found) > 20
    taken = re.compile(r"\b(time|level|logger|message|exception)=%")
    assert [text for text in found if taken.search(text)] == []


VALUES = st.one_of(
    st.text(), st.integers(), st.floats(), st.binary().map(repr), st.none(), st.booleans()
)


@given(values=st.lists(VALUES, min_size=1, max_size=5))
def test_whatever_the_values_a_line_is_one_object(values: list[Any]) -> None:
    message = "happened: " + " ".join(f"f{index}=%s" for index in range(len(values)))
    record = logging.LogRecord("x", 20, "p", 1, message, tuple(values), None)
    text = logs.JsonLines().format(record)
    assert text.splitlines() == [text]
    line = json.loads(text)
    for index, value in enumerate(values):
        same = line[f"f{index}"]
        plain = isinstance(value, str | int | bool) or (
            isinstance(value, float) and math.isfinite(value)
        )
        assert same == (value if plain else str(value))
