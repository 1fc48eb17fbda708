"""Names people know models by, from Ollama's own directory; the store knows file names only.

Reads manifests below `models/manifests`, changes nothing; what it cannot read has no name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ollama_tiering.errors import UsageError

if TYPE_CHECKING:
    from ollama_tiering.store.describe import Fields

_MODEL_TYPE: Final = "application/vnd.ollama.image.model"
_DEFAULTS: Final = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
_MALFORMED: Final = (ValueError, TypeError, AttributeError, RecursionError)
_BLOB: Final = re.compile(r"sha256-[0-9a-f]{64}")
_MAX_MANIFESTS: Final = 10_000
_MAX_MANIFEST_BYTES: Final = 1 << 20
_DIGEST_DIGITS: Final = 12


def default_models_dir() -> Path | None:
    """Where this user's Ollama keeps its models; None when no such place is there."""
    for name in (os.environ.get("OLLAMA_MODELS"), *_DEFAULTS):
        with contextlib.suppress(OSError):
            if name and (Path(name).expanduser() / "manifests").is_dir():
                return Path(name).expanduser()
    return None


def model_names(models: Path | None) -> dict[str, str]:
    """Blob file name -> `qwen3:0.6b`."""
    names: dict[str, str] = {}
    for path, document in _manifests(models) if models else ():
        for layer in document.get("layers", []):
            if layer.get("mediaType") == _MODEL_TYPE:
                blob = str(layer.get("digest", "")).replace(":", "-")
                names.setdefault(blob, _name(path.relative_to(models / "manifests")))  # type: ignore[operator]
    return names


def present_models(models: Path) -> frozenset[str]:
    """File names of the blobs that are there. UsageError when that is no models directory.

    None at all would make every model look gone: a disk that is not mounted, the wrong directory.
    """
    blobs = models / "blobs"
    if not blobs.is_dir():
        raise UsageError(f"{models} is no models directory: it has no blobs/")
    found = frozenset(path.name for path in blobs.iterdir() if _BLOB.fullmatch(path.name))
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
    if _BLOB.fullmatch(model):
        return model.removeprefix("sha256-")[:_DIGEST_DIGITS]
    return model


def _manifests(models: Path) -> Iterator[tuple[Path, dict[str, list[dict[str, str]]]]]:
    with contextlib.suppress(OSError):
        paths = sorted(path for path in (models / "manifests").rglob("*") if path.is_file())
        for path in paths[:_MAX_MANIFESTS]:
            with contextlib.suppress(OSError, *_MALFORMED):
                if path.stat().st_size <= _MAX_MANIFEST_BYTES:
                    document = json.loads(path.read_bytes())
                    layers = document.get("layers") or []
                    yield path, {"layers": [dict(layer) for layer in layers]}


def _name(path: Path) -> str:
    """`registry.ollama.ai/library/qwen3/0.6b` is `qwen3:0.6b`."""
    *place, model, tag = ("", *path.parts)[-5:]
    shown = [part for part in place if part and part not in ("registry.ollama.ai", "library")]
    return "/".join([*shown, f"{model}:{tag}"])
