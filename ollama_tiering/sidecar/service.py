"""The protocol on top of the store: messages in, messages out, one table of errors. No policy.

Calls that only read the store's books run on the event loop, long ones in pieces. Everything that
may touch a file, or has thousands of blocks to release, runs in a thread pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.sidecar.administration import AdministrationService
from ollama_tiering.sidecar.bounds import (
    MAX_PUT_STREAMS,
    MAX_TOOL_STREAMS,
    Slots,
    begun,
    in_seconds,
    received,
    sent,
)
from ollama_tiering.sidecar.content.check_files import CheckFiles
from ollama_tiering.sidecar.content.contents import Contents
from ollama_tiering.sidecar.engine.adoption_record import AdoptionRecord
from ollama_tiering.sidecar.ledger import Ledger
from ollama_tiering.sidecar.look_up import LookUps
from ollama_tiering.sidecar.look_up_times import LookUpTimes
from ollama_tiering.sidecar.model_book import ModelBook
from ollama_tiering.sidecar.namespaces import NamespaceUses
from ollama_tiering.sidecar.partings.messages import sum_message
from ollama_tiering.sidecar.partings.partings import Partings
from ollama_tiering.sidecar.puts import PutStream
from ollama_tiering.sidecar.reads import Reads, checked_keys
from ollama_tiering.sidecar.rechecks import Rechecks
from ollama_tiering.sidecar.refusing import abort
from ollama_tiering.sidecar.reload import Reloaded
from ollama_tiering.sidecar.runners import RunnerTable
from ollama_tiering.sidecar.stat_message import build_pair, rechecked, stat_message
from ollama_tiering.sidecar.wear import Wear
from ollama_tiering.store import (
    DIGEST_BYTES,
    TieredStore,
    as_key,
    as_namespace,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import InvalidBlock
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.tools.partings import PartingFinder
from ollama_tiering.system.quiet_log import QuietLog

log = logging.getLogger(__name__)

T = TypeVar("T")
Context = Any  # grpc.aio.ServicerContext; its stubs lack the type parameters used here


class BlockStoreService(AdministrationService):
    """All calls come on one event loop; `pool` runs what may block. `book` is what was done for
    each model (in memory only if none is given); `runners` are their last reports; `contents` is
    what is known of models' files, for all clients; `partings` are where prompts parted from what
    is stored; `record` says which builds read what others stored; `rechecks` what was computed
    again; `reload` reads the settings again.
    """

    def __init__(
        self,
        store: TieredStore,
        pool: Executor,
        book: ModelBook | None = None,
        runners: RunnerTable | None = None,
        contents: Contents | None = None,
        partings: Partings | None = None,
        times: LookUpTimes | None = None,
        record: AdoptionRecord | None = None,
        rechecks: Rechecks | None = None,
        reload: Callable[[], Reloaded] | None = None,
    ) -> None:
        self._reload = reload or (lambda: Reloaded((), ()))
        self._store = store
        self._pool = pool
        self._admin = Administration(store, alone=False)
        self._runners = runners or RunnerTable()
        self._book = book or ModelBook(Ledger())
        self._partings = partings or Partings(PartingFinder(store))
        self._record = record or AdoptionRecord()
        self._rechecks = rechecks or Rechecks()
        self._wear = Wear(store, self._book.ledger)
        self._uses = NamespaceUses(self._admin.describe, pool)
        self._started = int(time.time())
        self._puts = Slots("streams that store", MAX_PUT_STREAMS)
        self._tools = Slots("listings and verifications", MAX_TOOL_STREAMS)
        self._look_ups = LookUps(store)
        self._reads = Reads(store, pool, times)
        self._check_files = CheckFiles(contents or Contents())
        self._seldom = QuietLog(log)

    async def Has(self, request: pb.HasRequest, context: Context) -> pb.HasResponse:
        try:
            return await self._look_ups.answer(request)
        except Exception as error:
            await abort(context, "Has", error, self._seldom)

    async def Put(self, _: object, context: Context) -> None:
        # A place is kept until the client has gone: one that does not even read its refusal holds
        # what gRPC keeps for it.
        with contextlib.ExitStack() as places:
            try:
                places.enter_context(self._puts.taken())
                await self._put_stream(context)
            except Exception as error:
                await abort(context, "Put", error, self._seldom)

    async def LookUp(self, request: pb.LookUpRequest, context: Context) -> None:
        try:
            await self._reads.look_up(request, context)
        except Exception as error:
            await abort(context, "LookUp", error, self._seldom)

    async def Get(self, request: pb.GetRequest, context: Context) -> None:
        try:
            await self._reads.get(request, context)
        except Exception as error:
            await abort(context, "Get", error, self._seldom)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        # Shielded: a caller that hangs up meanwhile has released it all the same.
        await asyncio.shield(self._blocking(self._store.release, request.lease_id))
        return pb.ReleaseResponse()

    async def RemoveSeq(
        self, request: pb.RemoveSeqRequest, context: Context
    ) -> pb.RemoveSeqResponse:
        try:
            removed_blocks, removed_bytes = await self._blocking(
                self._store.remove_seq, as_namespace(request.namespace), checked_keys(request.keys)
            )
        except Exception as error:
            await abort(context, "RemoveSeq", error, self._seldom)
        return pb.RemoveSeqResponse(removed_blocks=removed_blocks, removed_bytes=removed_bytes)

    async def ReportCorrupt(
        self, request: pb.ReportCorruptRequest, context: Context
    ) -> pb.ReportCorruptResponse:
        try:
            key = as_key(request.key)
            said = "damage reported: key=%s detail=%.200r"
            self._seldom.warning("damage", said, key.hex(), request.detail)
            quarantined = await self._blocking(
                self._store.report_corrupt, as_namespace(request.namespace), key
            )
        except Exception as error:
            await abort(context, "ReportCorrupt", error, self._seldom)
        return pb.ReportCorruptResponse(quarantined=quarantined)

    async def ReportRunner(
        self, request: pb.RunnerReport, context: Context
    ) -> pb.ReportRunnerResponse:
        try:
            self._runners.put(request)
            self._partings.reported(request)
            if self._book.book(request):
                await self._blocking(self._book.refresh)
            if len(request.namespace) == DIGEST_BYTES and request.model:
                namespace = as_namespace(request.namespace)
                await self._blocking(self._store.learn_model, namespace, request.model)
        except Exception as error:
            await abort(context, "ReportRunner", error, self._seldom)
        return pb.ReportRunnerResponse()

    async def CheckFiles(
        self, request: pb.CheckFilesRequest, context: Context
    ) -> pb.CheckFilesResponse:
        try:
            return await self._check_files.answer(request)
        except Exception as error:
            await abort(context, "CheckFiles", error, self._seldom)

    async def Stat(self, request: pb.StatRequest, context: Context) -> adm.StatResponse:
        try:
            report = self._store.report()
            uses = await self._uses.messages(report.namespaces)
            runners = self._runners.alive()
            models = self._book.messages({runner.namespace for runner in runners})
            lost = sum_message(self._partings)
            name = self._book.name
            builds = [build_pair(one, name(one.model)) for one in self._record.all()]
            again = [rechecked(m, name(m), one) for m, one in self._rechecks.sums().items()]
            more = self._wear.message(), builds, again
            return stat_message(report, self._started, runners, uses, models, lost, *more)
        except Exception as error:
            await abort(context, "Stat", error, self._seldom)

    async def _put_stream(self, context: Context) -> None:
        patience_seconds = self._store.reserve_seconds  # all it has reserved is over by then
        stream: PutStream | None = None
        await begun(context, in_seconds(patience_seconds))
        try:
            while request := await received(context, in_seconds(patience_seconds)):
                kind = request.WhichOneof("op")
                if kind == "open" and stream is None:
                    stream = await self._blocking(PutStream, self._store, request.open)
                elif stream is None or kind in (None, "open"):
                    raise InvalidBlock("a stream starts with one open and goes on with the rest")
                else:
                    response = await self._blocking(stream.answer, request)
                    if response is not None:
                        await sent(context, response, in_seconds(patience_seconds))
        finally:
            if stream is not None:
                # RuntimeError: the sidecar ends, and the store closes what is open.
                with contextlib.suppress(asyncio.CancelledError, RuntimeError):
                    closing = self._pool.submit(stream.close)
                    await asyncio.shield(asyncio.wrap_future(closing))

    async def _blocking(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *args)
