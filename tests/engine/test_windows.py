"""Sliding windows that drop rows: a conversation goes on after a restart of everything exactly
where stock would have gone on in memory, which is where its last answer ended; the same prompt goes
on before its last token; and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import BLOCK_TOKENS, PREDICT, Server, Sidecar, assert_same, text
from tests.engine.test_restore import LookupTooSlow, Rig, rigs, settings, until_heard

# All have a window of 128. Stock keeps 128 rows of gemma3's and olmo3's, 4,096 of gpt-oss's and
# gemma4's; with no more context than that it drops none. num_batch is 512.
CONTEXT = {"sliding": 2048, "olmo": 2048, "sinks": 8192, "shared": 8192}
FEW, MANY = (100, 128, 129, 700, 1500), (100, 700, 4200, 5000)
PROMPTS = {"sliding": FEW, "olmo": FEW, "sinks": MANY, "shared": MANY}

# flash attention, slots, attention on the CPU, type of the cache
STOCK, OFF, EXACT = (1, 1, "stock", "f16"), (0, 1, "stock", "f16"), (1, 1, "exact", "f16")
SLOTS, QUANTISED = (1, 2, "stock", "f16"), (1, 1, "stock", "q8_0")
OFTEN = [(STOCK, "sliding"), (STOCK, "sinks"), (EXACT, "sliding"), (OFF, "sliding")]
OFTEN += [(QUANTISED, "sliding"), (SLOTS, "sliding"), (STOCK, "olmo"), (STOCK, "shared")]
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


rig = rigs(settings)


def restart_everything(rig: Rig, model: str) -> None:
    rig.sidecar.settle(rig.server, model)
    rig.server.unload(model)
    rig.server.stop()
    rig.sidecar.restart()
    rig.server.start()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("rig", "model"), PRODUCT, indirect=["rig"])
def test_a_conversation_goes_on_where_memory_would(
    need: Callable[[str], None], rig: Rig, model: str
) -> None:
    need(model)
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
        changed = prompt[:400] + text(100, "else")
        expected = rig.reference.generate(model, changed)
        assert expected.resumed == 0
        rig.server.unload(model)
        answer = rig.server.generate(model, changed)
        if answer.resumed and rig.server.pauses():
            raise LookupTooSlow
        assert_same(answer, expected)

    until_heard(again)


AGAIN: list[Any] = [(STOCK, "sliding"), (EXACT, "sliding"), (STOCK, "sinks")]
AGAIN += [pytest.param(rig, "sliding", marks=pytest.mark.slow) for rig in (OFF, SLOTS, QUANTISED)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("rig", "model"), AGAIN, indirect=["rig"], ids=str)
def test_the_same_prompt_again_goes_on_before_its_last_token(rig: Rig, model: str) -> None:
    """Stock has lost gemma3's window by then, and has it where the prompt before was shorter by a
    token. Whole batches: the last token is one of its own in either.
    """
    context, lengths = {"num_ctx": CONTEXT[model]}, (513, 1025)
    if model == "sinks":
        lengths = (700, 5000)  # stock still has it all

    def again(attempt: int) -> None:
        asked = []
        for length in lengths:
            prompt = text(length, (model, length, attempt, "again"))
            before = prompt if model == "sinks" else prompt[:-1]
            rig.reference.generate(model, before, **context | {"predict": 1})
            expected = rig.reference.generate(model, prompt, **context)
            assert expected.resumed == length - 1
            rig.server.generate(model, prompt, **context)
            asked.append((prompt, expected))
        restart_everything(rig, model)
        for prompt, expected in asked:
            rig.check(len(prompt), expected, model, prompt, **context)

    until_heard(again)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("rig", "model"), [(STOCK, "sliding"), (EXACT, "sliding")], indirect=["rig"]
)
def test_an_answer_is_regenerated_again_and_again(rig: Rig, model: str) -> None:
    """Each answer has a block of its own after the prompt. The window hangs on the first one's; of
    all that share the prompt it is the one to be found.
    """
    length = 600

    def again(attempt: int) -> None:
        prompt = text(length, (model, attempt, "regenerated"))
        rig.reference.generate(model, prompt[:-1], predict=1)
        expected = rig.reference.generate(model, prompt)
        assert expected.resumed == length - 1
        rig.server.generate(model, prompt)
        texts = {expected.text}
        for seed in range(4):
            restart_everything(rig, model)
            pauses = rig.server.pauses()
            other = rig.server.generate(model, prompt, temperature=2.0, seed=seed)
            if not other.resumed and rig.server.pauses() > pauses:
                raise LookupTooSlow
            assert other.resumed == length - 1, seed
            texts.add(other.text)
        assert len(texts) > 3
        restart_everything(rig, model)
        rig.check(length, expected, model, prompt)

    until_heard(again)


def test_another_cut_of_the_prompt_has_another_window(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """Both caches have 256 cells, and the rows lie in others of them."""
    more, seen = text(90, "more"), {}
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        for batch, other in ((128, 96), (96, 128)):
            first = text(600, ("cut", batch))
            prompt = first + server.generate("sliding", first, num_batch=batch).text + more
            sidecar.settle(server, "sliding")
            for asked in (other, batch):
                server.unload("sliding")
                seen[batch, asked] = server.generate("sliding", prompt, num_batch=asked).resumed
            server.unload("sliding")
    found = 600 + PREDICT - 1
    assert seen == {(128, 96): 0, (128, 128): found, (96, 128): 0, (96, 96): found}


def unlink(file: Path) -> None:
    file.unlink()


def flip(file: Path) -> None:
    """One bit of its last row that is not padding."""
    data = bytearray(file.read_bytes())
    at = max(i for i in range(len(data) - 4096, len(data)) if data[i])
    data[at] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)
    file.chmod(0o400)


@pytest.mark.parametrize("harm", [unlink, flip])
def test_a_window_with_a_block_that_is_gone_or_damaged_is_computed(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, harm: Callable[[Path], None]
) -> None:
    first, more = text(600, harm.__name__), text(90, "more")
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        second = first + server.generate("sliding", first).text + more
        sidecar.settle(server, "sliding")
        server.unload("sliding")
        # Blocks of the chain have one layer's rows in gemma3-tiny, window blocks those of five.
        largest = max(sidecar.block_files(), key=lambda file: file.stat().st_size).name
        sidecar.kill()
        for file in sidecar.block_files():
            if file.name == largest:
                harm(file)
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
