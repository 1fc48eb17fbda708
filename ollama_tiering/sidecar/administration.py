"""The administration's calls of the protocol. All run in threads; none holds up a lookup."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Any, Final, NoReturn, TypeVar

import grpc

from ollama_tiering.errors import TieringError
from ollama_tiering.protocol import admin_messages as messages
from ollama_tiering.protocol.statuses import HINT_KEY, STATUS_OF_ERROR
from ollama_tiering.sidecar.bounds import Slots
from ollama_tiering.sidecar.runners import RunnerTable
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.tools.listing import build_of

log = logging.getLogger(__name__)

T = TypeVar("T")
Context = Any  # grpc.aio.ServicerContext; its stubs lack the type parameters used here

_MAX_NAMED: Final = 1 << 16  # in one request


class AdministrationService:
    """The part of the service for people and their tools; a base of BlockStoreService."""

    _admin: Administration
    _tools: Slots
    _pool: Executor
    _runners: RunnerTable

    async def List(
        self, request: pb.ListRequest, context: Context
    ) -> AsyncIterator[pb.ListResponse]:
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
                await _abort(context, error)
            for message in messages.listing_messages(listing):
                yield message

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        call = self._admin.unpin if request.unpin else self._admin.pin
        try:
            result = await self._threaded(lambda: call(request.id, dry_run=request.dry_run))
        except Exception as error:
            await _abort(context, error)
        return messages.pin_message(result)

    async def Verify(
        self, request: pb.VerifyRequest, context: Context
    ) -> AsyncIterator[pb.VerifyResponse]:
        steps = self._admin.verify(repair=request.repair)
        with contextlib.ExitStack() as places:
            try:
                places.enter_context(self._tools.taken())
                # One thread of the pool for the time of one step: other calls come in between.
                while (step := await self._threaded(lambda: next(steps, None))) is not None:
                    yield messages.step_message(step)
            except Exception as error:
                await _abort(context, error)
            finally:
                with contextlib.suppress(ValueError):  # cancelled while a thread is in it
                    steps.close()  # type: ignore[attr-defined]

    async def Remove(self, request: pb.RemoveRequest, context: Context) -> pb.RemoveResponse:
        try:
            selection = messages.selection_of(request.selection)
            removal = await self._threaded(
                lambda: self._admin.remove(selection, dry_run=request.dry_run)
            )
        except Exception as error:
            await _abort(context, error)
        return messages.removal_message(removal)

    async def Collect(self, request: pb.CollectRequest, context: Context) -> pb.CollectResponse:
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
            await _abort(context, error)
        return messages.waste_message(waste)

    def _builds_in_use(self) -> frozenset[str]:
        """Those of the runners that are alive, whoever built them."""
        named = (build_of(runner.engine) for runner in self._runners.alive())
        return frozenset(name for name in named if name)  # of a model that is not tiered: none

    async def _threaded(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


async def _abort(context: Context, error: Exception) -> NoReturn:
    """Ends the call with the status that stands for the error, its hint in the metadata."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    code, message, hint = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}", ""
    for kind, known in STATUS_OF_ERROR:
        if isinstance(error, kind):
            code = known
            message = error.message if isinstance(error, TieringError) else str(error)
            hint = error.hint or "" if isinstance(error, TieringError) else ""
            break
    else:
        log.exception("call failed", exc_info=error)
    plain = hint.encode("ascii", "replace").decode()
    await context.abort(code, message, trailing_metadata=((HINT_KEY, plain),) if hint else ())
    raise AssertionError("abort always raises")
