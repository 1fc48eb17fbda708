"""What is checked of a llama.cpp that nobody has tried: on tiny models, whether each answer is bit
for bit that of the installed llama-server's own cache in memory, which resumes at the same place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ResultDiffers
from ollama_tiering.launch.llama_server import Completed
from ollama_tiering.launch.self_test.images import IMAGES, behind_images
from ollama_tiering.launch.self_test.pair import BLOCK_TOKENS, ServerPair, blocks_of
from ollama_tiering.launch.self_test.store import NOT_KEPT
from ollama_tiering.models.pictures import AXES, PLAIN

ROWS: Final = "rows"  # the kind without which nothing is served
_ANSWER: Final = 8
_INSIDE, _WHOLE, _LONG = 300, 256, 1500  # tokens: a block that is not whole at the end, none, many
_FLASH: Final = ("-fa", "on", "-np", "1")
_SHIFTED_CONTEXT, _KEPT = 512, 4


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """`kind` is what is served as stock if it fails. `run` raises. `encoder`: of images."""

    name: str
    kind: str
    shape: str
    options: Sequence[str]
    run: Callable[[ServerPair], None]
    context: int = 2048
    encoder: str = ""
    dtype: str = "f16"  # of the weights


def after_a_kill(
    pair: ServerPair, rows: int = _INSIDE, slots: tuple[int | None, int | None] = (None, None)
) -> None:
    """A prompt, a kill, and another prompt that begins with the same rows."""
    first = pair.text(rows)
    one, two = [*first, 3, *pair.text(20)], [*first, 4, *pair.text(20)]
    with pair.stock() as stock:
        cold, hit = (stock.complete(prompt, _ANSWER, slots[0]) for prompt in (one, two))
    pair.require_resident(hit, rows)
    with pair.tiered() as server:
        pair.require_equal("computed", cold, server.complete(one, _ANSWER, slots[0]))
        pair.store.wait(server, blocks_of(rows))
        server.kill()
    with pair.tiered() as server:
        restored = server.complete(two, _ANSWER, slots[1])
    pair.require_equal("restored after a kill", hit, restored)


def _at_a_block_border(pair: ServerPair) -> None:
    after_a_kill(pair, _WHOLE)


def _in_another_slot(pair: ServerPair) -> None:
    after_a_kill(pair, slots=(0, 1))


def _conversation(pair: ServerPair) -> None:
    """The next turn of a conversation: of a model that goes on at checkpoints only."""
    prompt, more = pair.text(700), pair.text(40, 3)
    with pair.stock() as stock:
        cold = stock.complete(prompt, _ANSWER)
        turn = [*prompt, *cold.tokens, *more]
        hit = stock.complete(turn, _ANSWER)
    pair.require_resident(hit, BLOCK_TOKENS)
    with pair.tiered() as server:
        pair.require_equal("computed", cold, server.complete(prompt, _ANSWER))
        pair.store.settle(server)
        server.kill()
    with pair.tiered() as server:
        restored = server.complete(turn, _ANSWER)
    pair.require_equal("restored after a kill", hit, restored)


def _spoiled(pair: ServerPair, spoil: Callable[[Path], None]) -> None:
    """A block in the middle is spoiled, with its copies: what comes before it may come back."""
    prompt = pair.text(_INSIDE)
    with pair.tiered() as server:
        server.complete(prompt, _ANSWER)
        pair.store.wait(server, blocks_of(_INSIDE))
        files = pair.store.files(server)
        server.kill()
    for path in files[len(files) // 2]:
        with contextlib.suppress(FileNotFoundError):  # a copy that just went
            spoil(path)
    with pair.tiered() as server:
        restored = server.complete(prompt, _ANSWER)
    if restored.cached_tokens >= _INSIDE - 1:
        raise ResultDiffers(
            "self-test: a spoiled block was restored, or its damage was not seen", hint=NOT_KEPT
        )
    _require_resident_answer(pair, prompt, restored)


def _damaged(pair: ServerPair) -> None:
    def flip(path: Path) -> None:
        path.chmod(0o600)
        with path.open("r+b") as opened:
            opened.seek(-4000, 2)
            byte = opened.read(1)[0]
            opened.seek(-4000, 2)
            opened.write(bytes([byte ^ 0x10]))

    _spoiled(pair, flip)


def _missing(pair: ServerPair) -> None:
    _spoiled(pair, Path.unlink)


def _killed_while_saving(pair: ServerPair) -> None:
    prompt = pair.text(_LONG)
    with pair.tiered() as server:
        server.complete(prompt, 1)
        server.kill()
    with pair.tiered() as server:
        restored = server.complete(prompt, _ANSWER)
    _require_resident_answer(pair, prompt, restored)


def _require_resident_answer(pair: ServerPair, prompt: Sequence[int], found: Completed) -> None:
    """As stock answers that has as many of the prompt's first rows in memory."""
    begin = list(prompt[: found.cached_tokens])
    with pair.stock() as stock:
        if begin:
            stock.complete([*begin, 90, *pair.text(20)], 1)
        wanted = stock.complete(prompt, _ANSWER)
    pair.require_equal("restored in part", wanted, found)


