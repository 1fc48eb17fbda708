"""Every setting with its value in force and the origin of that value. Read-only."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ollama_tiering.config.load import _read_file, lookup
from ollama_tiering.config.places import config_file
from ollama_tiering.config.readable import document_of, readable
from ollama_tiering.config.settings import SETTINGS
from ollama_tiering.config.sizes import format_size
from ollama_tiering.errors import ConfigError

_SECRET = re.compile(r"salt|secret|token$|password|(^|_)key$")


@dataclass(frozen=True, slots=True)
class InForce:
    """`origin`: `default`, `environment variable NAME`, or `FILE:LINE: KEY`."""

    key: str
    value: Any
    shown: str
    origin: str
    variable: str | None  # that would set it


def in_force(path: Path | None = None) -> tuple[list[InForce], ConfigError | None]:
    """Returns values in the order of SETTINGS, and what is wrong with them, as `load` says it."""
    file = path or config_file()
    settings, broken = readable(path=path)
    if broken is None:
        document, text = _read_file(file, required=path is not None)
    else:
        document, text = document_of(file), _text_of(file)
    found = []
    for setting in SETTINGS:
        section, _, name = setting.key.partition(".")
        value = getattr(getattr(settings, section), setting.field)
        origin = lookup(setting, {}, document.get(section, {}), name, file, text)
        said = origin[2] if origin else "default"
        shown = _shown(setting.field, value) if _is_valid(origin) else _INVALID
        kept = value if shown not in (_HIDDEN, _INVALID) else None
        found.append(InForce(setting.key, kept, shown, said, setting.env))
    return found, broken


def _is_valid(origin: tuple[Any, Callable[[Any], Any], str, str] | None) -> bool:
    try:
        return origin is None or origin[1](origin[0]) is not ...
    except (ValueError, TypeError, OverflowError):
        return False


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_INVALID = "(not valid)"
_HIDDEN = "(set, not shown)"


def _shown(field: str, value: Any) -> str:
    if value is None or value == "":
        return "none"
    if _SECRET.search(field):
        return _HIDDEN
    if field.endswith("_bytes"):
        return format_size(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
