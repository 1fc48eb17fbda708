"""How `tiering why` shows what it found: to people, the causes; as JSON, every parting."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from ollama_tiering.config import count
from ollama_tiering.errors import plain
from ollama_tiering.protocol.seconds_saved import duration

if TYPE_CHECKING:
    from rich.console import Console

    from ollama_tiering.why.explain import Cause, Explained

_DOCUMENT_VERSION: Final = 1
_INDENT: Final = 2
_LABEL: Final = 9


def show(
    causes: Sequence[Cause], explained: Sequence[Explained], since: float, *, text: bool
) -> None:
    """The cause that cost most first."""
    from rich.console import Console

    console = Console(highlight=False)
    last_line = last_line_of(causes, explained, since)
    if console.is_terminal:
        _show_wrapped(console, causes, text=text)
        console.print(last_line, markup=False)
        return
    for cause in causes:
        click.echo(headline_of(cause))
        for label, words in rows_of(cause, text=text):
            click.echo(f"{'':{_INDENT}}{label:<{_LABEL}}{words}")
        click.echo()
    click.echo(last_line)


def _show_wrapped(console: Console, causes: Sequence[Cause], *, text: bool) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    for cause in causes:
        console.print(Text(headline_of(cause), style="bold"))
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(no_wrap=True, style="dim")
        rows.add_column(overflow="fold")
        for label, words in rows_of(cause, text=text):
            rows.add_row(label, _styled(words))
        console.print(Padding(rows, (0, 0, 1, _INDENT), expand=False))


def document(explained: Sequence[Explained], since: float, *, text: bool) -> dict[str, Any]:
    """Every parting, those that are no fault too, the latest first."""
    return {
        "version": _DOCUMENT_VERSION,
        "since_unix_seconds": since,
        "partings": [_entry(parting, text=text) for parting in explained],
    }


def _entry(parting: Explained, *, text: bool) -> dict[str, Any]:
    judgement, recipe = parting.judgement, parting.recipe
    difference = judgement.difference if text else None
    return {
        "model": parting.model,
        "unix_seconds": parting.unix_seconds,
        "verdict": str(judgement.verdict),
        "what": judgement.what,
        "is_fault": parting.is_fault,
        "part": str(judgement.place.role) or None,
        "turn": judgement.place.number or None,
        "prompt_tokens": parting.prompt_tokens,
        "at_token": parting.at_token,
        "computed_tokens": parting.computed_tokens,
        "lost_tokens": parting.lost_tokens,
        "lost_seconds": parting.lost_seconds,
        "prompt_text": difference.prompt.marked() if difference else None,
        "stored_text": difference.stored.marked() if difference else None,
        "evicted_unix_seconds": parting.evicted_unix_seconds,
        "settings": {name: list(both) for name, both in parting.elsewhere.items()},
        "client": recipe.client if recipe else None,
        "cure": recipe.cure if recipe else None,
        "source": recipe.source if recipe else None,
    }


def headline_of(cause: Cause) -> str:
    """What computing it again has cost, in one line."""
    cost = f"{count(cause.lost_tokens, 'token')} that were stored"
    if cause.lost_seconds is not None:
        cost = f"{duration(cause.lost_seconds)}, {cost}"
    if not cause.lost_tokens:
        cost = "nothing that was stored"
    times = "once" if cause.times == 1 else f"{cause.times:,} times"
    return f"{plain(cause.latest.model)}: computed again {times}: {cost}"


def rows_of(cause: Cause, *, text: bool) -> Iterator[tuple[str, str]]:
    """Labels and what they say; what goes on a line of its own has no label."""
    latest = cause.latest
    yield "what", latest.judgement.what
    if latest.evicted_unix_seconds is not None:
        yield "evicted", f"on {_date(latest.evicted_unix_seconds)}"
    when = _date(latest.unix_seconds)
    yield "where", f"token {latest.at_token:,} of {latest.prompt_tokens:,}, last on {when}"
    for name, (stored, asked) in latest.elsewhere.items():
        yield "", plain(f"{name}: {stored} → {asked}")
    if text and (difference := latest.judgement.difference):
        yield "stored", difference.stored.marked()
        yield "prompt", difference.prompt.marked()
    if latest.recipe:
        client = f"{latest.recipe.client}: " if latest.recipe.client else ""
        yield "cure", f"{client}{latest.recipe.cure}"
        yield "source", latest.recipe.source


def _date(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))


def _styled(line: str) -> Any:
    """What differs stands out."""
    from rich.text import Text

    from ollama_tiering.why.difference import CLOSE, OPEN

    shown = Text(line)
    if (start := line.find(OPEN)) >= 0 and (stop := line.rfind(CLOSE)) > start:
        shown.stylize("reverse", start, stop + 1)
    return shown


def last_line_of(causes: Sequence[Cause], explained: Sequence[Explained], since: float) -> str:
    others = sum(not parting.is_fault for parting in explained)
    start = time.strftime("%Y-%m-%d %H:%M", time.localtime(since))
    new = f"{count(others, 'prompt')} that only began like others, which is no fault"
    if not causes:
        nothing = f"nothing that was stored had to be computed again since {start}"
        return f"{nothing}; {new}" if others else nothing
    return f"since {start}; beside these {new}" if others else f"since {start}"
