"""Places and patience, without a server: what a call holds while its client does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.protocol.statuses import ClientTooSlow
from ollama_tiering.sidecar.administration import AdministrationService
from ollama_tiering.sidecar.bounds import Slots, in_seconds, received, sent
from ollama_tiering.store.errors import NoRoom
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.values import VerifyStep


class Refused(grpc.aio.AbortError):
    pass


class FakeContext:
    """A client that never reads and never sends, and may have gone."""

    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone
        self.code: grpc.StatusCode | None = None

    async def abort(self, code: grpc.StatusCode, *_: Any, **__: Any) -> None:
        self.code = code
        raise Refused

    async def write(self, _: object) -> None:
        if self.gone:
            raise grpc.aio.InternalError
        await asyncio.sleep(60)

    async def read(self) -> object:
        await asyncio.sleep(60)
        return None


class Service(AdministrationService):
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._tools = Slots("verifications", 1)
        self._admin = cast(Administration, self)

    def verify(self, *, repair: bool) -> Iterator[VerifyStep]:
        yield from [VerifyStep(0, 0, 0, ())] * 2


def test_a_place_is_free_again_when_its_call_ends() -> None:
    slots = Slots("streams", 2)
    with (
        slots.taken(),
        slots.taken(),
        pytest.raises(NoRoom, match="2 streams are open already"),
        slots.taken(),
    ):
        pass
    with pytest.raises(KeyError), slots.taken():
        raise KeyError
    with slots.taken(), slots.taken():
        pass


def test_an_unread_verification_keeps_its_place_until_the_client_has_gone() -> None:
    def begun(service: Service, context: FakeContext) -> AsyncIterator[adm.VerifyResponse]:
        return service.Verify(adm.VerifyRequest(), context)

    async def scenario(service: Service) -> None:
        unread = begun(service, FakeContext())
        await anext(unread)
        context = FakeContext()
        with pytest.raises(Refused):
            await anext(begun(service, context))
        assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await unread.aclose()  # type: ignore[attr-defined]
        await anext(begun(service, FakeContext()))

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(scenario(Service(pool)))


def test_who_does_not_read_or_send_in_time_is_too_slow() -> None:
    async def scenario() -> None:
        with pytest.raises(ClientTooSlow, match="not read"):
            await sent(FakeContext(), object(), in_seconds(0.01))
        with pytest.raises(ClientTooSlow, match="no message"):
            await received(FakeContext(), in_seconds(0.01))

    asyncio.run(scenario())


def test_a_client_that_has_gone_cancels_its_call_and_is_no_bug() -> None:
    async def scenario() -> None:
        with pytest.raises(asyncio.CancelledError):
            await sent(FakeContext(gone=True), object(), in_seconds(5))

    asyncio.run(scenario())
