"""A Chromium without a window, told what to do by its own protocol through a pipe: no driver, no
library of a browser's version, and no port.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_SECONDS = 30.0
_POLL_SECONDS = 0.02
_CRITICAL = ("error", "assert")


def found() -> str | None:
    """The program, if there is one on PATH."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserTab:
    """One tab. `problems`: what its console, its scripts and its network complained of; `urls`: all
    that it asked for.
    """

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context
        self.problems: list[str] = []
        self.urls: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.tell(f"{domain}.enable")

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.tell(method, self._session, **params)

    def open(self, url: str) -> None:
        """Returns when the page and what it names are loaded; its scripts may still ask."""
        self.tell(
            "Page.navigate", url="about:blank"
        )  # or a part of the page behind # is no new one
        assert "errorText" not in self.tell("Page.navigate", url=url)
        self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    def look_like(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.tell("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """Of a piece of JavaScript; a promise is awaited."""
        said = self.tell(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def wait(self, condition: str, seconds: float = ANSWER_SECONDS) -> None:
        """Until the piece of JavaScript is true; what it throws while a page is new is false."""
        tried = f"(() => {{ try {{ return !!({condition}) }} catch {{ return false }} }})()"
        end = time.monotonic() + seconds
        while not self.value(tried):
            assert time.monotonic() < end, (condition, self.text(), self.problems)
            time.sleep(_POLL_SECONDS)

    def click(self, selector: str) -> None:
        self.wait(f"document.querySelector({json.dumps(selector)}) !== null")
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self) -> str:
        return str(self.value("document.body.innerText"))

    def picture(self, path: Path, *, whole: bool = False) -> None:
        shot = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._browser.tell("Target.disposeBrowserContext", browserContextId=self._context)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in _CRITICAL:
            self.problems.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(params["entry"]))


class Browser:
    """`open_browser` starts one."""

    def __init__(self, process: subprocess.Popen[bytes], out: int, into: int) -> None:
        self._process, self._out, self._into = process, out, into
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._tabs: dict[str, BrowserTab] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tab(self) -> BrowserTab:
        """A new one, with cookies of its own."""
        context = self.tell("Target.createBrowserContext")["browserContextId"]
        target = self.tell("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.tell("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        session = attached["sessionId"]
        tab = self._tabs[session] = BrowserTab(self, session, context)
        return tab

    def tell(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers[number] = answer
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        said = answer.get(timeout=ANSWER_SECONDS)
        assert "error" not in said, (method, said)
        result: dict[str, Any] = said["result"]
        return result

    def _read(self) -> None:
        with os.fdopen(self._out, "rb") as pipe:
            rest = b""
            while part := pipe.read1():
                *messages, rest = (rest + part).split(b"\0")
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers.pop(message["id"]).put(message)
                    elif tab := self._tabs.get(message.get("sessionId", "")):
                        tab.heard(message["method"], message["params"])

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.tell("Browser.close")
        try:
            self._process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._into)
        self._reader.join(5)


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Its profile lies in `folder`. It reads commands from descriptor 3 and answers on 4."""
    program = found()
    assert program is not None
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    options = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"]
    options += ["--disable-background-networking", f"--user-data-dir={folder}", "about:blank"]
    if os.geteuid() == 0:
        options.insert(0, "--no-sandbox")
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "-", program, *options],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(theirs_in)
    os.close(theirs_out)
    browser = Browser(process, ours_out, ours_in)
    try:
        yield browser
    finally:
        browser.close()
