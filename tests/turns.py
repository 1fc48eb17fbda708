"""Tests that run by turns: a third of them each day, so that testing a commit takes less time.

TIERING_TEST_DAY=N          the day, any number; `scripts/test` sets it. Without it all tests run.
TIERING_TEST_TOUCHED=FILES  run whole: those that the change touches, which `tests/touched.py` says

In the files of TURNS a test takes long, and is one of many cases of a rule, or shows what is off
unless a person asks for it. Over three days all of them run. Those of ONE_CASE choose one of their
cases, or none; SCRIPTS are no tests of pytest's. `make nightly` runs all. Beside each file is what
it tests, as the beginnings of paths: where a change touches that, the file itself or what it
imports from `tests`, it runs whole.
"""

from __future__ import annotations

import os
import zlib

DAYS = 3
ENV_DAY = "TIERING_TEST_DAY"
ENV_TOUCHED = "TIERING_TEST_TOUCHED"

_GO = ("patches/hooks/", "patches/overlay/kvcache/", "patches/overlay/runner/ollamarunner/")
_TIERING = (*_GO, "patches/overlay/kvtier/")
_SHIM = ("csrc/shim/", "ollama_tiering/patchset/shim.py", "tests/attention/fakegpu/")
_DEVICE = (*_SHIM, "patches/overlay/ml/", "patches/hooks/", "tests/engine/attention/op/")
_PAGED = (*_DEVICE, *_GO, "patches/overlay/kvpaged/", "patches/overlay/llm/")
_CUDA = ("csrc/cuda/", "csrc/emulate/", "csrc/include/")
_EXACT = (*_SHIM, *_CUDA, "ollama_tiering/kernels/images.py", "tests/engine/attention/op/")
_VULKAN = (
    *(*_TIERING, "patches/overlay/llama/", "patches/overlay/runner/llamarunner/"),
    *("llama_server/", "scripts/vulkan"),
)
_SIDECAR = ("ollama_tiering/protocol/", "ollama_tiering/sidecar/", "ollama_tiering/store/")
_COMMANDS = (
    *("ollama_tiering/cli/", "ollama_tiering/config/", "ollama_tiering/launch/"),
    "ollama_tiering/system/",
)
_PROCESSORS = (
    *("ollama_tiering/patchset/processor.py", "patches/hooks/attention/"),
    "patches/overlay/ml/backend/ggml/ggml/",
)

