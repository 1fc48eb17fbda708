"""gRPC reflection: a client without our .proto finds out what it may call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from ollama_tiering.protocol.calls import BLOCK_STORE, SERVICES
from tests.sidecar import SidecarProcess
from tests.unit.sidecar.scrape import MeteredSidecar, of_port


@pytest.fixture(scope="module", params=[SidecarProcess, MeteredSidecar])
def daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarProcess]:
    root: Path = tmp_path_factory.mktemp("reflected")
    with request.param(root) as running:
        yield running


def test_services_and_their_methods_are_described(daemon: SidecarProcess) -> None:
    with daemon.channel() as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) == {
            *SERVICES,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        service = DescriptorPool(database).FindServiceByName(BLOCK_STORE)
        assert {"Has", "Get", "Put", "Stat"} <= {method.name for method in service.methods}
        fields = service.methods_by_name["Has"].input_type.fields_by_name
        assert "block_tokens" in fields

        stub = ServerReflectionStub(channel)
        # The database leaves after an answer's first message: its calls may count as cancelled.
        assert len(list(stub.ServerReflectionInfo(iter([ServerReflectionRequest()])))) == 1
    if isinstance(daemon, MeteredSidecar):
        labels = {"method": "ServerReflectionInfo", "code": "OK"}
        key = ("tiering_grpc_calls_total", frozenset(labels.items()))
        # The call is counted when it has ended, a moment after the client has its answer.
        deadline = time.monotonic() + 10
        while not of_port(daemon.port).values.get(key) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert of_port(daemon.port).values[key] >= 1
