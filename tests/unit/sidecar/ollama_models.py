"""A made-up models directory of Ollama's: manifests that name blobs."""

from __future__ import annotations

import json
from pathlib import Path


def blob(number: int) -> str:
    return f"sha256-{number:064x}"


def name_model(models: Path, name: str, model: str) -> Path:
    """`name` is `[[host/]namespace/]model:tag`, as Ollama lays it out."""
    path, _, tag = name.rpartition(":")
    parts = path.split("/")
    parts = [*("registry.ollama.ai", "library")[: 3 - len(parts)], *parts]
    file = models.joinpath("manifests", *parts, tag)
    file.parent.mkdir(parents=True, exist_ok=True)
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": model.replace("-", ":", 1),
    }
    other = {"mediaType": "application/vnd.ollama.image.params", "digest": "sha256:" + "9" * 64}
    file.write_text(json.dumps({"layers": [other, layer]}))
    return file
