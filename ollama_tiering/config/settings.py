"""Every setting: its type, its default, its key in the file, its variable, and how its value is
parsed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ollama_tiering.config.environment import (
    ENV_CPU_ATTENTION,
    ENV_ENGINE_SOCKET,
    ENV_LOCAL,
    ENV_LOCAL_ENCODING,
    ENV_LOCAL_GB,
    ENV_MIN_TOKENS,
    ENV_MODELS,
    ENV_RAM_DIR,
    ENV_RAM_GB,
    ENV_REMOTE,
    ENV_REMOTE_GB,
    ENV_SOCKET,
    ENV_SOURCE,
)
from ollama_tiering.config.model_rules import MAX_TTL_DAYS, ModelRule
from ollama_tiering.config.sizes import GIB, parse_size

DEFAULT_SOURCE = "https://github.com/ollama/ollama.git"
DEFAULT_TAG = "v0.16.3"
SOCKET_PATH_MAX_BYTES = 107  # sun_path of Linux, less the terminating zero
_NETWORK_ADDRESS = re.compile(
    r"(?!unix:)[a-z][a-z0-9+.-]*:/.*|(tcp|dns|ipv4|ipv6|vsock|unix-abstract):.*|[^/]*:\d+",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class SidecarConfig:
    """Settings of the sidecar and its store. Budgets are physical bytes and are never exceeded."""

    socket_path: Path
    ram_dir: Path | None  # None: the sidecar chooses (sidecar.ram_place)
    ram_budget_bytes: int
    local_dir: Path
    local_budget_bytes: int
    engine_socket: Path | None = None  # None: beside the first socket
    remote_dir: Path | None = None  # shared with other sidecars, as on NFS; None: no remote tier
    remote_budget_bytes: int = 256 * GIB  # of the whole directory, whoever wrote it
    remote_deadline_seconds: float = 5.0  # of every operation on it
    remote_rescan_seconds: float = 120.0  # how often it is looked at for what others did
    remote_mac: bool = True  # its blocks carry a MAC, and those without one are not used
    remote_key_file: Path | None = None  # the secret of the MACs; places.py says where
    high_watermark: float = 0.95  # share of a budget at which demotion starts
    low_watermark: float = 0.85  # ... and at which it stops
    lease_seconds: float = 60.0  # a lease keeps its blocks so long, unless it is renewed
    reserve_seconds: float = 120.0  # a Put reservation not committed by then is released
    pin_share: float = 0.5  # of the local tier's budget: more may not be pinned
    adopt: bool = True  # another build's blocks are read once its rows are known to be the same
    min_tokens: int = 64  # shorter prefixes are not written down
    admission: str = "eager"  # eager | second-touch | pressure: when a block is written down
    daily_write_bytes: int = 50 * 10**9  # local tier, per day; 0 means no limit
    min_free_percent: float = 10.0  # of the local tier's file system, left to others
    write_queue_bytes: int = 4 * GIB  # may wait to be written down, at most half of the RAM tier
    write_queue_seconds: float = 60.0  # ... at the measured speed; 0 means no limit
    tail_seconds: float = 10.0  # how long a tail block waits for a longer one
    ttl_days: float = 30.0  # a block is dropped after this time without use; 0: never
    model_rules: tuple[ModelRule, ...] = ()  # [models."name"]: store, ttl_days, budget
    models_dir: Path | None = None  # Ollama's, for names of models; None: its default place
    local_encoding: str = "none"  # none | zstd: how blocks are written to the local tier
    remote_encoding: str = "none"  # ... and to the remote one
    zstd_level: int = 1
    metrics_port: int = 0  # Prometheus on loopback; 0 means off
    log_level: str = "info"
    log_format: str = "text"  # text | json


@dataclass(frozen=True, slots=True)
class PatchConfig:
    """Defaults of `tiering fetch` and `tiering patch`."""

    source: str = DEFAULT_SOURCE
    tag: str = DEFAULT_TAG
    cpu: str = "native"  # native (this processor) | variants (every one)
    cuda: str = "auto"  # auto | on | off | stock | stock=PLACE


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What `tiering up` and the service set for the patched server, which reads only its
    environment.
    """

    cpu_attention: str = "exact"  # exact | stock: how attention on the CPU is computed
    recheck_hours: float = 0.0  # how often a stored conversation is computed again; 0: never
    idle_minutes: float = 2.0  # ... once nobody has asked for anything for so long


@dataclass(frozen=True, slots=True)
class Config:
    sidecar: SidecarConfig
    patch: PatchConfig
    server: ServerConfig


def _gigabytes(value: Any) -> int:
    """Parses variables named *_GB, and flags named *-gb: a bare number counts GiB, a number with a
    unit is taken as written.
    """
    try:
        size_bytes = int(float(value) * GIB)
    except (ValueError, OverflowError):
        return parse_size(str(value))
    return parse_size(size_bytes)


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError(f"{value!r} is not a path")
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:  # a home directory of nobody
        raise ValueError(f"{value!r}: {error}") from None