TURNS = {
    "tests/engine/attention/test_attention.py": (
        *("csrc/include/", "csrc/src/", "patches/overlay/exactattn/", "patches/overlay/ml/"),
        *("patches/hooks/", "tests/engine/attention/op/"),
    ),
    "tests/engine/attention/test_exact_cuts.py": _EXACT,
    "tests/engine/attention/test_exact_op.py": _EXACT,
    "tests/engine/attention/test_exact_paged.py": (*_EXACT, *_PAGED),
    "tests/engine/attention/test_exact_ring.py": _EXACT,
    "tests/engine/attention/test_exact_ring_paged.py": (*_EXACT, *_PAGED),
    "tests/engine/attention/test_fake_gpu.py": _DEVICE,
    "tests/engine/attention/test_fake_gpu_tiering.py": (*_DEVICE, *_TIERING),
    "tests/engine/attention/test_paged.py": _PAGED,
    "tests/engine/attention/test_paged_batches.py": _PAGED,
    "tests/engine/attention/test_paged_mirror.py": _PAGED,
    "tests/engine/attention/test_paged_plan.py": _PAGED,
    "tests/engine/attention/test_paged_slots.py": (*_PAGED, *_TIERING),
    "tests/engine/test_architectures.py": (*_TIERING, "patches/architectures.toml"),
    "tests/engine/test_caches.py": _TIERING,
    "tests/engine/test_damage.py": (*_TIERING, "ollama_tiering/store/"),
    "tests/engine/test_edges.py": _TIERING,
    "tests/engine/test_one_answer.py": (*_EXACT, *_TIERING, "csrc/src/", "patches/overlay/ml/"),
    "tests/engine/test_quantised.py": _TIERING,
    "tests/engine/test_recurrent.py": _TIERING,
    "tests/engine/test_replay.py": _TIERING,
    "tests/engine/attention/test_shim_library.py": (*_SHIM, "csrc/tests/shim/"),
    "tests/engine/test_storm.py": _TIERING,
    "tests/engine/test_windows.py": _TIERING,
    "tests/engine_gpu/test_restore.py": _VULKAN,
    "tests/engine_gpu/test_waits.py": _VULKAN,
    "tests/fault/test_abuse.py": _SIDECAR,
    "tests/fault/test_chaos.py": _SIDECAR,
    "tests/fault/test_dead_disk.py": _SIDECAR,
    "tests/fault/test_hostile_share.py": _SIDECAR,
    "tests/fault/test_planted.py": _SIDECAR,
    "tests/integration/test_demo.py": (
        *("ollama_tiering/bench/", "ollama_tiering/cli/demo.py", "ollama_tiering/engines/"),
        "ollama_tiering/launch/",
    ),
    "tests/integration/test_engine_allocations.py": ("llama_server/",),
    "tests/integration/test_engine_client.py": ("llama_server/", "ollama_tiering/sidecar/engine/"),
    "tests/integration/test_engine_images.py": ("llama_server/",),
    "tests/integration/test_engine_slots.py": ("llama_server/", "ollama_tiering/sidecar/engine/"),
    "tests/integration/test_linked_libraries.py": ("llama_server/",),
    "tests/integration/test_odd_paths.py": _COMMANDS,
    "tests/integration/test_odd_paths_looked_at.py": (*_COMMANDS, "ollama_tiering/doctor/"),
    "tests/unit/patchset/test_odd_paths.py": ("ollama_tiering/cli/", "ollama_tiering/patchset/"),
    "tests/integration/test_start_script.py": ("requirements", "scripts/tiering", "scripts/venv"),
    "tests/integration/test_wheel.py": (
        *("csrc/sources.txt", "hatch_build.py", "ollama_tiering/kernels/compile.py"),
        *("ollama_tiering/patchset/", "pyproject.toml", "requirements"),
    ),
    "tests/unit/cli/test_printing.py": _COMMANDS,
    "tests/unit/measure/test_store.py": ("measure/",),
    "tests/unit/web/test_browser.py": ("ollama_tiering/web/", "ollama_tiering/cli/web"),
    "tests/unit/kernels/test_cuda_emulation.py": (*_CUDA, "csrc/reference/", "csrc/tests/cuda/"),
    "tests/unit/kernels/test_cuda_fake.py": (
        *(*_CUDA, "csrc/tests/cuda/", "ollama_tiering/kernels/", "tests/attention/gpu/"),
    ),
}
ONE_CASE = {
    "tests/integration/test_amx.py": (
        "ollama_tiering/patchset/processor.py",
        "tests/attention/amx/",
    ),
    "tests/integration/test_arm_processors.py": _PROCESSORS,
    "tests/integration/test_processors.py": _PROCESSORS,
}
# Of this one `scripts/test` runs one of three parts each day: sanitizers, and the emulated AArch64.
SCRIPTS = {"scripts/test-csrc": ("csrc/",)}


def in_part(file: str) -> bool:
    """Whether only a part of `file` runs, which is in TURNS or in ONE_CASE."""
    return ENV_DAY in os.environ and file not in os.environ.get(ENV_TOUCHED, "").split()


def waits(nodeid: str) -> bool:
    """Whether it is not this test's day. `nodeid`: pytest's name of a test, from the repository."""
    file = nodeid.partition("::")[0]
    if file not in TURNS or not in_part(file):
        return False
    return zlib.crc32(nodeid.encode()) % DAYS != int(os.environ[ENV_DAY]) % DAYS
