"""What a device has yet to do of a batch that has returned is over before rows are restored.

A batch without outputs, as those of a long prompt but the last, returns when it is launched. The
batch after it may then be built, and where layers have sliding windows that frees cells which the
launched batch has yet to write. Another slot's rows that are restored into them at once would be
written over. The GPU is one that is not there (`tests/attention/fakegpu`), and late by seconds.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.attention.fake_gpu import devices
from tests.engine.harness import Result, Server, Sidecar, assert_same, text, wait_until
from tests.engine.test_restore import LookupTooSlow, until_heard

MODEL = "sliding"  # windows of 128; with two slots stock keeps 129 rows
OPTIONS: dict[str, Any] = {"num_ctx": 1024, "num_batch": 256}
# Several users: a request gets the slot that was used least recently, if no slot begins like it.
SLOTS = {"OLLAMA_FLASH_ATTENTION": "1", "OLLAMA_NUM_PARALLEL": "2", "OLLAMA_MULTIUSER_CACHE": "1"}
TRACE = {"OLLAMA_DEBUG": "2"}
LATE_US, SEEDS = 3_000_000, (1, 6, 10)  # whose first delay is a second or more

# The cells of the windows' cache, in the order in which stock gives them:
#   stored:    BEFORE has 0 to 20 (a batch was built ahead), TESTED 21 and more
#   beside it: the first batch of LONG 0 to 255, the second 0 to 126 and 256 to 384. When the third,
#              of 5 tokens, is built, it frees all of those but the last, and takes 0 to 4
BEFORE, TESTED, LONG = 20, 100, 2 * 256 + 5
LAST_OF_LONG = 2  # number of its last batch, from 0


def _launched(log: Path) -> int:
    """How many batches the device was given."""
    said = log.read_text(encoding="utf-8") if log.exists() else ""
    return len(re.findall(r"graph of \d+ nodes, [1-9]\d* of attention", said))


def _came_before_the_last_batch(server: Server) -> bool:
    """Whether the tested prompt was in its slot before the last batch of the long one began."""
    lines = server.lines()
    loaded = next(i for i, line in enumerate(lines) if f" prompt={TESTED} " in line)
    began = f'msg="computeBatch: signaling computeStartedCh" batchID={LAST_OF_LONG}'
    return loaded < next(i for i, line in enumerate(lines) if began in line)


def _beside_a_long_prompt(server: Server, log: Path, prompt: str, long: str) -> None:
    """Sends the prompt when the first of the long one's batches has been launched."""

    def ask(what: str) -> None:
        server.post("/api/generate", json=server.body(MODEL, what, predict=1, **OPTIONS))

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, long)
        wait_until("the first batch is launched", lambda: _launched(log) or asked.done(), 60)
        ask(prompt)
        asked.result()


def _hit(server: Server, prompt: str) -> Result:
    """The answer from the rows in memory. Another request frees the lowest cells before: wherever
    the rows lie, the prompt's last token, which is computed again, lies before them, and attention
    sums in the same order.
    """
    server.generate(MODEL, "d", predict=1, **OPTIONS)
    hit = server.generate(MODEL, prompt, predict=2, **OPTIONS)
    assert hit.resumed == TESTED - 1
    return hit


@pytest.mark.timeout(400)
def test_rows_come_back_after_what_is_in_flight_has_been_written(
    gpu_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    def stored(attempt: int, prompt: str) -> Result:
        folder, env = tmp_path / f"{attempt}-stored", SLOTS | devices(1024)
        with Server(gpu_binary, folder, models, socket=sidecar.socket, env=env) as server:
            server.generate(MODEL, "a" + text(BEFORE - 1, attempt), predict=1, **OPTIONS)
            server.generate(MODEL, prompt, predict=1, **OPTIONS)
            sidecar.settle(server, MODEL)
            return _hit(server, prompt)

    def raced(attempt: int, seed: int, prompt: str, hit: Result) -> bool:
        """False: the prompt came too late for what is tested here."""
        folder, log = tmp_path / f"{attempt}-{seed}", tmp_path / f"{attempt}-{seed}.log"
        env = SLOTS | TRACE | devices(1024, DELAY_US=LATE_US, SEED=seed, LOG=str(log))
        with Server(gpu_binary, folder, models, socket=sidecar.socket, env=env) as server:
            _beside_a_long_prompt(server, log, prompt, "c" + text(LONG - 1, (attempt, seed)))
            restored = [restore.tokens for restore in server.restores()]
            if not restored and server.pauses():
                raise LookupTooSlow
            if not restored or not _came_before_the_last_batch(server):
                return False
            assert restored == [TESTED - 1]
            assert_same(_hit(server, prompt), hit, seed)
        return True

    def check(attempt: int) -> None:
        prompt = "b" + text(TESTED - 1, attempt)
        hit = stored(attempt, prompt)
        assert any(raced(attempt, seed, prompt, hit) for seed in SEEDS), "it never came in time"

    until_heard(check)
