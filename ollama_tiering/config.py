"""Settings: flag > environment > TOML file > default. Sizes are parsed once, here, into bytes.

The file is $XDG_CONFIG_HOME/ollama-tiering/config.toml; each line of SETTINGS is one key of it. An
invalid value is a ConfigError that names where it came from (file and line, variable, or flag).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from ollama_tiering.errors import ConfigError

APP_NAME = "ollama-tiering"

ENV_CACHE = "OLLAMA_TIERING_CACHE"
ENV_CONFIG = "OLLAMA_TIERING_CONFIG"
ENV_SOURCE = "OLLAMA_TIERING_SOURCE"
ENV_ENABLE = "OLLAMA_KV_TIERING"
ENV_SOCKET = "OLLAMA_KV_TIER_SOCKET"
ENV_RAM_DIR = "OLLAMA_KV_TIER_RAM"
ENV_RAM_GB = "OLLAMA_KV_TIER_RAM_GB"
ENV_LOCAL = "OLLAMA_KV_TIER_LOCAL"
ENV_LOCAL_GB = "OLLAMA_KV_TIER_LOCAL_GB"
ENV_MIN_TOKENS = "OLLAMA_KV_TIER_MIN_TOKENS"
ENV_SNAPSHOT = "OLLAMA_KV_TIER_SNAPSHOT"  # read by the patched server only
ENV_GATE = "OLLAMA_KV_TIER_GATE"  # read by the patched server only

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DEFAULT_SOURCE = "https://github.com/ollama/ollama.git"
DEFAULT_TAG = "v0.16.3"
SOCKET_PATH_MAX_BYTES = 107  # sun_path of Linux, less the terminating zero

_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {
    f"{unit}b": factor for unit, factor in list(_UNITS.items()) if len(unit) == 1 and unit != "b"
}
_UNITS |= {"kib": KIB, "mib": MIB, "gib": GIB, "tib": GIB << 10}
_UNITS |= {"ki": KIB, "mi": MIB, "gi": GIB, "ti": GIB << 10}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_size(value: str | int) -> int:
    """Bytes of `8GiB`, `500MB`, `1.5g` or a plain number. ValueError says what is wrong."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size")
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a size cannot be negative")
        return value
    match = _SIZE.fullmatch(value)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{value!r} is not a size; write it like 8GiB, 500MB or 1048576")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_size(size_bytes: int) -> str:
    """The same in words a person reads: `1.5 GiB`."""
    for unit, factor in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} B"


# --- where things are -----------------------------------------------------------------------------


def cache_dir() -> Path:
    """Source cache, build trees, tools, Go caches. All of it can be made again."""
    override = os.environ.get(ENV_CACHE)
    return Path(override).expanduser().absolute() if override else _user_dir("cache")


def state_dir() -> Path:
    """Logs and what a running service leaves behind."""
    return _user_dir("state")


def data_dir() -> Path:
    """The block store and made models."""
    return _user_dir("data")


