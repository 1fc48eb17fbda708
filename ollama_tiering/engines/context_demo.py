"""The demonstration of a context that does not fit the GPU: stock's plan beside the paged one, and
what must be true of them.

The reference is the answer of the same model at a context that does fit: the GPU computes all of
it. Paged K/V are read by the same kernels, so that answer must be the reference, bit for bit. In
stock's plan for the long context the CPU computes some layers; its kernels add up in another order
than a GPU's, so there the last bits may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ollama_tiering.config import MIB, format_size
from ollama_tiering.errors import MissingTool
from ollama_tiering.launch.ollama import Generated
from ollama_tiering.launch.server_log import LoadPlan, LoggedGpu

SHORT, LONG = 4096, 32768  # num_ctx
PROMPT_TOKENS = 700  # two batches
NEW_TOKENS = 16

# Ollama leaves so much of every GPU alone (v0.16.3 ml/device.go:348).
MINIMUM_BYTES = 457 * MIB
# What the demonstration takes of a GPU beside that: the model with K/V of SHORT fits, K/V of LONG
# alone (512 MiB) do not.
ROOM_BYTES = 480 * MIB

STOCK: dict[str, str] = {"OLLAMA_FLASH_ATTENTION": "1"}
PAGED = STOCK | {"OLLAMA_PAGED_ATTN": "1"}
FITS, DIVIDED, OURS = "all fits", "stock's plan", "paged"

Env = Mapping[str, str]


class ContextServer(Protocol):
    """One server with one model."""

    def gpus(self) -> list[LoggedGpu]: ...

    def run(self, num_ctx: int, prompt: str, new_tokens: int) -> tuple[LoadPlan, Generated]:
        """Loads the model anew, and answers. Greedy."""
        ...


Serve = Callable[[Env], AbstractContextManager[ContextServer]]


@dataclass(frozen=True, slots=True)
class ContextRun:
    label: str
    num_ctx: int
    plan: LoadPlan
    answer: Generated


@dataclass(frozen=True, slots=True)
class ContextOutcome:
    """`runs`: the reference, stock's plan and ours, in this order."""

    gpu: LoggedGpu
    used_bytes: int  # of the GPU, at most; the rest was left alone
    runs: tuple[ContextRun, ContextRun, ContextRun]

    def same(self, run: ContextRun) -> tuple[bool, bool]:
        """Whether its tokens, and their log probabilities, are those of the reference."""
        reference = self.runs[0].answer
        same_tokens = run.answer.tokens == reference.tokens and bool(reference.tokens)
        return same_tokens, run.answer.logprobs == reference.logprobs

    def verdict(self, run: ContextRun) -> str:
        if run.label == FITS:
            return "the reference"
        same_tokens, same_logprobs = self.same(run)
        if same_tokens and same_logprobs:
            return "yes"
        if run.label == OURS:
            return "NO"
        return "tokens yes, last bits no" if same_tokens else "tokens differ"

    @property
    def failures(self) -> list[str]:
        """What is not as it must be; empty if the demonstration succeeded."""
        fits, divided, ours = self.runs
        room = f"of {format_size(self.gpu.total_bytes)} it had {format_size(self.gpu.free_bytes)}"
        found = []
        if not fits.plan.all_on_gpu:
            found.append(f"not all layers are on the GPU at num_ctx {fits.num_ctx}: {room} to give")
        elif divided.plan.all_on_gpu:
            found.append(f"stock has all layers on the GPU at num_ctx {divided.num_ctx}, too")
        if not ours.plan.all_on_gpu:
            found.append(
                f"paged, {ours.plan.layers_on_gpu} of {ours.plan.layers} layers are on the GPU"
            )
        elif not ours.plan.pinned_bytes:
            found.append("no K/V were paged")
        if self.same(ours) != (True, True):
            found.append("the paged answer differs from that with all K/V on the GPU")
        return found

    def as_json(self) -> dict[str, Any]:
        runs = [
            {
                "run": run.label,
                "num_ctx": run.num_ctx,
                "layers_on_gpu": run.plan.layers_on_gpu,
                "layers": run.plan.layers,
                "vram_bytes": run.plan.vram_bytes,
                "kv_vram_bytes": run.plan.kv_vram_bytes,
                "pinned_bytes": run.plan.pinned_bytes,
                "kv_cpu_bytes": run.plan.kv_cpu_bytes,
                "prompt_tokens": run.answer.prompt_tokens,
                "seconds_to_first_token": round(run.answer.seconds_to_first_token, 6),
                "tokens_per_second": round(run.answer.decode_tokens_per_second, 3),
                "same_tokens": self.same(run)[0],
                "same_logprobs": self.same(run)[1],
                "tokens": list(run.answer.tokens),
            }
            for run in self.runs
        ]
        gpu = asdict(self.gpu)
        return {"gpu": gpu, "used_bytes": self.used_bytes, "runs": runs, "failures": self.failures}


def show(
    serve: Serve, prompt: str, say: Callable[[str], None], *, new_tokens: int = NEW_TOKENS
) -> ContextOutcome:
    """Runs the demonstration on the first GPU. MissingTool if the server finds none."""
    say("starting a private server, to see which GPU it finds")
    with serve(STOCK) as server:
        found = server.gpus()
    if not found:
        raise MissingTool(
            "Ollama finds no NVIDIA GPU on this machine, and --context needs one",
            hint="`nvidia-smi` says whether the driver sees a GPU; `tiering doctor` which library "
            "Ollama loads for it",
        )
    gpu = found[0]
    left_alone = overhead_bytes(gpu)
    limits = {"OLLAMA_GPU_OVERHEAD": str(left_alone), "CUDA_VISIBLE_DEVICES": gpu.id}
    runs = []
    with serve(STOCK | limits) as server:
        for label, num_ctx in ((FITS, SHORT), (DIVIDED, LONG)):
            say(f"asking with a prompt of {len(prompt)} tokens: num_ctx {num_ctx}, as stock plans")
            runs.append(ContextRun(label, num_ctx, *server.run(num_ctx, prompt, new_tokens)))
    with serve(PAGED | limits) as server:
        say(f"asking the same: num_ctx {LONG}, K/V paged")
        runs.append(ContextRun(OURS, LONG, *server.run(LONG, prompt, new_tokens)))
    fits, divided, ours = runs
    return ContextOutcome(gpu, gpu.free_bytes - left_alone, (fits, divided, ours))


def overhead_bytes(gpu: LoggedGpu) -> int:
    """What Ollama is told to leave alone, so that a card of any size is as small as the
    demonstration needs it, and nothing on it is in the way.
    """
    return max(0, gpu.free_bytes - MINIMUM_BYTES - ROOM_BYTES)
