"""LoRA adapters: rows depend on them and on their scales, which a request may change. Such a server
is refused by name, whatever it says of its adapters: nothing is stored, and nothing comes back.
"""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.engine_llama_server.server import Answer, LlamaServer, Starter
from tests.engine_llama_server.test_llama_server import WAYS, blocks_of, text, wait_stored
from tests.sidecar import SidecarProcess

OPTIONS = (*WAYS["flash attention"], "-c", "2048")
EMBD, K_V, RANK = 256, 128, 2  # of llama-tiny
PROMPT = 300
INVOCATION = [5, 6, 7]  # tokens from which on an adapter that waits for them is applied


def make_adapter(path: Path, *, invocation: list[int] | None = None) -> Path:
    """K and V of every layer, with seeded weights that move each logit."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    if invocation:
        array, unsigned = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32
        writer.add_key_value("adapter.alora.invocation_tokens", invocation, array, unsigned)
    for layer in range(2):
        for name in ("attn_k", "attn_v"):
            a = rng.standard_normal((RANK, EMBD), dtype=np.float32) / 4
            b = rng.standard_normal((K_V, RANK), dtype=np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_a", a)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


WAYS_TO_LOAD = {
    "applied": ("--lora", "{}"),
    "scaled": ("--lora-scaled", "{}:0.5"),
    "not applied at first": ("--lora", "{}", "--lora-init-without-apply"),
    "applied from some tokens on": ("--lora", "{}"),
}


@pytest.mark.parametrize("way", WAYS_TO_LOAD)
def test_with_an_adapter_nothing_is_stored_and_nothing_comes_back(
    start: Starter, sidecar: SidecarProcess, tmp_path: Path, way: str
) -> None:
    waits = INVOCATION if way == "applied from some tokens on" else None
    adapter = make_adapter(tmp_path / "adapter.gguf", invocation=waits)
    options = (*OPTIONS, *(word.format(adapter) for word in WAYS_TO_LOAD[way]))
    rng = random.Random(2)
    known, new = text(rng, PROMPT, first=8), text(rng, PROMPT, first=9)
    called = [*known[:200], *INVOCATION, *known[200:]]

    def turns(server: LlamaServer) -> list[Answer]:
        """Applied, or not; changed for all requests, and for one."""
        said = [server.complete(known), server.complete(new), server.complete(called)]
        for scale in (0.0, 1.0):
            server.scale_adapter(scale)
            said += [server.complete(known), server.complete([*known, 5])]
            said.append(server.complete(new, lora=[{"id": 0, "scale": 1.0 - scale}]))
        return said

    plain = start(*OPTIONS, sidecar=sidecar)
    without = plain.complete(known)
    wait_stored(sidecar, plain, blocks_of(PROMPT))
    plain.kill()
    stock = start(*options)
    wanted = turns(stock)
    stock.kill()
    assert any(answer.tokens != without.tokens for answer in wanted)  # it does something

    tiered = start(*options, sidecar=sidecar)
    assert turns(tiered) == wanted
    stat = sidecar.wait(lambda s: any(not one.tiered for one in s.runners), "it says why not")
    assert [one.reason for one in stat.runners if not one.tiered] == ["LoRA adapters"]
    tiered.kill()
    plain = start(*OPTIONS, sidecar=sidecar)
    again = plain.complete([*new, 5])
    assert again.cached == 0
    plain.kill()
    stock = start(*OPTIONS)
    assert stock.complete([*new, 5]) == again
