"""`tiering up` in the background: the same command in a session of its own, shown until it is
ready, and ended by its process id.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import psutil

from ollama_tiering import config
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import running_up
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.ollama import STOP_SECONDS
from ollama_tiering.launch.process import (
    POLL_SECONDS,
    Child,
    package_path,
    rotate,
    start,
)
from ollama_tiering.launch.running_up import RunningUp
from ollama_tiering.launch.service_unit import stop_command

_DRAIN_SECONDS: Final = 60.0  # of a sidecar, whose disk may be slow
_LAST_WORDS_SECONDS: Final = 0.5  # it says that it is ready right after it has noted it
_CLOCKS_DIFFER_SECONDS: Final = 2.0  # the kernel says in whole seconds when it was booted


def begin(words: Sequence[str], address: Address, show: Callable[[str], None]) -> int:
    """Starts `tiering up` with these options, shows what it says until it is ready, and lets it
    run. Returns 0, or its exit code if it ends before.
    """
    log = rotate(config.state_dir() / "logs" / f"up-{address.port}.log")
    command = (sys.executable, "-m", "ollama_tiering", "up", *words)
    child = start("`tiering up`", *command, log=log, env=package_path())
    shown = 0
    try:
        while (code := child.exit_code) is None and not _is_ready(child, address):
            shown = _show_more(child, shown, show)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        child.stop(signal.SIGINT, seconds=STOP_SECONDS)
        raise
    time.sleep(0 if code is not None else _LAST_WORDS_SECONDS)
    _show_more(child, shown, show)
    return abs(code or 0)


def _is_ready(child: Child, address: Address) -> bool:
    record = running_up.running(address)
    return record is not None and record.pid == child.pid and record.ready


def _show_more(child: Child, shown: int, show: Callable[[str], None]) -> int:
    """Whole lines that came since; returns how many bytes were shown."""
    with contextlib.suppress(OSError), child.log.open("rb") as log:
        log.seek(shown)
        whole = log.read().rpartition(b"\n")[0]
        if whole:
            show(whole.decode(errors="replace"))
            return shown + len(whole) + 1
    return shown


def stop(address: Address) -> RunningUp | None:
    """Ends the `tiering up` at this address as Ctrl-C would, and waits for its end; None if there
    is none. ServiceError if it is a service, another user's, or does not end in time.
    """
    record = running_up.running(address)
    if record is None:
        return None
    if command := stop_command(record.pid):
        raise ServiceError(
            f"process {record.pid} at {record.url} is a service", hint=f"{command} stops it"
        )
    try:
        process = psutil.Process(record.pid)
        if process.create_time() > record.started + _CLOCKS_DIFFER_SECONDS:
            return None  # its number is somebody else's by now
        os.kill(record.pid, signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS + _DRAIN_SECONDS
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > until:
                raise ServiceError(
                    f"process {record.pid} has not ended yet: it still stores what its models hold",
                    hint="`tiering logs` shows what it does; a second `tiering stop` insists",
                )
            time.sleep(POLL_SECONDS)
    except (ProcessLookupError, psutil.NoSuchProcess):
        pass
    except (PermissionError, psutil.AccessDenied):
        raise ServiceError(
            f"process {record.pid} at {record.url} is another user's", hint="stop it as that user"
        ) from None
    return record
