"""What other builds of an engine have stored of a model, and whether their rows are the same."""

from __future__ import annotations

from ollama_tiering.store.block.description import Fields
from ollama_tiering.store.block.key import NamespaceId
from ollama_tiering.store.books.builds import SameRows as SameRows
from ollama_tiering.store.books.builds import larger, same_rows
from ollama_tiering.store.tiered import TieredStore

_BUILD = "engine"  # the field of a namespace's description
_EXTRA = "extra"
ADOPTS = "adopts"  # the part of it that says what a build reads besides its own


class Builds:
    """Thread-safe. Touches no disk, which may hang while an engine waits."""

    def __init__(self, store: TieredStore) -> None:
        self._state = store.state

    def others(self, namespace: NamespaceId, fields: Fields) -> list[NamespaceId]:
        """Namespaces with more blocks than this one, those with most first, whose description
        differs from this one's in the build of the same engine alone, and in what that reads.
        """
        state = self._state
        model = dict(fields).get("model", "")
        names = larger(state, namespace, state.terms.by_model().get(model, ()))
        return [name for name in names if _same_but_build(self.description(name), fields)]

    def description(self, namespace: NamespaceId) -> Fields:
        """Empty where it is not known."""
        return self._state.terms.described(namespace)

    def same_rows(self, mine: NamespaceId, other: NamespaceId) -> SameRows:
        return same_rows(self._state, mine, other)


def _same_but_build(theirs: Fields, mine: Fields) -> bool:
    if [name for name, _ in theirs] != [name for name, _ in mine]:
        return False
    for (name, their), (_, my) in zip(theirs, mine, strict=True):
        if name == _BUILD and their.partition("/")[0] == my.partition("/")[0]:
            continue
        if name == _EXTRA:
            their = without_adopts(their)
        if their != my:
            return False
    return True


def without_adopts(extra: str) -> str:
    return ";".join(part for part in extra.split(";") if not part.startswith(f"{ADOPTS}="))
