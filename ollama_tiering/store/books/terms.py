"""Terms: whether, how long and how much of a namespace is kept. Decided elsewhere, by its model.

Look-ups ask for the terms of a namespace, so that costs no lock and no I/O: they are worked out
when a namespace is heard of (`learn`) and when the rules or what they are about change (`redo`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from ollama_tiering.store.block.description import Fields
from ollama_tiering.store.block.key import NamespaceId

_MAX_NAMESPACES: Final = 1 << 16
_MOST_DESCRIBED: Final = 1024  # of some kilobytes each
_CHECKED_ENGINES: Final = ("ollama-go/", "llama.cpp/", "llama-server/")
_CONTENT: Final = "content="
UNCHECKED: Final = (
    "its engine is older than this sidecar and does not say which file it has loaded: "
    "build it again (`tiering patch build`)"
)


@dataclass(frozen=True, slots=True)
class Terms:
    name: str = ""  # of the model, as people know it
    refusal: str = ""  # why nothing of it is stored or served; empty: it is
    remove: bool = False  # ... and what is stored goes
    ttl_seconds: float = 0.0  # without use; 0: never
    budget_bytes: int = 0  # physical, of its model's blocks in a tier on a disk; 0: the tier's own
    text: bool = True  # whether its tokens may be shown to a person, as text


Decide = Callable[[str], Terms]  # of a model's file name, or empty where that is not known


class TermsTable:
    """Thread-safe. `decide` may do I/O; `of` never does."""

    def __init__(self, decide: Decide) -> None:
        self._changing = threading.Lock()
        self._models: dict[NamespaceId, str] = {}
        self._terms: dict[NamespaceId, Terms] = {}
        self._unchecked: set[NamespaceId] = set()
        self._described: dict[NamespaceId, Fields] = {}  # those heard of last
        self.redo(decide)

    def redo(self, decide: Decide) -> None:
        """Call it when other terms may hold."""
        with self._changing:
            self._decide = decide
            self.unknown = decide("")
            of_model = {model: decide(model) for model in set(self._models.values())}
            self._terms = {name: of_model[model] for name, model in self._models.items()}
            for name in self._unchecked:
                self._withhold(name)
            self._note()

    def learn_described(self, namespace: NamespaceId, fields: Iterable[tuple[str, str]]) -> None:
        """What the namespace's description says of it."""
        self._described.pop(namespace, None)
        self._described[namespace] = fields = tuple(fields)
        while len(self._described) > _MOST_DESCRIBED:
            del self._described[next(iter(self._described))]
        described = dict(fields)
        self.learn(namespace, described.get("model", ""))
        if not is_checked(described) and namespace not in self._unchecked:
            with self._changing:
                if len(self._unchecked) < _MAX_NAMESPACES:
                    self._unchecked.add(namespace)
                self._withhold(namespace)

    def learn(self, namespace: NamespaceId, model: str, *, sure: bool = True) -> None:
        """What the namespace's model is; not `sure`: said by somebody, not by its description."""
        known = self._models.get(namespace)
        if not model or known == model or (known is not None and not sure):
            return
        with self._changing:
            if known is None and len(self._models) >= _MAX_NAMESPACES:
                return
            self._models[namespace] = model
            self._terms[namespace] = self._decide(model)
            if namespace in self._unchecked:
                self._withhold(namespace)
            self._note()

    def of(self, namespace: NamespaceId) -> Terms:
        return self._terms.get(namespace, self.unknown)

    def model(self, namespace: NamespaceId) -> str:
        """File name; empty where it is not known."""
        return self._models.get(namespace, "")

    def described(self, namespace: NamespaceId) -> Fields:
        """What the namespace is the digest of; empty where it is not known. No I/O."""
        return self._described.get(namespace, ())

    def together(self, namespace: NamespaceId) -> frozenset[NamespaceId]:
        """All namespaces of its model: they share one budget."""
        model = self._models.get(namespace)
        if model is None:
            return frozenset((namespace,))
        return frozenset(name for name, other in list(self._models.items()) if other == model)

    def by_model(self) -> dict[str, list[NamespaceId]]:
        found: dict[str, list[NamespaceId]] = {}
        for namespace, model in list(self._models.items()):
            found.setdefault(model, []).append(namespace)
        return found

    def _withhold(self, namespace: NamespaceId) -> None:
        terms = self._terms.get(namespace, self.unknown)
        self._terms[namespace] = replace(terms, refusal=terms.refusal or UNCHECKED)

    def _note(self) -> None:
        terms = self._terms.items()
        self.forbidden = frozenset(name for name, one in terms if one.remove)
        self.with_budget = frozenset(name for name, one in terms if one.budget_bytes)
        ages = {self.unknown.ttl_seconds, *(one.ttl_seconds for one in self._terms.values())}
        self.shortest_ttl_seconds = min((age for age in ages if age), default=0.0)


def is_checked(fields: dict[str, str]) -> bool:
    """Whether the engine has the content of its files checked before it asks or stores. Who writes
    an engine with the Python client does so as docs/format.md says.
    """
    ours = fields.get("engine", "").startswith(_CHECKED_ENGINES)
    parts = fields.get("extra", "").split(";")
    return not ours or any(part.startswith(_CONTENT) for part in parts)
