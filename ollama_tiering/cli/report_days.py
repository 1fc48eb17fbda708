"""Sums of days for `tiering report`: of one day, of one model, of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from ollama_tiering.launch.names import shown

if TYPE_CHECKING:
    from ollama_tiering.protocol.pb import administration_pb2 as adm

OTHERS: Final = "other models"


@dataclass(frozen=True, slots=True)
class Reported:
    """Of one model in one day; sums have an empty date, or model, or both."""

    date: str = ""
    model: str = ""  # as people know it
    requests: int = 0
    prompt_tokens: int = 0
    memory_tokens: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    restore_seconds: float = 0.0
    saved_seconds: float = 0.0
    written_bytes: int = 0
    partings: int = 0


_NUMBERS: Final = tuple(field.name for field in fields(Reported))[2:]


def reported(days: Iterable[adm.DayOfModel], model: str = "") -> list[Reported]:
    """Of models with `model` in their name, in the order of days."""
    found = []
    for day in days:
        name = shown(day.model, {day.model: day.name} if day.name else {}) or OTHERS
        if model.casefold() in name.casefold():
            numbers = {number: getattr(day, number) for number in _NUMBERS}
            found.append(Reported(day.date, name, **numbers))
    return found


def of_days(found: Iterable[Reported]) -> dict[str, Reported]:
    """By date, in its order."""
    parts: dict[str, list[Reported]] = {}
    for one in found:
        parts.setdefault(one.date, []).append(one)
    return {date: sum_of(parts[date]) for date in sorted(parts)}


def of_models(found: Iterable[Reported]) -> dict[str, Reported]:
    """By name, what saved most first."""
    parts: dict[str, list[Reported]] = {}
    for one in found:
        parts.setdefault(one.model, []).append(one)
    sums = {name: sum_of(of_one) for name, of_one in parts.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1].saved_seconds))


def sum_of(found: Iterable[Reported]) -> Reported:
    parts = list(found)
    return Reported(**{name: sum(getattr(one, name) for one in parts) for name in _NUMBERS})
