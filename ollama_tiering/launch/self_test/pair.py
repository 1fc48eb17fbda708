"""The installed llama-server and the tree's, with one model and the same options."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ollama_tiering.config import count
from ollama_tiering.config.environment import ENV_CPU_ATTENTION, ENV_ENGINE_SOCKET
from ollama_tiering.errors import ResultDiffers, ServiceError
from ollama_tiering.launch import llama_devices
from ollama_tiering.launch.llama_server import Completed, LlamaServer, serving
from ollama_tiering.launch.self_test.store import NOT_KEPT, TrialStore
from ollama_tiering.patchset.llama_server.installation import InstalledOllama

BLOCK_TOKENS: Final = 64
_TEXT: Final = range(1, 90)  # tokens of the models that are text
_LETTERS: Final = range(ord("A"), ord("Z") + 1)
_NO_OWN_CACHE: Final = {"LLAMA_ARG_CACHE_RAM": "0"}
_RESTORE: Final = {"OLLAMA_KV_TIER_GATE": "restore"}  # computing so little may be faster


class StockFails(ServiceError):
    """The installed llama-server itself does not serve."""


class TooFew(ResultDiffers):
    """Fewer rows came back than were in memory. The machine may have been too busy: a look-up has
    80 ms.
    """


@dataclass
class ServerPair:
    """`folder` gets logs. `name` is that of the check: what it stores no other one finds. `place`
    says where it computes, for messages.
    """

    name: str
    installed: InstalledOllama
    tree: InstalledOllama
    model: Path
    options: Sequence[str]
    folder: Path
    store: TrialStore
    backend: Path | None = None
    place: str = ""
    started: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(30)  # a report can be followed

    def text(self, count: int, *first: int) -> list[int]:
        """So many tokens, `first` among them: prompts with others part there."""
        return [*first, *(self._random.choice(_TEXT) for _ in range(count - len(first)))]

    def characters(self, count: int) -> str:
        """Text of so many tokens."""
        return "".join(chr(self._random.choice(_LETTERS)) for _ in range(count))

    @contextlib.contextmanager
    def stock(self) -> Iterator[LlamaServer]:
        """The installed one. StockFails if it does not start."""
        env = {**_NO_OWN_CACHE, **llama_devices.environment(self.installed.lib, self.backend)}
        with contextlib.ExitStack() as stack:
            started = serving(self.installed.server, self.model, self._log(), env, *self.options)
            try:
                server = stack.enter_context(started)
            except ServiceError as error:
                cause, _, told = error.message.partition("\n")
                raise StockFails(f"the installed {cause}", hint=NOT_KEPT, told=told) from None
            yield server

    @contextlib.contextmanager
    def tiered(self) -> Iterator[LlamaServer]:
        """The tree's, with the store."""
        env = {
            **_NO_OWN_CACHE,
            **_RESTORE,
            **llama_devices.environment(self.tree.lib, self.backend),
        }
        env |= self._tier()
        with serving(self.tree.server, self.model, self._log(), env, *self.options) as server:
            yield server

    @contextlib.contextmanager
    def exact(self, *options: str, tiered: bool = False) -> Iterator[LlamaServer]:
        """The tree's, with exact attention. `options` come behind those of the pair."""
        env = {
            **_NO_OWN_CACHE,
            **_RESTORE,
            **llama_devices.environment(self.tree.lib, self.backend),
            ENV_CPU_ATTENTION: "exact",
        }
        if tiered:
            env |= self._tier()
        given = (*self.options, *options)
        with serving(self.tree.server, self.model, self._log(), env, *given) as server:
            yield server

    def _tier(self) -> dict[str, str]:
        return {
            ENV_ENGINE_SOCKET: f"{self.store.socket}.engine",
            "OLLAMA_KV_TIER_SALT": self.name,
        }

    def _log(self) -> Path:
        self.started += 1
        return self.folder / f"{self.started}.log"

    def require_equal(self, what: str, wanted: Completed, found: Completed) -> None:
        """ResultDiffers names what is not as it must be."""
        if wanted.cached_tokens != found.cached_tokens:
            which = TooFew if found.cached_tokens < wanted.cached_tokens else ResultDiffers
            raise which(
                f"self-test: {what}{self.place}: {found.cached_tokens} tokens of the prompt were "
                f"not computed, and {wanted.cached_tokens} in the installed llama-server",
                hint=NOT_KEPT,
            )
        if wanted != found:
            raise ResultDiffers(
                f"self-test: {what}{self.place}: the answer is not the installed llama-server's",
                hint=NOT_KEPT,
            )

    def require_resident(self, hit: Completed, least: int) -> None:
        """A stock that kept nothing proves nothing."""
        if hit.cached_tokens < least:
            raise ResultDiffers(
                f"self-test: stock had {count(hit.cached_tokens, 'token')} in memory",
                hint="end other programs, and try again",
            )


def blocks_of(rows: int) -> int:
    return -(-rows // BLOCK_TOKENS)
