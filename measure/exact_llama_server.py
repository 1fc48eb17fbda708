"""Measures exact attention in an installed Ollama's llama-server beside the installed CPU library.

The same program and the same model file, in turns: exact attention, and GGML's own with flash
attention on and off. Each has a process of its own, and only one runs at a time. Every turn has a
prompt of its own, the same for the three. The seconds are the server's own: of the whole prompt,
and of each token that is generated behind it.

    python -m measure.exact_llama_server TREE [--model FILE | --shape qwen3-0.6b --dtype q8_0]
                   [--tokens 2048,8192] [--rounds 3] [--threads 2] [--out FILE]

TREE is a tree of links (`tiering patch` prints `TREE/bin/ollama`). An installed library that was
built with fewer instructions, or with -O2, than this processor and a release have flatters ours.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from measure.running import arguments, publish
from ollama_tiering.bench.machine import begin
from ollama_tiering.config import ENV_CPU_ATTENTION
from ollama_tiering.errors import UsageError
from ollama_tiering.launch.address import free_address
from ollama_tiering.launch.process import Child, start, wait_ready
from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from ollama_tiering.patchset.llama_server import guard, link_tree
from ollama_tiering.patchset.llama_server.link_tree import LinkTree

ANSWER: Final = 32  # tokens
SECONDS: Final = 3600.0
SIDES: Final = {
    "exact": ("exact", "on"),
    "stock, flash attention on": ("stock", "on"),
    "stock, flash attention off": ("stock", "off"),
}


@dataclass
class Times:
    """Milliseconds, of each round."""

    prompt: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)


def measured(tree: LinkTree, model: Path, side: str, prompt: list[int], threads: int) -> Times:
    attention, flash = SIDES[side]
    address = free_address()
    with tempfile.TemporaryDirectory() as folder:
        command: tuple[str | Path, ...] = (
            *(tree.lib / guard.COPY, "--model", model, "--no-webui", "--offline", "-np", "1"),
            *("--host", address.host, "--port", str(address.port), "-fa", flash, "-ngl", "0"),
            *("-c", str(len(prompt) + 4 * ANSWER), "-t", str(threads), "-tb", str(threads)),
        )
        env = {ENV_CPU_ATTENTION: attention, "LLAMA_ARG_CACHE_RAM": "0"}
        child = start("llama-server", *command, log=Path(folder, "log"), env=env, leashed=True)
        try:
            wait_ready(child, lambda: _answers(address.url), seconds=600.0)
            _require_library(child, attention == "exact")
            body = {"prompt": prompt, "n_predict": ANSWER, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{address.url}/completion", json=body, timeout=SECONDS)
            said = answer.raise_for_status().json()["timings"]
        finally:
            child.kill()
    return Times([said["prompt_ms"]], [said["predicted_per_token_ms"]])


def _answers(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/health").json().get("status") == "ok")
    except (httpx.HTTPError, ValueError):
        return False


def _require_library(child: Child, is_exact: bool) -> None:
    loaded = Path(f"/proc/{child.pid}/maps").read_text(encoding="utf-8")
    if is_exact != ("libggml-cpu-exact.so" in loaded):
        raise UsageError("another CPU library computes than the one that was asked for")


def rows(tokens: int, times: dict[str, Times]) -> list[str]:
    """Medians, and against stock's: below 1 exact attention is faster."""
    ours = times["exact"]
    lines = []
    for side, one in times.items():
        prompt, token = statistics.median(one.prompt), statistics.median(one.token)
        apart = [statistics.median(ours.prompt) / prompt, statistics.median(ours.token) / token]
        lines.append(
            f"| {tokens:,} | {side} | {prompt:,.0f} | {apart[0]:.2f} | {token:.1f} | "
            f"{apart[1]:.2f} |"
        )
    return lines


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("tree", type=Path, metavar="TREE")
    parser.add_argument("--model", type=Path, help="a GGUF file; else one is made")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="q8_0")
    parser.add_argument("--tokens", default="2048,8192")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    tree = link_tree.read(given.tree.absolute())
    if tree is None or not tree.runs_exact:
        raise SystemExit(f"{given.tree} is no tree with exact attention for this processor")
    began = begin()
    lines = ["", "| tokens | side | prompt, ms | ours / it | token, ms | ours / it |"]
    lines += ["|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or Path(folder, "model.gguf")
        if given.model is None:
            make_model(make_shape(given.shape, dtype=given.dtype), model)
        for tokens in map(int, given.tokens.split(",")):
            rng, times = random.Random(tokens), {side: Times() for side in SIDES}
            for _ in range(given.rounds):
                prompt = [rng.randrange(1, 90) for _ in range(tokens)]
                for side, found in times.items():
                    one = measured(tree, model, side, prompt, given.threads)
                    found.prompt += one.prompt
                    found.token += one.token
            lines += rows(tokens, times)
    title = "Exact attention in llama-server"
    publish("exact_llama_server", title, began, tree.engine, lines, given.out)


if __name__ == "__main__":
    main()
