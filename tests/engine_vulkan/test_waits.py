"""Rows are written only when the device has computed what was given to it before.

A client leaves while a part of its prompt is computed, and the next prompt gets the same cells. On
lavapipe a write into a device's memory is done at once, and what it computes comes later: without
the wait it would be written over what was restored. No CPU shows that.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Sidecar
from tests.engine_vulkan.engines import End, Engine, Said
from tests.engine_vulkan.test_restore import CPP, FIRST, GO, ON, text

Begin = Callable[..., Engine]

SMALL = {"num_batch": 128}
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Go engine": (GO, "qwen3", SMALL),
    "llama.cpp engine": (GO, "llama", SMALL),
    "llama-server": (CPP, "llama", ON | {"-b": "128", "-ub": "128"}),
}
LEFT, RIGHT, MOST = 500, 4, 20  # tokens of the prompts that are left; attempts


def wanted(begin: Begin, way: tuple[str, str, Any], prompt: str, tail: str) -> Said:
    """Stock's answer when the prompt is in memory."""
    resident = begin(*way)
    resident.ask(prompt + text(len(tail), "other"))
    answer = resident.ask(prompt + tail)
    assert answer.resumed == FIRST
    resident.close()
    return answer


def attempts(engine: Engine, prompt: str, tail: str, count: int) -> list[Said]:
    """Answers right after a client has left, each with all of the prompt restored."""
    said = []
    for number in range(count):
        engine.leave(text(LEFT, ("left", number)), random.uniform(0.0, 2.0))
        said.append(engine.ask(prompt + tail))
        assert engine.restored() == FIRST, number
    return said


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_not_restored_below_what_a_device_still_computes(
    begin: Begin, sidecar: Sidecar, way: str
) -> None:
    prompt, tail = text(FIRST, way), text(30, "tail")
    expected = wanted(begin, WAYS[way], prompt, tail)
    tiered = begin(*WAYS[way], sidecar)
    tiered.ask(prompt)
    tiered.lose(End.KILL)
    assert attempts(tiered, prompt, tail, RIGHT) == [expected] * RIGHT
    assert tiered.on_device()


def test_without_the_wait_an_answer_is_wrong(
    begin: Begin, sidecar: Sidecar, tmp_path: Path
) -> None:
    """The test above would notice: here, a library takes the wait away."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "no_wait.c", tmp_path / "no_wait.so"
    source.write_text("void llama_synchronize(void * ctx) { (void) ctx; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    prompt, tail = text(FIRST, "control"), text(30, "tail")
    kind, model, how = WAYS["llama-server"]
    expected = wanted(begin, (kind, model, how), prompt, tail)
    tiered = begin(kind, model, how | {"LD_PRELOAD": str(library)}, sidecar)
    tiered.ask(prompt)
    tiered.lose(End.KILL)
    for _ in range(MOST):
        if attempts(tiered, prompt, tail, 1) != [expected]:
            return
    pytest.fail(f"{MOST} right answers without the wait")
