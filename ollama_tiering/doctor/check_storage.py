"""The tiers' directories: the type of their file system, who may write to them, and whether budgets
fit.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil

from ollama_tiering.config import APP_NAME, SidecarConfig, format_size, memory_limit
from ollama_tiering.doctor.check import Check, fail, ok, warn
from ollama_tiering.store import VERSION_DIRECTORY, ram_place, stores_seen
from ollama_tiering.system.abilities import lacks
from ollama_tiering.system.deadline import DeadlineThreads
from ollama_tiering.system.directories import NotPrivate, UnusableDirectory, cure_of
from ollama_tiering.system.files import without_links
from ollama_tiering.system.filesystems import is_memory, is_network

_TO_BE_CHOSEN = ram_place.SHARED_MEMORY / f"{APP_NAME}-..."  # the first start makes a name up


def checks(settings: SidecarConfig) -> Iterator[Check]:
    ram_dir = settings.ram_dir or ram_place.recorded() or _TO_BE_CHOSEN
    places = (
        ("RAM tier", ram_dir, settings.ram_budget_bytes),
        ("local tier", settings.local_dir, settings.local_budget_bytes),
    )
    for name, directory, budget_bytes in places:
        if not budget_bytes:
            yield ok(name, "off (budget 0)")
            continue
        try:
            stores_seen.require_place(directory, volatile=name == "RAM tier")
        except UnusableDirectory as error:
            yield fail(f"{name} directory", error.message, error.hint or "")
            continue
        yield permissions(f"{name} directory", directory)
        yield from _abilities(f"{name} file system", directory)
        kind = file_system(directory)
        yield (_ram if name == "RAM tier" else _local)(name, directory, kind)
        yield _room(f"{name} budget", directory, budget_bytes)
    yield from _remote(settings)
    if settings.ram_budget_bytes:
        yield _memory(settings, ram_dir)
    yield permissions("socket directory", settings.socket_path.parent)


def _abilities(name: str, directory: Path) -> Iterator[Check]:
    """What a small file in the directory shows, if it is there; the file is removed at once."""
    try:
        found = lacks(directory) if directory.is_dir() else []
    except NotPrivate as error:
        yield fail(name, error.message, error.hint or "")
    except OSError as error:
        yield warn(name, f"nothing can be written to {directory}: {error.strerror}", cure_of(error))
    else:
        if found:
            cure = "nothing, if a power cut may cost what was stored lately; else another disk"
            yield warn(name, f"{directory}: {'; '.join(found)}", cure)


def _ram(name: str, directory: Path, kind: str) -> Check:
    if is_memory(kind):
        return ok(name, f"{directory} on {kind}")
    finding = f"{directory} is on {kind or 'an unknown file system'}, not in memory"
    return warn(name, finding, "set OLLAMA_KV_TIER_RAM to a directory on tmpfs, as in /dev/shm")


def _local(name: str, directory: Path, kind: str) -> Check:
    finding = f"{directory} on {kind or 'an unknown file system'}"
    cure = "set OLLAMA_KV_TIER_LOCAL to a directory on a local disk"
    if is_network(kind):
        return warn(name, f"{finding}: over a network it may be slower than computing", cure)
    if is_memory(kind):
        return warn(name, f"{finding}: in memory, gone after a reboot", cure)
    return ok(name, finding)


def _remote(settings: SidecarConfig) -> Iterator[Check]:
    """Runs in a thread, so that a mount that hangs does not hang the doctor."""
    directory, name = settings.remote_dir, "remote tier"
    if directory is None or not settings.remote_budget_bytes:
        yield ok(name, "off (set OLLAMA_KV_TIER_REMOTE to a directory on NFS)")
        return
    seconds = settings.remote_deadline_seconds
    threads = DeadlineThreads("doctor", limit=1, deadline_seconds=seconds)
    try:
        yield from threads.call(lambda: list(_remote_checks(name, directory, settings)))
    except TimeoutError:
        cure = "check the mount; until then its blocks are misses, and nothing else waits"
        yield warn(name, f"{directory} does not answer within {seconds:g} s", cure)
    except OSError as error:
        yield warn(name, f"{directory}: {error.strerror or error}", "check the mount")
    finally:
        threads.close()


def _remote_checks(name: str, directory: Path, settings: SidecarConfig) -> Iterator[Check]:
    if not directory.is_dir():
        cure = f"mount its file system; the first time: mkdir -m 700 {directory}"
        yield fail(f"{name} directory", f"{directory} is not there", cure)
        return
    yield permissions(f"{name} directory", directory)
    yield from _abilities(f"{name} file system", directory)
    kind = file_system(directory)
    finding = f"{directory} on {kind or 'an unknown file system'}"
    if is_memory(kind):
        yield warn(name, f"{finding}: in memory, gone after a reboot", "name a directory on NFS")
    else:
        yield ok(name, finding)
    usage = shutil.disk_usage(_existing(directory))
    budget = settings.remote_budget_bytes
    finding = f"budget {format_size(budget)}, the file system has {format_size(usage.total)}"
    if usage.total < budget:
        yield warn(f"{name} budget", finding, "lower OLLAMA_KV_TIER_REMOTE_GB")
    else:
        yield ok(f"{name} budget", finding)


def _room(name: str, directory: Path, budget_bytes: int) -> Check:
    """What the tier holds already counts as room."""
    usage = shutil.disk_usage(_existing(directory))
    room = usage.free + stored_bytes(directory)
    finding = (
        f"budget {format_size(budget_bytes)}, room for {format_size(room)} of "
        f"{format_size(usage.total)}"
    )
    if room < budget_bytes:
        which = "RAM" if name.startswith("RAM") else "LOCAL"
        return warn(name, finding, f"free some space, or lower OLLAMA_KV_TIER_{which}_GB")
    return ok(name, finding)


def _memory(settings: SidecarConfig, ram_dir: Path) -> Check:
    memory, limit = psutil.virtual_memory(), memory_limit()
    finding = f"{format_size(memory.available)} of {format_size(memory.total)} available"
    if limit.group:
        finding += f", {format_size(limit.limit_bytes)} for this group ({limit.group})"
        if settings.ram_budget_bytes > limit.shared_bytes // 2:
            cure = f"the RAM tier gets {format_size(limit.shared_bytes // 2)}: give the group more"
            return warn("memory", finding, f"{cure}, or set OLLAMA_KV_TIER_RAM_GB")
    if memory.available + stored_bytes(ram_dir) < settings.ram_budget_bytes:
        budget = format_size(settings.ram_budget_bytes)
        return warn(
            "memory", f"{finding}, the RAM tier may take {budget}", "lower OLLAMA_KV_TIER_RAM_GB"
        )
    return ok("memory", finding)


def permissions(name: str, directory: Path) -> Check:
    """The sidecar refuses a directory that others can write to, so the doctor says it first."""
    try:
        info = directory.lstat()
    except FileNotFoundError:
        above = _existing(directory)
        if os.access(above, os.W_OK | os.X_OK):
            return ok(name, f"{directory} is not there yet; it will be made")
        return fail(name, f"{directory} cannot be made in {above}", "name a directory of your own")
    if stat.S_ISLNK(info.st_mode):
        where = f"name the directory itself: {without_links(directory)}"
        return fail(name, f"{directory} is a link", where)
    if not stat.S_ISDIR(info.st_mode):
        return fail(name, f"{directory} is no directory", "remove it, or name another")
    if info.st_uid != os.geteuid():
        return fail(
            name, f"{directory} belongs to user {info.st_uid}", "name a directory of your own"
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.filemode(info.st_mode)
        return fail(name, f"{directory} is writable by others ({mode})", f"chmod 700 {directory}")
    return ok(name, f"only you can write to {directory}")


def file_system(directory: Path) -> str:
    """The type of the mounted file system that has this path; empty if it is not known."""
    place = without_links(_existing(directory))
    mounts = [(Path(mount.mountpoint), mount.fstype) for mount in psutil.disk_partitions(all=True)]
    holding = [(m, kind) for m, kind in mounts if place == m or m in place.parents]
    # of two mounts at one place the later one is seen
    return (
        max(enumerate(holding), key=lambda e: (len(e[1][0].parts), e[0]))[1][1] if holding else ""
    )


def stored_bytes(directory: Path) -> int:
    """Physical bytes of the blocks in the directory."""
    total = 0
    for folder, _, files in os.walk(directory / VERSION_DIRECTORY):  # all else is not ours
        for name in files:
            try:
                total += (Path(folder) / name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue  # evicted meanwhile
    return total


def _existing(directory: Path) -> Path:
    while not directory.exists():
        directory = directory.parent
    return directory
