"""The sidecar process: directories, locks, socket, signals, shutdown. No policy.

There is one sidecar per socket and per tier directory, ensured by file locks that end with the
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from typing import Final

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from ollama_tiering.config import SidecarConfig, count, format_size, state_dir
from ollama_tiering.errors import ServiceError
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.sidecar.alive import Alive
from ollama_tiering.sidecar.calls import CallMetrics
from ollama_tiering.sidecar.content.contents import Contents
from ollama_tiering.sidecar.content.record import ContentRecord
from ollama_tiering.sidecar.days import DaySums
from ollama_tiering.sidecar.endpoint import Endpoint
from ollama_tiering.sidecar.engine.account import EngineAccounts
from ollama_tiering.sidecar.engine.adoption import Adoptions
from ollama_tiering.sidecar.engine.adoption_record import AdoptionRecord
from ollama_tiering.sidecar.engine.connection import Engines
from ollama_tiering.sidecar.engine.listener import EngineSocket, place
from ollama_tiering.sidecar.entrance import Entrance
from ollama_tiering.sidecar.grpc_socket import GrpcSocket
from ollama_tiering.sidecar.held_socket import HeldSocket, hold_socket, keep_reachable
from ollama_tiering.sidecar.ledger import Ledger
from ollama_tiering.sidecar.ledger_file import LedgerFile, held
from ollama_tiering.sidecar.look_up_times import LookUpTimes
from ollama_tiering.sidecar.memory import share_one_arena
from ollama_tiering.sidecar.metrics import make_registry, metrics_page
from ollama_tiering.sidecar.model_book import ModelBook
from ollama_tiering.sidecar.notify import notify
from ollama_tiering.sidecar.openings import Openings, end_tasks, has_ended
from ollama_tiering.sidecar.partings.metrics import PartingCollector
from ollama_tiering.sidecar.partings.partings import Partings
from ollama_tiering.sidecar.peer import PeerGuard
from ollama_tiering.sidecar.recheck_metrics import RecheckCollector
from ollama_tiering.sidecar.rechecks import Rechecks
from ollama_tiering.sidecar.reload import Reloader, with_live
from ollama_tiering.sidecar.rule_book import REFRESH_SECONDS, RuleBook
from ollama_tiering.sidecar.runners import RunnerTable
from ollama_tiering.sidecar.service import BlockStoreService
from ollama_tiering.sidecar.standing import Standing, standing_pages
from ollama_tiering.sidecar.wear import Wear
from ollama_tiering.sidecar.wire import RefusedRequests, WireFormat
from ollama_tiering.store import (
    LeftOver,
    TieredStore,
    cut_budget,
    open_store,
    ram_place,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.tools.partings import PartingFinder
from ollama_tiering.system.daemon_pool import DaemonPool

log = logging.getLogger(__name__)

_IO_THREADS: Final = 8
_GRACE_SECONDS: Final = 2.0
_DRAIN_SECONDS: Final = 10.0
_SWITCH_SECONDS: Final = 0.0005
_PEER_SECONDS: Final = 1.0  # how often connections that never call are looked at
_OPEN_FILES: Final = 8192  # far above what MAX_CONNECTIONS and the tiers need


def serve(
    config: SidecarConfig,
    *,
    ready: Callable[[str], None] | None = None,
    reread: Callable[[], SidecarConfig] | None = None,
) -> LeftOver:
    """Runs until SIGTERM or SIGINT; returns what could not be written down in time. On SIGHUP it
    takes the settings from `reread`; if a terminal hangs up, the sidecar ends.
    """
    # The loop must not wait 5 ms for the interpreter whenever a copying thread has it.
    sys.setswitchinterval(_SWITCH_SECONDS)
    share_one_arena()
    _allow_open_files()
    os.umask(0o077)  # of all that is made here, sockets too
    openings = Openings()
    # One loop for all of them: without its handlers a signal would end the process at once.
    with hold_socket(config.socket_path) as held_socket, asyncio.Runner() as runner:
        while True:
            left, again = _serve_once(config, held_socket, (runner, openings), ready, reread)
            runner.run(asyncio.sleep(0.01))  # hears a signal that came meanwhile
            if again is None or openings.told_to_end:
                return left
            log.info("a tier that was left out can be had: the store is opened again")
            config = again


def _serve_once(
    asked: SidecarConfig,
    held_socket: HeldSocket,
    around: tuple[asyncio.Runner, Openings],
    ready: Callable[[str], None] | None,
    reread: Callable[[], SidecarConfig] | None,
) -> tuple[LeftOver, SidecarConfig | None]:
    """Until the end, or until a tier that was left out can be had: then it is to be done again with
    these settings.
    """
    runner, openings = around
    config = ram_place.placed(asked)
    book = RuleBook(config)
    store = open_store(config, book.decide)
    try:
        with held(state_dir(), ledger := Ledger()) as file:
            uses = ModelBook(ledger, config.models_dir)
            reread = _keeping_place(asked, config, reread)
            serving = _serve(
                config, held_socket, store, book, (uses, file), openings, ready, reread
            )
            now = runner.run(serving)
    finally:
        left = store.close(_DRAIN_SECONDS)
        if left.blocks:
            log.warning(
                "in RAM only, kept until a reboot: blocks=%d size=%s",
                left.blocks,
                format_size(left.left_bytes),
            )
    if now is None:
        return left, None
    if store.hangs:  # its locks end with the process
        raise ServiceError(
            "a tier that was left out can be had, but the store cannot be opened again in this "
            "process: a disk hangs",
            hint="start the sidecar again; a service manager does",
        )
    return left, with_live(asked, now)


def _keeping_place(
    asked: SidecarConfig, now: SidecarConfig, reread: Callable[[], SidecarConfig] | None
) -> Callable[[], SidecarConfig] | None:
    """A RAM tier whose place was chosen stays there until the next start."""
    if reread is None or asked.ram_dir is not None:
        return reread
    return lambda: ram_place.kept(now, reread())


def make_entrance(guard: PeerGuard, counting: CallMetrics | None = None) -> Entrance:
    """What every call passes first; services are added to it."""
    counted = [counting.around] if counting is not None else []
    layers = [WireFormat(rpc.PACKAGE).around, *counted, RefusedRequests(rpc.PACKAGE).around]
    return Entrance(guard, layers)


async def _serve(
    config: SidecarConfig,
    held_socket: HeldSocket,
    store: TieredStore,
    book: RuleBook,
    counts: tuple[ModelBook, LedgerFile],
    openings: Openings,
    ready: Callable[[str], None] | None,
    reread: Callable[[], SidecarConfig] | None,
) -> SidecarConfig | None:
    """The settings as they are now, if it ended because a tier that was left out can be had."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        openings.told_to_end = True
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    if openings.told_to_end:
        stopping.set()
    reloader = Reloader(
        *(store, config, reread or (lambda: config), cut_budget),
        book=book,
        wanted=openings.reload_wanted,
    )
    hung_up = sys.stderr.isatty() or reread is None
    loop.add_signal_handler(signal.SIGHUP, end if hung_up else reloader.request)
    uses, ledger_file = counts
    registry = make_registry(store, uses, runners := RunnerTable())
    guard = PeerGuard(config.socket_path, bound=held_socket.hidden_name)
    entrance = make_entrance(guard, CallMetrics(registry) if config.metrics_port else None)
    server = GrpcSocket(held_socket, entrance)
    standing = Standing(store)
    pages = {"/metrics": metrics_page(registry), **standing_pages(standing)}
    contents = Contents(ContentRecord(state_dir()))
    ledger, wear = uses.ledger, Wear(store, uses.ledger)
    partings = Partings(
        PartingFinder(store), count=lambda model: ledger.book_today(model, DaySums(partings=1))
    )
    times = LookUpTimes(registry)
    builds = AdoptionRecord(state_dir())
    adoptions = Adoptions(store, builds, enabled=config.adopt, decided=openings.decided)
    rechecks = Rechecks(state_dir())
    registry.register(RecheckCollector(rechecks, uses.name))
    registry.register(PartingCollector(partings))
    shared = (store, contents, times, adoptions, rechecks)
    engines = _engine_socket(config, uses, runners, partings, shared)
    reading = contextlib.closing(contents)
    with _pool() as pool, Endpoint(pages, config.metrics_port), reading, engines as engine:
        service = BlockStoreService(
            *(store, pool, uses, runners, contents, partings, times),
            *(adoptions.record, rechecks, reloader.apply),
        )
        rpc.add_to_server(service, entrance)
        health_service = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(health_service, entrance)
        names = (*rpc.SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        # `enable_server_reflection` takes the blocking one if the server is no grpc.aio.Server.
        described = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(described, entrance)
        await server.listen()
        for name in ("", *rpc.SERVICES):
            await health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
        watching = _watch_names(book, store, pool)
        counting = (
            *(uses.keep_up(pool), ledger_file.keep(pool)),
            *(partings.keep_up(pool), wear.keep_up(pool)),
        )
        returning = asyncio.create_task(openings.wait_for_one(store, pool))
        returning.add_done_callback(lambda task: stopping.set() if has_ended(task) else None)
        chores = (
            Alive(store).run(),
            reloader.run(pool),
            _watch_peers(guard),
            watching,
            keep_reachable({held_socket: server.listen, **engine}, pool),
            *counting,
        )
        tasks = [asyncio.create_task(chore) for chore in chores]
        standing.phase = "serving"
        notify("READY=1")
        if ready is not None:
            ready(f"sidecar ready: socket={config.socket_path} {_summary(store)}")
        await stopping.wait()
        log.info("stopping")
        standing.phase = "stopping"
        if openings.told_to_end:
            notify("STOPPING=1")
        for task in (*tasks, returning):
            task.cancel()
        await health_service.enter_graceful_shutdown()
        await server.stop(_GRACE_SECONDS)
        wear.book()
        await ledger_file.end(pool)
    await end_tasks()
    return None if openings.told_to_end else reloader.config


@contextlib.contextmanager
def _engine_socket(
    config: SidecarConfig,
    uses: ModelBook,
    runners: RunnerTable,
    partings: Partings,
    shared: tuple[TieredStore, Contents, LookUpTimes, Adoptions, Rechecks],
) -> Iterator[dict[HeldSocket, Callable[[], Awaitable[None]]]]:
    """For engines that speak no gRPC; what they do is counted where runners report theirs."""
    path = place(config)
    if path is None:
        log.warning("no engine socket: its path would be too long; name one: sidecar.engine_socket")
        yield {}
        return

    def report(message: pb.RunnerReport) -> None:
        runners.put(message)
        partings.reported(message)
        if uses.book(message):
            uses.refresh()

    engines = Engines(
        *(shared[0], EngineAccounts(report), *shared[1:]),
        min_tokens=config.min_tokens,
        lease_seconds=config.lease_seconds,
    )
    with hold_socket(path) as held_path, EngineSocket(held_path, engines) as listener:
        yield {held_path: listener.listen_again}


@contextlib.contextmanager
def _pool() -> Iterator[DaemonPool]:
    """Threads for calls that may touch a file. A thread that hangs does not keep the sidecar from
    ending.
    """
    pool = DaemonPool(_IO_THREADS, "block-io")
    try:
        yield pool
    finally:
        if not pool.close(_GRACE_SECONDS):
            log.warning("calls hang, left behind")


async def _watch_peers(guard: PeerGuard) -> None:
    while True:
        await asyncio.sleep(_PEER_SECONDS)
        guard.trim()


async def _watch_names(book: RuleBook, store: TieredStore, pool: Executor) -> None:
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(pool, book.keep_up, store.set_terms)
        except Exception:
            log.exception("names of models not read")


def _allow_open_files() -> None:
    """The soft limit is often 1024, and a burst of connections would leave
    nothing for the tiers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _summary(store: TieredStore) -> str:
    tiers = store.report().tiers
    return " ".join(
        f"{tier.kind.label}={count(tier.blocks, 'block')}, {format_size(tier.used_bytes)}"
        f" of {format_size(tier.budget_bytes)}" + ("" if tier.state == "ok" else f" ({tier.state})")
        for tier in tiers
    )
