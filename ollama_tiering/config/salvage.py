"""What of the settings says which Ollama is meant, where they cannot all be read.

A typo costs the cache, never the choice: what cannot be read for sure is named, and nobody guesses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ollama_tiering.config.environment import ENV_CONFIG
from ollama_tiering.config.load import lookup
from ollama_tiering.config.model_rules import SECTION as MODELS
from ollama_tiering.config.places import config_file
from ollama_tiering.config.readable import without_bad_lines
from ollama_tiering.config.settings import SETTINGS, PatchConfig
from ollama_tiering.errors import ConfigError

_SECTIONS: Final = frozenset(setting.key.partition(".")[0] for setting in SETTINGS)
_NAMES: Final = frozenset(
    setting.key.partition(".")[2] for setting in SETTINGS if setting.key.startswith("patch.")
)


@dataclass(frozen=True, slots=True)
class Asked:
    """`patch` as flags, variables and the readable part of the file have it; `unknown`: names of
    its fields of which nobody can say what they are meant to be.
    """

    patch: PatchConfig
    unknown: frozenset[str]


def asked(flags: Mapping[str, Any]) -> Asked:
    """`flags` by the setting's key, as for `load`. ConfigError for a bad one of them."""
    document, unknown, text = _readable()
    values: dict[str, Any] = {}
    given = {key: value for key, value in flags.items() if value is not None}
    for setting in (one for one in SETTINGS if one.key.startswith("patch.")):
        name = setting.key.partition(".")[2]
        found = lookup(setting, given, document.get("patch", {}), name, config_file(), text)
        if found is None:
            continue
        value, parse, origin, cure = found
        try:
            values[setting.field] = parse(value)
        except (ValueError, TypeError, OverflowError) as error:
            if setting.key in given:
                raise ConfigError(f"{origin}: {error}", hint=cure) from None
            unknown |= {name}
        else:
            if setting.key in given:
                unknown -= {name}
    return Asked(PatchConfig(**values), unknown)


def _readable() -> tuple[dict[str, Any], frozenset[str], str]:
    """The file without the lines that cannot be read, and what may have stood there."""
    try:
        text = config_file().read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        named = os.environ.get(ENV_CONFIG)  # and is not there
        return {}, _NAMES if named else frozenset(), ""
    except OSError:
        return {}, _NAMES, ""
    document, left_out = without_bad_lines(text)
    if document is None:
        return {}, _NAMES, text
    lines, unknown = text.splitlines(), _misplaced(document)
    for number in left_out:
        unknown |= _NAMES if number is None else _may_have_said(lines, number)
    return _known(document), unknown, text


def _may_have_said(lines: list[str], number: int) -> frozenset[str]:
    """Names of settings that a line may have been for. One that begins a section, or lies in ours,
    may be anything.
    """
    line = lines[number]
    before = [one.strip() for one in lines[:number] if one.strip().startswith("[")]
    begins = "[" in line.partition("=")[0]
    if begins or "patch" in line or (before and "patch" in before[-1]):
        return _NAMES
    return _NAMES & frozenset(re.findall(r"[\w-]+", line.partition("=")[0]))


def _misplaced(document: Mapping[str, Any]) -> frozenset[str]:
    """Names of settings that an unknown section or key may have been meant for."""
    unknown: frozenset[str] = frozenset()
    for section, content in document.items():
        if section == MODELS:
            continue
        if section not in _SECTIONS or not isinstance(content, dict):
            return _NAMES
        keys = {setting.key for setting in SETTINGS}
        for name in (name for name in content if f"{section}.{name}" not in keys):
            unknown |= _NAMES if section == "patch" else _NAMES & {name}
    return unknown


def _known(document: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in document.items() if isinstance(part, dict)}
