"""Layers that keep a state instead of rows: a conversation goes on after a restart of everything
exactly where stock would have gone on in memory, which is a checkpoint of the states, and nowhere
else.

Stock notes a checkpoint at the end of the first batch of a prompt, and then at the end of the first
batch that ends 1,664 tokens or more after the last one; it goes on behind the last one that lies
before what differs. `num_batch` is 512, and after the prompt each token is a batch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.store.block import blockfile
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import Segment
from tests.engine.harness import PREDICT, Result, Server, Sidecar, assert_same, text, wait_until
from tests.engine.test_damage import make_checksums_right, rewrite
from tests.engine.test_restore import LookupTooSlow, Rig, rigs, settings, until_heard
from tests.engine.test_windows import restart_everything

PAUSE_SECONDS = 0.1
MODELS = ("conv", "delta", "mamba")  # short convolutions, the gated delta rule, Mamba 2
CONTEXT = {"num_ctx": 8192}

# Tokens of the first prompt, and where the second turn goes on.
SHORT, TURNS = 12, {300: 300, 700: 512, 1700: 512, 2600: 2560, 5100: 4608}
LONGER = {1700: 1100}  # tokens that the second turn adds: it has a checkpoint of its own

# flash attention, slots (stock gives these models one), attention on the CPU, type of the cache
STOCK, OFF, EXACT = (1, 1, "stock", "f16"), (0, 1, "stock", "f16"), (1, 1, "exact", "f16")
QUANTISED = (1, 1, "stock", "q8_0")
OFTEN = [(STOCK, model) for model in MODELS]
OFTEN += [(QUANTISED, "delta"), (OFF, "conv"), (EXACT, "mamba")]
PRODUCT = [
    pytest.param(
        rig,
        model,
        id=f"fa{rig[0]}-{rig[2]}-{rig[3]}-{model}",
        marks=() if (rig, model) in OFTEN else pytest.mark.slow,
    )
    for rig in (STOCK, OFF, EXACT, QUANTISED)
    for model in MODELS
]
EACH = [pytest.param(STOCK, model, id=model) for model in MODELS]


@pytest.fixture(scope="module", autouse=True)
def since(need: Callable[[str], None]) -> None:
    """Ahead of the servers."""
    need(MODELS[0])


rig = rigs(settings)


def ask(server: Server, model: str, prompt: str, **options: Any) -> Result:
    """One request, and then a pause: when an answer ends, a batch with its last token is still to
    be computed, which changes the states. Who does not wait for it: test_recurrent_queue.py.
    """
    answer = server.generate(model, prompt, **CONTEXT, **options)
    time.sleep(PAUSE_SECONDS)
    return answer


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rig", "model"), PRODUCT, indirect=["rig"])
def test_a_conversation_goes_on_where_memory_would(rig: Rig, model: str) -> None:
    """The second turn and the fourth after a restart of everything, the third in memory."""
    left = list(TURNS)

    def converse(attempt: int) -> None:
        turns = {}
        for length in left:
            prompt = text(length, (model, length, attempt))
            prompts, answers = [prompt], [ask(rig.reference, model, prompt)]
            assert len(set(answers[0].tokens)) > PREDICT // 4, "one thing said over says little"
            for turn, more in enumerate((LONGER.get(length, 97), 60, 40)):
                prompt += answers[-1].text + text(more, (length, turn))
                prompts.append(prompt)
                answers.append(ask(rig.reference, model, prompt))
            assert answers[1].resumed == TURNS[length]  # stock's own hit
            assert answers[2].resumed == (2560 if length in LONGER else TURNS[length])
            assert_same(ask(rig.server, model, prompts[0]), answers[0], length)
            turns[length] = prompts, answers
        restart_everything(rig, model)
        for length, (prompts, answers) in turns.items():
            restore = rig.check((length, "second"), answers[1], model, prompts[1], **CONTEXT)
            assert restore.first == 0
            time.sleep(PAUSE_SECONDS)
            assert_same(ask(rig.server, model, prompts[2]), answers[2], (length, "third"))
        restart_everything(rig, model)
        for length, (prompts, answers) in turns.items():
            rig.check((length, "fourth"), answers[3], model, prompts[3], **CONTEXT)
            time.sleep(PAUSE_SECONDS)
            left.remove(length)

    until_heard(converse)


def test_checkpoints_follow_the_batches(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """With 128 tokens in a batch one lies exactly 1,664 after the first; another cut finds none."""
    prompt, cut = text(2000, "cut"), {"num_batch": 128}
    with Server(binary, tmp_path / "reference", models) as reference:
        more = prompt + ask(reference, "delta", prompt, **cut).text + text(50, "more")
        expected = ask(reference, "delta", more, **cut)
        assert expected.resumed == 1792
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        ask(server, "delta", prompt, **cut)
        sidecar.settle(server, "delta")
        server.unload("delta")
        assert ask(server, "delta", more, num_batch=256).resumed == 0
        server.unload("delta")
        assert_same(ask(server, "delta", more, **cut), expected)


CHANGES: dict[str, tuple[int, Callable[[str], str], int]] = {
    "the same again": (700, lambda p: p, 512),
    "the same, of one batch": (300, lambda p: p, 0),
    "after the last checkpoint": (1500, lambda p: p[:1000] + text(300, "else"), 512),
    "before the last checkpoint": (2700, lambda p: p[:2000] + text(300, "else"), 512),
    "before any": (700, lambda p: p[:400] + text(300, "else"), 0),
}


@pytest.mark.parametrize(("rig", "model"), EACH, indirect=["rig"])
def test_a_changed_prompt_goes_on_where_memory_would(rig: Rig, model: str) -> None:
    left = list(CHANGES)

    def change(attempt: int) -> None:
        probes = {}
        for name in left:
            length, changed, resumed = CHANGES[name]
            prompt = text(length, (model, name, attempt))
            for server in (rig.reference, rig.server):
                ask(server, model, prompt)
            probe = changed(prompt)
            probes[name] = probe, ask(rig.reference, model, probe)
            assert probes[name][1].resumed == resumed, name  # stock's own hit
        rig.sidecar.settle(rig.server, model)
        rig.server.unload(model)
        for name, (probe, expected) in probes.items():
            pauses = rig.server.pauses()
            answer = ask(rig.server, model, probe)
            if answer.resumed != expected.resumed and rig.server.pauses() > pauses:
                raise LookupTooSlow
            assert_same(answer, expected, name)
            left.remove(name)

    until_heard(change)


@pytest.mark.parametrize(("rig", "model"), EACH, indirect=["rig"])
def test_a_prompt_without_a_checkpoint_is_computed(rig: Rig, model: str) -> None:
    first = text(SHORT, (model, "short"))
    second = first + ask(rig.reference, model, first, predict=3).text + text(90, "short")
    expected = ask(rig.reference, model, second)
    assert expected.resumed == 0  # nor does stock go on
    ask(rig.server, model, first, predict=3)
    rig.sidecar.settle(rig.server, model)
    rig.server.unload(model)
    restores = len(rig.server.restores())
    assert_same(ask(rig.server, model, second), expected)
    assert len(rig.server.restores()) == restores
    assert why(rig.sidecar, rig.server, model)


def why(sidecar: Sidecar, server: Server, model: str) -> str:
    """The reason that `tiering status` has for the last request."""
    sidecar.settle(server, model)
    command = [sys.executable, "-m", "ollama_tiering", "status", "--json"]
    done = subprocess.run(
        [*command, "--socket", str(sidecar.socket)],
        env=sidecar.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    pid = server.runner_pid(model)
    (found,) = (runner for runner in json.loads(done.stdout)["runners"] if runner["pid"] == pid)
    said: str = found["last_request"]["why"]
    return said


# --- what is in the store -------------------------------------------------------------------------


def states(sidecar: Sidecar) -> list[Path]:
    """The block files with states: rows of K and V are f16 here."""
    return [file for file in sidecar.block_files() if _segments(file)[0].dtype == "f32"]


def _segments(file: Path) -> tuple[Segment, ...]:
    data = file.read_bytes()
    return blockfile.read_meta(blockfile.buffer_reader(data), len(data)).segments


def stored(server: Server, sidecar: Sidecar, model: str, seed: object, **options: Any) -> str:
    """The second turn of a conversation whose first is in every tier, and not in memory."""
    prompt = text(600, (model, seed))
    answer = ask(server, model, prompt, **options)
    sidecar.settle(server, model)
    server.unload(model)
    wait_until("RAM and disk hold the same", lambda: sidecar.stat().queued_demotions == 0)
    return prompt + answer.text + text(90, "more")


def flip(data: bytearray, at: int) -> None:
    data[at] ^= 0x80  # of the high byte of an f32: its sign


def flip_first(segments: tuple[Segment, ...], data: bytearray) -> None:
    flip(data, segments[0].file_offset + 3)


def flip_every(segments: tuple[Segment, ...], data: bytearray) -> None:
    """The sign of every number of every state."""
    for segment in segments:
        start = segment.file_offset
        for at in range(start + 3, start + segment.stored_bytes, 4):
            flip(data, at)


@pytest.mark.parametrize("model", MODELS)
def test_a_damaged_state_is_computed_and_a_wrong_one_would_show(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, model: str
) -> None:
    with (
        Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server,
        Server(binary, tmp_path / "reference", models) as reference,
    ):
        for what in ("damaged", "wrong"):
            others = set(states(sidecar))
            second = stored(server, sidecar, model, what)
            fresh = [file for file in states(sidecar) if file not in others]
            assert len(fresh) == 2, "one in RAM, one on disk"
            for file in fresh:
                segments = _segments(file)
                assert {one.encoding for one in segments} == {pb.ENCODING_RAW}
                if what == "damaged":
                    rewrite(file, lambda data, s=segments: flip_first(s, data))
                else:
                    rewrite(file, lambda data, s=segments: flip_every(s, data))
                    rewrite(file, make_checksums_right)
            answer = ask(server, model, second)
            said = why(sidecar, server, model)
            server.unload(model)
            if what == "damaged":
                assert answer.resumed == 0
                assert "damaged" in said
                expected = ask(reference, model, second)
                assert_same(answer, expected)
            else:
                ask(reference, model, second[:600])
                expected = ask(reference, model, second)
                assert answer.resumed == expected.resumed == 512
                assert answer.logprobs[0] != expected.logprobs[0]


@pytest.mark.parametrize("model", MODELS)
def test_a_state_that_is_gone_is_computed_and_the_reason_is_said(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, model: str
) -> None:
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        second = stored(server, sidecar, model, "gone")
        sidecar.stop()
        gone = states(sidecar)
        assert gone
        for file in gone:
            file.unlink()
        sidecar.start()
        answer = ask(server, model, second)
        said = why(sidecar, server, model)  # all is stored then
        server.unload(model)
        assert answer.resumed == 0
        assert "checkpoint" in said
        with Server(binary, tmp_path / "reference", models) as reference:
            assert_same(answer, ask(reference, model, second))
        # what was computed takes the place of what was gone
        third = second + answer.text + text(50, "third")
        assert ask(server, model, third).resumed == 512