def _socket(value: Any) -> Path:
    """A path. TCP is refused, because anybody on the network could then call and read what is
    stored.
    """
    if isinstance(value, str | Path):
        text = str(value)
        if _NETWORK_ADDRESS.fullmatch(text):
            raise ValueError(
                f"{text!r} is not the path of a Unix socket: there is no TLS, so TCP is refused"
            )
        value = text.removeprefix("unix://").removeprefix("unix:")
    path = _path(value)
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


def _cuda(value: Any) -> str:
    """One of the words; a place after `stock=` is made absolute."""
    word, equals, place = str(value).partition("=")
    if equals and word == "stock" and place:
        return f"stock={_path(place)}"
    if value not in ("auto", "on", "off", "stock"):
        raise ValueError(f"{value!r} is not one of auto, on, off, stock, stock=PLACE")
    return str(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a name")
    return value


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the file, its variable, and how its value is parsed."""

    key: str  # section.key in the file
    field: str  # field of the section's dataclass
    parse: Callable[[Any], Any]
    env: str | None = None
    env_parse: Callable[[Any], Any] | None = None
    flag: str | None = None  # of `tiering sidecar`, if it is not the key's name


SETTINGS = (
    Setting("sidecar.socket", "socket_path", _socket, ENV_SOCKET),
    Setting("sidecar.engine_socket", "engine_socket", _socket, ENV_ENGINE_SOCKET),
    Setting("sidecar.ram_dir", "ram_dir", _path, ENV_RAM_DIR),
    Setting(
        "sidecar.ram_budget", "ram_budget_bytes", parse_size, ENV_RAM_GB, _gigabytes, "--ram-gb"
    ),
    Setting("sidecar.local_dir", "local_dir", _path, ENV_LOCAL, flag="--local"),
    Setting(
        "sidecar.local_budget",
        "local_budget_bytes",
        parse_size,
        ENV_LOCAL_GB,
        _gigabytes,
        "--local-gb",
    ),
    Setting("sidecar.remote_dir", "remote_dir", _path, ENV_REMOTE, flag="--remote"),
    Setting(
        "sidecar.remote_budget",
        "remote_budget_bytes",
        parse_size,
        ENV_REMOTE_GB,
        _gigabytes,
        "--remote-gb",
    ),
    Setting("sidecar.remote_deadline_seconds", "remote_deadline_seconds", _number(0.1, 300)),
    # Well below what the others wait before they take a sidecar for dead.
    Setting("sidecar.remote_rescan_seconds", "remote_rescan_seconds", _number(1, 240)),
    Setting("sidecar.remote_mac", "remote_mac", _switch),
    Setting("sidecar.remote_key_file", "remote_key_file", _path),
    Setting("sidecar.high_watermark", "high_watermark", _number(0.1, 1.0)),
    Setting("sidecar.low_watermark", "low_watermark", _number(0.0, 1.0)),
    Setting("sidecar.lease_seconds", "lease_seconds", _number(1, 86400)),
    Setting("sidecar.reserve_seconds", "reserve_seconds", _number(1, 86400)),
    Setting("sidecar.pin_share", "pin_share", _number(0.0, 1.0)),
    Setting("sidecar.adopt", "adopt", _switch),
    Setting("sidecar.min_tokens", "min_tokens", _count(1, 1 << 30), ENV_MIN_TOKENS),
    Setting("sidecar.admission", "admission", _choice("eager", "second-touch", "pressure")),
    Setting("sidecar.daily_write", "daily_write_bytes", parse_size),
    Setting("sidecar.min_free_percent", "min_free_percent", _number(0, 90)),
    Setting("sidecar.write_queue", "write_queue_bytes", parse_size),
    Setting("sidecar.write_queue_seconds", "write_queue_seconds", _number(0, 86400)),
    Setting("sidecar.tail_seconds", "tail_seconds", _number(0, 3600)),
    Setting("sidecar.ttl_days", "ttl_days", _number(0, MAX_TTL_DAYS)),
    Setting("sidecar.models_dir", "models_dir", _path, ENV_MODELS),
    Setting(
        "sidecar.local_encoding", "local_encoding", _choice("none", "zstd"), ENV_LOCAL_ENCODING
    ),
    Setting("sidecar.remote_encoding", "remote_encoding", _choice("none", "zstd")),
    Setting("sidecar.zstd_level", "zstd_level", _count(1, 19)),
    Setting("sidecar.metrics_port", "metrics_port", _count(0, 65535)),
    Setting("sidecar.log_level", "log_level", _choice("debug", "info", "warning", "error")),
    Setting("sidecar.log_format", "log_format", _choice("text", "json")),
    Setting("server.cpu_attention", "cpu_attention", _choice("exact", "stock"), ENV_CPU_ATTENTION),
    Setting("server.recheck_hours", "recheck_hours", _number(0, 8760)),
    Setting("server.idle_minutes", "idle_minutes", _number(0.1, 1440)),
    Setting("patch.source", "source", _text, ENV_SOURCE),
    Setting("patch.tag", "tag", _text),
    Setting("patch.cpu", "cpu", _choice("variants", "native")),
    Setting("patch.cuda", "cuda", _cuda),
)
