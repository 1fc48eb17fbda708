"""Names of models for people: which models exist, and what to call one in a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ollama_tiering.errors import UsageError
from ollama_tiering.launch.names import first_names, models_dirs, shown
from ollama_tiering.sidecar.manifests import is_blob

if TYPE_CHECKING:
    from ollama_tiering.store import Fields

_DIGEST_DIGITS: Final = 12
_FEW: Final = 3  # named in a sentence


def present_models(models: Path) -> frozenset[str]:
    """File names of the blobs that exist. UsageError if that is no models directory, or has no
    model: then every model would look gone, for instance because a disk is not mounted.
    """
    blobs = models / "blobs"
    if not blobs.is_dir():
        raise UsageError(
            f"{models} is no models directory: it has no blobs/",
            hint="mount its disk, or name Ollama's models directory",
        )
    found = frozenset(path.name for path in blobs.iterdir() if is_blob(path.name))
    if not found:
        raise UsageError(f"{blobs} holds no model", hint="to remove everything: tiering rm --all")
    return found


def known_names() -> dict[str, str]:
    """Blob file name -> name, from every models directory that is known on this machine."""
    return first_names(models_dirs())


def label(description: Fields, namespace: bytes, names: Mapping[str, str]) -> str:
    """What to call the model of a namespace in a table."""
    model = dict(description).get("model", "")
    return shown(model, names) if model else f"? {namespace.hex()[:_DIGEST_DIGITS]}"


def of_models(labels: Iterable[str]) -> str:
    """` of qwen3:0.6b and gemma3:1b` for a sentence; empty for none."""
    names = sorted(set(labels))
    if not names:
        return ""
    few, more = names[:_FEW], len(names) - _FEW
    last = f"{more} more model{'s' if more > 1 else ''}" if more > 0 else few.pop()
    return f" of {', '.join(few)} and {last}" if few else f" of {last}"
