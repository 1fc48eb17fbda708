"""Rules for models by name: `[models."qwen3:*"]` with `store`, `ttl_days`, `budget`, `text`. Pure.

Of the rules that match a name and set a value, the most specific one decides: the one with the most
characters that are not wildcards. If two rules are equally specific, or a model has several names,
the strictest value decides: store = false, the shortest time, the smallest budget, text = false.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from ollama_tiering.config.sizes import parse_size
from ollama_tiering.errors import ConfigError, did_you_mean, plain

SECTION: Final = "models"
EVERY: Final = "*"
MAX_TTL_DAYS: Final = 36500
_KEYS: Final = ("store", "ttl_days", "budget", "text")
_SWITCHES: Final = ("store", "text")
_PATTERN: Final = re.compile(r"[\w./:*?!\[\]-]{1,255}", re.ASCII)
_WILDCARD: Final = re.compile(r"\[!?[^\]]+\]|[*?]")
_PREFIXES: Final = ("registry.ollama.ai/", "library/")  # left out of the names people know
_SHOWN_CHARACTERS: Final = 100


@dataclass(frozen=True, slots=True)
class ModelRule:
    """`pattern` is as in the file. A field is None if the rule does not set it."""

    pattern: str
    store: bool | None = None
    ttl_days: float | None = None  # 0: never
    budget_bytes: int | None = None
    text: bool | None = None

    @property
    def glob(self) -> str:
        """The pattern that names are compared with. Without a tag it matches any tag."""
        text = self.pattern.lower()
        for prefix in _PREFIXES:
            text = text.removeprefix(prefix)
        tagged = ":" in text.rpartition("/")[2]
        return text if tagged or text == EVERY or text.startswith("sha256-") else f"{text}:*"

    @property
    def specific(self) -> int:
        return len(_WILDCARD.sub("", self.glob))

    def matches(self, name: str) -> bool:
        lower = name.lower()
        return fnmatchcase(lower, self.glob) or fnmatchcase(f"{lower}:", self.glob)

    def __str__(self) -> str:
        return f'[{SECTION}."{self.pattern}"]'


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the rules say of one model. `by` is the rule that decided about `store`, if there is
    one. `text`: whether text of its conversations is shown.
    """

    store: bool = True
    ttl_days: float = 0.0
    budget_bytes: int = 0  # 0: none of its own
    by: ModelRule | None = None
    text: bool = True


def ruling(names: Sequence[str], rules: Iterable[ModelRule], ttl_days: float) -> Ruling:
    """The ruling for a model with these names. Without a name only `"*"` applies. `ttl_days` counts
    if no rule sets another time.
    """
    rules = list(rules)
    of_names = [[rule for rule in rules if rule.matches(name)] for name in names]
    chosen = [_of_one(found, ttl_days) for found in of_names or [_every(rules)]]
    forbids = [of_name for of_name in chosen if not of_name.store]
    decided = [of_name for of_name in forbids or chosen if of_name.by is not None]
    return Ruling(
        store=not forbids,
        ttl_days=min((of_name.ttl_days for of_name in chosen if of_name.ttl_days), default=0.0),
        budget_bytes=min(
            (of_name.budget_bytes for of_name in chosen if of_name.budget_bytes), default=0
        ),
        by=decided[0].by if decided else None,
        text=all(of_name.text for of_name in chosen),
    )


def _every(rules: Iterable[ModelRule]) -> list[ModelRule]:
    return [rule for rule in rules if rule.glob == EVERY]


def _of_one(rules: Sequence[ModelRule], ttl_days: float) -> Ruling:
    stores = _most_specific(rules, "store")
    by = min(stores, key=lambda rule: bool(rule.store), default=None)
    ages = [rule.ttl_days for rule in _most_specific(rules, "ttl_days")]
    sizes = [rule.budget_bytes for rule in _most_specific(rules, "budget_bytes")]
    return Ruling(
        store=by is None or bool(by.store),
        ttl_days=min((age for age in ages if age), default=0.0) if ages else ttl_days,
        budget_bytes=min((size for size in sizes if size), default=0),
        by=by,
        text=all(rule.text for rule in _most_specific(rules, "text")),
    )


