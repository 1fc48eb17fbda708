"""One model in one peer: `python worker.py SOCKET SETTINGS`, in the peers' virtual environment.

SETTINGS is JSON: peer, model, own_socket (for a peer that insists on listening; its name ends in
.sock), context_tokens, batch_tokens, threads, flash. JSON lines go over the Unix socket SOCKET,
beginning with {"version", "system"} when the model is loaded. The answer to a request {"prompt":
ids, "new_tokens": n} is n lines {"token": id, "top": [[id, log probability], ...]}, each sent when
its token is known, and then {"prompt_tokens": n}. Greedy; nothing is kept from one request to the
next. This uses only the standard library and the peer's package, because our package is not
installed there.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import math
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

TOP = 5

Request = dict[str, Any]
Send = Callable[[dict[str, Any]], None]


class LlamaCpp:
    """llama.cpp's own server, by xllamacpp. It listens, too: on a socket nobody is told."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import xllamacpp

        flash = xllamacpp.llama_flash_attn_type
        given = xllamacpp.CommonParams()
        given.model.path = settings["model"]
        given.n_ctx = settings["context_tokens"]
        given.n_batch = given.n_ubatch = settings["batch_tokens"]
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = settings["threads"]
        given.cache_type_k = given.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F16
        given.flash_attn_type = (
            flash.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if settings["flash"]
            else flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        given.n_parallel = 1
        given.n_gpu_layers = 0
        given.cache_ram_mib = 0  # prompts that left the slot are not kept
        given.hostnames = [settings["own_socket"]]  # else it takes a port
        self._server = xllamacpp.Server(given)
        self.version = f"xllamacpp {importlib.metadata.version('xllamacpp')}"
        self.system = str(xllamacpp.get_system_info())

    def answer(self, request: Request, send: Send) -> int:
        found: dict[str, Any] = {}

        def take(chunk: dict[str, Any]) -> bool:
            if "error" in chunk:
                found["error"] = chunk["error"]
            for choice in chunk.get("choices", ()):
                for token in (choice.get("logprobs") or {}).get("content", ()):
                    best = [[one["id"], one["logprob"]] for one in token["top_logprobs"]]
                    send({"token": token["id"], "top": best})
            found.update(chunk.get("timings") or {})
            return False  # go on

        body = {"prompt": request["prompt"], "n_predict": request["new_tokens"], "temperature": 0}
        body |= {"stream": True, "n_probs": TOP, "cache_prompt": False}
        self._server.handle_completions(body, take)
        if "error" in found:
            raise RuntimeError(found["error"])
        return int(found["prompt_n"])  # computed, not found in memory


class IkLlamaCpp:
    """ik_llama.cpp by ik-llama-cpp-python. Its class IkLlama sets neither batch nor cache type, and
    turns flash attention off without asking, so its bindings are called as that class calls them.
    """

    _F16 = 1  # ggml.h

    def __init__(self, settings: dict[str, Any]) -> None:
        from ik_llama_cpp import _ctypes_api, _internals

        self._api, self._make = _ctypes_api, _internals
        self._api.llama_backend_init()
        model = self._api.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = self._api.llama_model_load_from_file(settings["model"].encode(), model)
        if not self._model:
            raise RuntimeError("the model was not loaded")
        given = self._api.llama_context_default_params()
        given.n_ctx = settings["context_tokens"]
        given.n_batch = given.n_ubatch = settings["batch_tokens"]
        given.n_threads = given.n_threads_batch = settings["threads"]
        given.type_k = given.type_v = self._F16
        given.flash_attn = settings["flash"]
        self._context = self._api.llama_init_from_model(self._model, given)
        if not self._context:
            raise RuntimeError("no context for the model")
        vocabulary = self._api.llama_model_get_vocab(self._model)
        self._tokens = int(self._api.llama_vocab_n_tokens(vocabulary))
        self._batch_tokens = settings["batch_tokens"]
        self.version = f"ik-llama-cpp-python {importlib.metadata.version('ik-llama-cpp-python')}"
        tell = self._api._lib.llama_print_system_info
        tell.restype = ctypes.c_char_p
        self.system = str(tell().decode())

    def answer(self, request: Request, send: Send) -> int:
        prompt = request["prompt"]
        self._api.llama_kv_cache_clear(self._context)
        for at in range(0, len(prompt), self._batch_tokens):
            part = prompt[at : at + self._batch_tokens]
            last = at + len(part) == len(prompt)
            self._compute(self._make.make_batch_range(part, pos_start=at, logits_last=last))
        token = self._next(send)
        for number in range(1, request["new_tokens"]):
            self._compute(self._make.make_batch_single(token, len(prompt) + number - 1))
            token = self._next(send)
        return len(prompt)

    def _next(self, send: Send) -> int:
        best = top(self._api.llama_get_logits_ith(self._context, -1)[: self._tokens])
        send({"token": best[0][0], "top": best})
        return best[0][0]

    def _compute(self, batch: Any) -> None:
        failed = self._api.llama_decode(self._context, batch)
        self._api.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode: {failed}")


def top(logits: Sequence[float]) -> list[tuple[int, float]]:
    """The best few tokens with their log probabilities, the best first."""
    highest = max(logits)
    lse = highest + math.log(math.fsum(math.exp(logit - highest) for logit in logits))
    best = sorted(range(len(logits)), key=lambda token: -logits[token])[:TOP]
    return [(token, logits[token] - lse) for token in best]


PEERS: dict[str, type[LlamaCpp] | type[IkLlamaCpp]] = {
    "llama.cpp": LlamaCpp,
    "ik_llama.cpp": IkLlamaCpp,
}


def main() -> None:
    """Ends when the other side closes the socket; an error ends it with a traceback."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        lines = connection.makefile("rw", encoding="utf-8")

        def send(message: dict[str, Any]) -> None:
            lines.write(json.dumps(message) + "\n")
            lines.flush()

        settings = json.loads(sys.argv[2])
        peer = PEERS[settings["peer"]](settings)
        send({"version": peer.version, "system": peer.system})
        for request in _requests(lines):
            send({"prompt_tokens": peer.answer(request, send)})


def _requests(lines: Any) -> Iterator[Request]:
    while line := lines.readline():
        yield json.loads(line)


if __name__ == "__main__":
    main()
