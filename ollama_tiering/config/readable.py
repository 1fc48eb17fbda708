"""What can be read of settings that are not all valid: for the commands that show what runs, which
are needed most when something is wrong.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ollama_tiering.config.load import _sidecar_defaults, load, lookup
from ollama_tiering.config.model_rules import SECTION as MODELS
from ollama_tiering.config.model_rules import read_rules
from ollama_tiering.config.places import config_file
from ollama_tiering.config.settings import (
    SETTINGS,
    Config,
    PatchConfig,
    ServerConfig,
    SidecarConfig,
)
from ollama_tiering.errors import ConfigError

_MOST_LINES: Final = 100  # that are left out
_PLACE: Final = re.compile(r"\(at line (\d+), column \d+\)")


def readable(
    overrides: Mapping[str, Any] | None = None, *, path: Path | None = None
) -> tuple[Config, ConfigError | None]:
    """The settings, and what is wrong with them, as `load` says it. What is not valid has its
    default; a flag that is not valid is the ConfigError itself.
    """
    try:
        return load(overrides, path=path), None
    except ConfigError as error:
        broken = error
    file = path or config_file()
    document = document_of(file)
    flags = {key: value for key, value in (overrides or {}).items() if value is not None}
    values: dict[str, dict[str, Any]] = {"sidecar": {}, "patch": {}, "server": {}}
    for setting in SETTINGS:
        section, _, name = setting.key.partition(".")
        if found := lookup(setting, flags, document.get(section, {}), name, file, ""):
            try:
                values[section][setting.field] = found[1](found[0])
            except (ValueError, TypeError, OverflowError):
                if setting.key in flags:
                    raise broken from None
    with contextlib.suppress(ConfigError):
        values["sidecar"]["model_rules"] = read_rules(document.get(MODELS, {}), file, "")
    sidecar = SidecarConfig(**(_sidecar_defaults() | values["sidecar"]))
    return Config(sidecar, PatchConfig(**values["patch"]), ServerConfig(**values["server"])), broken


def document_of(file: Path) -> dict[str, Any]:
    """The tables of the file, without the lines that are no TOML; none if it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    document, _ = without_bad_lines(text)
    return {name: one for name, one in (document or {}).items() if isinstance(one, dict)}


def without_bad_lines(text: str) -> tuple[dict[str, Any] | None, list[int | None]]:
    """What is left, None if nothing can be read, and the numbers from 0 of the lines that were left
    out; None for the last line, where the parser names none.
    """
    lines, left_out = text.splitlines(), list[int | None]()
    for _ in range(_MOST_LINES):
        try:
            return tomllib.loads("\n".join(lines)), left_out
        except RecursionError:
            break
        except ValueError as error:
            place = _PLACE.search(str(error))
            number = int(place[1]) if place else len(lines)
            if not 0 < number <= len(lines):
                break
            left_out.append(number - 1 if place else None)
            lines[number - 1] = ""
    return None, left_out
