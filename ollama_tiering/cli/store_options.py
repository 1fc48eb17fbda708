"""What the commands on the store share: options, values, and how they reach the store."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar

import click

from ollama_tiering import config
from ollama_tiering.cli import NamedPath
from ollama_tiering.cli.reach import listens
from ollama_tiering.config import parse_size
from ollama_tiering.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from ollama_tiering.store import OpenBlock
    from ollama_tiering.store.tools.archive import ArchiveManifest
    from ollama_tiering.store.tools.chain_to_export import ChainToExport
    from ollama_tiering.store.tools.importing import BlockSink, CheckedChain, Present
    from ollama_tiering.store.values import (
        Listing,
        PinResult,
        Removal,
        Selection,
        VerifyStep,
        Waste,
    )

F = TypeVar("F", bound=Callable[..., Any])

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)


class Admin(Protocol):
    """The store's administration, in a sidecar or on the files; see store/tools/admin.py."""

    def listing(
        self, selection: Selection, *, blocks: bool = False, words: bool = False
    ) -> Listing: ...
    def remove(self, selection: Selection, *, dry_run: bool) -> Removal: ...
    def pin(self, chain_id: str, *, follow: bool = False, dry_run: bool = False) -> PinResult: ...
    def unpin(self, chain_id: str, *, dry_run: bool = False) -> PinResult: ...
    def verify(self, *, repair: bool) -> Iterator[VerifyStep]: ...
    def collect(
        self,
        *,
        older_than_seconds: float,
        models: frozenset[str] | None,
        dry_run: bool,
        builds: frozenset[str] | None = None,
    ) -> list[Waste]: ...
    def chain(self, chain_id: str) -> ChainToExport: ...
    def opened(self, chain: ChainToExport) -> Iterator[AbstractContextManager[OpenBlock]]: ...
    def present(self, checked: CheckedChain) -> Present: ...
    def sink(self, manifest: ArchiveManifest) -> AbstractContextManager[BlockSink]: ...


class Duration(click.ParamType[float]):
    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        match = _DURATION.fullmatch(str(value).strip())
        if match is None or not float(match[1]):
            self.fail(f"{value!r} is no time; write it like 30d, 12h, 90m or 2w", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


class Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def store_options(command: F) -> F:
    """Adds --socket, --config and --json, which every command on the store has."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/cli.md lists it)."),
        click.option(
            "--config", "config_file", type=NamedPath(path_type=Path), help="Settings file."
        ),
        click.option(
            "--socket", type=NamedPath(path_type=Path), help="Unix socket of the sidecar."
        ),
    ):
        command = option(command)
    return command


def selection_options(command: F) -> F:
    """Adds the options that select chains: --model, --older-than, --min-tokens,
    --min-size, --tier.
    """
    for option in (
        click.option(
            "--tier",
            type=click.Choice(["ram", "local", "remote"]),
            help="Only what has a block in this tier.",
        ),
        click.option(
            "--min-size", type=Size(), default=0, help="Only if its own blocks take at least this."
        ),
        click.option(
            "--min-tokens",
            type=click.IntRange(0),
            default=0,
            help="Only with at least this many tokens.",
        ),
        click.option(
            "--older-than",
            type=Duration(),
            default=0.0,
            help="Only if not used for this time, such as 30d.",
        ),
        click.option(
            "--model",
            default="",
            help="Only of this model: a part of its name, or the beginning of its namespace.",
        ),
    ):
        command = option(command)
    return command


dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Say what would be done, and change nothing."
)


def make_selection(
    ids: Sequence[str],
    *,
    model: str,
    older_than: float,
    min_tokens: int,
    min_size: int,
    tier: str | None,
    pinned: bool = False,
) -> Selection:
    from ollama_tiering.launch.names import models_called
    from ollama_tiering.store import TierKind
    from ollama_tiering.store.values import Selection

    return Selection(
        ids=tuple(ids),
        model=model,
        models=models_called(model),
        older_than_seconds=older_than,
        min_tokens=min_tokens,
        min_bytes=min_size,
        tier=TierKind[tier.upper()] if tier else None,
        pinned=pinned,
    )


@contextlib.contextmanager
def administration(
    socket: Path | None, config_file: Path | None, *, purpose: Literal["look", "change", "store"]
) -> Iterator[Admin]:
    """Works through the sidecar if one listens; otherwise on the files, with their directories
    locked.

    A socket that was named must answer: ServiceError. Where settings are not valid, a running
    sidecar is still looked at; the ConfigError comes when the command has said what it found.
    """
    found, broken = config.readable({"sidecar.socket": socket}, path=config_file)
    settings = found.sidecar
    if broken and (purpose != "look" or not listens(settings.socket_path)):
        raise broken
    if broken:
        click.get_current_context().call_on_close(functools.partial(_complain, broken))
    if listens(settings.socket_path):
        from ollama_tiering.client.admin_client import SidecarAdministration

        with SidecarAdministration(settings.socket_path) as admin:
            yield admin
        return
    if socket is not None:
        raise ServiceError(
            f"no sidecar listens on {socket}",
            hint="start it, or leave --socket out to work on the files",
        )
    from ollama_tiering.sidecar.rule_book import RuleBook
    from ollama_tiering.store.tools.offline import Purpose, offline

    with offline(settings, RuleBook(settings).decide, Purpose(purpose)) as admin_here:
        yield admin_here


def socket_in_force(socket: Path | None, config_file: Path | None) -> Path:
    settings, _ = config.readable({"sidecar.socket": socket}, path=config_file)
    return settings.sidecar.socket_path


def _complain(broken: ConfigError) -> None:
    """Raises, unless the command has failed for another reason."""
    if sys.exc_info()[1] is None:
        raise broken


def short(key: bytes, digits: int) -> str:
    return key.hex()[:digits]


def age(unix_seconds: float) -> str:
    """How long ago, in the largest unit that fits."""
    seconds = max(0.0, time.time() - unix_seconds)
    for unit in ("w", "d", "h", "m"):
        if seconds >= _UNITS[unit] * (1 if unit != "w" else 8):
            return f"{int(seconds / _UNITS[unit])}{unit}"
    return f"{int(seconds)}s"
