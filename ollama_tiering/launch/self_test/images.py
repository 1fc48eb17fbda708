"""What is checked of prompts behind images: they come back, and never for another image."""

from __future__ import annotations

from typing import Final

from ollama_tiering.launch.llama_server import PicturedPrompt
from ollama_tiering.launch.self_test.pair import ServerPair, blocks_of
from ollama_tiering.models.pictures import make_image

IMAGES: Final = "images"  # the kind that is refused
_ANSWER: Final = 8
_WIDTH_PX, _HEIGHT_PX = 280, 196
_BEGIN, _BETWEEN, _END = 40, 90, 30  # characters, which are tokens here


def behind_images(pair: ServerPair) -> None:
    """Two images, a kill, and another prompt behind them; then one with another first image."""
    cat, dog, cow = (make_image(seed, _WIDTH_PX, _HEIGHT_PX) for seed in range(3))
    begin, between, end = (pair.characters(count) for count in (_BEGIN, _BETWEEN, _END))
    one, two = (PicturedPrompt((begin, between, end + last), (cat, dog)) for last in ("a", "b"))
    other = PicturedPrompt(two.words, (cow, dog))
    with pair.stock() as stock:
        cold, hit, apart = (stock.complete(prompt, _ANSWER) for prompt in (one, two, other))
    pair.require_resident(hit, 2 * _BETWEEN)
    pair.require_resident(apart, _BEGIN)
    with pair.tiered() as server:
        pair.require_equal("computed", cold, server.complete(one, _ANSWER))
        pair.store.wait(server, blocks_of(hit.cached_tokens))
        server.kill()
    with pair.tiered() as server:
        pair.require_equal("restored after a kill", hit, server.complete(two, _ANSWER))
        pair.require_equal("another image", apart, server.complete(other, _ANSWER))