def _shifted(pair: ServerPair) -> None:
    """Rows behind a context shift are those of other positions: they are not stored."""
    prompt, tail = pair.text(400), pair.text(20, 6)
    with pair.stock() as stock:
        stock.complete([*prompt, *pair.text(20, 5)], 4)
        hit = stock.complete([*prompt, *tail], 4)
    pair.require_resident(hit, 400)
    with pair.tiered() as server:
        said = server.complete(prompt, 300)
        pair.store.wait(server, blocks_of(_SHIFTED_CONTEXT - 1))
        server.kill()
    moved = (_SHIFTED_CONTEXT - _KEPT) // 2
    with pair.tiered() as server:
        pair.require_equal("before a shift", hit, server.complete([*prompt, *tail], 4))
        behind = [*prompt[:_KEPT], *[*prompt, *said.tokens][_KEPT + moved :][:_INSIDE]]
        found = server.complete(behind, 4)
    if found.cached_tokens > _KEPT + 1:
        raise ResultDiffers("self-test: rows behind a context shift came back", hint=NOT_KEPT)


def _tells_apart(pair: ServerPair) -> None:
    """Answers to two prompts, of which one token is another, have other bits: else no comparison
    here could fail.
    """
    prompt = pair.text(_INSIDE)
    with pair.stock() as stock:
        one, other = (stock.complete([first, *prompt], _ANSWER) for first in (7, 8))
    if one.bits == other.bits:
        raise ResultDiffers("self-test: the model answers all prompts alike", hint=NOT_KEPT)


_SHIFT: Final = (*_FLASH, "--context-shift", "--keep", str(_KEPT))
_NO_FLASH: Final = ("-fa", "off", "-np", "1")
_Q8_0, _Q4_0 = ((*_FLASH, "-ctk", dtype, "-ctv", dtype) for dtype in ("q8_0", "q4_0"))
_TWO_SLOTS: Final = ("-fa", "on", "-np", "2", "--no-kv-unified")
_SHARED: Final = ("-fa", "on", "-np", "2", "-kvu")
ALL: Final = (
    SelfCheck("rows", ROWS, "llama-tiny", _FLASH, after_a_kill),
    SelfCheck("a block's border", ROWS, "llama-tiny", _FLASH, _at_a_block_border),
    SelfCheck("a damaged block", ROWS, "llama-tiny", _FLASH, _damaged),
    SelfCheck("a missing block", ROWS, "llama-tiny", _FLASH, _missing),
    SelfCheck("a kill while it saves", ROWS, "llama-tiny", _FLASH, _killed_while_saving),
    SelfCheck("the comparison", ROWS, "llama-tiny", _FLASH, _tells_apart),
    SelfCheck("no flash attention", "no-flash-attention", "llama-tiny", _NO_FLASH, after_a_kill),
    SelfCheck("q8_0", "quantised", "llama-tiny", _Q8_0, after_a_kill),
    SelfCheck("q4_0", "quantised", "llama-tiny", _Q4_0, after_a_kill),
    SelfCheck("two slots", "slots", "llama-tiny", _TWO_SLOTS, _in_another_slot, 4096),
    SelfCheck("shared cells", "shared-cells", "llama-tiny", _SHARED, _in_another_slot, 4096),
    SelfCheck("a context shift", "context-shift", "llama-tiny", _SHIFT, _shifted, _SHIFTED_CONTEXT),
    SelfCheck("positions of several axes", "axes", "qwen2vl-tiny", _FLASH, after_a_kill),
    SelfCheck("latent attention", "latent", "mla-tiny", _FLASH, after_a_kill),
    SelfCheck("windows", "windows", "gemma3-tiny", _FLASH, _conversation),
    SelfCheck("windows in every other layer", "windows", "gemma2-tiny", _FLASH, _conversation),
    SelfCheck("states", "states", "lfm2-tiny", _FLASH, _conversation),
    SelfCheck("states of Mamba 2", "states", "nemotron-h-tiny", _FLASH, _conversation),
    SelfCheck("behind images", IMAGES, "llama-tiny", _FLASH, behind_images, encoder=PLAIN),
    SelfCheck("images, axes", IMAGES, "qwen2vl-tiny", _FLASH, behind_images, encoder=AXES),
)  # fmt: skip
SHORT: Final = ALL[:1]  # of a llama.cpp that is on the list
