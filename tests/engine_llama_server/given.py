"""What a server goes through that is given more than a model: with the same it finds its rows again
after a kill, and with anything else nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.damaged_file import flip_bit, put_right
from tests.engine_llama_server.server import Starter
from tests.engine_llama_server.test_llama_server import (
    WAYS,
    blocks_of,
    report,
    text,
    wait_stored,
)
from tests.sidecar import SidecarProcess

OPTIONS = (*WAYS["flash attention"], "-c", "2048")
PROMPT = 300


def filled(words: tuple[str, ...], files: Mapping[str, Path]) -> tuple[str, ...]:
    """The options, with the paths of the files: `{one}` is that of `one`."""
    for name, path in files.items():
        words = tuple(word.replace(f"{{{name}}}", str(path)) for word in words)
    return (*OPTIONS, *words)


def comes_back_with_the_same_alone(
    start: Starter,
    sidecar: SidecarProcess,
    rng: random.Random,
    options: tuple[str, ...],
    others: Iterable[tuple[str, ...]],
    *,
    changes_nothing: bool = False,
) -> None:
    """`changes_nothing`: a server without it computes the same bits."""
    prompt, more = text(rng, PROMPT), text(rng, 40, first=3)
    resident = start(*options)
    first = resident.complete(prompt)
    hit = resident.complete([*prompt, *more])
    assert hit.cached == PROMPT
    resident.kill()
    without = start(*OPTIONS)
    assert (without.complete(prompt) == first) == changes_nothing
    without.kill()

    tiered = start(*options, sidecar=sidecar)
    assert tiered.complete(prompt) == first
    wait_stored(sidecar, tiered, blocks_of(PROMPT))
    tiered.kill()
    for other in others:
        server = start(*other, sidecar=sidecar)
        assert server.complete([*prompt, *more]).cached == 0, other
        assert report(sidecar, server, 1).restored_tokens == 0
        server.kill()
    again = start(*options, sidecar=sidecar)
    assert again.complete([*prompt, *more]) == hit
    assert report(sidecar, again, 1).restored_tokens == PROMPT


def another_file_of_the_name_finds_nothing(
    start: Starter,
    sidecar: SidecarProcess,
    rng: random.Random,
    options: tuple[str, ...],
    file: Path,
) -> None:
    """And the first one, put right, finds all."""
    prompt = text(rng, PROMPT)
    data = file.read_bytes()

    def cached(blocks: int) -> int:
        server = start(*options, sidecar=sidecar)
        found = server.complete(prompt).cached
        wait_stored(sidecar, server, blocks)
        server.kill()
        return found

    assert cached(blocks_of(PROMPT)) == 0
    flip_bit(file, data, len(data) - 2)
    assert cached(2 * blocks_of(PROMPT)) == 0
    put_right(file, data)
    assert cached(2 * blocks_of(PROMPT)) == PROMPT - 1
