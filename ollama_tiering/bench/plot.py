"""One plot per table: every ratio as a bar, the bound as a line across its row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ollama_tiering.bench.tiers.results import Ratio

_ROW_INCHES = 0.32
_NEAR = 0.08  # of the width: a bound so close beyond its bar would stand in the label
_LOG_ROOM = 3  # on both sides of a logarithmic axis, as a factor
_NEAR_FACTOR = 2  # the same as _NEAR there
_MET, _MISSED, _PLAIN = "#4c8a5b", "#b5543c", "#6b7b8c"


def bars(path: Path, title: str, axis: str, ratios: Sequence[Ratio], *, log: bool = False) -> None:
    """Writes an SVG. Green is within its bound, red is not, grey has none."""
    import matplotlib

    matplotlib.use("svg")  # no display is asked for
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "tiering"  # the same numbers give the same file
    figure, axes = pyplot.subplots(figsize=(9, 1.1 + _ROW_INCHES * len(ratios)))
    rows = range(len(ratios))
    values = [ratio.value for ratio in ratios]
    colours = [_PLAIN if r.bound is None else _MET if r.met else _MISSED for r in ratios]
    axes.barh(rows, values, color=colours, height=0.62)
    ends = [*filter(math.isfinite, values), *(r.bound for r in ratios if r.bound is not None)]
    widest = max(ends, default=1) * (_LOG_ROOM if log else 1.12)
    left = min((end for end in ends if end > 0), default=1) / _LOG_ROOM if log else 0
    for row, ratio in enumerate(ratios):
        near = ratio.bound is not None and _near(ratio.value, ratio.bound, widest, log)
        at = ratio.bound if near and ratio.bound is not None else ratio.value
        label = f"{ratio.value:.3g}"
        at = max(at, left)  # nothing is at 0 of a logarithmic axis
        axes.annotate(label, (at, row), (4, 0), textcoords="offset points", va="center")
        if ratio.bound is not None:
            axes.plot([ratio.bound] * 2, [row - 0.45, row + 0.45], color="black", linewidth=1.6)
    axes.set_yticks(rows, [ratio.what for ratio in ratios])
    axes.invert_yaxis()
    if log:
        axes.set_xscale("log")
    axes.set_xlim(left, widest)
    axes.set_xlabel(axis)
    axes.set_title(title, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def _near(value: float, bound: float, widest: float, log: bool) -> bool:
    """Whether the bound is so close beyond the end of the bar that a label would cover it."""
    if log:
        return value <= bound < value * _NEAR_FACTOR
    return 0 <= bound - value < _NEAR * widest
