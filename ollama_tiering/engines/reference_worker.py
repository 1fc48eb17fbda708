"""The reference engine in a process of its own: a JSON request a line on stdin, a JSON answer a
line on stdout.

    {"prompt": "…", "new_tokens": 16}   ->  tokens, logprobs, counts, seconds
    {"forget": true}                    ->  {}          (what an unload does)
    end of input                        ->  exit 0

Started as `python -m ollama_tiering.engines.reference_worker MODEL.gguf SOCKET CTX`; the first line
says it is ready.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ollama_tiering.client import BlockClient
from ollama_tiering.engines.reference_engine import ReferenceEngine
from ollama_tiering.models import vocab


def main() -> None:
    model, socket, ctx = sys.argv[1:]
    with BlockClient(socket) as client:
        engine = ReferenceEngine(Path(model), client, ctx=int(ctx))
        _answer({"ready": True})
        for line in sys.stdin:
            _answer(_handle(engine, json.loads(line)))


def _handle(engine: ReferenceEngine, request: dict[str, Any]) -> dict[str, Any]:
    if request.get("forget"):
        engine.forget()
        return {}
    result = engine.generate(request["prompt"], int(request["new_tokens"]))
    return {
        "tokens": [vocab.decode([token]) for token in result.tokens],
        "logprobs": [[[vocab.decode([t]), p] for t, p in step] for step in result.logprobs],
        "seconds_to_first_token": result.seconds_to_first_token,
        "prompt_tokens": len(vocab.encode(request["prompt"])),
        "memory_tokens": result.tokens_in_memory,
        "restored_tokens": result.tokens_restored,
        "recomputed_tokens": result.tokens_recomputed,
    }


def _answer(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main()
