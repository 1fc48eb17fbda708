"""One picture of `tiering top`, by rich."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ollama_tiering.cli import status_partings, status_use
from ollama_tiering.config import agreeing, count, format_size
from ollama_tiering.protocol.tier_names import tier_name

if TYPE_CHECKING:
    from ollama_tiering.cli.top_state import EndedRequest, Watched
    from ollama_tiering.protocol.pb import administration_pb2 as adm

_BAR: Final = 24
_RESTORED_STYLE: Final = "green"


def picture(
    answer: adm.StatResponse | None, watched: Watched, names: Mapping[str, str], rows: int
) -> RenderableType:
    """`answer` is None while no sidecar answers; `rows`: of the terminal."""
    if answer is None:
        return Group(Text("the sidecar does not answer; waiting for it", style="red"))
    head: list[RenderableType] = [_heading(answer, watched), _tiers(answer), *_lines(answer, names)]
    left = rows - len(answer.tiers) - len(head) - 3
    return Group(*head, Text(), _requests(watched, max(1, left)))


def _heading(answer: adm.StatResponse, watched: Watched) -> Text:
    text = f"tiering {answer.version}  {time.strftime('%H:%M:%S')}"
    flow = watched.flow
    moves = [
        f"{words} {format_size(int(rate))}/s"
        for words, rate in (("restoring", flow.read), ("storing", flow.stored))
        if rate >= 1
    ]
    if answer.queued_demotions:
        size = format_size(answer.queued_bytes)
        moves.append(f"{size} {agreeing(answer.queued_demotions, 'is')} to be written to the disk")
    return Text("  ".join([text, *moves]))


def _tiers(answer: adm.StatResponse) -> Table:
    table = Table.grid(padding=(0, 1))
    for tier in answer.tiers:
        bar = ProgressBar(
            total=max(tier.budget_bytes, 1), completed=tier.used_bytes, width=_BAR, pulse=False
        )
        state = "" if tier.state in ("", "ok") else tier.state
        if tier.disk_full:
            state = "the disk is too full"
        table.add_row(
            Text(tier_name(tier.tier)),
            bar,
            Text(f"{format_size(tier.used_bytes)} of {format_size(tier.budget_bytes)}"),
            Text(count(tier.blocks, "block")),
            Text(state, style="red"),
        )
    return table


def _lines(answer: adm.StatResponse, names: Mapping[str, str]) -> Iterator[Text]:
    for runner in answer.runners:
        model = status_use.shown(runner.model, names)
        if not runner.tiered:
            yield Text(f"{model}: not tiered: {runner.reason or 'no reason given'}", style="red")
            continue
        waits = f", {count(runner.to_store, 'conversation')} to store" if runner.to_store else ""
        speed = runner.prefill_tokens_per_second
        prefill = f", computes {count(round(speed), 'token')}/s" if speed else ""
        yield Text(f"{model}: {count(runner.requests, 'request')}{prefill}{waits}")
    if not answer.runners:
        yield Text("no model is loaded")
    for line in status_partings.lines(answer):
        yield Text(line.strip(), style="yellow")


def _requests(watched: Watched, most: int) -> RenderableType:
    if not watched.requests:
        return Text("no request has ended since this began")
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("ENDED", no_wrap=True)
    table.add_column("MODEL", no_wrap=True, overflow="ellipsis", max_width=24)
    for heading in ("PROMPT", "MEMORY", "RESTORED", "COMPUTED", "SAVED"):
        style = _RESTORED_STYLE if heading in ("RESTORED", "SAVED") else ""
        table.add_column(heading, justify="right", no_wrap=True, style=style)
    table.add_column("WHY", no_wrap=True, overflow="ellipsis", ratio=1)
    for request in list(watched.requests)[:most]:
        table.add_row(*map(Text, _cells(request)))
    return table


def _cells(request: EndedRequest) -> tuple[str, ...]:
    numbers = (
        request.prompt_tokens,
        request.memory_tokens,
        request.restored_tokens,
        request.computed_tokens,
    )
    saved = request.seconds_saved
    before = f"({request.unseen} more before) " if request.unseen else ""
    return (
        time.strftime("%H:%M:%S", time.localtime(request.unix_seconds)),
        request.model,
        *(f"{number:,}" for number in numbers),
        "?" if saved is None else f"{saved:.1f} s" if saved else "",
        f"{before}{request.why}",
    )
