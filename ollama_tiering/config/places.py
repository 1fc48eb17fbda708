"""The directories of this program: XDG on Linux, the usual places elsewhere."""

from __future__ import annotations

import os
import pwd
import socket
import stat
from pathlib import Path
from typing import Final

import platformdirs

from ollama_tiering.config.environment import ENV_CACHE, ENV_CONFIG
from ollama_tiering.errors import ConfigError

APP_NAME = "ollama-tiering"
_CONNECT_SECONDS: Final = 2.0
_LOGIND: Final = Path("/run/user")
_LINGERING: Final = Path("/var/lib/systemd/linger")  # a file for each user that does


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
    runtime = runtime_dir()
    return runtime / APP_NAME if runtime and _outlives_sessions(runtime) else state_dir() / "run"


def runtime_dir() -> Path | None:
    """$XDG_RUNTIME_DIR, if it is a directory of this user that nobody else may write to. `sudo -E`
    and `su` hand on another user's: whoever listens there is a stranger.
    """
    named = os.environ.get("XDG_RUNTIME_DIR") or ""
    try:
        info = Path(named).stat()
    except OSError:
        return None
    own = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()
    closed = not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return Path(named) if Path(named).is_absolute() and own and closed else None


def _outlives_sessions(runtime: Path) -> bool:
    """logind removes its directory at the end of the user's last session, under a `tiering up` that
    goes on in tmux; unless the user lingers.
    """
    if runtime != _LOGIND / str(os.geteuid()):
        return True
    try:
        return (_LINGERING / pwd.getpwuid(os.geteuid()).pw_name).exists()
    except (KeyError, OSError):
        return False


def config_file() -> Path:
    override = os.environ.get(ENV_CONFIG)
    return expanded(override) if override else _user_dir("config") / "config.toml"


def default_socket_path() -> Path:
    """Lies in the run directory; or where a sidecar listens that has the other place that it can
    be, as a user's service has, or one that was started before the user began to linger.
    """
    runtime = runtime_dir()
    folders = [run_dir(), state_dir() / "run", *([runtime / APP_NAME] if runtime else [])]
    first, *others = dict.fromkeys(folder / "sidecar.sock" for folder in folders)
    if not any(map(is_socket, others)):  # mostly: then nobody has to be asked
        return first
    return next((path for path in (first, *others) if _is_listened_on(path)), first)


def is_socket(path: Path) -> bool:
    """False also where this user may not look, or a disk does not answer."""
    try:
        return path.is_socket()
    except OSError:
        return False


def _is_listened_on(path: Path) -> bool:
    if not is_socket(path):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_SECONDS)  # a process that is suspended
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


def default_local_dir() -> Path:
    return data_dir() / "blocks"


def default_remote_key_file() -> Path:
    """The secret that machines with one remote directory share."""
    return state_dir() / "remote.key"


def home() -> Path:
    return expanded("~")


def expanded(path: str | Path) -> Path:
    """Replaces `~` and `~user`. ConfigError if the system knows no such home."""
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
