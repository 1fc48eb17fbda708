"""Images for tests, and what test encoders make of them. Pure: no numpy."""

from __future__ import annotations

import random
from typing import Final

PLAIN: Final = "mlp"  # LLaVA's: a row of the model has one position
AXES: Final = "qwen2vl_merger"  # M-RoPE: all rows of an image have one position in time
BOTH_WAYS: Final = "gemma3"  # rows of an image see those behind them
PATCH_PX: Final = 14
SIDE_PX: Final = 10 * PATCH_PX  # of what PLAIN and BOTH_WAYS make of an image
ROWS: Final = (SIDE_PX // PATCH_PX) ** 2  # of one of their images


def rows_of(kind: str, width_px: int, height_px: int) -> int:
    """Of an image in the model's cache."""
    return ROWS if kind != AXES else width_px * height_px // (2 * PATCH_PX) ** 2


def make_image(seed: int, width_px: int = SIDE_PX, height_px: int = SIDE_PX) -> bytes:
    """A PPM of random pixels."""
    pixels = random.Random(seed).randbytes(3 * width_px * height_px)
    return f"P6 {width_px} {height_px} 255\n".encode() + pixels
