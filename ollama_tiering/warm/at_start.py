"""Prompts that are computed whenever the server starts.

Each is a file in the state directory. It is a person's text, so nobody else may read it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ollama_tiering import config
from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.errors import ConfigError, TieringError, UsageError
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.names import models_called
from ollama_tiering.launch.ollama import Api
from ollama_tiering.launch.unharmed import unharmed
from ollama_tiering.system.directories import secure_directory
from ollama_tiering.system.durable_file import bounded_content, replace_file
from ollama_tiering.warm.compute import warm
from ollama_tiering.warm.prompt import WarmPrompt, checked

Say = Callable[[str], None]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_BYTES: Final = 16 << 20


def directory() -> Path:
    return config.state_dir() / "warm"


def keep(name: str, prompt: WarmPrompt) -> None:
    """UsageError for a name that is none; ServiceError if it cannot be written."""
    path = _path(name)
    secure_directory(path.parent)
    replace_file(path, json.dumps(dict(prompt.body), ensure_ascii=False, indent=1))


def forget(name: str) -> bool:
    """Whether there was one."""
    path = _path(name)
    known = path.exists()
    path.unlink(missing_ok=True)
    return known


def names() -> list[str]:
    found = directory()
    files = found.glob("*.json") if found.is_dir() else ()
    return sorted(path.stem for path in files)


def kept() -> Iterator[tuple[str, WarmPrompt | TieringError]]:
    """All of them; for one that cannot be read, why."""
    for name in names():
        try:
            yield name, _read(_path(name))
        except TieringError as error:
            yield name, error


def _read(path: Path) -> WarmPrompt:
    try:
        body = json.loads(bounded_content(path, _MOST_BYTES))
    except (OSError, ValueError) as error:
        cure = f"make it again, or: tiering warm --forget {path.stem}"
        raise ConfigError(f"{path} cannot be read: {error}", hint=cure) from None
    if not isinstance(body, dict):
        raise ConfigError(f"{path} is no request", hint=f"tiering warm --forget {path.stem}")
    return checked(body)


def _path(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a prompt", hint="use letters, digits, . _ and -")
    return directory() / f"{name}.json"


def begin(address: Address, socket: Path, say: Say, warn: Say) -> threading.Thread | None:
    """Computes all prompts that are kept, one after the other, beside whatever else goes on; None
    if there are none. What goes wrong is a line, and ends nothing.
    """
    if not names():
        return None

    def work() -> None:
        for name, prompt in kept():
            with unharmed(warn, f"the prompt {name} is not computed"):
                if isinstance(prompt, TieringError):
                    raise prompt
                with SidecarAdministration(socket) as admin:
                    admin.stat()  # without a sidecar nothing is computed for nothing
                    warmed = warm(Api(address), admin, prompt, models_called(prompt.model))
                say(f"{name}: {warmed.sentence}")

    thread = threading.Thread(target=work, name="warm", daemon=True)
    thread.start()
    return thread