def run_dir() -> Path:
    """Sockets and pid files; gone after a reboot where the system offers such a place."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / APP_NAME if runtime else state_dir() / "run"


def config_file() -> Path:
    override = os.environ.get(ENV_CONFIG)
    return Path(override).expanduser() if override else _user_dir("config") / "config.toml"


def default_socket_path() -> Path:
    return run_dir() / "sidecar.sock"


def default_ram_dir() -> Path:
    """tmpfs on Linux; elsewhere a directory that behaves the same, only slower."""
    shm = Path("/dev/shm")
    return shm / f"{APP_NAME}-{os.getuid()}" if shm.is_dir() else state_dir() / "ram"


def default_local_dir() -> Path:
    return data_dir() / "blocks"


def _user_dir(kind: str) -> Path:
    return Path(str(getattr(platformdirs, f"user_{kind}_dir")(APP_NAME)))


# --- the typed settings ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SidecarConfig:
    """What the sidecar and its store are told. Budgets are physical bytes and hold."""

    socket_path: Path
    ram_dir: Path
    ram_budget_bytes: int
    local_dir: Path
    local_budget_bytes: int
    high_watermark: float = 0.95  # share of a budget at which demotion starts
    low_watermark: float = 0.85  # ... and at which it stops
    lease_seconds: float = 60.0  # a Get lease pins its blocks no longer than this
    reserve_seconds: float = 120.0  # a Put reservation not committed by then is released
    min_tokens: int = 64  # shorter prefixes are not stored
    admission: str = "eager"  # eager | second-touch: when a block may go to the local tier
    daily_write_bytes: int = 0  # local tier, per day; 0 means no limit
    metrics_port: int = 0  # Prometheus on loopback; 0 means off
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class PatchConfig:
    """Defaults of `tiering fetch` and `tiering patch`."""

    source: str = DEFAULT_SOURCE
    tag: str = DEFAULT_TAG
    cpu: str = "variants"  # variants | native
    cuda: str = "auto"  # auto | on | off


@dataclass(frozen=True, slots=True)
class Config:
    sidecar: SidecarConfig
    patch: PatchConfig


def _gigabytes(value: Any) -> int:
    """Variables named *_GB: a bare number counts GiB, a number with a unit is taken as written."""
    text = str(value).strip()
    return int(float(text) * GIB) if re.fullmatch(r"\d+(\.\d+)?", text) else parse_size(text)


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError(f"{value!r} is not a path")
    return Path(value).expanduser().absolute()


def _socket(value: Any) -> Path:
    path = _path(str(value).removeprefix("unix://").removeprefix("unix:") if value else value)
    if len(os.fsencode(path)) > SOCKET_PATH_MAX_BYTES:
        raise ValueError(f"a socket path may have {SOCKET_PATH_MAX_BYTES} bytes, {path} is longer")
    return path


def _number(low: float, high: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        number = float(value)
        if isinstance(value, bool) or not low <= number <= high:
            raise ValueError(f"{value!r} is not between {low:g} and {high:g}")
        return number

    return parse


def _count(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool | float) or not low <= int(value) <= high:
            raise ValueError(f"{value!r} is not a whole number between {low} and {high}")
        return int(value)

    return parse


def _choice(*names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in names:
            raise ValueError(f"{value!r} is not one of {', '.join(names)}")
        return str(value)

    return parse


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a name")
    return value


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the file, its variable, and how its value is read."""

    key: str  # section.key in the file
    field: str  # field of the section's dataclass
    parse: Callable[[Any], Any]
    env: str | None = None
    env_parse: Callable[[Any], Any] | None = None


SETTINGS = (
    Setting("sidecar.socket", "socket_path", _socket, ENV_SOCKET),
    Setting("sidecar.ram_dir", "ram_dir", _path, ENV_RAM_DIR),
    Setting("sidecar.ram_budget", "ram_budget_bytes", parse_size, ENV_RAM_GB, _gigabytes),
    Setting("sidecar.local_dir", "local_dir", _path, ENV_LOCAL),
    Setting("sidecar.local_budget", "local_budget_bytes", parse_size, ENV_LOCAL_GB, _gigabytes),
    Setting("sidecar.high_watermark", "high_watermark", _number(0.1, 1.0)),
    Setting("sidecar.low_watermark", "low_watermark", _number(0.0, 1.0)),
    Setting("sidecar.lease_seconds", "lease_seconds", _number(1, 86400)),
    Setting("sidecar.reserve_seconds", "reserve_seconds", _number(1, 86400)),
    Setting("sidecar.min_tokens", "min_tokens", _count(1, 1 << 30), ENV_MIN_TOKENS),
    Setting("sidecar.admission", "admission", _choice("eager", "second-touch")),
    Setting("sidecar.daily_write", "daily_write_bytes", parse_size),
    Setting("sidecar.metrics_port", "metrics_port", _count(0, 65535)),
    Setting("sidecar.log_level", "log_level", _choice("debug", "info", "warning", "error")),
    Setting("patch.source", "source", _text, ENV_SOURCE),
    Setting("patch.tag", "tag", _text),
    Setting("patch.cpu", "cpu", _choice("variants", "native")),
    Setting("patch.cuda", "cuda", _choice("auto", "on", "off")),
)


