"""Rows of a device come back: a conversation goes on after an unload, a restart of everything and a
kill -9 exactly as in stock's memory. Tokens, logarithms, the five most likely tokens and the number
of tokens that were not computed are stock's, and all of the latter were restored.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.store.block.blockfile import buffer_reader, read_meta
from tests.engine.harness import BLOCK_TOKENS, Sidecar
from tests.engine.test_restore import LookupTooSlow, until_heard
from tests.engine_gpu.engines import CHARACTERS, End, Engine, Said, preloaded

Begin = Callable[..., Engine]

FIRST, MORE = 150, (30, 20, 10)  # tokens of the prompts, those of the answers beside them
GO, CPP = "Ollama", "llama-server"
ON = {"-fa": "on", "-np": "1"}
TWO = {"devices": 2}
Q8 = {"OLLAMA_KV_CACHE_TYPE": "q8_0"}
Q8_CPP = {"-ctk": "q8_0", "-ctv": "q8_0"}
OFF, OFF_CPP = {"OLLAMA_FLASH_ATTENTION": "0"}, {"-fa": "off"}  # V is stored transposed
SLOTS, SLOTS_CPP = {"OLLAMA_NUM_PARALLEL": "2"}, {"-np": "2", "--no-kv-unified": ""}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Go engine": (GO, "qwen3", {}),
    "Go engine, q8_0": (GO, "qwen3", Q8),
    "Go engine, some layers": (GO, "qwen3", {"num_gpu": 1}),
    "Go engine, two devices": (GO, "qwen3", TWO | {"OLLAMA_SCHED_SPREAD": "1"}),
    "Go engine, two slots": (GO, "qwen3", SLOTS),
    "Go engine, windows": (GO, "gemma3", {}),
    "Go engine, windows, some layers": (GO, "gemma3", {"num_gpu": 2}),
    "Go engine, V transposed": (GO, "qwen3", OFF),
    "Go engine, V transposed, some layers": (GO, "qwen3", OFF | {"num_gpu": 1}),
    "Go engine, V transposed, windows": (GO, "gemma3", OFF),
    "Go engine, K's rows longer than V's": (GO, "glm4moelite", {}),
    "Go engine, K's rows longer than V's, V transposed": (GO, "glm4moelite", OFF),
    "Go engine, V transposed, chunks": (GO, "llama4", OFF),
    "llama.cpp engine": (GO, "llama", {}),
    "llama.cpp engine, V transposed": (GO, "llama", OFF),
    "llama.cpp engine, V transposed, two slots": (GO, "llama", OFF | SLOTS),
    "llama.cpp engine, q8_0": (GO, "llama", Q8),
    "llama.cpp engine, some layers": (GO, "llama", {"num_gpu": 1}),
    "llama-server": (CPP, "llama", ON),
    "llama-server, flash attention if it can": (CPP, "llama", ON | {"-fa": "auto"}),
    "llama-server, V transposed": (CPP, "llama", ON | OFF_CPP),
    "llama-server, V transposed, some layers": (CPP, "llama", ON | OFF_CPP | {"-ngl": "2"}),
    "llama-server, V transposed, two slots": (CPP, "llama", ON | OFF_CPP | SLOTS_CPP),
    "llama-server, V transposed, windows": (CPP, "gemma3", ON | OFF_CPP),
    "llama-server, V transposed, states": (CPP, "lfm2", ON | OFF_CPP),
    "llama-server, q8_0": (CPP, "llama", ON | Q8_CPP),
    "llama-server, some layers": (CPP, "llama", ON | {"-ngl": "2"}),
    "llama-server, two devices": (CPP, "llama", ON | TWO | {"-ngl": "2"}),
    "llama-server, two slots": (CPP, "llama", ON | SLOTS_CPP),
    "llama-server, qwen3": (CPP, "qwen3", ON),
    "llama-server, windows": (CPP, "gemma3", ON),
    "llama-server, windows, q8_0": (CPP, "gemma3", ON | Q8_CPP),
    "llama-server, states": (CPP, "lfm2", ON),
    "llama-server, states, q8_0": (CPP, "lfm2", ON | Q8_CPP),
    "llama-server, states, some layers": (CPP, "lfm2", ON | {"-ngl": "3"}),
    "llama-server, nemotron-h": (CPP, "nemotron-h", ON),
}


def text(count: int, seed: object) -> str:
    return "".join(random.Random(repr(seed)).choices(CHARACTERS, k=count))


def restored_by(engine: Engine) -> int:
    """Rows, for its last answer."""
    rows = engine.restored()
    if not rows:
        print(engine.log()[-20_000:])
        if engine.late():
            raise LookupTooSlow
    return rows


def converse(engine: Engine, seed: object, ends: tuple[End, ...]) -> tuple[list[Said], list[int]]:
    """Four turns, and how many rows were restored for each; between them it ends, if so wanted."""
    prompt = text(FIRST, seed)
    said, restored = [engine.ask(prompt)], [0]
    for number, more in enumerate(MORE):
        if ends:
            engine.lose(ends[number])
        prompt += said[-1].text + text(more, (seed, number))
        said.append(engine.ask(prompt))
        restored.append(restored_by(engine) if ends else 0)
    return said, restored


OFTEN = (
    *("Go engine", "Go engine, windows", "llama.cpp engine, some layers"),
    *("llama-server", "llama-server, windows", "llama-server, states, some layers"),
    *("Go engine, V transposed", "llama.cpp engine, V transposed", "llama-server, V transposed"),
)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in OFTEN else pytest.mark.slow) for c in CASES]
)
def test_a_conversation_goes_on_after_each_end_as_in_stocks_memory(
    begin: Begin, sidecar: Sidecar, case: str
) -> None:
    kind, model, how = CASES[case]

    def check(attempt: int) -> None:
        seed = case, attempt
        resident = begin(kind, model, how)
        wanted, _ = converse(resident, seed, ())
        assert resident.on_device()
        resident.close()
        assert min(answer.resumed for answer in wanted[1:]) >= FIRST // 2
        tiered = begin(kind, model, how, sidecar)
        said, restored = converse(tiered, seed, (End.UNLOAD, End.RESTART, End.KILL))
        assert tiered.on_device()
        tiered.close()
        assert [one.resumed for one in said] == [one.resumed for one in wanted]
        assert said == wanted
        assert restored[1:] == [one.resumed for one in said[1:]]

    until_heard(check)


def test_a_device_that_does_not_copy_exactly_is_not_tiered_and_answers_as_stock(
    begin: Begin, sidecar: Sidecar, tmp_path: Path
) -> None:
    """A library takes the copies away. llama-server calls this function for nothing else."""
    how = ON | OFF_CPP
    resident = begin(CPP, "llama", how)
    prompt = text(FIRST, "inexact")
    wanted = resident.ask(prompt)
    resident.close()
    library = preloaded(tmp_path, "int ggml_backend_graph_compute(void) { return 0; }")
    tiered = begin(CPP, "llama", how | {"LD_PRELOAD": str(library)}, sidecar)
    assert tiered.ask(prompt) == wanted
    assert tiered.reason().startswith("V is transposed on a device that cannot copy it exactly (")


ENGINES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Go engine": (GO, "qwen3", {}),
    "Go engine, V transposed": (GO, "qwen3", OFF),
    "llama.cpp engine": (GO, "llama", {}),
    "llama.cpp engine, V transposed": (GO, "llama", OFF),
    "llama-server": (CPP, "llama", ON),
    "llama-server, V transposed": (CPP, "llama", ON | OFF_CPP),
}
SHORT: dict[str, dict[str, Any]] = {
    GO: {"num_ctx": 256},
    CPP: {"-c": "256", "--context-shift": "", "--keep": "4"},
}
# Without this variable Ollama takes a second slot only for requests at the same time; the llama.cpp
# engine is not tiered with it (tests/engine/test_unsupported.py).
TWO_SLOTS: dict[str, dict[str, Any]] = {
    GO: SLOTS | {"OLLAMA_MULTIUSER_CACHE": "1"},
    CPP: SLOTS_CPP,
}
TAIL = "behind what was stored"


def resident(begin: Begin, way: tuple[str, str, Any], prompt: str, kept: int) -> Said:
    """Stock's answer to the prompt with `TAIL`, of which so many tokens are in its memory."""
    engine = begin(*way)
    engine.ask(prompt[:kept] + text(len(prompt) + len(TAIL) - kept, "other"))
    answer = engine.ask(prompt + TAIL)
    assert answer.resumed == kept
    engine.close()
    return answer


