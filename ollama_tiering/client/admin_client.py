"""The administration of a store through a running sidecar: the same calls as
store/tools/admin.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import grpc

from ollama_tiering.client.channel import SidecarChannel
from ollama_tiering.client.stream import Exchange
from ollama_tiering.errors import ConfigError, ServiceError, TieringError
from ollama_tiering.protocol import admin_messages as messages
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.protocol.plain_text import printable
from ollama_tiering.protocol.statuses import ERROR_OF_STATUS, HINT_KEY
from ollama_tiering.store import BlockKey, CommitResult, OpenBlock
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.tools.archive import ArchiveManifest
from ollama_tiering.store.tools.chain_to_export import ChainToExport, chain_to_export
from ollama_tiering.store.tools.importing import BlockSink, CheckedChain, Present, what_is_present
from ollama_tiering.store.values import (
    Listing,
    PinResult,
    Removal,
    Selection,
    VerifyStep,
    Waste,
)
from ollama_tiering.system.closing import Closing
from ollama_tiering.system.files import fd_reader, fill

T = TypeVar("T")

_ANSWER_SECONDS: Final = 120.0
_LONG_SECONDS: Final = 86400.0
_LEASE_AGAIN_SECONDS: Final = 5.0


class SidecarAdministration(Closing):
    """One connection to a sidecar; a context manager. ServiceError if the
    sidecar does not answer.
    """

    def __init__(self, socket_path: Path) -> None:
        self._channel = SidecarChannel(socket_path, administers=True)

    def close(self) -> None:
        self._channel.close()

    @property
    def _stub(self) -> Any:
        return self._channel.stub()

    def stat(self, *, timeout_seconds: float = _ANSWER_SECONDS) -> adm.StatResponse:
        answer: adm.StatResponse = _call(
            lambda: self._stub.Stat(pb.StatRequest(), timeout=timeout_seconds)
        )
        return answer

    def listing(
        self,
        selection: Selection = Selection(),  # noqa: B008 - frozen
        *,
        blocks: bool = False,
        words: bool = False,
    ) -> Listing:
        chosen = messages.selection_message(selection)
        request = adm.ListRequest(selection=chosen, blocks=blocks, words=words)
        return _call(lambda: messages.listing_of(self._stub.List(request, timeout=_ANSWER_SECONDS)))

    def partings(
        self, *, last: int = 0, model: str = "", models: Sequence[str] = ()
    ) -> Iterator[adm.Parting]:
        """The latest first; at most `last` of them, if that is not 0."""
        request = adm.PartingsRequest(
            last=last, model=printable(model), models=map(printable, models)
        )
        answers = self._stub.Partings(request, timeout=_ANSWER_SECONDS)
        try:
            while (answer := _call(lambda: next(answers, None))) is not None:
                yield answer
        finally:
            answers.cancel()

    def days(self, days: int) -> list[adm.DayOfModel]:
        """Sums of each of the last `days` days and model, today's last."""
        request = adm.DaysRequest(days=days)
        return list(_call(lambda: self._stub.Days(request, timeout=_ANSWER_SECONDS)).days)

    def revoke_builds(self, model: str) -> list[adm.BuildPair]:
        """Of a model, by its file name: what other builds stored is not read any more."""
        request = adm.RevokeBuildsRequest(model=model)
        return list(_call(lambda: self._stub.RevokeBuilds(request, timeout=_LONG_SECONDS)).revoked)

    def reload(self) -> adm.ReloadResponse:
        """Has it read its settings again. ConfigError, and nothing has changed, if it cannot."""
        try:
            answer: adm.ReloadResponse = _call(
                lambda: self._stub.Reload(adm.ReloadRequest(), timeout=_ANSWER_SECONDS)
            )
        except TieringError as error:
            if type(error) is TieringError:  # of a failed precondition, which is this one here
                raise ConfigError(error.message, hint=error.hint) from None
            raise
        return answer

    def remove(self, selection: Selection, *, dry_run: bool) -> Removal:
        request = adm.RemoveRequest(
            selection=messages.selection_message(selection), dry_run=dry_run
        )
        return _call(lambda: messages.removal_of(self._stub.Remove(request, timeout=_LONG_SECONDS)))

    def pin(self, chain_id: str, *, follow: bool = False, dry_run: bool = False) -> PinResult:
        return self._pin(adm.PinRequest(id=chain_id, follow=follow, dry_run=dry_run))

    def unpin(self, chain_id: str, *, dry_run: bool = False) -> PinResult:
        return self._pin(adm.PinRequest(id=chain_id, dry_run=dry_run, unpin=True))

    def verify(self, *, repair: bool) -> Iterator[VerifyStep]:
        answers = self._stub.Verify(adm.VerifyRequest(repair=repair), timeout=_LONG_SECONDS)
        try:
            while (answer := _call(lambda: next(answers, None))) is not None:
                yield messages.step_of(answer)
        finally:
            answers.cancel()

    def collect(
        self,
        *,
        older_than_seconds: float,
        models: frozenset[str] | None,
        dry_run: bool,
        builds: frozenset[str] | None = None,
    ) -> list[Waste]:
        request = adm.CollectRequest(
            older_than_seconds=older_than_seconds,
            ask_models=models is not None,
            models=sorted(models or ()),
            dry_run=dry_run,
            ask_builds=builds is not None,
            builds=sorted(builds or ()),
        )
        return _call(lambda: messages.waste_of(self._stub.Collect(request, timeout=_LONG_SECONDS)))

    def chain(self, chain_id: str) -> ChainToExport:
        return chain_to_export(self.listing(Selection(ids=(chain_id,)), blocks=True))

    def opened(self, chain: ChainToExport) -> Iterator[AbstractContextManager[OpenBlock]]:
        """Opens the files of the chain, one after the other. Blocks still to be read are leased,
        and the lease is renewed.
        """
        lease = _Lease(self._stub, chain)
        try:
            for index in range(len(chain.files)):
                yield _opened(lease.path(index))
        finally:
            lease.release()

    def present(self, checked: CheckedChain) -> Present:
        manifest = checked.manifest
        request = pb.HasRequest(
            namespace=manifest.namespace,
            keys=checked.whole_keys,
            tokens=checked.tokens,
            block_tokens=manifest.block_tokens,
        )
        answer = _call(lambda: self._stub.Has(request, timeout=_ANSWER_SECONDS))
        found = [
            (
                BlockKey(info.key),
                info.rows,
                info.block_rows,
                [BlockKey(window.key) for window in info.attached],
            )
            for info in answer.blocks
        ]
        return what_is_present(checked, found)

    @contextmanager
    def sink(self, manifest: ArchiveManifest) -> Iterator[BlockSink]:
        with Exchange(self._stub.Put, _LONG_SECONDS) as exchange:
            description = pb.Namespace(
                fields=[pb.NamespaceField(name=n, value=v) for n, v in manifest.description]
            )
            exchange.send(
                pb.PutRequest(
                    open=pb.PutOpen(
                        namespace=manifest.namespace,
                        description=description,
                        block_tokens=manifest.block_tokens,
                    )
                )
            )
            yield _ExchangeSink(exchange)

    def _pin(self, request: adm.PinRequest) -> PinResult:
        return _call(lambda: messages.pin_of(self._stub.Pin(request, timeout=_ANSWER_SECONDS)))


