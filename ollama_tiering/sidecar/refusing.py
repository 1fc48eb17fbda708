"""How a call ends that is not answered, of clients and of the administration alike."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NoReturn

import grpc
import grpc.aio

from ollama_tiering.errors import TieringError
from ollama_tiering.protocol.plain_text import printable
from ollama_tiering.protocol.statuses import HINT_KEY, status_of
from ollama_tiering.system.quiet_log import QuietLog

log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext; its stubs lack the type parameters used here


async def abort(
    context: Context, call: str, error: Exception, seldom: QuietLog | None = None
) -> NoReturn:
    """Ends the call with the status that stands for the error, its hint in the metadata. A bug is
    INTERNAL and logged; what is refused is logged where there is a log for it. Waits until a client
    that does not read has gone.
    """
    if isinstance(error, grpc.aio.AbortError):
        raise error
    code, message, hint = status_of(error), str(error), ""
    if isinstance(error, TieringError):
        message, hint = error.message, error.hint or ""
    if code is grpc.StatusCode.INTERNAL:
        log.exception("call failed: call=%s", call, exc_info=error)
        message = f"{type(error).__name__}: {error}"
    elif seldom is not None:
        said = "call refused: call=%s status=%s reason=%.200s"
        seldom.warning(f"{call} {code.name}", said, call, code.name, message)
    message = printable(message)
    plain = hint.encode("ascii", "replace").decode()
    try:
        metadata = ((HINT_KEY, plain),) if hint else ()
        await context.abort(code, message, trailing_metadata=metadata)
    except grpc.aio.InternalError:  # it has
        raise asyncio.CancelledError from None
    raise AssertionError("abort always raises")
