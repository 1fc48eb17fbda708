"""Alive and ready are answers that can be no, with the reason."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.sidecar import standing
from ollama_tiering.sidecar.endpoint import HttpRequest
from ollama_tiering.sidecar.standing import Standing, standing_pages
from tests.unit.sidecar.scrape import MeteredSidecar
from tests.unit.store.support import Bench


def asked(coroutine: Coroutine[Any, Any, str]) -> str:
    """As the endpoint does: on a loop of its own, in another thread."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(asyncio.run(coroutine)))
    thread.start()
    thread.join()
    return answers[0]


def test_ready_only_while_it_serves_and_all_tiers_are_scanned() -> None:
    async def go() -> None:
        bench = Bench(ram=2, local=2)
        made = Standing(bench.store)
        assert await made.against_ready() == "starting"
        made.phase = "serving"
        bench.state.levels[1].surveyed = False
        assert await made.against_ready() == "not scanned yet: local"
        bench.state.levels[0].surveyed = False
        assert await made.against_ready() == "not scanned yet: ram, local"
        for level in bench.state.levels:
            level.surveyed = True
        assert await made.against_ready() == ""
        made.phase = "stopping"
        assert await made.against_ready() == "stopping"

    asyncio.run(go())


def test_a_reason_is_503_and_none_is_200() -> None:
    async def go() -> None:
        made = Standing(Bench().store)
        ready = standing_pages(made)["/readyz"]
        request = HttpRequest("/readyz", "", {})
        answer = await ready(request)
        assert (answer.status, answer.body) == (503, b"starting\n")
        made.phase = "serving"
        answer = await ready(request)
        assert (answer.status, answer.body) == (200, b"ready\n")

    asyncio.run(go())


def test_alive_while_the_loop_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "_LOOP_SECONDS", 0.2)

    async def go() -> None:
        made = Standing(Bench().store)
        assert await asyncio.to_thread(asked, made.against_alive()) == ""
        # joined on the loop itself: it is held up meanwhile
        assert "held up" in asked(made.against_alive())

    asyncio.run(go())


def test_not_alive_when_the_mover_is_silent_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        bench = Bench()
        made = Standing(bench.store)
        monkeypatch.setattr(bench.store, "mover_silent_seconds", lambda: 299.0)
        assert await asyncio.to_thread(asked, made.against_alive()) == ""
        monkeypatch.setattr(bench.store, "mover_silent_seconds", lambda: 301.0)
        reason = await asyncio.to_thread(asked, made.against_alive())
        assert reason == "the thread that moves blocks has been silent for 301 s"

    asyncio.run(go())


def test_a_running_sidecar_answers_each_path(tmp_path: Path) -> None:
    with MeteredSidecar(tmp_path) as daemon:
        found = {}
        for path in ("metrics", "healthz", "readyz", "", "metricsx", "metrics/x"):
            try:
                url = f"http://127.0.0.1:{daemon.port}/{path}"
                with urllib.request.urlopen(url, timeout=20) as answer:
                    found[path] = answer.status
            except urllib.error.HTTPError as error:
                found[path] = error.code
                error.close()
    assert found == {
        "metrics": 200,
        "healthz": 200,
        "readyz": 200,
        "": 404,
        "metricsx": 404,
        "metrics/x": 404,
    }
