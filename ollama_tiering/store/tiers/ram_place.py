"""Chooses a directory for the RAM tier if the settings name none: in memory, where no other user
can be first.

It lies below $XDG_RUNTIME_DIR if that is a memory file system of ours with enough room. Otherwise
it lies in /dev/shm, where everybody may make directories, so its name cannot be guessed. The place
is recorded in the state directory. It is used again as long as it exists and is ours; otherwise
another one is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from ollama_tiering.config import APP_NAME, MIB, SidecarConfig, runtime_dir, state_dir
from ollama_tiering.errors import TieringError
from ollama_tiering.store.tiers.names import LOCK_NAME
from ollama_tiering.store.tiers.ram_record import read_record, write_record
from ollama_tiering.system.directories import secure_directory
from ollama_tiering.system.filesystems import in_memory
from ollama_tiering.system.locks import lock_file

log = logging.getLogger(__name__)

SHARED_MEMORY: Final = Path("/dev/shm")
LEAST_BYTES: Final = 128 * MIB  # a container's 64 MB hold nine blocks of a small model
_RUNTIME_SHARE: Final = 2  # it must be this many times the budget: the session uses it, too
_ATTEMPTS: Final = 8


def placed(config: SidecarConfig) -> SidecarConfig:
    """The settings with a directory for the RAM tier, which this makes. `ram_dir` stays None if no
    memory file system is large enough; the store then works without a RAM tier if it has another
    tier.
    """
    if config.ram_dir is not None or not config.ram_budget_bytes:
        return config
    directory = _choose(config.ram_budget_bytes)
    if directory is None and not config.local_budget_bytes:
        directory = state_dir() / "ram"
    return replace(config, ram_dir=directory)


def recorded() -> Path | None:
    """The place of the last start, if it exists and is ours. Changes nothing."""
    directory = read_record(_record_file())
    return (
        directory if directory is not None and _expected(directory) and is_ours(directory) else None
    )


def kept(now: SidecarConfig, wanted: SidecarConfig) -> SidecarConfig:
    """`wanted` with the place that is in use, if it names none itself."""
    return wanted if wanted.ram_dir is not None else replace(wanted, ram_dir=now.ram_dir)


def is_ours(directory: Path) -> bool:
    """Whether it is no link, belongs to this user, and is open to nobody else."""
    try:
        info = directory.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(info.st_mode)
        and info.st_uid == os.geteuid()
        and stat.S_IMODE(info.st_mode) == 0o700
    )


def _choose(budget_bytes: int) -> Path | None:
    record = _record_file()
    known = read_record(record)
    if known is not None and not _expected(known):
        log.warning("record of the RAM tier not used: path=%s names=%s", record, known)
        known = None
    directory = known
    if directory is not None and not is_ours(directory):
        if os.path.lexists(directory):
            log.warning("RAM tier moves: path=%s is not ours alone", directory)
        directory = None
    if directory is None:
        directory = _below_runtime(budget_bytes) or _in_shared_memory()
        if directory is not None:
            write_record(record, directory)
    for left in _left_behind(directory):
        _remove(left)
    return directory


def _below_runtime(budget_bytes: int) -> Path | None:
    runtime = runtime_dir()
    if runtime is None or not is_ours(runtime):
        return None
    try:
        info = os.statvfs(runtime)
        needed = _RUNTIME_SHARE * max(budget_bytes, LEAST_BYTES)
        if not in_memory(runtime) or info.f_blocks * info.f_frsize < needed:
            return None
        directory = runtime / APP_NAME / "ram"
        secure_directory(directory)
    except (OSError, TieringError) as error:
        log.warning("no RAM tier below %s: %s", runtime, error)
        return None
    return directory if is_ours(directory) else None


def _in_shared_memory() -> Path | None:
    if not SHARED_MEMORY.is_dir() or not in_memory(SHARED_MEMORY):
        return None
    for _ in range(_ATTEMPTS):
        directory = SHARED_MEMORY / f"{_prefix()}{secrets.token_hex(16)}"
        try:
            directory.mkdir(mode=0o700)
            directory.chmod(0o700)  # without the bit that a pod's fsGroup hands down
        except FileExistsError:
            continue
        except OSError as error:
            log.warning("no RAM tier in %s: %s", SHARED_MEMORY, error.strerror)
            return None
        return directory
    return None


def _prefix() -> str:
    """Distinguishes the directories of several installations of one user. It is no secret."""
    return f"{APP_NAME}-{hashlib.sha256(os.fsencode(state_dir())).hexdigest()[:8]}-"


def _expected(directory: Path) -> bool:
    """Whether it is a place that this module would choose: a record must not lead anywhere else."""
    runtime = runtime_dir()
    if runtime is not None and directory == runtime / APP_NAME / "ram":
        return True
    name = re.escape(_prefix()) + "[0-9a-f]{32}"
    return directory.parent == SHARED_MEMORY and re.fullmatch(name, directory.name) is not None


def _left_behind(chosen: Path | None) -> Iterator[Path]:
    """Directories of the version that had one name for each user, and of starts whose record was
    lost.
    """
    candidates = [SHARED_MEMORY / f"{APP_NAME}-{os.getuid()}", *SHARED_MEMORY.glob(f"{_prefix()}*")]
    yield from (path for path in candidates if path != chosen and is_ours(path))


def _remove(directory: Path) -> None:
    """Removes the directory unless a sidecar uses it."""
    try:
        lock = lock_file(directory / LOCK_NAME, str(directory))
    except (OSError, TieringError) as error:
        log.info("older RAM tier kept: path=%s reason=%s", directory, error)
        return
    try:
        with contextlib.suppress(OSError):
            shutil.rmtree(directory)
        log.info("older RAM tier removed: path=%s", directory)
    finally:
        os.close(lock)


def _record_file() -> Path:
    return state_dir() / "ram-dir"
