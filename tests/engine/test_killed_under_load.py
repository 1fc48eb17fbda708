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
PAUSE_SECONDS = (0.3, 0.9)  # between two kills
ANSWERED_SECONDS = 60.0  # within which a request is answered although runners are killed


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


def ask(server: Server, model: str, prompt: str) -> Result:
    """Asks again while the runner that had the request was killed."""
    body = server.body(model, prompt, predict=ANSWER, num_ctx=CONTEXT)
    deadline = time.monotonic() + ANSWERED_SECONDS
    while True:
        response = server.http.post(server.url + "/api/generate", json=body)
        if response.status_code == 200 and response.json().get("done"):
            return result_of(response.json(), -1, 0)
        assert time.monotonic() < deadline, f"{response.status_code} {response.text}"
        time.sleep(0.05)


def hang_up(server: Server, model: str, prompt: str, seconds: float) -> None:
    body = server.body(model, prompt, predict=ANSWER, num_ctx=CONTEXT)
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.Client(timeout=seconds, trust_env=False) as leaving,
    ):
        leaving.post(server.url + "/api/generate", json=body)


def converse(server: Server, model: str, number: int) -> Iterator[tuple[str, Result]]:
    """TURNS turns without a pause; now and then a client that goes away."""
    rng = random.Random(number)
    prompt = text(300, ("killed", model)) + text(100 + 60 * number, ("killed", model, number))
    for turn in range(TURNS):
        if rng.random() < 0.3:
            hang_up(server, model, prompt, rng.choice([0.02, 0.1]))
        answer = ask(server, model, prompt)
        yield prompt, answer
        prompt += answer.text + text(20, ("killed", model, number, turn))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("pair", "env", "noise"), [EXACT, NOISY], ids=["exact", "llama.cpp"])
@pytest.mark.parametrize("loaded", [1, 2], ids=["swapping", "both loaded"])
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

        def talk(number: int) -> None:
            model = pair[number % len(pair)]
            for prompt, answer in converse(server, model, number):
                given.append((model, prompt, answer))

        with Killer(server, sidecar, seed=loaded) as killer, ThreadPoolExecutor(CLIENTS) as pool:
            for _ in pool.map(talk, range(CONVERSATIONS)):
                pass
        restores = len(server.restores())
        log = server.log_text()
    for words in ("kv tiering failed", "left a gap", "panic"):
        assert words not in log
    print(f"{killer.runners} runners, {killer.sidecars} sidecars killed, {restores} restores")
    assert min(killer.runners, killer.sidecars, restores) > 0
    assert len(given) == CONVERSATIONS * TURNS
    wrong = []
    with Server(binary, tmp_path / "reference", models, env=env) as reference:
        for model, prompt, answer in given:
            expected = in_memory(reference, model, prompt, 0, predict=ANSWER, num_ctx=CONTEXT)
            if found := disagreement(answer, expected, ANSWER, noise):
                wrong.append(f"{model}, {len(prompt)}: {found}")
    assert wrong == []
