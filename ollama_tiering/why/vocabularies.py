"""The vocabularies of models, each read once: that of a blob lies in a models directory, that of
another file where a running server has it from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ollama_tiering.models.gguf_words import Vocabulary, read_vocabulary
from ollama_tiering.sidecar.manifests import is_blob


class Vocabularies:
    """`files` are the paths of models that are no blobs, by file name."""

    def __init__(
        self, directories: Sequence[Path], files: Mapping[str, Path] | None = None
    ) -> None:
        self._directories = directories
        self._files = files or {}
        self._known: dict[str, Vocabulary | None] = {}

    def of(self, model: str) -> Vocabulary | None:
        """Finds it by the model's file name. None if it is not found."""
        if model not in self._known:
            self._known[model] = self._read(model)
        return self._known[model]

    def _read(self, model: str) -> Vocabulary | None:
        if not is_blob(model):
            return read_vocabulary(self._files[model]) if model in self._files else None
        found = (read_vocabulary(place / "blobs" / model) for place in self._directories)
        return next((vocabulary for vocabulary in found if vocabulary), None)
