"""On SIGHUP, or when `tiering reload` asks for it, the settings are read again, and those that can
change while the sidecar runs do.

Either all of the file is read or nothing: if it cannot be used, every old setting stays, and the
log says why. A setting that needs a restart is named and keeps its old value.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from ollama_tiering.config import ENV_MODELS, SidecarConfig, format_size
from ollama_tiering.config.settings import SETTINGS
from ollama_tiering.errors import TieringError
from ollama_tiering.sidecar import logs
from ollama_tiering.sidecar.notify import notify
from ollama_tiering.sidecar.rule_book import RuleBook
from ollama_tiering.store import TieredStore, TierKind

log = logging.getLogger(__name__)

# Field of the budget -> tier, field of its directory.
_BUDGETS: Final = {
    "ram_budget_bytes": (TierKind.RAM, "ram_dir"),
    "local_budget_bytes": (TierKind.LOCAL, "local_dir"),
}
_ELSEWHERE: Final = {"model_rules": "models", "models_dir": ENV_MODELS}
_WATERMARKS: Final = ("high_watermark", "low_watermark")
_RULES: Final = frozenset(("model_rules", "ttl_days", "models_dir"))


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Keys of settings that were changed, and of those that have another value in the file and need
    a restart.
    """

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def _key_of(field: str) -> str:
    """As a person writes it."""
    known = (one.key for one in SETTINGS if one.key.startswith("sidecar.") and one.field == field)
    return next(known, _ELSEWHERE.get(field, f"sidecar.{field}"))


class Reloader:
    """`reread` gives the new settings, or raises TieringError. `limit` cuts a budget to the size of
    the file system: (directory, wanted bytes, tier) -> bytes.
    """

    def __init__(
        self,
        store: TieredStore,
        config: SidecarConfig,
        reread: Callable[[], SidecarConfig],
        limit: Callable[[Path, int, TierKind], int],
        say: Callable[[str], None] = notify,
        book: RuleBook | None = None,
        wanted: asyncio.Event | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._reread = reread
        self._limit = limit
        self._say = say
        self._book = book or RuleBook(config)
        self._wanted = wanted or asyncio.Event()
        self._one_at_a_time = threading.Lock()

    @property
    def config(self) -> SidecarConfig:
        """The settings as they are now."""
        return self._config

    def request(self) -> None:
        """A signal handler. Several signals before the first one is dealt with count as one."""
        self._wanted.set()

    async def run(self, pool: Executor) -> None:
        """Runs until it is cancelled. Files are read and evicted in the pool, not on the event
        loop.
        """
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            with contextlib.suppress(TieringError):  # the log has it
                await asyncio.get_running_loop().run_in_executor(pool, self.apply)

    def apply(self) -> Reloaded:
        """May block. TieringError, and nothing is changed, if the settings cannot be read."""
        with self._one_at_a_time:
            self._say(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
            try:
                return self._apply()
            except TieringError as error:
                said = "reload refused, old settings stay: reason=%s hint=%s"
                log.error(said, error.message, error.hint or "none")
                raise
            except Exception as error:
                log.exception("reload failed, the old settings stay")
                raise TieringError(f"reload failed: {error}", hint="see the log") from error
            finally:
                self._say("READY=1")

    def _apply(self) -> Reloaded:
        wanted = self._reread()
        changed = [
            field.name
            for field in fields(SidecarConfig)
            if getattr(wanted, field.name) != getattr(self._config, field.name)
        ]
        done = [name for name in changed if self._change(name, wanted)]
        if not _RULES.isdisjoint(done):
            self._book.change(wanted)
            self._store.set_terms(self._book.decide)
        values: dict[str, Any] = {name: getattr(wanted, name) for name in done}
        self._config = replace(self._config, **values)
        left = [name for name in changed if name not in done]
        log.log(
            logging.WARNING if left else logging.INFO,
            "reloaded: changed=%s needs_restart=%s",
            ",".join(done) or "none",
            ",".join(left) or "none",
        )
        return Reloaded(tuple(map(_key_of, done)), tuple(map(_key_of, left)))

    def _change(self, name: str, wanted: SidecarConfig) -> bool:
        """False if the setting needs a restart."""
        if name in _BUDGETS:
            return self._set_budget(name, wanted)
        if name in _WATERMARKS:
            self._store.set_watermarks(wanted.high_watermark, wanted.low_watermark)
        elif name == "log_level":
            logs.set_level(wanted.log_level)
        else:
            return name in _RULES
        return True

    def _set_budget(self, name: str, wanted: SidecarConfig) -> bool:
        kind, field = _BUDGETS[name]
        directory = getattr(wanted, field)
        if directory is None or directory != getattr(self._config, field):
            return False  # a budget of another place
        budget_bytes = getattr(wanted, name)
        try:
            if budget_bytes:
                budget_bytes = self._limit(directory, budget_bytes, kind)
            over = self._store.set_budget(kind, budget_bytes)
        except (ValueError, OSError) as error:
            log.warning("budget not changed: tier=%s reason=%s", kind.label, error)
            return False
        log.info(
            "budget changed: tier=%s budget=%s still_over=%s",
            kind.label,
            format_size(budget_bytes),
            format_size(over),
        )
        return True


def with_live(asked: SidecarConfig, now: SidecarConfig) -> SidecarConfig:
    """`asked` with what was changed since while the sidecar ran, and only that: a place that was
    chosen for the RAM tier is no setting.
    """
    names = (*_BUDGETS, *_WATERMARKS, *_RULES, "log_level")
    return replace(asked, **{name: getattr(now, name) for name in names})
