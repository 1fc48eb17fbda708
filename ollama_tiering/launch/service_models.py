"""The models of the service that Ollama's installer makes: they belong to a user of its own, and a
server that somebody else starts looks elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ollama_tiering import config

SERVICE_MODELS: Final = Path("/usr/share/ollama/.ollama/models")


def left_behind(models: Path, service: Path = SERVICE_MODELS) -> str:
    """What to say where `models`, which nobody named, has no model and the service has some; else
    empty.
    """
    if os.environ.get(config.ENV_MODELS) or models == service or _has_some(models):
        return ""
    how = f"tiering up --models {service}"
    if _has_some(service):
        pull = "" if os.access(service, os.W_OK) else "; to pull others, this user must write there"
        return f"{models} has no models; to serve those of Ollama's service: {how}{pull}"
    if service.parents[1].is_dir() and not os.access(service, os.R_OK | os.X_OK):
        return f"{models} has no models, and this user may not read those of the service: {service}"
    return ""


def _has_some(models: Path) -> bool:
    return any(files for _, _, files in os.walk(models / "manifests"))
