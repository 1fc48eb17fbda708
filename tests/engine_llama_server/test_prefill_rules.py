"""Which rows are stored while a prompt is computed: those that are what computing its tokens gives,
and of models that need more than rows, where they can go on.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine_llama_server.prefill import Prefill
from tests.engine_llama_server.server import Starter, alike
from tests.engine_llama_server.test_llama_server import WAYS, blocks_of, report, text, wait_stored
from tests.engine_llama_server.test_states import COUNT, cold, settled
from tests.sidecar import SidecarProcess

SMALL = ("-b", "128", "-ub", "128")
SOON = {"OLLAMA_KV_TIER_PROGRESS_SECONDS": "0"}
STATES = {
    "lfm2": ("lfm2-tiny", "-fa", "on", "-np", "1", "-c", "8192", *SMALL),
    "gemma3": ("gemma3-tiny", "-fa", "on", "-np", "1", "-c", "8192", *SMALL),
}


@pytest.fixture
def rng() -> random.Random:
    return random.Random(33)


def stored(sidecar: SidecarProcess) -> int:
    return sum(one.blocks for one in sidecar.stat().namespaces)


def test_behind_rows_of_unknown_origin_nothing_is_stored_on_the_way(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, tmp_path: Path
) -> None:
    options = (*WAYS["flash attention"], "-c", "8192", *SMALL)
    options += ("--slot-save-path", f"{tmp_path}/")
    prompt = text(rng, 300)
    foreign = start(*options, "--rope-freq-base", "9000")
    foreign.complete(prompt, 1)
    foreign.slot_file("save", "slot.bin")
    foreign.kill()
    tiered = start(*options, sidecar=sidecar, env=SOON)
    tiered.complete(text(rng, 100, first=5))
    wait_stored(sidecar, tiered, blocks_of(100))
    settled(sidecar, tiered)
    before = stored(sidecar)
    tiered.slot_file("restore", "slot.bin")
    with Prefill(tiered, [*prompt, *text(rng, 4000)]) as prefill:
        prefill.reach(0.9)
        prefill.kill()
    assert stored(sidecar) == before
    assert start(*options, sidecar=sidecar).complete([*prompt, 7], 1).cached == 0


def test_of_a_request_that_wants_no_cache_nothing_is_stored_on_the_way(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """In a slot that had one before which did."""
    tiered = start(*WAYS["flash attention"], "-c", "8192", *SMALL, sidecar=sidecar, env=SOON)
    tiered.complete(text(rng, 100, first=5))
    settled(sidecar, tiered)
    before = stored(sidecar)
    with Prefill(tiered, text(rng, 4000, first=6), cache_prompt=False) as prefill:
        prefill.reach(0.9)
        prefill.kill()
    assert stored(sidecar) == before


def test_behind_a_shift_that_changes_all_rows_nothing_is_stored_on_the_way(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """With YaRN it multiplies those of the other slot, too, whose prompt is computed."""
    yarn = ("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "1024")
    options = (*WAYS["two slots"], "-c", "8192", "--context-shift", *SMALL, *yarn)
    full, prompt = text(rng, 4092, first=5), text(rng, 4000, first=6)
    tiered = start(*options, sidecar=sidecar, env=SOON)
    tiered.complete(full, 1, id_slot=0)
    settled(sidecar, tiered)
    before = stored(sidecar)
    with Prefill(tiered, prompt, id_slot=1) as prefill:
        prefill.reach(0.2)
        tiered.complete(full, 6, id_slot=0)
        assert "slot context shift" in tiered.log.read_text()
        settled(sidecar, tiered)
        shifted = stored(sidecar)
        computed = prefill.reach(0.9)
        settled(sidecar, tiered)
        tiered.kill()
    assert stored(sidecar) == shifted > before  # some of it before the shift
    again = start(*options, sidecar=sidecar)
    assert 0 < again.complete([*prompt, 9], 1, id_slot=1).cached < computed


@pytest.mark.parametrize("way", STATES)
def test_a_cancelled_prompt_of_a_model_with_states_goes_on_where_it_ended(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, way: str
) -> None:
    """After a restart as in the slot. On the way such a model has no place to go on at."""
    options, prompt = STATES[way], text(rng, 5000, first=6)
    tiered = start(*options, sidecar=sidecar, env=SOON)
    with Prefill(tiered, prompt) as prefill:
        prefill.reach(0.5)
        computed = prefill.leave()
    settled(sidecar, tiered)
    sidecar.stop()
    asked = [*prompt[:computed], *text(rng, 30, first=1 + prompt[computed] % 80)]
    wanted = tiered.complete(asked, COUNT)  # this is not stored
    assert wanted.cached == computed
    tiered.kill()
    sidecar.start()
    again = start(*options, sidecar=sidecar)
    assert again.complete(asked, COUNT) == wanted
    assert report(sidecar, again, 1).restored_tokens == computed


@pytest.mark.parametrize("way", STATES)
def test_a_server_that_is_to_end_stores_the_state_of_a_prompt(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, way: str
) -> None:
    options, prompt = STATES[way], text(rng, 5000, first=6)
    tiered = start(*options, sidecar=sidecar)
    with Prefill(tiered, prompt) as prefill:
        prefill.reach(0.5)
        prefill.terminate()
        computed = prefill.kill()
    again = start(*options, sidecar=sidecar)
    said = again.complete(prompt, COUNT)
    assert said.cached == computed
    assert alike(said, cold(start, options, prompt))


@pytest.mark.parametrize("way", ["shared cells", "drafts of n-grams"])
def test_an_answer_that_is_killed_on_the_way_is_found(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, way: str
) -> None:
    """Its own tokens, too, with the bits of the cache in memory: also where they were drafted, and
    where another slot computes in the same cells.
    """
    options = (*WAYS[way], "-c", "8192")
    prompt = text(rng, 40, first=6) * 20  # drafts come of what is said again
    resident = start(*options)
    answered = resident.complete(prompt, 1500, id_slot=0).tokens
    resident.kill()
    tiered = start(*options, sidecar=sidecar, env=SOON)
    tokens = tiered.stream(prompt, 1500, id_slot=0)
    for _ in range(1000):
        next(tokens)
    wait_stored(sidecar, tiered, blocks_of(800 + 600))
    tiered.kill()
    asked = [*prompt, *answered[:500], 9]
    resident = start(*options)
    resident.complete(prompt, 1500, id_slot=0)
    wanted = resident.complete(asked, COUNT, id_slot=0)
    resident.kill()
    again = start(*options, sidecar=sidecar)
    said = again.complete(asked, COUNT, id_slot=0)
    assert said == wanted
    assert report(sidecar, again, 1).restored_tokens == said.cached >= 800 + 500
