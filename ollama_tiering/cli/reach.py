"""Whether a sidecar can be reached on a socket, and why not."""

from __future__ import annotations

import socket as sockets
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ServiceError

_CONNECT_SECONDS: Final = 2.0


def listens(path: Path) -> bool:
    """ServiceError where this user may not ask."""
    try:
        if not path.is_socket():
            return False
        with sockets.socket(sockets.AF_UNIX) as probe:
            probe.settimeout(_CONNECT_SECONDS)
            probe.connect(str(path))
    except PermissionError:
        raise ServiceError(
            f"{path}: this user may not use the sidecar there",
            hint=f"run this as the user who runs it (sudo stat {path}), or name another --socket",
        ) from None
    except OSError:
        return False
    return True
