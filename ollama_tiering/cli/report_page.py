"""The page of `tiering report --html`: one file without scripts, fonts or anything from elsewhere,
for a light or a dark screen and a narrow one.
"""

from __future__ import annotations

import datetime
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from ollama_tiering.cli.report_days import Reported, of_days, of_models, sum_of
from ollama_tiering.config import format_size
from ollama_tiering.protocol.seconds_saved import duration

_WIDTH: Final = 720
_HEIGHT: Final = 160
_PARTS: Final = (
    ("memory_tokens", "in memory", "memory"),
    ("restored_tokens", "restored", "restored"),
    ("recomputed_tokens", "computed", "computed"),
)
_STYLE: Final = """
:root { color-scheme: light dark; --text: #1c1c1e; --back: #fff; --line: #c7c7cc;
  --memory: #8fb8de; --restored: #2f6fb0; --computed: #d9822b; --saved: #3a8f5c; }
@media (prefers-color-scheme: dark) {
  :root { --text: #f2f2f7; --back: #1c1c1e; --line: #48484a; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 760px; margin: 2em auto; padding: 0 1em; }
svg { width: 100%; height: auto; } svg text { fill: var(--text); font-size: 12px; }
.memory { fill: var(--memory); } .restored { fill: var(--restored); }
.computed { fill: var(--computed); } .saved { fill: var(--saved); }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
th, td { text-align: right; padding: .2em .6em; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
"""

Bars = Mapping[str, Sequence[tuple[str, float]]]  # by date: (class, value) from below


def page(found: Sequence[Reported], days: int) -> str:
    """HTML. Every day of the calendar has its place, whether anything was asked or not."""
    by_day, total = of_days(found), sum_of(found)
    dates = calendar(days, by_day)
    tokens = {
        date: [(css, float(getattr(sums, name))) for name, _, css in _PARTS]
        for date, sums in by_day.items()
    }
    saved = {date: [("saved", max(0.0, sums.saved_seconds))] for date, sums in by_day.items()}
    keys = "".join(
        f'<span class="key" style="background: var(--{css})"></span>{words}'
        for _, words, css in _PARTS
    )
    rows = [*of_models(found).items(), ("all", total)]
    table = "".join(map(_row, rows))
    heads = "".join(f"<th>{head}</th>" for head in ("model", "requests", "prompt tokens"))
    heads += "".join(f"<th>{words}</th>" for _, words, _ in _PARTS) + "".join(
        f"<th>{head}</th>" for head in ("saved", "parted", "written to disk")
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>tiering: {days} days</title><style>{_STYLE}</style></head><body>
<h1>{days} days: {duration(total.saved_seconds)} saved</h1>
<h2>Prompt tokens a day</h2><p>{keys}</p>
{_chart("Prompt tokens a day", dates, tokens, lambda value: f"{value:,.0f}")}
<h2>Time saved a day</h2>
{_chart("Time saved a day", dates, saved, duration)}
<h2>Models</h2><div class="wide"><table><tr>{heads}</tr>{table}</table></div>
</body></html>
"""


def calendar(days: int, by_day: Iterable[str]) -> list[str]:
    """Dates up to today here, or where the sidecar runs, if that is later."""
    last = max(map(datetime.date.fromisoformat, by_day), default=datetime.date.min)
    last = max(last, datetime.date.today())
    return [str(last - datetime.timedelta(ago)) for ago in reversed(range(days))]


def _row(row: tuple[str, Reported]) -> str:
    name, sums = row
    numbers = [f"{sums.requests:,}", f"{sums.prompt_tokens:,}"]
    numbers += [f"{getattr(sums, part):,}" for part, _, _ in _PARTS]
    numbers += [duration(sums.saved_seconds), f"{sums.partings:,}", format_size(sums.written_bytes)]
    cells = "".join(f"<td>{cell}</td>" for cell in numbers)
    return f"<tr><td>{html.escape(name)}</td>{cells}</tr>"


def _chart(title: str, dates: Sequence[str], bars: Bars, words: Callable[[float], str]) -> str:
    """Stacked bars, a day each, as SVG; each says its numbers to who points at it."""
    most = max((sum(value for _, value in parts) for parts in bars.values()), default=0.0)
    step = _WIDTH / len(dates)
    drawn = []
    for place, date in enumerate(dates):
        base, said = float(_HEIGHT), [date]
        for css, value in bars.get(date, ()):
            height = _HEIGHT * value / most if most else 0.0
            base -= height
            said.append(f"{css} {words(value)}")
            drawn.append(
                f'<rect class="{css}" x="{place * step:.1f}" y="{base:.1f}" '
                f'width="{max(1.0, 0.8 * step):.1f}" height="{height:.1f}">'
                f"<title>{', '.join(said)}</title></rect>"
            )
    first, last = dates[0], dates[-1]
    return (
        f'<svg viewBox="0 -18 {_WIDTH} {_HEIGHT + 40}" role="img" aria-label="{title}">'
        f'<text x="0" y="-5">{words(most)}</text>{"".join(drawn)}'
        f'<line x1="0" y1="{_HEIGHT}" x2="{_WIDTH}" y2="{_HEIGHT}" stroke="var(--line)"/>'
        f'<text x="0" y="{_HEIGHT + 16}">{first}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{last}</text></svg>'
    )
