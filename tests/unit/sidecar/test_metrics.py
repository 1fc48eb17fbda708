"""Metrics: the store's own numbers, by conventional names, on loopback or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from prometheus_client import CollectorRegistry

from measure.store import samples
from ollama_tiering import __version__
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.sidecar.calls import CallMetrics
from ollama_tiering.sidecar.endpoint import Endpoint
from ollama_tiering.sidecar.metrics import label, make_registry, metrics_page
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.books.state import PROMOTE_AFTER_SECONDS
from tests.contract.fake_engine import FakeEngine, prompt
from tests.sidecar import PutStream, SidecarProcess
from tests.unit.sidecar.scrape import MeteredSidecar, Scrape, free_port, of_port, of_registry
from tests.unit.store.support import FILE_BYTES, NAMESPACE, NS, Bench


def scrape(bench: Bench) -> Scrape:
    return of_registry(make_registry(bench.store))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeteredSidecar]:
    with MeteredSidecar(tmp_path_factory.mktemp("metered")) as running:
        yield running


def test_the_time_of_look_ups_is_measured_over_both_wires(daemon: MeteredSidecar) -> None:
    """And of nothing else: what is located and read behind the answer is not waited for."""
    count, total = "tiering_lookup_seconds_count", "tiering_lookup_seconds_sum"
    before = of_port(daemon.port)
    asked = pb.LookUpRequest(
        namespace=NS.digest(), tokens=bytes(400), block_tokens=4, most_rows=99, min_tokens=1
    )
    with daemon.channel() as channel:
        list(rpc.BlockStoreStub(channel).LookUp(asked, timeout=10))
    over_grpc = of_port(daemon.port)
    assert over_grpc(count) == before(count) + 1
    with FakeEngine(daemon.socket) as engine:
        engine.look_up(prompt(0, 100))
    over_both = of_port(daemon.port)
    assert over_both(count) == before(count) + 2
    assert 0 < over_both(total) - before(total) < 10


def test_every_number_of_the_store_is_shown_as_the_store_has_it() -> None:
    bench = Bench(ram=8, local=16)
    blocks = bench.put(range(8))
    bench.store.run_pending()
    assert bench.rows([*range(4), 77]) == 4
    assert bench.rows([99]) == 0
    lease = bench.lease(blocks)
    bench.tick(3)
    found = scrape(bench)
    assert found("tiering_lookups_total") == 2
    assert found("tiering_lookup_hits_total") == 1
    assert found("tiering_misses_total", reason="unknown_prefix") == 1
    assert found("tiering_asked_tokens_total") == 6
    assert found("tiering_matched_tokens_total") == 4
    assert found("tiering_put_blocks_total") == 2
    assert found("tiering_put_bytes_total") == 2 * FILE_BYTES
    assert found("tiering_leases") == 1
    assert found("tiering_oldest_lease_age_seconds") == 3
    assert found("tiering_queue_blocks") == 0
    for tier, budget in (("ram", 8), ("local", 16)):
        assert found("tiering_tier_budget_bytes", tier=tier) == budget * FILE_BYTES
        assert found("tiering_tier_used_bytes", tier=tier) == 2 * FILE_BYTES
        assert found("tiering_tier_blocks", tier=tier) == 2
        assert found("tiering_tier_written_bytes_total", tier=tier) == 2 * FILE_BYTES
        assert found("tiering_tier_seconds_total", tier=tier, direction="write") > 0
        assert found("tiering_tier_suspended", tier=tier) == 0
    assert found("tiering_tier_bytes_total", tier="ram", direction="read") == 2 * FILE_BYTES
    assert found("tiering_tier_served_blocks_total", tier="ram") == 2
    assert found("tiering_tier_served_bytes_total", tier="ram") == 2 * FILE_BYTES
    assert found("tiering_build_info", version=__version__) == 1
    bench.store.release(lease)
    assert scrape(bench)("tiering_leases") == 0


def test_queue_evictions_demotions_promotions_are_shown() -> None:
    bench = Bench(ram=2, local=3, high_watermark=0.9, low_watermark=0.5)
    first = bench.put([1])
    bench.put([2])
    assert scrape(bench)("tiering_queue_blocks") == 2
    bench.store.run_pending()
    assert scrape(bench)("tiering_tier_demoted_blocks_total", tier="ram") == 1
    bench.store.set_watermarks(1.0, 1.0)
    bench.store.release(bench.lease(first))
    bench.tick(PROMOTE_AFTER_SECONDS)
    bench.store.run_pending()
    assert scrape(bench)("tiering_tier_promoted_blocks_total", tier="ram") == 1
    for token in range(10, 14):
        bench.put([token])
        bench.store.run_pending()
    assert scrape(bench)("tiering_tier_evicted_blocks_total", tier="local") >= 1


def test_damage_and_errors_are_shown() -> None:
    bench = Bench(ram=None, local=8)
    (block,) = bench.put([1])
    before = scrape(bench)
    assert before("tiering_tier_quarantined_blocks_total", tier="local") == 0
    assert before("tiering_misses_total", reason="corrupt") == 0
    assert before("tiering_tier_failures_total", tier="local", error="EIO") == 0
    bench.damage(0, block.key)
    assert bench.store.report_corrupt(NAMESPACE, block.key)
    with bench.state.lock:
        bench.state.failed(bench.state.levels[0], OSError(5, "I/O error"))
    after = scrape(bench)
    assert after("tiering_tier_quarantined_blocks_total", tier="local") == 1
    assert after("tiering_tier_overhead_bytes", tier="local") == FILE_BYTES
    assert after("tiering_misses_total", reason="corrupt") == 1
    assert after("tiering_tier_failures_total", tier="local", error="EIO") == 1
    assert after("tiering_tier_suspended", tier="local") == 1


def test_names_follow_the_conventions() -> None:
    bench = Bench()
    bench.put([1])
    families = scrape(bench).families
    ours = [family for family in families if family.name.startswith("tiering_")]
    assert len(ours) > 25
    for family in ours:
        assert family.documentation.endswith("."), family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert not family.name.endswith(("_count", "_sum", "_ms", "_mb", "_milliseconds"))
    names = [family.name for family in families]
    assert len(names) == len(set(names))


def test_nothing_a_client_named_is_shown() -> None:
    bench = Bench()
    (block,) = bench.put([1, 2, 3])
    text = scrape(bench).text
    assert block.key.hex() not in text
    assert NAMESPACE.hex() not in text
    assert "sample" not in text  # the model's name


def test_reasons_become_label_values() -> None:
    assert [label(reason) for reason in ("i/o error", "file gone")] == ["io_error", "file_gone"]


def test_off_by_default(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path) as daemon:
        assert daemon.process is not None
        listening = psutil.Process(daemon.process.pid).net_connections("inet")
    assert listening == []


def test_the_endpoint_listens_on_loopback_only(daemon: MeteredSidecar) -> None:
    assert daemon.process is not None
    listening = [
        connection.laddr
        for connection in psutil.Process(daemon.process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert [(place.ip, place.port) for place in listening] == [("127.0.0.1", daemon.port)]


def test_a_running_sidecar_shows_its_calls_by_method_and_status(daemon: MeteredSidecar) -> None:
    blocks = samples.sequence(NS, range(8))
    with daemon.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        stream = PutStream(stub, NS)
        assert all(result.stored for result in stream.put(blocks))
        stream.close()
        before = of_port(daemon.port)
        request = pb.GetRequest(namespace=NAMESPACE, keys=[block.key for block in blocks])
        answers = list(stub.Get(request, timeout=10))
        assert all(answer.found for answer in answers)
        with pytest.raises(grpc.RpcError):
            stub.Has(pb.HasRequest(namespace=b"short"), timeout=10)
        unknown = channel.unary_unary("/ollama_tiering.v1.BlockStore/NoSuchMethod")
        with pytest.raises(grpc.RpcError):
            unknown(b"", timeout=10)
    after = of_port(daemon.port)
    assert before("tiering_grpc_calls_total", method="Put", code="OK") == 1
    assert after("tiering_grpc_calls_total", method="Get", code="OK") == 1
    assert after("tiering_grpc_calls_total", method="Has", code="INVALID_ARGUMENT") == 1
    assert after("tiering_grpc_call_seconds_count", method="Get") == 1
    assert after("tiering_grpc_call_seconds_sum", method="Get") > 0
    assert "NoSuchMethod" not in after.text
    assert after("tiering_tier_served_blocks_total", tier="ram") == len(blocks)
    assert after("tiering_put_blocks_total") == len(blocks)
    assert after("process_resident_memory_bytes") > 0


def test_a_cancelled_stream_is_counted_as_cancelled(daemon: MeteredSidecar) -> None:
    with daemon.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), NS)
        stream.reserve(samples.sequence(NS, [500, 501]))
        stream.answers.cancel()
        daemon.wait(lambda stat: stat.tiers[0].reserved_bytes == 0, "reservations are released")
    end = time.monotonic() + 10
    key = ("tiering_grpc_calls_total", frozenset({"method": "Put", "code": "CANCELLED"}.items()))
    while not of_port(daemon.port).values.get(key):
        assert time.monotonic() < end, of_port(daemon.port).text
    assert of_port(daemon.port).values[key] == 1


def test_a_slow_client_holds_up_neither_the_store_nor_the_end(tmp_path: Path) -> None:
    daemon = MeteredSidecar(tmp_path).start()
    over = threading.Event()
    with socket.create_connection(("127.0.0.1", daemon.port)) as slow:

        def drip() -> None:
            """A request that never ends, and never long enough for a time-out."""
            slow.sendall(b"GET /metrics HTTP/1.0\r\nX: ")
            with contextlib.suppress(OSError):
                while not over.wait(0.2):
                    slow.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert daemon.stat().version == __version__
            start = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - start < 15  # it would never end
        finally:
            over.set()
            dripping.join()


def test_a_taken_port_is_a_warning_and_the_store_works(tmp_path: Path) -> None:
    daemon = MeteredSidecar(tmp_path)
    with socket.create_server(("127.0.0.1", daemon.port)), daemon:
        assert daemon.stat().version == __version__
        daemon.stop()
    assert daemon.said(f"metrics not served: port={daemon.port}")


def test_the_numbers_come_in_the_format_that_is_asked_for() -> None:
    port = free_port()
    with Endpoint({"/metrics": metrics_page(make_registry(Bench().store))}, port):
        url = f"http://127.0.0.1:{port}/metrics"
        asked = {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"}
        request = urllib.request.Request(url, headers=asked)
        with urllib.request.urlopen(request, timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert gzip.decompress(answer.read()).endswith(b"# EOF\n")


class FakeContext:
    def __init__(self, code: Any = 0) -> None:
        self._code = code

    def code(self) -> Any:
        return self._code


def counted(handler: Any, context: FakeContext, use: Any) -> Scrape:
    """Runs one call through what counts it; its clock moves a second at each look."""
    registry = CollectorRegistry()
    seconds = iter(range(100))
    metrics = CallMetrics(registry, clock=lambda: float(next(seconds)))

    async def go() -> None:
        await use(metrics.around("/p.Service/Do", handler), context)

    asyncio.run(go())
    return of_registry(registry)


async def read_all(handler: Any, context: FakeContext) -> None:
    assert [answer async for answer in handler.unary_stream("request", context)] == [1, 2]


async def read_one(handler: Any, context: FakeContext) -> None:
    answers = handler.unary_stream("request", context)
    assert await anext(answers) == 1
    await answers.aclose()


async def fail(handler: Any, context: FakeContext) -> None:
    with pytest.raises(ZeroDivisionError):
        await handler.unary_unary("request", context)


def test_a_streams_time_is_that_of_the_whole_stream_and_its_end_is_ours() -> None:
    ended = []

    async def numbers(request: Any, context: Any) -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            ended.append(request)

    handler = grpc.unary_stream_rpc_method_handler(numbers)
    whole = counted(handler, FakeContext(), read_all)
    assert whole("tiering_grpc_calls_total", method="Do", code="OK") == 1
    assert whole("tiering_grpc_call_seconds_sum", method="Do") == 1
    part = counted(handler, FakeContext(), read_one)
    assert part("tiering_grpc_calls_total", method="Do", code="CANCELLED") == 1
    assert ended == ["request"] * 2


def test_a_bug_in_a_call_is_counted_and_passed_on() -> None:
    async def explode(request: Any, context: Any) -> None:
        raise ZeroDivisionError

    handler = grpc.unary_unary_rpc_method_handler(explode)
    found = counted(handler, FakeContext(), fail)
    assert found("tiering_grpc_calls_total", method="Do", code="UNKNOWN") == 1
    aborted = counted(handler, FakeContext(grpc.StatusCode.DATA_LOSS.value[0]), fail)
    assert aborted("tiering_grpc_calls_total", method="Do", code="DATA_LOSS") == 1
