"""Whether llama-server will be heard: the sidecar listens on the engine socket, and speaks the
version that our library speaks.
"""

from __future__ import annotations

from pathlib import Path

from ollama_tiering.client.engine_client import EngineRefused, ask_version
from ollama_tiering.config import SOCKET_PATH_MAX_BYTES
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import block_service
from ollama_tiering.launch.service_unit import stop_command
from ollama_tiering.protocol.engine.messages import EngineFailure

_ASK_SECONDS = 5.0


def why_unheard(path: Path | None, socket: Path) -> str:
    """Why the sidecar on `socket` would not welcome an engine on `path`, the engine socket (None:
    the settings give it no place); cause and cure in one line, empty where it would.
    """
    if path is None:
        return (
            f"the engine socket beside {socket} would have a name of more than "
            f"{SOCKET_PATH_MAX_BYTES} bytes (name a shorter place: sidecar.engine_socket, or "
            "--socket)"
        )
    try:
        ask_version(path, timeout_seconds=_ASK_SECONDS)
    except EngineRefused as error:
        if error.code is EngineFailure.VERSION:
            why = f"the sidecar on {socket} is of another version of ollama-tiering"
        else:
            why = f"the sidecar on {socket} refuses engines"
        return f"{why}: {error.message} ({_anew(socket)})"
    except (ServiceError, OSError) as error:
        why = f"the sidecar on {socket} does not answer on its engine socket {path}: {error}"
        return f"{why} ({_anew(socket)})"
    return ""


def _anew(socket: Path) -> str:
    pid = block_service.owner(socket)
    stop = (stop_command(pid) or f"kill {pid}") if pid else "end it"
    return f"start it anew: {stop}, then this again"
