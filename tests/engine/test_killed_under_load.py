"""Runners and the sidecar are killed while four slots of two models compute, store and restore.

With exact attention every text has one answer (test_one_answer.py), so whatever is answered before,
between and after the kills must be the cold answer of a server without tiering, bit for bit. With
the llama.cpp engine it is the same but for the noise of test_storm.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.harness import Result, Server, Sidecar, in_memory, result_of, text
from tests.engine.test_storm import NOISE, OTHERS, disagreement

# One cache, and two of which one drops rows.
EXACT = (("g5", "sliding"), {"OLLAMA_CPU_ATTENTION": "exact"}, 0.0)
# The other engine, and two caches that keep all.
NOISY = (OTHERS, {"OLLAMA_FLASH_ATTENTION": "0"}, NOISE[0])
CONTEXT, ANSWER = 1280, 8
CONVERSATIONS, TURNS, CLIENTS, SLOTS = 6, 4, 6, 4
KILLS = 4  # of runners, and of sidecars, at least
LONGEST_SECONDS = 120.0  # of all conversations, if nothing has been restored by then
PAUSE_SECONDS = (0.3, 0.9)  # between two kills
# With one model in memory stock may forget that a request waits for its unload: a request for the
# model in memory that comes meanwhile gives it its time to live back (v0.16.3, server/sched.go,
# `useLoadedRunner`), and the other waits that long, five minutes if nothing is said. With two, a
# time to live that ends while a runner that was killed is replaced may leave a request without one.
KEEP_ALIVE = {1: "1s", 2: "30m"}  # by the number of models in memory
ANSWERED_SECONDS = 60.0  # within which a request is answered although runners are killed
# A runner that is killed before it listens is waited for until the client of its request goes
# away, and all other requests wait, too (v0.16.3, llm/server.go, `waitUntilRunnerLaunched`).
LEFT_AFTER_SECONDS = 20.0
ITS_RUNNER_IS_GONE = "llama runner process no longer running"


class Killer:
    """Kills a runner or the sidecar, by turns and at random moments; the sidecar is started again
    after a while, as systemd would.
    """

    def __init__(self, server: Server, sidecar: Sidecar, seed: int) -> None:
        self.server, self.sidecar = server, sidecar
        self.rng = random.Random(seed)
        self.runners = self.sidecars = 0
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._kill)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failed:
            raise self._failed[0]

    def _kill(self) -> None:
        try:
            while not self._stop.wait(self.rng.uniform(*PAUSE_SECONDS)):
                if self.rng.random() < 0.5:
                    self._kill_runner()
                else:
                    self.sidecar.kill()
                    self._stop.wait(self.rng.uniform(0, 0.5))
                    self.sidecar.start()
                    self.sidecars += 1
        except BaseException as error:  # a thread's own end is silent
            self._failed.append(error)

    def _kill_runner(self) -> None:
        if found := sorted(self.server.runners()):
            with contextlib.suppress(ProcessLookupError):  # unloaded meanwhile
                os.kill(self.rng.choice(found), signal.SIGKILL)
                self.runners += 1


def ask(server: Server, body: dict[str, Any]) -> Result:
    """Asks again while the runner that had the request was killed."""
    deadline = time.monotonic() + ANSWERED_SECONDS
    while True:
        try:
            response = server.http.post(
                server.url + "/api/generate", json=body, timeout=LEFT_AFTER_SECONDS
            )
        except httpx.ReadTimeout:
            assert ITS_RUNNER_IS_GONE in server.log_text()
            assert time.monotonic() < deadline
            continue
        if response.status_code == 200 and response.json().get("done"):
            return result_of(response.json(), -1, 0)
        assert time.monotonic() < deadline, f"{response.status_code} {response.text}"
        time.sleep(0.05)


def hang_up(server: Server, body: dict[str, Any], seconds: float) -> None:
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.Client(timeout=seconds, trust_env=False) as leaving,
    ):
        leaving.post(server.url + "/api/generate", json=body)


def converse(
    server: Server, model: str, number: int, keep_alive: str
) -> Iterator[tuple[str, Result]]:
    """TURNS turns without a pause; now and then a client that goes away."""
    rng = random.Random(number)
    prompt = text(300, ("killed", model)) + text(
        100 + 60 * (number % CONVERSATIONS), ("killed", model, number)
    )
    for turn in range(TURNS):
        body = server.body(model, prompt, predict=ANSWER, num_ctx=CONTEXT, keep_alive=keep_alive)
        if rng.random() < 0.3:
            hang_up(server, body, rng.choice([0.02, 0.1]))
        answer = ask(server, body)
        yield prompt, answer
        prompt += answer.text + text(20, ("killed", model, number, turn))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("pair", "env", "noise", "loaded"),
    [
        pytest.param(*EXACT, 1, id="exact, swapping"),
        pytest.param(*EXACT, 2, id="exact, both loaded", marks=pytest.mark.slow),
        pytest.param(*NOISY, 1, id="llama.cpp, swapping", marks=pytest.mark.slow),
        pytest.param(*NOISY, 2, id="llama.cpp, both loaded", marks=pytest.mark.slow),
    ],
)
def test_whatever_is_killed_answers_are_the_cold_ones(
    binary: Path,
    models: Path,
    tmp_path: Path,
    sidecar: Sidecar,
    pair: tuple[str, str],
    env: dict[str, str],
    noise: float,
    loaded: int,
) -> None:
    parallel = env | {"OLLAMA_NUM_PARALLEL": SLOTS, "OLLAMA_MAX_LOADED_MODELS": loaded}
    given: list[tuple[str, str, Result]] = []
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket, env=parallel) as server:
        ends = time.monotonic() + LONGEST_SECONDS

        def talk(number: int) -> None:
            model = pair[number % len(pair)]
            while True:
                for prompt, answer in converse(server, model, number, KEEP_ALIVE[loaded]):
                    given.append((model, prompt, answer))
                if time.monotonic() > ends:
                    return
                if min(killer.runners, killer.sidecars) >= KILLS and server.restores():
                    return
                number += CONVERSATIONS

        with Killer(server, sidecar, seed=loaded) as killer, ThreadPoolExecutor(CLIENTS) as pool:
            for _ in pool.map(talk, range(CONVERSATIONS)):
                pass
        restores = len(server.restores())
        log = server.log_text()
    for words in ("kv tiering failed", "left a gap", "panic"):
        assert words not in log
    print(f"{killer.runners} runners, {killer.sidecars} sidecars killed, {restores} restores")
    assert restores > 0
    assert min(killer.runners, killer.sidecars) > 0
    assert len(given) >= CONVERSATIONS * TURNS
    wrong = []
    with Server(binary, tmp_path / "reference", models, env=env) as reference:
        for model, prompt, answer in given:
            expected = in_memory(reference, model, prompt, 0, predict=ANSWER, num_ctx=CONTEXT)
            if found := disagreement(answer, expected, ANSWER, noise):
                wrong.append(f"{model}, {len(prompt)}: {found}")
    assert wrong == []
