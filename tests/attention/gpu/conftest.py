"""The GPU of this machine, and attention problems on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ollama_tiering.errors import MissingTool
from ollama_tiering.kernels import nvrtc
from ollama_tiering.kernels.binding import PaError, PaStatus
from ollama_tiering.kernels.gpu_device import GpuDevice


@pytest.fixture(scope="module")
def device() -> Iterator[GpuDevice]:
    """Skipped only where there is no GPU. One that is there and does not work is a failure."""
    try:
        opened = GpuDevice()
    except PaError as error:
        if error.status is not PaStatus.NO_DEVICE:
            raise
        pytest.skip(error.message)
    try:
        nvrtc.compiler()
    except MissingTool as error:
        pytest.fail(f"there is a GPU, and its tests do not run: {error.message}: {error.hint}")
    yield opened
    opened.close()
