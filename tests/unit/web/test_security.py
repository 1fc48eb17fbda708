"""Who may use the page: each rule alone keeps a request out, and none can be left away by asking
for something else.
"""

from __future__ import annotations

import os

import pytest
from starlette.routing import Route
from starlette.websockets import WebSocketDisconnect

from ollama_tiering.launch.address import Address
from ollama_tiering.web.security import HEADERS, Door
from tests.unit.web.made_up import ID, LOCAL, OWN, PORT, TOKEN, Visitor

STRANGER = os.geteuid() + 1


def every_path() -> list[str]:
    return [route.path for route in Visitor().app.routes if isinstance(route, Route)]


def test_there_are_paths_to_look_at() -> None:
    assert {"/", "/app.js", "/api/live", "/api/pin", "/api/remove"} <= set(every_path())


def test_this_user_needs_no_token_on_this_machine() -> None:
    visitor = Visitor()
    assert visitor.code("/") == 200
    assert visitor.code() == 200
    assert visitor.change() == 200


@pytest.mark.parametrize("uid", [STRANGER, None], ids=["another user", "nobody knows"])
@pytest.mark.parametrize("path", [*every_path(), "/no-such-path"])
def test_whoever_else_is_on_this_machine_gets_nothing(path: str, uid: int | None) -> None:
    visitor = Visitor(uid=uid)
    for answer in (visitor.client.get(path), visitor.client.post(path, json={"id": ID})):
        assert answer.status_code == 401
        assert "secret" not in answer.text
    assert visitor.data.changes == []


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "fd00::1", "box.lan"])
def test_where_other_machines_can_ask_everybody_needs_the_token(host: str) -> None:
    visitor = Visitor(host)
    assert not visitor.door.is_local
    assert visitor.code() == 401
    assert visitor.code("/app.js") == 401
    assert visitor.change() == 401


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_is_this_machine(host: str) -> None:
    assert Door(Address(host, PORT), TOKEN).is_local


def test_the_token_becomes_a_cookie_and_leaves_the_address() -> None:
    visitor = Visitor("0.0.0.0")
    answer = visitor.client.get(f"/?token={TOKEN}")
    assert answer.status_code == 200
    assert TOKEN not in answer.text
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"tiering-{PORT}={TOKEN};")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert 'content="0; url=/"' in answer.text
    assert visitor.code() == 200  # the client keeps it
    assert visitor.change() == 200


@pytest.mark.parametrize("token", ["", "x", TOKEN[:-1], TOKEN + "t", "ä" * 43, "%ff"])
def test_another_token_is_none(token: str) -> None:
    visitor = Visitor("0.0.0.0")
    answer = visitor.client.get("/", params={"token": token})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    quoted = token.encode("ascii", "xmlcharrefreplace").decode()
    assert visitor.code("/api/live", Cookie=f"tiering-{PORT}={quoted}") == 401


def test_a_token_elsewhere_than_in_the_cookie_opens_nothing_but_the_page() -> None:
    visitor = Visitor("0.0.0.0")
    assert visitor.code(f"/api/live?token={TOKEN}") == 401
    assert visitor.client.post(f"/?token={TOKEN}").status_code == 401
    assert visitor.code("/api/live", Authorization=f"Bearer {TOKEN}") == 401
    assert visitor.code("/api/live", Cookie=f"tiering-{PORT + 1}={TOKEN}") == 401


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        f"evil.example:{PORT}",
        "127.0.0.1",
        "localhost",
        f"127.0.0.1:{PORT + 1}",
        f"127.0.0.1.evil.example:{PORT}",
        f"10.0.0.1:{PORT}",
        f"localhost:{PORT}@evil.example",
        "",
    ],
)
def test_a_name_that_was_bound_to_loopback_leads_nowhere(host: str) -> None:
    visitor = Visitor()
    for path in ("/", "/api/live", f"/?token={TOKEN}"):
        assert visitor.code(path, Host=host) == 421
    headers = {**OWN, "Host": host, "Origin": f"http://{host}"}
    assert visitor.client.post("/api/pin", json={"id": ID}, headers=headers).status_code == 421
    assert visitor.data.changes == []


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]"])
def test_its_own_names_are_known(name: str) -> None:
    assert Visitor().code(Host=f"{name}:{PORT}") == 200
    assert Visitor("127.0.0.2").door.knows_host(f"127.0.0.2:{PORT}")


@pytest.mark.parametrize("path", ["/api/pin", "/api/remove"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": ""},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": f"http://127.0.0.1:{PORT + 1}"},
        {"Origin": f"http://localhost:{PORT}"},  # another origin than the Host's
        {"Origin": f"http://{LOCAL}.evil.example"},
        {"X_Tiering_Change": ""},
    ],
    ids=str,
)
def test_another_page_changes_nothing(path: str, headers: dict[str, str]) -> None:
    visitor = Visitor()
    assert visitor.change(path, **headers) == 403
    assert visitor.data.changes == []


def test_nothing_is_changed_by_a_get() -> None:
    visitor = Visitor()
    for path in ("/api/pin", "/api/remove"):
        assert visitor.code(f"{path}?id={ID}", **{"X-Tiering-Change": "1"}) == 405
    assert visitor.data.changes == []


@pytest.mark.parametrize("path", [*every_path(), "/no-such-path", f"/?token={TOKEN}", "/?token=x"])
def test_every_answer_tells_the_browser_what_to_refuse(path: str) -> None:
    for visitor in (Visitor(), Visitor(uid=STRANGER), Visitor("0.0.0.0")):
        answer = visitor.client.get(path)
        for name, value in HEADERS.items():
            assert answer.headers.get_list(name) == [value]
    answer = Visitor().client.get("/", headers={"Host": "evil.example"})
    assert answer.headers["cache-control"] == "no-store"


def test_only_files_of_the_page_are_loaded_and_no_script_in_it() -> None:
    policy = dict(part.split(" ", 1) for part in HEADERS["Content-Security-Policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    for what in ("script-src", "style-src", "img-src", "connect-src"):
        assert policy.pop(what) == "'self'"
    assert set(policy.values()) == {"'none'"}
    assert "access-control-allow-origin" not in Visitor().client.get("/api/live").headers


def test_a_web_socket_is_not_served() -> None:
    client = Visitor().client
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/api/live"):
        pass