def load(overrides: Mapping[str, Any] | None = None, *, path: Path | None = None) -> Config:
    """All settings. `overrides` are flags by their file key (`sidecar.ram_budget`); None means not
    given.
    """
    file = path or config_file()
    document, text = _read_file(file, required=path is not None)
    flags = {key: value for key, value in (overrides or {}).items() if value is not None}
    unknown = flags.keys() - {setting.key for setting in SETTINGS}
    if unknown:
        raise AssertionError(f"no such setting: {sorted(unknown)}")
    _refuse_unknown_keys(document, file, text)
    values: dict[str, dict[str, Any]] = {"sidecar": {}, "patch": {}}
    for setting in SETTINGS:
        section, _, name = setting.key.partition(".")
        found = _lookup(setting, flags, document.get(section, {}), name, file, text)
        if found is not None:
            value, parse, origin, cure = found
            try:
                values[section][setting.field] = parse(value)
            except (ValueError, TypeError, OverflowError) as error:
                raise ConfigError(f"{origin}: {error}", hint=cure) from None
    sidecar = SidecarConfig(**(_sidecar_defaults() | values["sidecar"]))
    if sidecar.low_watermark >= sidecar.high_watermark:
        raise ConfigError(
            f"low watermark {sidecar.low_watermark:g} is not below high watermark "
            f"{sidecar.high_watermark:g}",
            hint=f"set sidecar.low_watermark and sidecar.high_watermark in {file}",
        )
    return Config(sidecar=sidecar, patch=PatchConfig(**values["patch"]))


def load_sidecar(
    overrides: Mapping[str, Any] | None = None, *, path: Path | None = None
) -> SidecarConfig:
    return load(overrides, path=path).sidecar


def _sidecar_defaults() -> dict[str, Any]:
    return {
        "socket_path": default_socket_path(),
        "ram_dir": default_ram_dir(),
        "ram_budget_bytes": min(8 * GIB, _total_ram_bytes() // 4),
        "local_dir": default_local_dir(),
        "local_budget_bytes": 32 * GIB,
    }


def _total_ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_Found = tuple[Any, Callable[[Any], Any], str, str]


def _lookup(
    setting: Setting,
    flags: Mapping[str, Any],
    section: Mapping[str, Any],
    name: str,
    file: Path,
    text: str,
) -> _Found | None:
    """The value that counts, its parser, where it came from, and what to do when it is wrong."""
    if setting.key in flags:
        flag = "--" + name.replace("_", "-")
        return (
            flags[setting.key],
            setting.parse,
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
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(match[1]) if match else max(1, text.count("\n"))
        reason = re.sub(r" \(at .*\)", "", str(error))
        raise ConfigError(f"{file}:{line}: {reason}", hint="correct that line (TOML)") from None


def _refuse_unknown_keys(document: Mapping[str, Any], file: Path, text: str) -> None:
    known = {setting.key for setting in SETTINGS}
    sections = {key.partition(".")[0] for key in known}
    for section, content in document.items():
        if section not in sections or not isinstance(content, dict):
            line = _line_of(text, section)
            raise ConfigError(
                f"{file}:{line}: no such section: {section}",
                hint=f"sections are {', '.join(f'[{name}]' for name in sorted(sections))}",
            )
        for name in content:
            key = f"{section}.{name}"
            if key not in known:
                keys = sorted(k.partition(".")[2] for k in known if k.startswith(f"{section}."))
                raise ConfigError(
                    f"{file}:{_line_of(text, key)}: no such key in [{section}]: {name}",
                    hint=f"keys are {', '.join(keys)}",
                )


def _line_of(text: str, key: str) -> int:
    """Line of `section.name` or `section` in a TOML text that has parsed; 1 where the spelling is
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
