"""One plot per table: every ratio as a bar, the bound as a line across its row.

The SVG is written here, a line of the file for each bar. Its text stays text: whoever reads it can
search it, and a plotting library, which writes every letter as an outline, is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from measure.results import Ratio

_ROW, _BAR, _WIDTH = 23, 14, 620  # pixels: a row, the bar in it, all rows without their names
_TOP, _BOTTOM, _EDGE = 34, 48, 12
_LETTER = 7  # of 12 pixels' height; few fonts have wider ones
_LABEL = 65  # the longest label of a value: a bound so close beyond the bar would stand in it
_LOG_ROOM = 3  # on both sides of a logarithmic axis, as a factor
_FEW_DECADES = 1000  # a logarithmic axis that is shorter has ticks between the powers of ten
_MOST_TICKS = 9
_MET, _MISSED, _PLAIN = "#4c8a5b", "#b5543c", "#6b7b8c"


def bars(path: Path, title: str, axis: str, ratios: Sequence[Ratio], *, log: bool = False) -> None:
    """Writes an SVG. Green is within its bound, red is not, grey has none."""
    drawing = _Drawing(ratios, log)
    path.write_text("\n".join([*drawing.lines(title, axis), ""]), encoding="utf-8")


class _Drawing:
    def __init__(self, ratios: Sequence[Ratio], log: bool) -> None:
        self._ratios, self._log = ratios, log
        bounds = [ratio.bound for ratio in ratios if ratio.bound is not None]
        ends = [*filter(math.isfinite, (ratio.value for ratio in ratios)), *bounds]
        self._most = max(ends, default=1) * (_LOG_ROOM if log else 1.12) or 1
        self._least = min((end for end in ends if end > 0), default=1) / _LOG_ROOM if log else 0
        self._left = 2 * _EDGE + _LETTER * max((len(ratio.what) for ratio in ratios), default=0)
        self._bottom = _TOP + _ROW * len(ratios)

    def lines(self, title: str, axis: str) -> Iterator[str]:
        left, bottom = self._left, self._bottom
        width, height = left + _WIDTH + 4 * _EDGE, bottom + _BOTTOM
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
            f'width="{width:.0f}" height="{height}" '
            'font-family="DejaVu Sans, Verdana, sans-serif" font-size="12">'
        )
        yield '<rect width="100%" height="100%" fill="white"/>'
        yield f'<text x="{left:.1f}" y="22" font-size="14">{escape(title)}</text>'
        for row, ratio in enumerate(self._ratios):
            yield self._row(_TOP + _ROW * row, ratio)
        right = left + _WIDTH
        yield f'<path d="M{left:.1f} {_TOP}V{bottom}H{right:.1f}" fill="none" stroke="black"/>'
        for tick in _log_ticks(self._least, self._most) if self._log else _ticks(self._most):
            yield (
                f'<path d="M{self._x(tick):.1f} {bottom}v4" stroke="black"/>'
                f'<text x="{self._x(tick):.1f}" y="{bottom + 17}" text-anchor="middle">'
                f"{tick:g}</text>"
            )
        middle = left + _WIDTH / 2
        yield f'<text x="{middle:.1f}" y="{bottom + 36}" text-anchor="middle">{escape(axis)}</text>'
        yield "</svg>"

    def _row(self, top: int, ratio: Ratio) -> str:
        """Name, bar, value and bound."""
        end, base = self._x(ratio.value), top + _ROW / 2 + 4
        colour = _PLAIN if ratio.bound is None else _MET if ratio.met else _MISSED
        label, mark = end, ""
        if ratio.bound is not None:
            at = self._x(ratio.bound)
            mark = f'<path d="M{at:.1f} {top + 1}v{_ROW - 2}" stroke="black" stroke-width="2"/>'
            if 0 <= at - end < _LABEL:
                label = at
        return (
            f'<text x="{self._left - 8:.1f}" y="{base}" text-anchor="end">'
            f"{escape(ratio.what)}</text>"
            f'<rect x="{self._left:.1f}" y="{top + (_ROW - _BAR) / 2}" '
            f'width="{end - self._left:.1f}" height="{_BAR}" fill="{colour}"/>{mark}'
            f'<text x="{label + 5:.1f}" y="{base}">{ratio.value:.3g}</text>'
        )

    def _x(self, value: float) -> float:
        value = min(max(self._least, value), self._most)  # nothing is at 0 of a logarithmic axis
        if self._log:
            share = math.log(value / self._least) / math.log(self._most / self._least)
        else:
            share = value / self._most
        return self._left + _WIDTH * share


def _ticks(most: float) -> list[float]:
    """From 0 on, at most _MOST_TICKS of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(most / _MOST_TICKS))
    step = next(step * power for step in (1, 2, 5, 10) if most / (step * power) < _MOST_TICKS)
    return [count * step for count in range(int(most / step) + 1)]


def _log_ticks(least: float, most: float) -> list[float]:
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    factors = (1, 2, 5) if most / least < _FEW_DECADES else (1,)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if least <= tick <= most]
