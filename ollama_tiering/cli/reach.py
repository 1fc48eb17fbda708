"""Whether a sidecar can be reached on a socket, and why not."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ollama_tiering.config import MemoryLimit, limit_of
from ollama_tiering.errors import ServiceError


def listens(path: Path) -> bool:
    """ServiceError where this user may not ask, or another user's process listens (Stranger)."""
    from ollama_tiering.client.channel import service_uid  # slow to import
    from ollama_tiering.system.listener import OwnListener

    try:
        if not path.is_socket():
            return False
        OwnListener(path, also=service_uid(path)).close()
    except PermissionError:
        raise ServiceError(
            f"{path}: this user may not use the sidecar there",
            hint=f"run this as the user who runs it (sudo stat {path}), or name another --socket",
        ) from None
    except OSError:
        return False
    return True


def require_there(path: Path) -> None:
    """ServiceError if there is no sidecar's socket."""
    if not listens(path) and not path.is_socket():
        raise ServiceError(
            f"no sidecar runs: {path} is not there",
            hint="start Ollama with it: tiering up (or the service alone: tiering sidecar)",
        )


def memory_of(path: Path) -> MemoryLimit | None:
    """What the memory groups of the sidecar on this socket may have; None if they have no limit, or
    it cannot be seen from here.
    """
    from ollama_tiering.client.channel import service_uid
    from ollama_tiering.system.listener import OwnListener

    with contextlib.suppress(OSError, ServiceError):
        with OwnListener(path, also=service_uid(path)) as listener:
            limit = limit_of(listener.pid)
        return limit if limit.group else None
    return None
