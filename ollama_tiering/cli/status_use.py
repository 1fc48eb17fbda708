"""What `tiering status` says was done for each model, loaded or not, and what it saved."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ollama_tiering.cli import status_shortfalls
from ollama_tiering.config import count
from ollama_tiering.launch import names as launch_names
from ollama_tiering.protocol.seconds_saved import Saved, tokens_per_second

if TYPE_CHECKING:
    from ollama_tiering.protocol.pb import administration_pb2 as adm


def names(answer: adm.StatResponse) -> dict[str, str]:
    """File name of a model -> its name: the one that the sidecar gives, else the one in this user's
    own manifests (which are not the service's).
    """
    found = {one.model: one.name for one in answer.model_uses if one.name}
    seen = {one.model for one in answer.model_uses} | {one.model for one in answer.runners}
    if seen - found.keys():
        from ollama_tiering.cli.model_names import known_names

        own = known_names()
        found = {model: own[model] for model in seen if model in own} | found
    return found


def shown(model: str, known: Mapping[str, str]) -> str:
    """What to call a model, by its file name."""
    return launch_names.shown(model, known) or "?"


def lines(answer: adm.StatResponse, known: Mapping[str, str]) -> Iterator[str]:
    by_model: dict[str, list[adm.ModelUse]] = {}
    for use in answer.model_uses:
        by_model.setdefault(use.model, []).append(use)
    for model, uses in by_model.items():
        since = _date(min(use.since_unix_seconds for use in uses))
        yield f"use of {shown(model, known)}, since {since}"
        yield from (f"  {line}" for line in _lines_of(uses))


def all_models(answer: adm.StatResponse) -> Iterator[str]:
    """One line of all that was saved, if there is anything to sum up."""
    if len({use.model for use in answer.model_uses}) > 1:
        since = _date(min(use.since_unix_seconds for use in answer.model_uses))
        yield f"all models, since {since}: {Saved.of(answer.model_uses).words()}"


def _lines_of(uses: list[adm.ModelUse]) -> Iterator[str]:
    loaded = any(use.loaded for use in uses)
    last = _date(max(use.last_used_unix_seconds for use in uses))
    yield (
        f"{count(sum(u.requests for u in uses), 'request')}, "
        f"{count(sum(u.prompt_tokens for u in uses), 'prompt token')} = "
        f"{sum(u.memory_tokens for u in uses):,} in memory + "
        f"{sum(u.restored_tokens for u in uses):,} restored + "
        f"{sum(u.recomputed_tokens for u in uses):,} recomputed"
    )
    yield Saved.of(uses).words()
    yield f"{'loaded' if loaded else 'not loaded now'}, last used {last}"
    if not loaded:  # the runner of one that is says it of itself
        counts = (one for use in uses for one in use.shortfalls)
        yield from (line.removeprefix("  ") for line in status_shortfalls.by_reason(counts))


def documents(answer: adm.StatResponse, known: Mapping[str, str]) -> list[dict[str, Any]]:
    """One document for each namespace. Numbers that were not measured are null."""
    return [
        {
            "namespace": use.namespace.hex(),
            "model": use.model,
            "name": known.get(use.model, ""),
            "engine": use.engine,
            "loaded": use.loaded,
            "since_unix_seconds": use.since_unix_seconds,
            "last_used_unix_seconds": use.last_used_unix_seconds,
            "requests": use.requests,
            "prompt_tokens": use.prompt_tokens,
            "memory_tokens": use.memory_tokens,
            "restored_tokens": use.restored_tokens,
            "recomputed_tokens": use.recomputed_tokens,
            "restore_seconds": use.restore_seconds,
            "measured_prefill_tokens_per_second": tokens_per_second(use),
            "saved_seconds": Saved.of([use]).seconds,
            "shortfalls": status_shortfalls.documents(use.shortfalls),
        }
        for use in answer.model_uses
    ]


def rechecked(again: adm.Rechecked, known: Mapping[str, str]) -> str:
    """What was computed again of a model and compared, in one line."""
    said = f"{count(again.blocks, 'block')} computed again and alike, {again.different:,} different"
    if again.different:
        said += " (WRONG ROWS, put aside: rechecks.json has their names; please report it)"
    return f"rechecked {shown(again.model, known)}: {said}, last {_date(again.last_unix_seconds)}"


def rechecks(answer: adm.StatResponse) -> list[dict[str, Any]]:
    return [
        {
            "model": one.model,
            "name": one.name,
            "blocks": one.blocks,
            "different": one.different,
            "last_unix_seconds": one.last_unix_seconds,
        }
        for one in answer.rechecked
    ]


def _date(unix_seconds: float) -> str:
    """Writes it in this machine's time zone. A time outside of any calendar is shown as it is."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_seconds))
    except (OverflowError, OSError, ValueError):
        return f"{unix_seconds:g} s"
