"""Prompts behind images: what a killed server knew of them comes back, the encoder is not asked,
and the answer is that of the resident cache. Rows of one image are never another's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.damaged_file import flip_bit
from tests.engine_llama_server.pictures import (
    KINDS,
    Part,
    Picture,
    ask,
    projector_for,
    rows_in,
)
from tests.engine_llama_server.server import Answer, LlamaServer, Starter
from tests.engine_llama_server.test_llama_server import report
from tests.engine_llama_server.test_states import files, header, settled
from tests.sidecar import SidecarProcess

CAT, DOG, COW = Picture(1), Picture(2), Picture(3)
OPTIONS = ("-fa", "on", "-c", "8192")
ENCODES = "encoding mtmd batch"  # what the server says before it does, with -lv 4


def text(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return "".join(chr(rng.randint(33, 126)) for _ in range(count))


PROMPTS: dict[str, list[Part]] = {
    "at the start": [CAT, text(1, 200)],
    "in the middle": [text(2, 90), CAT, text(3, 130)],
    "near the end": [text(4, 200), CAT, text(5, 5)],
    "two": [text(6, 30), CAT, text(7, 40), DOG, text(8, 100)],
    "side by side": [text(9, 70), CAT, DOG, text(10, 90)],
    "twice the same": [text(11, 20), CAT, "and", CAT, text(12, 60)],
    "of another shape": [text(13, 64), Picture(4, 112, 224), text(14, 50), COW, text(15, 30)],
}
MORE = [text(16, 20), text(17, 20)]

Run = Callable[..., LlamaServer]
PLAIN_KINDS = ["one position", "several axes"]


@pytest.fixture
def run(start: Starter, tmp_path: Path) -> Run:
    """Starts a server that takes images; tiered if a sidecar is given."""

    def begin(
        kind: str,
        sidecar: SidecarProcess | None = None,
        *options: str,
        seed: int = 1,
        slots: int = 1,
    ) -> LlamaServer:
        projector = str(projector_for(kind, tmp_path, seed))
        given = ("--mmproj", projector, "-np", str(slots), *OPTIONS, *options, "-lv", "4")
        return start(KINDS[kind][0], *given, sidecar=sidecar)

    return begin


def encodings(server: LlamaServer) -> int:
    return server.log.read_text(errors="replace").count(ENCODES)


@pytest.mark.parametrize("where", PROMPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_kill_the_answer_is_that_of_the_resident_cache(
    kind: str, where: str, run: Run, sidecar: SidecarProcess
) -> None:
    prompt = [*PROMPTS[where], MORE[0]]
    stock = run(kind)
    cold = ask(stock, prompt)
    resident = ask(stock, [*prompt, MORE[1]])
    stock.kill()
    assert resident.cached >= cold.computed - 4

    server = run(kind, sidecar)
    assert ask(server, prompt) == cold
    settled(sidecar, server)
    server.kill()
    server = run(kind, sidecar)
    restored = ask(server, [*prompt, MORE[1]])
    assert report(sidecar, server, 1).restored_tokens > 0
    assert restored.cached == resident.cached
    assert restored.bits == resident.bits
    assert encodings(server) == 0


def where_it_begins(server: LlamaServer, before: str) -> int:
    """The first row of an image behind this text, as the resident cache of a stock says it."""
    ask(server, [before, CAT, "?"], 1)
    return ask(server, [before, DOG, "?"], 1).cached


def resident_at(server: LlamaServer, before: str, prompt: Sequence[Part]) -> Answer:
    """As a stock answers that has what stands before the first image in memory."""
    ask(server, [before, Picture(77), "~~"], 1)
    return ask(server, prompt)


def stored(run: Run, kind: str, sidecar: SidecarProcess, prompt: Sequence[Part]) -> Answer:
    server = run(kind, sidecar)
    said = ask(server, prompt)
    settled(sidecar, server)
    server.kill()
    return said


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_another_image_of_the_same_size_is_another_prompt(
    kind: str, run: Run, sidecar: SidecarProcess
) -> None:
    one, other = ([text(20, 90), image, text(21, 90)] for image in (CAT, DOG))
    stock = run(kind)
    wanted = resident_at(stock, text(20, 90), other)
    stock.kill()
    assert wanted.cached >= 90
    stored(run, kind, sidecar, one)
    server = run(kind, sidecar)
    found = ask(server, other)
    assert (found.cached, found.bits) == (wanted.cached, wanted.bits)
    assert encodings(server) == 1


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_an_image_that_is_joined_to_the_one_before_tells_it_apart(
    kind: str, run: Run, sidecar: SidecarProcess
) -> None:
    """llama.cpp computes two images of one size side by side as one, and calls it as the first."""
    one, other = ([text(22, 70), CAT, second, text(23, 90)] for second in (DOG, COW))
    stock = run(kind)
    wanted = resident_at(stock, text(22, 70), other)
    stock.kill()
    first = stored(run, kind, sidecar, one)
    assert first.tokens != wanted.tokens
    server = run(kind, sidecar)
    found = ask(server, other)
    assert (found.cached, found.bits) == (wanted.cached, wanted.bits)
    assert ask(server, one).tokens == first.tokens  # nor are they one another in memory


@pytest.mark.parametrize("damaged", [True, False], ids=["damaged", "missing"])
@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_where_an_image_is_not_whole_the_prompt_goes_on_before_it(
    kind: str, damaged: bool, run: Run, sidecar: SidecarProcess
) -> None:
    prompt = [text(24, 20), CAT, text(25, 30), DOG, text(26, 60)]
    stock = run(kind)
    begin = where_it_begins(stock, text(24, 20))
    stock.kill()
    stored(run, kind, sidecar, prompt)
    middle = (begin + rows_in(kind, CAT) // 2) // 64 * 64
    assert begin < middle < begin + rows_in(kind, CAT)
    for path in files(sidecar):
        meta = header(path)
        if meta.first_position >= middle and not meta.cells:
            if not damaged:
                path.unlink()
            elif meta.first_position == middle:
                data = path.read_bytes()
                flip_bit(path, data, len(data) - 4000)
    server = run(kind, sidecar)
    found = ask(server, prompt)
    assert found.cached == begin
    server.kill()
    stock = run(kind)
    wanted = resident_at(stock, text(24, 20), prompt)
    assert wanted.cached == begin
    assert found.bits == wanted.bits


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize("ends", [False, True], ids=["begins", "ends"])
def test_an_image_at_the_border_of_a_block(
    kind: str, ends: bool, run: Run, sidecar: SidecarProcess
) -> None:
    stock = run(kind)
    added = where_it_begins(stock, text(27, 30)) - 30
    length = 128 - added - (rows_in(kind, CAT) if ends else 0)
    before = text(27, length)
    prompt = [before, CAT, text(28, 50)]
    assert where_it_begins(stock, before) == length + added
    stock.kill()
    stock = run(kind)
    ask(stock, prompt)
    wanted = ask(stock, [*prompt, MORE[0]])
    stock.kill()
    stored(run, kind, sidecar, prompt)
    server = run(kind, sidecar)
    found = ask(server, [*prompt, MORE[0]])
    assert (found.cached, found.bits) == (wanted.cached, wanted.bits)
    assert encodings(server) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_in_a_later_turn(kind: str, run: Run, sidecar: SidecarProcess) -> None:
    turns: list[list[Part]] = [[text(29, 150)]]
    turns.append([*turns[0], text(30, 20), CAT, text(31, 40)])
    turns.append([*turns[1], text(32, 10), DOG, text(33, 40)])
    turns.append([*turns[2], text(34, 90)])
    stock = run(kind)
    wanted = [ask(stock, turn) for turn in turns]
    stock.kill()
    server = run(kind, sidecar)
    for number, turn in enumerate(turns):
        found = ask(server, turn)
        assert (found.cached, found.bits) == (wanted[number].cached, wanted[number].bits), number
        settled(sidecar, server)
        server.kill()
        server = run(kind, sidecar)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_two_slots_with_an_image_each(kind: str, run: Run, sidecar: SidecarProcess) -> None:
    prompts: list[list[Part]] = [
        [text(35, 50), CAT, text(36, 70)],
        [text(37, 80), DOG, text(38, 70)],
    ]
    options = ("--no-kv-unified",)
    stock = run(kind, None, *options, slots=2)
    for slot, prompt in enumerate(prompts):
        ask(stock, prompt, id_slot=slot)
    wanted = [ask(stock, [*prompt, MORE[0]], id_slot=i) for i, prompt in enumerate(prompts)]
    stock.kill()
    server = run(kind, sidecar, *options, slots=2)
    for slot, prompt in enumerate(prompts):
        ask(server, prompt, id_slot=slot)
    settled(sidecar, server)
    server.kill()
    server = run(kind, sidecar, *options, slots=2)
    for slot, prompt in enumerate(prompts):
        found = ask(server, [*prompt, MORE[0]], id_slot=1 - slot)
        assert (found.cached, found.bits) == (wanted[slot].cached, wanted[slot].bits)
    assert encodings(server) == 0


def test_rows_of_another_encoder_are_others(run: Run, sidecar: SidecarProcess) -> None:
    kind = "one position"
    prompt = [text(39, 90), CAT, text(40, 90)]
    stored(run, kind, sidecar, prompt)
    server = run(kind, sidecar, seed=2)
    assert ask(server, prompt).cached == 0


def test_a_kind_that_failed_the_self_test_is_refused_alone(
    run: Run, start: Starter, sidecar: SidecarProcess, tmp_path: Path
) -> None:
    kind = "one position"
    prompt = [text(41, 90), CAT, text(42, 90)]
    projector = str(projector_for(kind, tmp_path))
    for _ in range(2):
        server = start(
            *(KINDS[kind][0], "--mmproj", projector, "-np", "1", *OPTIONS, "-lv", "4"),
            sidecar=sidecar,
            env={"OLLAMA_KV_TIER_REFUSED_KINDS": "images"},
        )
        found = ask(server, prompt)
        settled(sidecar, server)
        server.kill()
    # What stands before the image, but for its last token: a look-up never names the last.
    assert found.cached == where_it_begins(run(kind), text(41, 90)) - 1
    assert encodings(server) == 1


def test_a_projector_that_was_changed_since_it_was_loaded_is_refused(
    run: Run, sidecar: SidecarProcess, tmp_path: Path
) -> None:
    kind = "one position"
    server = run(kind, sidecar)
    projector_for(kind, tmp_path).touch()
    ask(server, [text(43, 90), CAT, text(44, 90)])
    stat = sidecar.wait(lambda stat: len(stat.runners) > 0, "it says why")
    why = "the projector's file is another one than when it was loaded"
    assert [(one.tiered, one.reason) for one in stat.runners] == [(False, why)]


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_what_comes_behind_a_block_that_begins_in_an_image(
    kind: str, run: Run, sidecar: SidecarProcess
) -> None:
    """The slot holds rows of the prompt up to a block of which the first rows are an image's."""
    begin: list[Part] = [text(45, 50), CAT, text(46, 20)]
    longer = [*begin, "~", text(47, 200)]
    stock = run(kind)
    ask(stock, longer)
    wanted = ask(stock, [*longer, MORE[0]])
    stock.kill()
    stored(run, kind, sidecar, longer)
    server = run(kind, sidecar)
    held = ask(server, [*begin, "=", MORE[1]], 1).cached
    row = held // 64 * 64
    assert held - 20 - rows_in(kind, CAT) < row < held - 20  # in the image, or its last words
    found = ask(server, [*longer, MORE[0]])
    assert (found.cached, found.bits) == (wanted.cached, wanted.bits)
    told = report(sidecar, server, 2).last_request
    assert told.restored_tokens == wanted.cached - held
    assert told.memory_tokens == held
    assert encodings(server) == 0
