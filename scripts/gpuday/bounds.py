"""The bounds that a day with a GPU is for. None has a value before a step has measured it."""

from __future__ import annotations

from scripts.gpuday.steps import Bound

VRAM = Bound("VRAM decode ÷ device read rate, the least of all cases", None, 0.70)
COLD = Bound("cold decode ÷ pinned copy", None, 0.95)
STEP_TIME = Bound("cold decode, step time ÷ max(copy, compute)", None, 1.10, at_least=False)
ALL_HOT = Bound("all hot ÷ stock, tokens/s", None, 0.98)
STAGING = Bound("staged bytes of a token per second ÷ pinned copy", None, 0.90)
AHEAD = Bound("time that copying ahead saves ÷ time of the copies", None, 0.80)

WANTED = (VRAM, COLD, STEP_TIME, ALL_HOT, STAGING, AHEAD)
