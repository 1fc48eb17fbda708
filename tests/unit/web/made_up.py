"""A page whose data are made up, and whoever asks for it."""

from __future__ import annotations

import os
from typing import Any

from starlette.testclient import TestClient

from ollama_tiering.launch.address import Address
from ollama_tiering.web.security import Door
from ollama_tiering.web.server import application

TOKEN = "t" * 43
PORT = 8434
ID = "ab" * 32
LOCAL = f"127.0.0.1:{PORT}"
OWN = {"Origin": f"http://{LOCAL}", "X-Tiering-Change": "1"}  # what the page's script sends


class MadeUpData:
    """Notes what it is asked to change."""

    def __init__(self) -> None:
        self.changes: list[Any] = []
        self.days: list[int] = []
        self.most: list[int | None] = []
        self.error: Exception | None = None
        self.value: dict[str, Any] = {"secret": "what a prompt says"}

    def _said(self) -> dict[str, Any]:
        if self.error:
            raise self.error
        return self.value

    def live(self) -> dict[str, Any]:
        return self._said()

    def conversations(self, most: int | None = None) -> dict[str, Any]:
        self.most.append(most)
        return self._said()

    def why(self) -> dict[str, Any]:
        return self._said()

    def report(self, days: int) -> dict[str, Any]:
        self.days.append(days)
        return self._said()

    def doctor(self) -> dict[str, Any]:
        return self._said()

    def config(self) -> dict[str, Any]:
        return self._said()

    def pin(self, chain_id: str, *, unpin: bool) -> dict[str, Any]:
        self.changes.append(("pin", chain_id, unpin))
        return {"sentence": "pinned"}

    def remove(self, chain_id: str, *, dry_run: bool) -> dict[str, Any]:
        self.changes.append(("remove", chain_id, dry_run))
        return {"sentence": "removed"}


class Visitor:
    """Asks a server on `host`, as a process of user `uid` of this machine, or from another one."""

    def __init__(self, host: str = "127.0.0.1", uid: int | None = os.geteuid()) -> None:
        self.data = MadeUpData()
        self.door = Door(Address(host, PORT), TOKEN, user_of=lambda *_: uid)
        self.app = application(self.data, self.door)
        self.client = TestClient(
            self.app, base_url=f"http://{LOCAL}", follow_redirects=False, client=("127.0.0.1", 5)
        )

    def code(self, path: str = "/api/live", **headers: str) -> int:
        return self.client.get(path, headers=headers).status_code

    def change(self, path: str = "/api/pin", **headers: str) -> int:
        """With the headers of the page's script, but for those that are given; empty: without."""
        sent = {**OWN, **{name.replace("_", "-"): value for name, value in headers.items()}}
        sent = {name: value for name, value in sent.items() if value}
        return self.client.post(path, json={"id": ID}, headers=sent).status_code