@pytest.mark.parametrize("name", ENGINES)
def test_behind_a_context_shift_nothing_comes_back_and_all_before_it_does(
    begin: Begin, sidecar: Sidecar, name: str
) -> None:
    kind, model, how = ENGINES[name]
    way = (kind, model, {**how, **SHORT[kind]})

    def check(attempt: int) -> None:
        prompt = text(200, (name, attempt))
        wanted = resident(begin, way, prompt, 200)
        tiered = begin(*way, sidecar)
        tiered.ask(prompt, 80)
        tiered.lose(End.KILL)
        answer, restored = tiered.ask(prompt + TAIL), restored_by(tiered)
        assert (answer, restored) == (wanted, 200)

    until_heard(check)


def numbers(bits: Any) -> list[float]:
    """All that are no whole ones."""
    if isinstance(bits, float):
        return [bits]
    parts = bits if isinstance(bits, (list, tuple)) else vars(bits).values()
    return [one for part in parts if not isinstance(part, (str, int)) for one in numbers(part)]


@pytest.mark.parametrize("name", ["Go engine", "llama-server"])
def test_two_slots_get_their_own_rows(begin: Begin, sidecar: Sidecar, name: str) -> None:
    """The slot that is asked first gets the first cells. If stock's bits depend on that (on CUDA,
    in the Go engine, attention sums by cells), the answers are those of other cells.
    """
    kind, model, how = ENGINES[name]
    way = (kind, model, {**how, **TWO_SLOTS[kind]})

    def of_stock(prompts: list[str]) -> dict[str, Said]:
        engine = begin(*way)
        for prompt in prompts:
            engine.ask(prompt)
        said = {prompt: engine.ask(prompt + TAIL) for prompt in prompts}
        assert [answer.resumed for answer in said.values()] == [FIRST, FIRST]
        engine.close()
        return said

    def check(attempt: int) -> None:
        prompts = [text(FIRST, (name, number, attempt)) for number in range(2)]
        wanted = of_stock(prompts)
        in_any_cells = wanted == of_stock(prompts[::-1])
        tiered = begin(*way, sidecar)
        for prompt in prompts:
            tiered.ask(prompt)
        tiered.lose(End.RESTART)
        for prompt in reversed(prompts):
            answer, restored = tiered.ask(prompt + TAIL), restored_by(tiered)
            hit = wanted[prompt]
            assert (answer.resumed, answer.text, restored) == (FIRST, hit.text, FIRST)
            if in_any_cells:
                assert answer == hit
            assert numbers(answer.bits) == pytest.approx(numbers(hit.bits), abs=0.01)

    until_heard(check)


@pytest.mark.parametrize("name", ENGINES)
def test_of_what_is_damaged_nothing_comes_back(begin: Begin, sidecar: Sidecar, name: str) -> None:
    way, sound = ENGINES[name], 2 * BLOCK_TOKENS

    def check(attempt: int) -> None:
        prompt = text(FIRST, (name, attempt))
        wanted = resident(begin, way, prompt, sound)
        tiered = begin(*way, sidecar)
        tiered.ask(prompt)
        tiered.lose(End.KILL)
        sidecar.wait(lambda stat: not stat.queued_demotions, "the disk has the same")
        assert damage(sidecar, sound) >= 2
        answer, restored = tiered.ask(prompt + TAIL), restored_by(tiered)
        assert (answer, restored) == (wanted, sound)

    until_heard(check)


def damage(sidecar: Sidecar, first: int) -> int:
    """One bit of each block from this position on."""
    damaged = 0
    for path in sidecar.block_files():
        data = bytearray(path.read_bytes())
        if read_meta(buffer_reader(bytes(data)), len(data)).first_position >= first:
            data[-4000] ^= 0x10
            path.chmod(0o600)
            path.write_bytes(data)
            path.chmod(0o400)
            damaged += 1
    return damaged
