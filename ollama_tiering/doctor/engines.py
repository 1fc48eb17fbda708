"""Which engines compute on this machine. What another one stored is never found here: its bits are
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.doctor.builds import builds_here
from ollama_tiering.launch import block_service
from ollama_tiering.patchset.llama_server import built
from ollama_tiering.store import Fields
from ollama_tiering.store.tools.listing import of_other_build

_LLAMA_SERVER: Final = "llama-server"


@dataclass(frozen=True, slots=True)
class EnginesHere:
    """`builds` of the Go engines; whether an installed Ollama is patched; and by the file name of a
    model, the engines that computed it here.
    """

    builds: frozenset[str]
    patched: bool
    used: Mapping[str, frozenset[str]]

    def why_useless(self, description: Fields) -> str:
        """Why nothing here will ever find what a namespace holds; empty if something may."""
        fields = dict(description)
        engine = fields.get("engine", "")
        used = self.used.get(fields.get("model", ""), frozenset())
        if not engine or engine in used:
            return ""
        kinds = {_kind(one) for one in used}
        if kinds and _kind(engine) not in kinds:
            return f"this machine computes that model with {' and '.join(sorted(kinds))}"
        if kinds or not (self.builds or self.patched):
            return ""  # another version of the same, or nothing is known of this machine
        if _kind(engine) == _LLAMA_SERVER:
            return "" if self.patched else "no installed Ollama is patched here"
        return "no such build is on this machine" if of_other_build(engine, self.builds) else ""


def engines_here(socket: Path) -> EnginesHere:
    """Asks the sidecar there, if one runs, what its runners are and were."""
    used: dict[str, set[str]] = {}
    if answer := block_service.ask(socket, administers=True):
        pairs = [(one.model, one.engine) for one in answer.runners if one.tiered]
        pairs += [(one.model, one.engine) for one in answer.model_uses if one.requests]
        for model, engine in pairs:
            used.setdefault(model, set()).add(engine)
    return EnginesHere(
        builds_here(), bool(built.trees()), {m: frozenset(e) for m, e in used.items()}
    )


def name_of(description: Fields) -> str:
    """`ollama-go/0.16.3`: without the build, which says nothing to a person."""
    return dict(description).get("engine", "").partition("+")[0]


def _kind(engine: str) -> str:
    return engine.partition("/")[0]
