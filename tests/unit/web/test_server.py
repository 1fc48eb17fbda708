"""What the server answers: the page's files, values as JSON, failures with their cure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ollama_tiering.errors import ConfigError, ServiceError, TieringError, UsageError
from tests.unit.web.made_up import ID, OWN, Visitor

STATIC = Path(__file__).parents[3] / "ollama_tiering/web/static"
_ELSE = "the command in a terminal says more"
VALUES = ("live", "conversations", "why", "report", "doctor", "config")


def test_every_file_is_served_with_its_type_and_nothing_else() -> None:
    client = Visitor().client
    files = sorted(path.name for path in STATIC.iterdir())
    assert {"app.js", "index.html", "style.css"} <= set(files)
    for name in files:
        answer = client.get("/" if name == "index.html" else f"/{name}")
        assert answer.content == (STATIC / name).read_bytes()
        assert Path(name).suffix[1:][:3] in answer.headers["content-type"].replace("javas", "js")
    for path in ("/index.html", "/../server.py", "/static", "/%2e%2e/server.py", "/docs"):
        assert client.get(path).status_code == 404


def test_no_file_names_another_place_or_turns_text_into_markup() -> None:
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//\w+\.\w|@import|url\(|innerHTML|outerHTML", text), (
            path.name
        )
        assert not re.search(r"insertAdjacent|document\.write|eval\(|\bstyle=", text), path.name
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="/app.js">']
    assert " on" not in "".join(re.findall(r"<[^>]*>", page))


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_json(name: str) -> None:
    assert Visitor().client.get(f"/api/{name}").json() == {"secret": "what a prompt says"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ServiceError("no sidecar", hint="tiering up"), 503),
        (TieringError("pinned", hint="tiering up"), 409),
        (ConfigError("bad", hint="tiering up"), 409),
        (UsageError("no such ID", hint="tiering up"), 400),
        (OSError(5, "Input/output error"), 500),
    ],
)
@pytest.mark.parametrize("name", VALUES)
def test_a_failure_has_its_cause_and_its_cure(name: str, error: Exception, code: int) -> None:
    visitor = Visitor()
    visitor.data.error = error
    answer = visitor.client.get(f"/api/{name}")
    assert answer.status_code == code
    assert str(error) in answer.json()["error"]
    assert answer.json()["hint"] == (_ELSE if code == 500 else "tiering up")
    assert answer.headers["cache-control"] == "no-store"


def test_bytes_that_are_no_text_are_answered() -> None:
    visitor = Visitor()
    visitor.data.value = {"directory": "/tmp/\udcff"}
    assert visitor.client.get("/api/live").json() == visitor.data.value


@pytest.mark.parametrize("days", ["1", "30", "400"])
def test_days_are_a_number(days: str) -> None:
    visitor = Visitor()
    assert visitor.code(f"/api/report?days={days}") == 200
    assert visitor.data.days == [int(days)]


@pytest.mark.parametrize("days", ["0", "401", "-1", "1e1", "x", "", "٣", "9" * 5000])
def test_what_is_no_number_of_days_is_refused(days: str) -> None:
    visitor = Visitor()
    assert visitor.code(f"/api/report?days={days}") == 400
    assert visitor.data.days == []


def test_a_first_look_is_at_some_conversations() -> None:
    visitor = Visitor()
    assert visitor.code("/api/conversations?most=100") == 200
    assert visitor.code("/api/conversations") == 200
    assert visitor.code("/api/conversations?most=all") == 400
    assert visitor.data.most == [100, None]


def test_changes_are_passed_on() -> None:
    visitor = Visitor()
    said = [("pin", {"unpin": True}), ("pin", {}), ("remove", {}), ("remove", {"dry_run": False})]
    for name, more in said:
        answer = visitor.client.post(f"/api/{name}", json={"id": ID, **more}, headers=OWN)
        assert "sentence" in answer.json()
    assert visitor.data.changes == [
        *(("pin", ID, True), ("pin", ID, False)),
        *(("remove", ID, True), ("remove", ID, False)),  # only what is said removes
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"{}",
        b'{"id": 3}',
        b'{"id": "ab"}',
        b'{"id": ""}',
        b'{"id": "%s", "dry_run": 0}' % ID.encode(),
        b'{"id": "%s"}' % (ID[:-1] + "G").encode(),
        b'{"id": "%s "}' % ID.encode(),
        b"[" * 3000,
        b"\xff",
    ],
)
def test_what_names_no_whole_id_changes_nothing(body: bytes) -> None:
    visitor = Visitor()
    answer = visitor.client.post("/api/remove", content=body, headers=OWN)
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert visitor.data.changes == []


def test_a_long_request_is_not_read_to_its_end() -> None:
    visitor = Visitor()
    answer = visitor.client.post("/api/remove", content=b" " * (1 << 20), headers=OWN)
    assert answer.status_code == 413
    assert visitor.data.changes == []


def test_the_picture_in_the_readme_is_small() -> None:
    picture = STATIC.parents[2] / "docs/web.png"
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) <= 150_000
    assert "](docs/web.png)" in (STATIC.parents[2] / "README.md").read_text(encoding="utf-8")
