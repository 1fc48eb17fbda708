"""Every setting with its value in force and the origin of that value. Read-only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ollama_tiering.config.load import _read_file, load, lookup
from ollama_tiering.config.places import config_file
from ollama_tiering.config.settings import SETTINGS
from ollama_tiering.config.sizes import format_size

_SECRET = re.compile(r"salt|secret|token$|password|(^|_)key$")


@dataclass(frozen=True, slots=True)
class InForce:
    """`origin`: `default`, `environment variable NAME`, or `FILE:LINE: KEY`."""

    key: str
    value: Any
    shown: str
    origin: str
    variable: str | None  # that would set it


def in_force(path: Path | None = None) -> list[InForce]:
    """In the order of SETTINGS. ConfigError for an invalid value, as in `load`."""
    file = path or config_file()
    settings = load(path=path)
    document, text = _read_file(file, required=path is not None)
    found = []
    for setting in SETTINGS:
        section, _, name = setting.key.partition(".")
        value = getattr(getattr(settings, section), setting.field)
        origin = lookup(setting, {}, document.get(section, {}), name, file, text)
        said = origin[2] if origin else "default"
        shown = _shown(setting.field, value)
        kept = value if shown != _HIDDEN else None
        found.append(InForce(setting.key, kept, shown, said, setting.env))
    return found


_HIDDEN = "(set, not shown)"


def _shown(field: str, value: Any) -> str:
    if value is None or value == "":
        return "none"
    if _SECRET.search(field):
        return _HIDDEN
    if field.endswith("_bytes"):
        return format_size(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
