"""The directories of this program: XDG on Linux, the usual places elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from ollama_tiering.config.environment import ENV_CACHE, ENV_CONFIG
from ollama_tiering.errors import ConfigError

APP_NAME = "ollama-tiering"


def cache_dir() -> Path:
    """Source cache, build trees, tools, Go caches. All of it can be made again."""
    override = os.environ.get(ENV_CACHE)
    return expanded(override).absolute() if override else _user_dir("cache")


def state_dir() -> Path:
    """Logs, and what a running service keeps."""
    return _user_dir("state")


def data_dir() -> Path:
    """The block store, and models that were made."""
    return _user_dir("data")


def run_dir() -> Path:
    """Sockets and pid files; emptied by a reboot if the system has such a place."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / APP_NAME if runtime else state_dir() / "run"


def config_file() -> Path:
    override = os.environ.get(ENV_CONFIG)
    return expanded(override) if override else _user_dir("config") / "config.toml"


def default_socket_path() -> Path:
    return run_dir() / "sidecar.sock"


def default_local_dir() -> Path:
    return data_dir() / "blocks"


def default_remote_key_file() -> Path:
    """The secret that machines with one remote directory share."""
    return state_dir() / "remote.key"


def home() -> Path:
    return expanded("~")


def expanded(path: str | Path) -> Path:
    """With `~` and `~user` replaced. ConfigError where the system knows no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        if user != "~":
            raise ConfigError(
                f"{path}: this machine has no user {user[1:]}", hint="write that path from / on"
            ) from None
        raise ConfigError(
            f"no home directory: HOME is not set, and the system knows no user {os.getuid()}",
            hint="set HOME to a directory of that user: HOME=/DIRECTORY tiering ...",
        ) from None


def _user_dir(kind: str) -> Path:
    try:
        place = str(getattr(platformdirs, f"user_{kind}_dir")(APP_NAME))
    except RuntimeError:  # no home; an older version names a directory `~`
        place = f"~/{APP_NAME}"
    return expanded(place)
