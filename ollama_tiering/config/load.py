"""Settings: flag > environment > TOML file > default. Sizes are parsed once, here, into bytes.

The file is $XDG_CONFIG_HOME/ollama-tiering/config.toml; each entry of SETTINGS is one key of it. An
invalid value is a ConfigError that names where it came from (file and line, variable, or flag).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ollama_tiering.config.environment import ENV_CONFIG
from ollama_tiering.config.memory_limit import memory_limit
from ollama_tiering.config.model_rules import SECTION as MODELS
from ollama_tiering.config.model_rules import read_rules
from ollama_tiering.config.places import (
    config_file,
    default_local_dir,
    default_remote_key_file,
    default_socket_path,
)
from ollama_tiering.config.settings import (
    SETTINGS,
    Config,
    PatchConfig,
    ServerConfig,
    Setting,
    SidecarConfig,
)
from ollama_tiering.config.sizes import GIB
from ollama_tiering.errors import ConfigError, did_you_mean, plain

_SHOWN_CHARACTERS: Final = 200  # of what the file says, in a message: it may say anything


def load(overrides: Mapping[str, Any] | None = None, *, path: Path | None = None) -> Config:
    """All settings. `overrides` are flags by the setting's key (`sidecar.ram_budget`); None means
    that the flag was not given.
    """
    file = path or config_file()
    document, text = _read_file(file, required=path is not None)
    flags = {key: value for key, value in (overrides or {}).items() if value is not None}
    unknown = flags.keys() - {setting.key for setting in SETTINGS}
    if unknown:
        raise AssertionError(f"no such setting: {sorted(unknown)}")
    _refuse_unknown_keys(document, file, text)
    values: dict[str, dict[str, Any]] = {"sidecar": {}, "patch": {}, "server": {}}
    for setting in SETTINGS:
        section, _, name = setting.key.partition(".")
        found = lookup(setting, flags, document.get(section, {}), name, file, text)
        if found is not None:
            value, parse, origin, cure = found
            try:
                values[section][setting.field] = parse(value)
            except (ValueError, TypeError, OverflowError) as error:
                raise ConfigError(f"{origin}: {_shown(str(error))}", hint=cure) from None
    values["sidecar"]["model_rules"] = read_rules(document.get(MODELS, {}), file, text)
    sidecar = SidecarConfig(**(_sidecar_defaults() | values["sidecar"]))
    if sidecar.low_watermark >= sidecar.high_watermark:
        raise ConfigError(
            f"low watermark {sidecar.low_watermark:g} is not below high watermark "
            f"{sidecar.high_watermark:g}",
            hint=f"set sidecar.low_watermark and sidecar.high_watermark in {file}",
        )
    return Config(
        sidecar=sidecar,
        patch=PatchConfig(**values["patch"]),
        server=ServerConfig(**values["server"]),
    )


def load_sidecar(
    overrides: Mapping[str, Any] | None = None, *, path: Path | None = None
) -> SidecarConfig:
    return load(overrides, path=path).sidecar


def _sidecar_defaults() -> dict[str, Any]:
    return {
        "socket_path": default_socket_path(),
        "ram_dir": None,
        "ram_budget_bytes": min(8 * GIB, _total_ram_bytes() // 4),
        "local_dir": default_local_dir(),
        "local_budget_bytes": 32 * GIB,
        "remote_key_file": default_remote_key_file(),
    }


def _total_ram_bytes() -> int:
    return memory_limit().shared_bytes


_Found = tuple[Any, Callable[[Any], Any], str, str]


def lookup(
    setting: Setting,
    flags: Mapping[str, Any],
    section: Mapping[str, Any],
    name: str,
    file: Path,
    text: str,
) -> _Found | None:
    """The value in force, its parser, where it came from, and the hint for a bad value."""
    if setting.key in flags:
        flag = setting.flag or "--" + name.replace("_", "-")
        return (
            flags[setting.key],
            setting.env_parse
            if setting.env_parse and isinstance(flags[setting.key], str)
            else setting.parse,
            f"flag {flag}",
            f"run the command with another {flag}",
        )
    if setting.env and os.environ.get(setting.env):
        cure = f"unset {setting.env} or give it a valid value"
        parse = setting.env_parse or setting.parse
        return os.environ[setting.env], parse, f"environment variable {setting.env}", cure
    if name in section:
        place = f"{file}:{_line_of(text, setting.key)}"
        return section[name], setting.parse, f"{place}: {name}", "correct that line"
    return None


def _read_file(file: Path, *, required: bool) -> tuple[dict[str, Any], str]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        if required or os.environ.get(ENV_CONFIG):
            raise ConfigError(
                f"{file}: no such file", hint=f"unset {ENV_CONFIG} to use none"
            ) from None
        return {}, ""
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        raise ConfigError(f"{file}:{line}: not UTF-8 text", hint="save it as UTF-8") from None
    except OSError as error:
        hint = f"make it readable or set {ENV_CONFIG} to another file"
        raise ConfigError(f"{file}: {error.strerror}", hint=hint) from None
    try:
        return tomllib.loads(text), text
    except RecursionError:
        raise ConfigError(f"{file}:1: nested too deeply", hint="write it flat (TOML)") from None
    except ValueError as error:  # TOMLDecodeError, and a number of thousands of digits
        match = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(match[1]) if match else max(1, text.count("\n"))
        reason = re.sub(r" \(at .*\)", "", str(error))
        raise ConfigError(
            f"{file}:{line}: {_shown(reason)}", hint="correct that line (TOML)"
        ) from None


def _refuse_unknown_keys(document: Mapping[str, Any], file: Path, text: str) -> None:
    known = {setting.key for setting in SETTINGS}
    sections = {key.partition(".")[0] for key in known}
    for section, content in document.items():
        if section == MODELS:
            continue  # its rules have names of their own
        if section not in sections or not isinstance(content, dict):
            line = _line_of(text, section)
            raise ConfigError(
                f"{file}:{line}: no such section: {_shown(section)}"
                f"{did_you_mean(section, known_sections := sorted({*sections, MODELS}))}",
                hint=f"sections are {', '.join(f'[{name}]' for name in known_sections)}",
            )
        for name in content:
            key = f"{section}.{name}"
            if key not in known:
                keys = sorted(k.partition(".")[2] for k in known if k.startswith(f"{section}."))
                raise ConfigError(
                    f"{file}:{_line_of(text, key)}: no such key in [{section}]: {_shown(name)}"
                    f"{did_you_mean(name, keys)}",
                    hint=f"keys are {', '.join(keys)}",
                )


def _shown(text: str) -> str:
    """One line that a terminal can show."""
    return plain(text[:_SHOWN_CHARACTERS]) + "…" * (len(text) > _SHOWN_CHARACTERS)


def _line_of(text: str, key: str) -> int:
    """The line of `section.name` or `section` in a TOML text that was parsed; 1 if its spelling is
    unusual.
    """
    section, _, name = key.partition(".")
    current = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\s*\"?([\w-]+)\"?\s*\]", line)
        if header:
            current = header[1]
            if not name and current == section:
                return number
        elif (
            name and current == section and re.match(rf"\s*\"?{re.escape(name)}\"?\s*=", line)
        ) or re.match(rf"\s*{re.escape(key)}\s*=", line):
            return number
    return 1
