"""Sliding windows that drop rows: a conversation goes on after a restart of everything exactly
where stock would have gone on in memory, which is where its last answer ended, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import BLOCK_TOKENS, Server, Sidecar, assert_same, text
from tests.engine.test_restore import LookupTooSlow, Rig, running, until_heard

# A window of 128 both. Stock keeps 128 rows of gemma3's, 4,096 of gpt-oss's; with no more context
# than that it drops none. num_batch is 512.
CONTEXT = {"sliding": 2048, "sinks": 8192}
PROMPTS = {"sliding": (100, 128, 129, 700, 1500), "sinks": (100, 700, 4200, 5000)}

# flash attention, slots, attention on the CPU, type of the cache
STOCK, OFF, EXACT = (1, 1, "stock", "f16"), (0, 1, "stock", "f16"), (1, 1, "exact", "f16")
SLOTS, QUANTISED = (1, 2, "stock", "f16"), (1, 1, "stock", "q8_0")
OFTEN = [(STOCK, "sliding"), (STOCK, "sinks"), (EXACT, "sliding"), (OFF, "sliding")]
OFTEN += [(QUANTISED, "sliding"), (SLOTS, "sliding")]
PRODUCT = [
    pytest.param(
        rig,
        model,
        id=f"fa{rig[0]}-slots{rig[1]}-{rig[2]}-{rig[3]}-{model}",
        marks=() if (rig, model) in OFTEN else pytest.mark.slow,
    )
    for rig in (STOCK, OFF, EXACT, SLOTS, QUANTISED)
    for model in CONTEXT
]


@pytest.fixture(scope="module")
def rig(
    request: pytest.FixtureRequest,
    binary: Path,
    models: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    flash_attention, slots, attention, cache_type = request.param
    env = {
        "OLLAMA_FLASH_ATTENTION": flash_attention,
        "OLLAMA_NUM_PARALLEL": slots,
        "OLLAMA_CPU_ATTENTION": attention,
        "OLLAMA_KV_CACHE_TYPE": cache_type,
    }
    with running(binary, models, tmp_path_factory.mktemp("windows"), env) as found:
        yield found


def restart_everything(rig: Rig, model: str) -> None:
    rig.sidecar.settle(rig.server, model)
    rig.server.unload(model)
    rig.server.stop()
    rig.sidecar.restart()
    rig.server.start()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("rig", "model"), PRODUCT, indirect=["rig"])
def test_a_conversation_goes_on_where_memory_would(rig: Rig, model: str) -> None:
    left = list(PROMPTS[model])
    context = {"num_ctx": CONTEXT[model]}

    def converse(attempt: int) -> None:
        turns = []
        for length in left:
            first = text(length, (model, length, attempt))
            answers = [rig.reference.generate(model, first, **context)]
            second = first + answers[0].text + text(97, (length, "second"))
            answers.append(rig.reference.generate(model, second, **context))
            assert answers[1].resumed == length + len(answers[0].text) - 1  # stock's own hit
            third = second + answers[1].text + text(60, (length, "third"))
            answers.append(rig.reference.generate(model, third, **context))
            assert_same(rig.server.generate(model, first, **context), answers[0], length)
            turns.append((length, second, third, answers))
        restart_everything(rig, model)
        for length, second, third, answers in turns:
            restore = rig.check((length, "second"), answers[1], model, second, **context)
            assert restore.first == 0
            if answers[2].resumed:
                assert_same(rig.server.generate(model, third, **context), answers[2], length)
            left.remove(length)

    until_heard(converse)


@pytest.mark.parametrize(("rig", "model"), [(STOCK, "sliding")], indirect=["rig"], ids=str)
def test_where_stock_has_lost_the_window_nothing_is_restored(rig: Rig, model: str) -> None:
    """Stock computes all of it again, and so does the tested one: its rows would be others."""

    def again(attempt: int) -> None:
        prompt = text(600, ("again", attempt))
        for server in (rig.reference, rig.server):
            server.generate(model, prompt)
        rig.sidecar.settle(rig.server, model)
        for changed in (prompt, prompt[:400] + text(100, "else")):
            expected = rig.reference.generate(model, changed)
            assert expected.resumed == 0
            rig.server.unload(model)
            answer = rig.server.generate(model, changed)
            if answer.resumed and rig.server.pauses():
                raise LookupTooSlow
            assert_same(answer, expected, changed == prompt)

    until_heard(again)


def test_a_window_whose_block_is_gone_is_computed(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """One file of it is missing: nothing is restored, and the answer is that of a cold start."""
    first, more = text(600, "gone"), text(90, "more")
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        second = first + server.generate("sliding", first).text + more
        sidecar.settle(server, "sliding")
        server.unload("sliding")
        files = sorted(sidecar.block_files(), key=lambda file: file.stat().st_size)
        sidecar.kill()
        # Blocks of the chain have one layer's rows in gemma3-tiny, window blocks those of five.
        names = {file.name for file in files[-1:]}
        for file in sidecar.block_files():
            if file.name in names:
                file.unlink()
        sidecar.start()
        answer = server.generate("sliding", second)
        assert answer.resumed == 0
        server.unload("sliding")
    with Server(binary, tmp_path / "reference", models) as reference:
        assert_same(answer, reference.generate("sliding", second))


def test_files_of_a_window_are_larger_than_those_of_the_chain(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """The test above takes away what it thinks it does."""
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        server.generate("sliding", text(600, "sizes"))
        sidecar.settle(server, "sliding")
        server.unload("sliding")
    sizes = sorted({file.stat().st_size for file in sidecar.block_files(sidecar.ram_dir)})
    assert len(sizes) >= 2
    assert sizes[-1] > 2 * sizes[0]
    assert sizes[-1] >= 5 * 2 * BLOCK_TOKENS * 2 * 64 * 2