def _most_specific(rules: Sequence[ModelRule], field: str) -> list[ModelRule]:
    """The most specific rules that set the field; several only if they are equally specific."""
    setting_it = [rule for rule in rules if getattr(rule, field) is not None]
    most = max((rule.specific for rule in setting_it), default=0)
    return [rule for rule in setting_it if rule.specific == most]


def read_rules(section: Any, file: Path, text: str) -> tuple[ModelRule, ...]:
    """The rules of the `models` table of a settings file. ConfigError names the line."""
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{file}:{_line(text, (SECTION,))}: models is no table of rules",
            hint=f'write [{SECTION}."llama3.2"] and its keys below it',
        )
    return tuple(_read(pattern, content, file, text) for pattern, content in section.items())


def _read(pattern: str, content: Any, file: Path, text: str) -> ModelRule:
    place = f"{file}:{_line(text, (SECTION, pattern))}"
    header = f'[{SECTION}."{_shown(pattern)}"]'
    if not _PATTERN.fullmatch(pattern):
        raise ConfigError(
            f"{place}: no model has a name like {_shown(repr(pattern))}",
            hint="write a name as `ollama ls` shows it; * and ? stand for what may vary",
        )
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{place}: {_shown(pattern)} in [{SECTION}] is no rule",
            hint=f'give each rule its own header; a rule for every model is [{SECTION}."{EVERY}"]',
        )
    values: dict[str, Any] = {}
    for key, value in content.items():
        where = f"{file}:{_line(text, (SECTION, pattern), key)}"
        if key not in _KEYS:
            dotted = isinstance(value, Mapping)
            raise ConfigError(
                f"{where}: no such key in {header}: {_shown(key)}{did_you_mean(key, _KEYS)}",
                hint=f'a name with dots is quoted: [{SECTION}."{_shown(f"{pattern}.{key}")}"]'
                if dotted
                else f"keys are {', '.join(sorted(_KEYS))}",
            )
        try:
            values["budget_bytes" if key == "budget" else key] = _value(key, value)
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(
                f"{where}: {key}: {_shown(str(error))}", hint="correct that line"
            ) from None
    return ModelRule(pattern, **values)


def _value(key: str, value: Any) -> bool | float | int:
    if key in _SWITCHES:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")
        return value
    if key == "ttl_days":
        days = float(value)
        if isinstance(value, bool) or not 0 <= days <= MAX_TTL_DAYS:
            raise ValueError(f"{value!r} is not between 0 and {MAX_TTL_DAYS}")
        return days
    size_bytes = parse_size(value)
    if not size_bytes:
        raise ValueError("0 could mean all or nothing: leave it out, or write store = false")
    return size_bytes


def _line(text: str, path: tuple[str, ...], key: str = "") -> int:
    """The line of a table's header, or of a key below it; 1 if the spelling is unusual."""
    at = 0
    name = key or path[-1]
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("["):
            inside = _opens(line, path)
            at = number if inside else 0
            if inside and not key:
                return number
        elif (at or not key) and re.match(rf"\s*[\"']?{re.escape(name)}[\"']?\s*[=.]", line):
            return number
    return 1


def _opens(line: str, path: tuple[str, ...]) -> bool:
    """Whether the header opens that table or one below it."""
    try:
        table: Any = tomllib.loads(line)
    except (ValueError, RecursionError):
        return False
    for name in path:
        if not isinstance(table, Mapping) or name not in table:
            return False
        table = table[name]
    return True


def _shown(text: str) -> str:
    return plain(text[:_SHOWN_CHARACTERS]) + "…" * (len(text) > _SHOWN_CHARACTERS)
