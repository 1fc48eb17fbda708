"""Tests that run by turns: a third of them each day, so that testing a commit takes less time.

TIERING_TEST_DAY=N    the day, any number; `scripts/test` sets it. Without it all tests run.

In these files a test takes long, and is one of many cases of a rule, or shows what is off unless a
person asks for it. Over three days all of them run. Whoever changes what they test runs the files
themselves, or `scripts/test all`.
"""

from __future__ import annotations

import os
import zlib

DAYS = 3
ENV_DAY = "TIERING_TEST_DAY"

FILES = frozenset(
    (
        "tests/engine/test_attention.py",
        "tests/engine/test_exact_cuts.py",
        "tests/engine/test_exact_op.py",
        "tests/engine/test_exact_paged.py",
        "tests/engine/test_exact_ring.py",
        "tests/engine/test_exact_ring_paged.py",
        "tests/engine/test_fake_gpu.py",
        "tests/engine/test_fake_gpu_tiering.py",
        "tests/engine/test_paged.py",
        "tests/engine/test_paged_batches.py",
        "tests/engine/test_paged_mirror.py",
        "tests/engine/test_paged_plan.py",
        "tests/engine/test_paged_slots.py",
        "tests/engine/test_replay.py",
        "tests/engine/test_shim_library.py",
        "tests/engine/test_storm.py",
        "tests/fault/test_abuse.py",
        "tests/fault/test_dead_disk.py",
        "tests/fault/test_hostile_share.py",
        "tests/fault/test_planted.py",
        "tests/integration/test_demo.py",
        "tests/integration/test_engine_allocations.py",
        "tests/integration/test_odd_paths.py",
        "tests/integration/test_odd_paths_looked_at.py",
        "tests/integration/test_start_script.py",
        "tests/integration/test_wheel.py",
        "tests/unit/measure/test_store.py",
        "tests/unit/patchset/test_odd_paths.py",
        "tests/unit/kernels/test_cuda_emulation.py",
        "tests/unit/kernels/test_cuda_fake.py",
    )
)


def waits(nodeid: str) -> bool:
    """Whether it is not this test's day. `nodeid`: pytest's name of a test, from the repository."""
    day = os.environ.get(ENV_DAY)
    if day is None or nodeid.partition("::")[0] not in FILES:
        return False
    return zlib.crc32(nodeid.encode()) % DAYS != int(day) % DAYS
