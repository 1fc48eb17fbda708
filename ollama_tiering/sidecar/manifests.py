"""The names that people know models by, from Ollama's own directory; the store knows only file
names.

This reads the manifests below `models/manifests` and changes nothing. A model whose manifest cannot
be read has no name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ollama_tiering.protocol.plain_text import printable

_MODEL_TYPE: Final = "application/vnd.ollama.image.model"
_DEFAULTS: Final = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
_MALFORMED: Final = (ValueError, TypeError, AttributeError, RecursionError)
_BLOB: Final = re.compile(r"sha256-[0-9a-f]{64}")
_MAX_MANIFESTS: Final = 10_000
_MAX_MANIFEST_BYTES: Final = 1 << 20
_DIGEST_DIGITS: Final = 12

_Stamp = tuple[int, int, int]  # time of change, size, inode: what tells two manifests apart


def is_blob(model: str) -> bool:
    """Whether this is the file name of a model that Ollama keeps, whose name is in a manifest."""
    return _BLOB.fullmatch(model) is not None


def short_name(model: str) -> str:
    """What to call a model by its file name, if its name is not known."""
    return model.removeprefix("sha256-")[:_DIGEST_DIGITS] if is_blob(model) else model


def default_models_dir() -> Path | None:
    """The directory in which this user's Ollama keeps its models; None if there is none."""
    for name in (os.environ.get("OLLAMA_MODELS"), *_DEFAULTS):
        with contextlib.suppress(OSError, RuntimeError):
            if name and (Path(name).expanduser() / "manifests").is_dir():
                return Path(name).expanduser()
    return None


@dataclass(frozen=True, slots=True)
class ModelNames:
    """`unread` says what could not be read; a model may then have a name that is missing here."""

    of_blob: dict[str, tuple[str, ...]] = field(default_factory=dict)  # blob's file name -> names
    unread: str = ""

    def all(self) -> set[str]:
        return {name for names in self.of_blob.values() for name in names}


class ManifestReader:
    """Remembers what it read, and opens a manifest again only if it has changed. Not thread-safe.
    With `models` None it looks in Ollama's default places.
    """

    def __init__(self, models: Path | None) -> None:
        self._models = models
        self._known: dict[Path, tuple[_Stamp, tuple[str, ...]]] = {}

    def read(self) -> ModelNames:
        models = self._models or default_models_dir()
        if models is None:
            return ModelNames(unread="Ollama's models directory is not found")
        found: dict[str, list[str]] = {}
        unread: list[str] = []
        known: dict[Path, tuple[_Stamp, tuple[str, ...]]] = {}
        for path in _files(models / "manifests", unread):
            try:
                info = path.stat()
                if not stat.S_ISREG(info.st_mode):
                    continue
                stamp = info.st_mtime_ns, info.st_size, info.st_ino
                before = self._known.get(path)
                blobs = before[1] if before and before[0] == stamp else _blobs(path, info.st_size)
            except FileNotFoundError:
                continue  # removed just now
            except (OSError, *_MALFORMED) as error:
                unread.append(f"{path}: {getattr(error, 'strerror', None) or 'no manifest'}")
                continue
            known[path] = stamp, blobs
            for blob in blobs:
                found.setdefault(blob, []).append(_name(path.relative_to(models / "manifests")))
        self._known = known
        return ModelNames({blob: tuple(names) for blob, names in found.items()}, _said(unread))


def _files(root: Path, unread: list[str]) -> Iterator[Path]:
    """Sorted, so that everywhere the same one of several names comes first."""

    def failed(error: OSError) -> None:
        unread.append(f"{error.filename}: {error.strerror}")

    paths: list[Path] = []
    for folder, _, names in os.walk(root, onerror=failed):
        paths += [Path(folder, name) for name in names]
        if len(paths) > _MAX_MANIFESTS:
            unread.append(f"{root} has more than {_MAX_MANIFESTS} manifests")
            break
    yield from sorted(paths)[:_MAX_MANIFESTS]


def _blobs(path: Path, size_bytes: int) -> tuple[str, ...]:
    if size_bytes > _MAX_MANIFEST_BYTES:
        raise ValueError(f"{size_bytes} bytes are no manifest")
    document = json.loads(path.read_bytes())
    layers = [dict(layer) for layer in document.get("layers") or []]
    models = (layer for layer in layers if layer.get("mediaType") == _MODEL_TYPE)
    return tuple(printable(str(layer.get("digest", ""))).replace(":", "-") for layer in models)


def _name(path: Path) -> str:
    """`registry.ollama.ai/library/qwen3/0.6b` is `qwen3:0.6b`."""
    *place, model, tag = ("", *path.parts)[-5:]
    shown = [part for part in place if part and part not in ("registry.ollama.ai", "library")]
    return printable("/".join([*shown, f"{model}:{tag}"]))


def _said(unread: Iterable[str]) -> str:
    first, *more = [*map(printable, unread), ""]
    return f"{first} and {len(more) - 1} more" if len(more) > 1 else first
