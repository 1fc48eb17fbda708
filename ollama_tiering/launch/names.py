"""Names of models from Ollama's manifests, in every directory in which a server of this user keeps
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ollama_tiering.launch.running_up import records
from ollama_tiering.sidecar.manifests import ManifestReader, default_models_dir, short_name


def models_dirs(first: Path | None = None) -> list[Path]:
    """`first`, then the directories that a `tiering up` uses or used last, then Ollama's own."""
    found = [first, *(Path(record.models) for record in records() if record.models)]
    return list(dict.fromkeys(path for path in (*found, default_models_dir()) if path))


def all_names(directories: list[Path]) -> dict[str, tuple[str, ...]]:
    """Blob file name -> its names. If several directories have the blob, the first one counts. A
    blob's name is the digest of its content, so it is the same model everywhere.
    """
    found: dict[str, tuple[str, ...]] = {}
    for directory in directories:
        for blob, names in ManifestReader(directory).read().of_blob.items():
            found.setdefault(blob, names)
    return found


def first_names(directories: list[Path]) -> dict[str, str]:
    """Blob file name -> `qwen3:0.6b`, the first of several names."""
    return {blob: names[0] for blob, names in all_names(directories).items()}


def models_called(text: str) -> tuple[str, ...]:
    """File names of the models with `text` in one of their names."""
    wanted = text.lower()
    found = all_names(models_dirs()) if wanted else {}
    return tuple(
        blob for blob, names in sorted(found.items()) if any(wanted in n.lower() for n in names)
    )


def shown(model: str, names: Mapping[str, str]) -> str:
    """What to call a model, given its file name or path. Without a name: the first digits of its
    digest.
    """
    file = Path(model).name
    return names.get(file) or short_name(file)
