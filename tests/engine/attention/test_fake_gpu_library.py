"""The fake GPU itself: without what it promises, the tests that use it would prove nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.engine.attention import fake_gpu

LATE_SEED = 3  # with it a late stream is late by tens of milliseconds at its first few jobs


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("memory", fake_gpu.devices(64)),
        ("faults", fake_gpu.devices(64, 64)),
        ("failing", fake_gpu.devices(64, FAIL_ALLOC="2,4")),
        ("streams", fake_gpu.devices(64, DELAY_US="200000,0", SEED=LATE_SEED)),
        ("two_devices", fake_gpu.devices(64, 64, DELAY_US=200000, SEED=LATE_SEED)),
    ],
)
def test_the_fake_gpu_keeps_what_it_promises(
    gpu_binary: Path, case: str, settings: dict[str, str]
) -> None:
    """Each case's own words say what it checks: tests/attention/fakegpu/check.cpp."""
    folder = gpu_binary.parents[1] / "lib/ollama/cuda_fake"
    command = [folder / "check", folder / "libggml-cuda.so", case]
    env = os.environ | settings
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
