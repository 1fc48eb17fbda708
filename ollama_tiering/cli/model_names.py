"""Names people know models by: which models are there, and what to call one in a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ollama_tiering.errors import UsageError
from ollama_tiering.sidecar.manifests import default_models_dir, is_blob, model_names

if TYPE_CHECKING:
    from ollama_tiering.store.describe import Fields

__all__ = ["default_models_dir", "label", "model_names", "present_models"]

_DIGEST_DIGITS: Final = 12


def present_models(models: Path) -> frozenset[str]:
    """File names of the blobs that are there. UsageError when that is no models directory.

    None at all would make every model look gone: a disk that is not mounted, the wrong directory.
    """
    blobs = models / "blobs"
    if not blobs.is_dir():
        raise UsageError(f"{models} is no models directory: it has no blobs/")
    found = frozenset(path.name for path in blobs.iterdir() if is_blob(path.name))
    if not found:
        raise UsageError(f"{blobs} holds no model", hint="to remove everything: tiering rm --all")
    return found


def label(description: Fields, namespace: bytes, names: Mapping[str, str]) -> str:
    """What to call the model of a namespace in a table."""
    model = dict(description).get("model", "")
    if not model:
        return f"? {namespace.hex()[:_DIGEST_DIGITS]}"
    if model in names:
        return names[model]
    if is_blob(model):
        return model.removeprefix("sha256-")[:_DIGEST_DIGITS]
    return model
