"""The calls of the protocol for administration. All of them run in threads, so none delays a
look-up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

from ollama_tiering.protocol import admin_messages as messages
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.sidecar.bounds import Slots
from ollama_tiering.sidecar.days import MOST_DAYS
from ollama_tiering.sidecar.engine.adoption_record import AdoptionRecord
from ollama_tiering.sidecar.model_book import ModelBook
from ollama_tiering.sidecar.partings.messages import parting_message, wanted
from ollama_tiering.sidecar.partings.partings import Partings as PartingsOfStore
from ollama_tiering.sidecar.refusing import abort
from ollama_tiering.sidecar.reload import Reloaded
from ollama_tiering.sidecar.runners import RunnerTable
from ollama_tiering.sidecar.stat_message import build_pair
from ollama_tiering.sidecar.wear import Wear
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.tools.listing import build_of

T = TypeVar("T")
Context = Any  # grpc.aio.ServicerContext; its stubs lack the type parameters used here

_MAX_NAMED: Final = 1 << 16  # in one request


class AdministrationService:
    """The part of the service for people and their tools; a base class of BlockStoreService."""

    _admin: Administration
    _tools: Slots
    _pool: Executor
    _runners: RunnerTable
    _book: ModelBook
    _partings: PartingsOfStore
    _record: AdoptionRecord
    _reload: Callable[[], Reloaded]
    _wear: Wear

    async def List(
        self, request: adm.ListRequest, context: Context
    ) -> AsyncIterator[adm.ListResponse]:
        with contextlib.ExitStack() as places:
            try:
                places.enter_context(self._tools.taken())
                selection = messages.selection_of(request.selection)
                listing = await self._threaded(
                    lambda: self._admin.listing(
                        selection, blocks=request.blocks, words=request.words
                    )
                )
            except Exception as error:
                await abort(context, "List", error)
            for message in messages.listing_messages(listing):
                yield message

    async def Pin(self, request: adm.PinRequest, context: Context) -> adm.PinResponse:
        dry_run = request.dry_run
        try:
            result = await self._threaded(
                lambda: (
                    self._admin.unpin(request.id, dry_run=dry_run)
                    if request.unpin
                    else self._admin.pin(request.id, follow=request.follow, dry_run=dry_run)
                )
            )
        except Exception as error:
            await abort(context, "Pin", error)
        return messages.pin_message(result)

    async def Verify(
        self, request: adm.VerifyRequest, context: Context
    ) -> AsyncIterator[adm.VerifyResponse]:
        steps = self._admin.verify(repair=request.repair)
        with contextlib.ExitStack() as places:
            try:
                places.enter_context(self._tools.taken())
                # One thread of the pool for the time of one step: other calls come in between.
                while (step := await self._threaded(lambda: next(steps, None))) is not None:
                    yield messages.step_message(step)
            except Exception as error:
                await abort(context, "Verify", error)
            finally:
                with contextlib.suppress(ValueError):  # cancelled while a thread is in it
                    steps.close()  # type: ignore[attr-defined]

    async def Remove(self, request: adm.RemoveRequest, context: Context) -> adm.RemoveResponse:
        try:
            selection = messages.selection_of(request.selection)
            removal = await self._threaded(
                lambda: self._admin.remove(selection, dry_run=request.dry_run)
            )
        except Exception as error:
            await abort(context, "Remove", error)
        return messages.removal_message(removal)

    async def Collect(self, request: adm.CollectRequest, context: Context) -> adm.CollectResponse:
        try:
            for what, named in (("models", request.models), ("builds", request.builds)):
                if len(named) > _MAX_NAMED:
                    raise ValueError(f"{len(named)} {what} are more than {_MAX_NAMED}")
            older_than_seconds = messages.seconds_of(request.older_than_seconds)
            models = frozenset(request.models) if request.ask_models else None
            builds = self._builds_in_use().union(request.builds) if request.ask_builds else None
            waste = await self._threaded(
                lambda: self._admin.collect(
                    older_than_seconds=older_than_seconds,
                    models=models,
                    dry_run=request.dry_run,
                    builds=builds,
                )
            )
        except Exception as error:
            await abort(context, "Collect", error)
        return messages.waste_message(waste)

    async def Days(self, request: adm.DaysRequest, context: Context) -> adm.DaysResponse:
        most = min(request.days, MOST_DAYS) or MOST_DAYS

        def booked() -> list[adm.DayOfModel]:
            self._wear.book()
            return list(self._book.days(most))

        return adm.DaysResponse(days=await self._threaded(booked))

    async def Partings(
        self, request: adm.PartingsRequest, context: Context
    ) -> AsyncIterator[adm.Parting]:
        with contextlib.ExitStack() as places:
            try:
                places.enter_context(self._tools.taken())
                chosen = wanted(request, self._partings)
                found = await self._threaded(lambda: self._partings.latest(chosen, request.last))
                for one in found:
                    yield await self._threaded(
                        lambda one=one: parting_message(  # type: ignore[misc]
                            *(one, self._partings, self._admin.describe, self._book.name)
                        )
                    )
            except Exception as error:
                await abort(context, "Partings", error)

    async def RevokeBuilds(
        self, request: adm.RevokeBuildsRequest, context: Context
    ) -> adm.RevokeBuildsResponse:
        try:
            revoked = await self._threaded(lambda: self._record.revoke(request.model))
        except Exception as error:
            await abort(context, "RevokeBuilds", error)
        pairs = [build_pair(one, self._book.name(one.model)) for one in revoked]
        return adm.RevokeBuildsResponse(revoked=pairs)

    async def Reload(self, _: adm.ReloadRequest, context: Context) -> adm.ReloadResponse:
        try:
            done = await self._threaded(self._reload)
        except Exception as error:
            await abort(context, "Reload", error)
        return adm.ReloadResponse(changed=done.changed, needs_restart=done.needs_restart)

    def _builds_in_use(self) -> frozenset[str]:
        """The builds of the runners that are alive."""
        named = (build_of(runner.engine) for runner in self._runners.alive())
        return frozenset(name for name in named if name)  # of a model that is not tiered: none

    async def _threaded(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)
