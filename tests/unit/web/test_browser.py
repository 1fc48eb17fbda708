"""The page in a real browser: every page opens without a complaint, in both colours and on a phone;
what changes is seen; text stays text; nothing is loaded from elsewhere.

TIERING_WEB_PICTURES=FOLDER  also writes a picture of each page there
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from ollama_tiering.cli.store_options import age
from ollama_tiering.config import format_size
from ollama_tiering.launch.address import free_address
from ollama_tiering.protocol.seconds_saved import duration
from ollama_tiering.web.security import Door
from ollama_tiering.web.server import application
from tests import browser
from tests.browser import BrowserTab
from tests.places import short_directory
from tests.unit.web.axe import axe_script
from tests.unit.web.made_up import TOKEN, MadeUpData
from tests.unit.web.stage import DANGEROUS, Stage, page

CONVERSATIONS = 1000
PAGES = ("now", "conversations", "why", "report", "doctor", "config")
LOOKS = {"light": (1200, False), "dark": (1200, True), "phone": (360, False)}
FIRST_SECONDS = 1.0
TRIES = 10
_SERIOUS = ("serious", "critical")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not browser.found(), reason="there is no Chromium on PATH"),
]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with short_directory() as root, Stage(root, days=30) as made:
        made.converse(CONVERSATIONS, long=2)
        made.part()
        yield made


@pytest.fixture(scope="module")
def url(stage: Stage) -> Iterator[str]:
    with page(stage.environment()) as address:
        yield address


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def tab(chromium: browser.Browser) -> Iterator[BrowserTab]:
    """Whatever is done in it, nothing complains."""
    opened = chromium.tab()
    opened.look_like(1200)
    yield opened
    assert opened.problems == []
    opened.close()


def show(tab: BrowserTab, url: str, name: str) -> None:
    tab.open(f"{url}/#{name}")
    tab.wait(f"performance.getEntriesByName('shown {name}').length > 0")


def rows(tab: BrowserTab) -> int:
    return int(tab.value("document.querySelectorAll('#main tbody tr').length"))


def search(tab: BrowserTab, words: str) -> None:
    """In all of them, of which those that were used last are there first."""
    tab.wait("performance.getEntriesByName('all conversations').length > 0")
    tab.value(
        "(() => { const box = document.querySelector('input[type=search]');"
        f"box.value = {json.dumps(words)}; box.dispatchEvent(new Event('input')); }})()"
    )


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens(tab: BrowserTab, url: str, name: str, look: str) -> None:
    width, dark = LOOKS[look]
    tab.look_like(width, dark=dark)
    show(tab, url, name)
    assert tab.value("document.querySelector('nav [aria-current]').hash") == f"#{name}"
    assert len(tab.value("document.getElementById('main').innerText")) > 50
    wide = tab.value("document.documentElement.scrollWidth")
    assert wide <= width, f"{wide} pixels: it has to be pushed sideways"
    back = tab.value("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in back.strip("rgb()").split(","))
    assert (brightness < 3 * 128) == dark
    assert {one for one in tab.urls if not one.startswith((url, "about:"))} == set()
    if folder := os.environ.get("TIERING_WEB_PICTURES"):
        tab.picture(Path(folder, f"{name}-{look}.png"))


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("look", LOOKS)
def test_nobody_is_kept_out_by_their_eyes_or_hands(
    tab: BrowserTab, url: str, name: str, look: str
) -> None:
    script = axe_script()
    width, dark = LOOKS[look]
    tab.look_like(width, dark=dark)
    show(tab, url, name)
    tab.value(script)
    found: dict[str, Any] = tab.value("axe.run(document, {resultTypes: ['violations']})")
    assert found["passes"], "it looked at something"
    bad = [
        (one["id"], [node["html"][:120] for node in one["nodes"][:3]])
        for one in found["violations"]
        if one["impact"] in _SERIOUS
    ]
    assert bad == []


@pytest.mark.parametrize("name", ["now", "conversations", "report"])
def test_the_first_picture_comes_within_a_second(tab: BrowserTab, url: str, name: str) -> None:
    """With a thousand conversations and thirty days. The best of some: others use this machine."""
    seconds = [2 * FIRST_SECONDS]
    while min(seconds) >= FIRST_SECONDS and len(seconds) <= TRIES:
        show(tab, url, name)
        marks = f"performance.getEntriesByName('shown {name}')[0].startTime"
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        tab.wait(f"{paint} > 0")
        seconds.append(max(tab.value(marks), tab.value(paint)) / 1000)
    print(f"{name}: {min(seconds):.2f} s of {FIRST_SECONDS} s")
    assert min(seconds) < FIRST_SECONDS


def test_a_thousand_conversations_are_searched_sorted_and_shown(tab: BrowserTab, url: str) -> None:
    show(tab, url, "conversations")
    assert rows(tab) == 100
    tab.wait("performance.getEntriesByName('all conversations').length > 0")
    tab.value("[...document.querySelectorAll('#main button')].at(-1).click()")
    assert rows(tab) >= CONVERSATIONS
    search(tab, "part 777 qwen3")
    assert rows(tab) == 0  # odd numbers are of the other model
    assert "Nothing fits." in tab.text()
    search(tab, "PART 777")
    assert rows(tab) == 1
    assert "1 of " in tab.text()
    search(tab, "")
    tab.value(
        "(() => { const box = document.querySelector('select'); box.value = 'longest';"
        "box.dispatchEvent(new Event('change')); })()"
    )
    tokens = "[...document.querySelectorAll('td:nth-child(2)')].map((td) => td.textContent)"
    shown = [int(text.replace(",", "")) for text in tab.value(tokens)]
    assert shown == sorted(shown, reverse=True)


def test_words_of_a_prompt_are_words(tab: BrowserTab, url: str) -> None:
    show(tab, url, "conversations")
    search(tab, DANGEROUS)
    assert rows(tab) == 1
    assert tab.value("document.querySelector('.words').textContent").startswith(DANGEROUS)
    assert tab.value("document.images.length") == 0


def test_a_conversation_is_pinned_kept_and_removed(tab: BrowserTab, url: str) -> None:
    show(tab, url, "conversations")
    search(tab, "part 500")
    said = "document.getElementById('said').textContent"
    button = "td.buttons button:nth-child({})".format
    tab.click(button(1))
    tab.wait(f"{said}.includes(' pinned: ')")
    assert tab.value("document.querySelector('tbody .badge').textContent") == "pinned"
    assert tab.value(f"document.querySelector('{button(2)}').disabled")
    tab.click(button(1))
    tab.wait(f"{said}.includes(' unpinned: ')")
    question = "document.getElementById('question')"
    tab.click(button(2))
    tab.wait(f"{question}.open")
    assert "part 500" in tab.value(f"{question}.innerText")
    assert "would remove 1 conversation of qwen3:8b" in tab.value(f"{question}.innerText")
    tab.click("#question button[value=no]")
    tab.wait(f"!{question}.open")
    assert rows(tab) == 1
    tab.click(button(2))
    tab.wait(f"{question}.open")
    tab.click("#question button[value=yes]")
    tab.wait(f"{said}.startsWith('removed 1 conversation')")
    assert rows(tab) == 0


def test_a_request_that_ends_is_seen_without_a_hand(
    tab: BrowserTab, url: str, stage: Stage
) -> None:
    show(tab, url, "now")
    many = "document.querySelectorAll('#chart g').length"
    before = tab.value(many)
    stage.ask("<|im_start|>user\nlive?<|im_end|>\n" * 9)
    tab.wait(f"{many} === {before + 1}", seconds=10)
    assert "qwen3:8b" in tab.value("document.querySelector('#requests tbody').innerText")


def test_what_is_not_looked_at_asks_nothing(tab: BrowserTab, url: str) -> None:
    show(tab, url, "now")
    asked = [one for one in tab.urls if one.endswith("/api/live")]
    tab.wait(f"performance.now() > {tab.value('performance.now()') + 1500}")
    assert len([one for one in tab.urls if one.endswith("/api/live")]) > len(asked)
    show(tab, url, "config")
    tab.urls.clear()
    tab.wait(f"performance.now() > {tab.value('performance.now()') + 1500}")
    assert tab.urls == []
    show(tab, url, "now")
    tab.value(
        "Object.defineProperty(document, 'hidden', {get: () => true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    tab.urls.clear()
    tab.wait(f"performance.now() > {tab.value('performance.now()') + 1500}")
    assert len(tab.urls) <= 1  # one may have been on its way


def test_what_changed_is_marked_and_its_cure_is_there(tab: BrowserTab, url: str) -> None:
    show(tab, url, "why")
    assert tab.value("document.querySelectorAll('article').length") == 2
    assert "0:37:19" in tab.value("document.querySelector('dd.stored mark').textContent")
    assert tab.value("document.querySelectorAll('dd.cure').length") == 2
    assert "⟪" not in tab.text()


@pytest.mark.parametrize("days", [7, 30, 90])
def test_each_day_has_its_place(tab: BrowserTab, url: str, days: int) -> None:
    show(tab, url, "report")
    tab.value(
        f"(() => {{ const box = document.querySelector('select'); box.value = '{days}';"
        "box.dispatchEvent(new Event('change')); })()"
    )
    tab.wait(f"document.querySelector('figure svg').querySelectorAll('g').length === {days}")
    heights = "[...document.querySelectorAll('figure')].map((one) => one.querySelector('svg')"
    heights += ".getBoundingClientRect().height)"
    assert all(height > 100 for height in tab.value(heights))


def test_numbers_are_written_as_the_commands_write_them(tab: BrowserTab, url: str) -> None:
    show(tab, url, "now")
    sizes = [0, 1, 1023, 1024, 1536, 10**6, 50 * 10**9, 10**9 + 1, 1 << 30, 5 << 40, 123456789]
    seconds = [0, 0.004, 0.12, 0.999, 3.14, 9.94, 9.96, 59.4, 59.6, 61, 3599, 3600, 7505, -75, -0.5]
    now = tab.value("Date.now() / 1000")
    ago = [0, 59, 61, 3599, 3700, 86401, 8 * 86400, 55 * 86400, 57 * 86400]
    words = tab.value(
        "import('/dom.js').then(({size, duration, age}) => ["
        f"{json.dumps(sizes)}.map(size), {json.dumps(seconds)}.map(duration),"
        f"{json.dumps([now - one - 0.5 for one in ago])}.map(age)])"
    )
    assert words[:2] == [list(map(format_size, sizes)), list(map(duration, seconds))]
    assert words[2] == [age(now - one - 0.5) for one in ago]


def test_the_token_lets_in_once_and_for_all_and_no_script_sees_it(
    chromium: browser.Browser,
) -> None:
    """Served here, but as if by another user."""
    address = free_address()
    door = Door(address, TOKEN, user=os.geteuid() + 1)
    settings = uvicorn.Config(
        application(MadeUpData(), door),
        *(address.host, address.port),
        log_level="error",
        lifespan="off",
        ws="none",
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    status = "fetch('/api/config').then((answer) => answer.status)"
    try:
        stranger, guest = chromium.tab(), chromium.tab()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.02)
        stranger.open(f"{address.url}/")
        assert "this page needs its token" in stranger.text()
        assert stranger.value(status) == 401
        guest.open(f"{address.url}/?token={TOKEN}")
        guest.wait("document.querySelector('nav') !== null")
        assert guest.value("location.href") == f"{address.url}/"
        assert guest.value(status) == 200
        assert guest.value("document.cookie") == ""
        guest.open(f"{address.url}/")
        assert guest.value(status) == 200
    finally:
        server.should_exit = True
        thread.join(20)


def test_without_a_sidecar_the_page_says_so_and_comes_back(
    chromium: browser.Browser, tmp_path: Path
) -> None:
    with short_directory() as root, Stage(root) as made, page(made.environment()) as url:
        tab = chromium.tab()
        tab.look_like(1200)
        show(tab, url, "now")
        made.sidecar.kill()
        tab.wait("document.querySelector('[role=alert]') !== null")
        assert "tiering up" in tab.text()
        made.sidecar.start()
        tab.wait("document.querySelector('#tiers') !== null")
        tab.close()
    assert all("503" in problem for problem in tab.problems)  # and nothing else
