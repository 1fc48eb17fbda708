"""What exact attention must do before a tree keeps it (docs/exact.md): be the one that computes,
give the same bits however a prompt is cut and by any number of threads, lie near stock's, and come
back from the store as it was in memory. Its rows and stock's are never taken for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ResultDiffers
from ollama_tiering.launch.llama_server import Completed, LlamaServer
from ollama_tiering.launch.self_test.checks import SelfCheck
from ollama_tiering.launch.self_test.pair import ServerPair, blocks_of
from ollama_tiering.patchset.llama_server.links import EXACT

KIND: Final = "exact"
_WITHOUT: Final = "the tree is made without it"
_OPTIONS: Final = ("-fa", "on", "-np", "1")
_CUT: Final = ("-ub", "64", "-t", "2", "-tb", "2")
_PROMPT, _ROWS = 333, 300  # tokens: parts of each, and of four, are left over
_LEFT: Final = 7  # tokens that a hit leaves
_ANSWER: Final = 8
# Of a logarithm: what the attention of another kernel may change, by the type of the weights.
_NEAR: Final = {"f16": 0.05, "q8_0": 0.3, "q4_k_m": 0.6}


def _computes(near: float) -> Callable[[ServerPair], None]:
    def run(pair: ServerPair) -> None:
        prompt = pair.text(_PROMPT)
        with pair.stock() as stock:
            wanted = stock.complete(prompt, _ANSWER)
        with pair.exact() as server:
            _require_loaded(server)
            whole = server.complete(prompt, _ANSWER)
            _require_near(wanted, whole, near)
            _require_same("a hit that leaves one token", whole, server.complete(prompt, _ANSWER))
            server.complete([*prompt[:-_LEFT], 90], 1)
            _require_same("a hit that leaves some", whole, server.complete(prompt, _ANSWER))
        with pair.exact(*_CUT) as other:
            again = other.complete([*prompt, *whole.tokens[:-1]], 1)
            if again.bits != whole.bits[-1:]:
                raise _other_bits("an answer that is read as a prompt, in parts of 64")
            _require_same("parts of 64, two threads", whole, other.complete(prompt, _ANSWER))

    return run


def _comes_back(pair: ServerPair) -> None:
    first = pair.text(_ROWS)
    one, two = [*first, 3, *pair.text(20)], [*first, 4, *pair.text(20)]
    with pair.exact() as memory:
        cold, hit = memory.complete(one, _ANSWER), memory.complete(two, _ANSWER)
    pair.require_resident(hit, _ROWS)
    with pair.exact(tiered=True) as server:
        _require_same("with the store", cold, server.complete(one, _ANSWER))
        pair.store.wait(server, blocks_of(_ROWS))
        server.kill()
    with pair.tiered() as stock:
        if found := stock.complete(two, 1).cached_tokens:
            raise ResultDiffers(
                f"self-test: stock's attention got {found} rows of the exact one", hint=_WITHOUT
            )
    with pair.exact(tiered=True) as server:
        restored = server.complete(two, _ANSWER)
    pair.require_equal("exact attention, restored after a kill", hit, restored)


def _require_loaded(server: LlamaServer) -> None:
    maps = Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8", errors="replace")
    if not any(line.endswith(f"/{EXACT}") for line in maps.splitlines()):
        raise ResultDiffers(f"self-test: llama-server does not compute with {EXACT}", hint=_WITHOUT)


def _require_near(wanted: Completed, found: Completed, near: float) -> None:
    """Of the first token: what comes behind it may be another text."""
    ours, theirs = dict(found.bits[0][2:]), dict(wanted.bits[0][2:])
    apart = [abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()]
    if not apart or max(apart) > near:
        said = f"by {max(apart):.3f}, more than {near}" if apart else "in all of the best tokens"
        raise ResultDiffers(
            f"self-test: exact attention differs from stock's {said}", hint=_WITHOUT
        )


def _require_same(what: str, wanted: Completed, found: Completed) -> None:
    if found.bits != wanted.bits:
        raise _other_bits(what)


def _other_bits(what: str) -> ResultDiffers:
    return ResultDiffers(f"self-test: exact attention has other bits: {what}", hint=_WITHOUT)


def _of(shape: str, dtype: str) -> SelfCheck:
    name = f"exact attention, {shape} in {dtype}"
    return SelfCheck(name, KIND, shape, _OPTIONS, _computes(_NEAR[dtype]), dtype=dtype)


ALL: Final = (
    *(_of("llama-tiny", dtype) for dtype in _NEAR),
    SelfCheck("exact attention from the store", KIND, "llama-tiny", _OPTIONS, _comes_back),
)
