"""A parting as a person is told of it, and partings of one kind together."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.why.recipes import Recipe, fitting
from ollama_tiering.why.turns import Role, text
from ollama_tiering.why.verdicts import (
    LEAST_LOST,
    Judgement,
    PartingVerdict,
    Place,
    Sides,
    judge,
    place_of,
)
from ollama_tiering.why.vocabularies import Vocabularies

_PROMPT_TOKENS: Final = 4000  # of its beginning, for recipes
_VALUE_CHARACTERS: Final = 40
_SAME: Final = ("extra",)  # a field with parts of its own
_NOT_SETTINGS: Final = ("content", "salt", "block_tokens", "format")
_NOWHERE: Final = Place(Role.NONE, 0)


@dataclass(frozen=True, slots=True)
class Explained:
    """One parting. `lost_seconds` is None if no speed was measured yet."""

    model: str
    unix_seconds: float
    judgement: Judgement
    recipe: Recipe | None
    prompt_tokens: int
    at_token: int
    computed_tokens: int
    lost_tokens: int
    lost_seconds: float | None
    elsewhere: Mapping[str, tuple[str, str]]  # setting -> (stored, asked)
    evicted_unix_seconds: float | None = None

    @property
    def verdict(self) -> PartingVerdict:
        return self.judgement.verdict

    @property
    def is_fault(self) -> bool:
        """Whether there is something to know: another prompt is none, unless a recipe is for it."""
        if self.verdict is PartingVerdict.OTHER_PROMPT:
            return self.recipe is not None
        return self.lost_tokens >= LEAST_LOST


@dataclass(frozen=True, slots=True)
class Cause:
    """All partings of one model that have the same cause; the latest is shown for all."""

    latest: Explained
    times: int
    lost_tokens: int
    lost_seconds: float | None  # of those of which it is known


class Explainer:
    """`names` are those of models by file name."""

    def __init__(
        self, vocabularies: Vocabularies, recipes: Sequence[Recipe], names: Mapping[str, str]
    ) -> None:
        self._vocabularies = vocabularies
        self._recipes = recipes
        self._names = names

    def explained(self, message: adm.Parting) -> Explained:
        elsewhere = _differing(message)
        judgement, around, prompt = self._judged(message, elsewhere)
        rate = message.tokens_per_second
        recipe = fitting(self._recipes, judgement.verdict, judgement.place.role, around, prompt)
        return Explained(
            model=self._names.get(message.model) or message.name or message.model or "?",
            unix_seconds=message.unix_seconds,
            judgement=judgement,
            recipe=recipe,
            prompt_tokens=message.prompt_tokens,
            at_token=message.at_token,
            computed_tokens=message.computed_tokens,
            lost_tokens=message.lost_tokens,
            lost_seconds=message.lost_tokens / rate if rate > 0 else None,
            elsewhere=elsewhere,
            evicted_unix_seconds=message.evicted_unix_seconds or None,
        )

    def _judged(
        self, message: adm.Parting, elsewhere: Mapping[str, tuple[str, str]]
    ) -> tuple[Judgement, str, str]:
        """And the texts that recipes are compared with."""
        sides = _sides(message)
        vocabulary = self._vocabularies.of(message.model)
        readable = vocabulary if sides.before or sides.asked else None
        differs = message.kind == adm.Parting.KIND_DIFFERS
        if readable is None:
            verdict = PartingVerdict.NO_TEXT if differs else _verdict(message, elsewhere)
            return Judgement(verdict, _words(message, verdict), _NOWHERE), "", ""
        prompt = text(readable, list(islice([*sides.before, *sides.asked], _PROMPT_TOKENS)))
        if differs:
            judgement = judge(readable, sides)
            difference = judgement.difference
            around = f"{difference.prompt.whole}\n{difference.stored.whole}" if difference else ""
            return judgement, around, prompt
        verdict = _verdict(message, elsewhere)
        place = place_of(readable, sides)
        return Judgement(verdict, _words(message, verdict), place), "", prompt


def causes(explained: Iterable[Explained]) -> list[Cause]:
    """The one that cost most comes first. What is no fault is left out."""
    by_cause: dict[Any, list[Explained]] = {}
    for parting in explained:
        if parting.is_fault:
            place = parting.judgement.place
            cure = parting.recipe.cure if parting.recipe else ""
            by_cause.setdefault((parting.model, parting.verdict, place.role, cure), []).append(
                parting
            )
    all_causes = [_cause(same) for same in by_cause.values()]
    return sorted(all_causes, key=lambda cause: (-(cause.lost_seconds or 0.0), -cause.lost_tokens))


def _cause(same: Sequence[Explained]) -> Cause:
    known = [parting.lost_seconds for parting in same if parting.lost_seconds is not None]
    return Cause(
        latest=max(same, key=lambda parting: parting.unix_seconds),
        times=len(same),
        lost_tokens=sum(parting.lost_tokens for parting in same),
        lost_seconds=sum(known) if known else None,
    )


def _sides(message: adm.Parting) -> Sides:
    before, asked, stored = (
        array("i", side[: len(side) // 4 * 4])
        for side in (message.before, message.asked, message.stored)
    )
    same = message.lost_tokens > 0
    return Sides(
        before=before,
        asked=asked,
        stored=stored,
        skipped=(message.skipped_asked, message.skipped_stored) if same else None,
        lost_tokens=message.lost_tokens,
        prompt_tokens=message.prompt_tokens,
        whole=len(before) == message.at_token,
        num_ctx=message.num_ctx,
    )


def _verdict(message: adm.Parting, elsewhere: Mapping[str, tuple[str, str]]) -> PartingVerdict:
    if message.kind == adm.Parting.KIND_EVICTED:
        return PartingVerdict.EVICTED
    if message.kind == adm.Parting.KIND_DAMAGED:
        return PartingVerdict.DAMAGED
    if message.kind == adm.Parting.KIND_OTHER_SETTINGS:
        return (
            PartingVerdict.OTHER_BUILD if "engine" in elsewhere else PartingVerdict.OTHER_SETTINGS
        )
    return PartingVerdict.NO_TEXT


def _words(message: adm.Parting, verdict: PartingVerdict) -> str:
    if verdict is PartingVerdict.NO_TEXT and message.text_forbidden:
        return "a rule in config.toml forbids to show text of this model"
    return {
        PartingVerdict.EVICTED: "it was stored, and was evicted",
        PartingVerdict.DAMAGED: "it was stored, and its blocks are damaged or cannot be read",
        PartingVerdict.OTHER_BUILD: "it is stored for another build of the engine",
        PartingVerdict.OTHER_SETTINGS: "it is stored under other settings",
        PartingVerdict.NO_TEXT: "it differs from what is stored; its vocabulary was not found",
    }[verdict]


def _differing(message: adm.Parting) -> dict[str, tuple[str, str]]:
    """Settings that are not the same in the two namespaces."""
    if message.kind != adm.Parting.KIND_OTHER_SETTINGS:
        return {}
    stored, asked = _settings(message.elsewhere), _settings(message.namespace)
    return {
        name: (stored.get(name, "-")[:_VALUE_CHARACTERS], asked.get(name, "-")[:_VALUE_CHARACTERS])
        for name in sorted(stored.keys() | asked.keys())
        if stored.get(name) != asked.get(name) and name not in _NOT_SETTINGS
    }


def _settings(namespace: adm.DescribedNamespace) -> dict[str, str]:
    settings: dict[str, str] = {}
    for field in namespace.description.fields:
        if field.name in _SAME:
            parts = (part.partition("=") for part in field.value.split(";") if part)
            settings.update((name, value) for name, _, value in parts)
        else:
            settings[field.name] = field.value
    return settings