class _Lease:
    """The paths of a chain's blocks, kept by a lease that is renewed while the blocks are read."""

    def __init__(self, stub: Any, chain: ChainToExport) -> None:
        self._stub = stub
        self._chain = chain
        self._ids: list[int] = []
        self._first = 0
        self._paths: list[bytes] = []
        self._until = 0.0

    def path(self, index: int) -> bytes:
        if time.monotonic() >= self._until:
            self._take(index)
        return self._paths[index - self._first]

    def release(self) -> None:
        for lease_id in self._ids:
            with contextlib.suppress(grpc.RpcError):
                self._stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=_ANSWER_SECONDS)
        self._ids = []

    def _take(self, index: int) -> None:
        keys = [key for key, _ in self._chain.files[index:]]
        request = pb.GetRequest(namespace=self._chain.namespace, keys=keys)
        answers: Sequence[pb.GetResponse] = _call(
            lambda: list(self._stub.Get(request, timeout=_ANSWER_SECONDS))
        )
        self.release()  # of the one before, now that the new one holds
        self._ids = [answers[0].lease_id] if answers else []
        if len(answers) != len(keys) or not all(answer.found for answer in answers):
            raise FileNotFoundError(errno.ENOENT, "a block of the chain was evicted meanwhile")
        self._first = index
        self._paths = [answer.path for answer in answers]
        self._until = time.monotonic() + _LEASE_AGAIN_SECONDS


class _ExchangeSink:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def put(self, key: BlockKey, parts: Iterator[tuple[bytes, bool]]) -> CommitResult:
        for part, last in parts:
            inline = pb.PutInline(key=key, part=part, last=last)
            self._exchange.send(pb.PutRequest(inline=inline))
        answer = _call(self._exchange.receive)
        (result,) = answer.committed.results
        return CommitResult(result.stored, result.reason)


class _FileBlock:
    def __init__(self, fd: int, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self._fd = fd
        self.read_at = fd_reader(fd)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        fill(self._fd, offset, buffer)

    def resident(self) -> bool | None:
        return None


@contextmanager
def _opened(path: bytes) -> Iterator[OpenBlock]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fsdecode(path))
        yield _FileBlock(fd, info.st_size)
    finally:
        os.close(fd)


def _call(call: Callable[[], T]) -> T:
    try:
        return call()
    except grpc.RpcError as error:
        _raise(error)


def _raise(error: Any) -> NoReturn:
    code, details = error.code(), error.details() or ""
    hints = [value for key, value in error.trailing_metadata() or () if key == HINT_KEY]
    kind = ERROR_OF_STATUS.get(code)
    if kind is not None:
        raise kind(details, hint=hints[0] if hints else None) from None
    raise ServiceError(
        f"the sidecar: {code.name.lower().replace('_', ' ')}: {details}",
        hint="is it still running? `tiering status`",
    ) from None
