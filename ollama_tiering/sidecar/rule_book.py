"""The terms of a namespace, from the rules in the settings and the names in Ollama's manifests.

The store knows a model by its file name. The rule `"*"` applies to a model without a name. But as
long as another rule says store = false, such a model is neither stored nor served, because it could
be the forbidden one. So could a model with a name, as long as not all manifests can be read: it may
have a second one. Nothing is removed on this suspicion.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final

from ollama_tiering.config import Ruling, SidecarConfig, ruling
from ollama_tiering.config.model_rules import EVERY
from ollama_tiering.errors import did_you_mean
from ollama_tiering.sidecar.manifests import ManifestReader, ModelNames, is_blob
from ollama_tiering.store import Decide, Terms

log = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 5.0  # between two looks at the manifests
_LEAST_SECONDS: Final = 0.5  # ... also if a model appears whose name is not known
_DAY_SECONDS: Final = 86400.0
_FILE: Final = ".gguf"


class RuleBook:
    """Thread-safe. Without rules, no manifest is ever read."""

    def __init__(self, config: SidecarConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reading = threading.Lock()
        self._read_at = -math.inf
        self.change(config)

    def change(self, config: SidecarConfig) -> None:
        """Takes other settings; the store has to be told afterwards."""
        with self._reading:
            self._rules = config.model_rules
            self._ttl_days = config.ttl_days
            self._reader = ManifestReader(config.models_dir)
            self._said: set[str] = set()
            self._names = ModelNames(unread="not read yet")
            self._untold = False
        self.refresh()

    def keep_up(self, tell: Callable[[Decide], object]) -> None:
        """Tells the store if names have changed. To be called every few seconds. May block."""
        self.refresh()
        if self._untold:
            self._untold = False
            tell(self.decide)

    def refresh(self) -> None:
        """Reads those manifests that have changed. May block."""
        if not self._rules:
            return
        with self._reading:
            before, self._names = self._names, self._reader.read()
            self._read_at = self._clock()
        if self._names != before:
            self._untold = True
            self._say()

    def decide(self, model: str) -> Terms:
        """The terms of a model, given its file name; an empty one means that it is not known. May
        block.
        """
        if not self._rules:
            return Terms(ttl_seconds=self._ttl_days * _DAY_SECONDS)
        if is_blob(model) and model not in self._names.of_blob and self._stale():
            self.refresh()
        names = self._names.of_blob.get(model, ())
        if names or (model and not is_blob(model)):
            found = ruling(names or (model,), self._rules, self._ttl_days)
            refusal = self._doubt(found) if names else ""
            in_doubt = bool(names and self._names.unread)
            return self._terms(found, names, refusal, in_doubt=in_doubt)
        return self._unnamed(model)

    def _doubt(self, found: Ruling) -> str:
        """Why a model with a name is withheld: it may have another name, which a rule forbids."""
        unread = self._names.unread
        forbids = next((rule for rule in self._rules if rule.store is False), None)
        if not unread or forbids is None or not found.store:
            return ""
        return (
            f"it may have another name ({unread}) and a rule in config.toml says not to store: "
            f"{forbids}"
        )

    def _unnamed(self, model: str) -> Terms:
        found = ruling((model,) if model else (), self._rules, self._ttl_days)
        by_digest = found.by is not None and found.by.glob != EVERY
        forbids = next((r for r in self._rules if r.store is False and r.glob != EVERY), None)
        if by_digest or (forbids is None and found.store):
            return self._terms(found, ())
        unread = self._names.unread
        if forbids is None and model and not unread:
            return self._terms(found, ())  # "*" forbids it, and there is no doubt
        why = f" ({unread})" if unread else ""
        return self._terms(
            found,
            (),
            refusal=f"its name is not known{why} and a rule in config.toml says not to store: "
            f"{forbids or found.by}",
        )

    def _terms(
        self,
        found: Ruling,
        names: tuple[str, ...],
        refusal: str = "",
        *,
        in_doubt: bool = True,
    ) -> Terms:
        """`in_doubt`: it may have another name, and a rule for that may say to show no text."""
        if not refusal and not found.store:
            refusal = f"rule in config.toml: {found.by} store = false"
            return Terms(", ".join(names), refusal, remove=True, text=False)
        return Terms(
            ", ".join(names),
            refusal,
            ttl_seconds=found.ttl_days * _DAY_SECONDS,
            budget_bytes=found.budget_bytes,
            text=found.text and not (in_doubt and any(r.text is False for r in self._rules)),
        )

    def _stale(self) -> bool:
        return self._clock() - self._read_at >= _LEAST_SECONDS

    def _say(self) -> None:
        """Logs each thing once. A rule that fits no model is a typing error, or its model is not
        there yet.
        """
        names = self._names
        if names.unread:
            self._warn(f"names of models are not all known: {names.unread}")
        known = names.all()
        for rule in self._rules:
            if rule.glob.startswith(("sha256-", EVERY)) or _FILE in rule.glob:
                continue  # the name of a file that plain llama-server may be given
            if any(map(rule.matches, known)):
                continue
            like = did_you_mean(rule.pattern, {*known, *(n.rpartition(":")[0] for n in known)})
            self._warn(f"no model here has a name that fits the rule {rule}{like}")

    def _warn(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)
