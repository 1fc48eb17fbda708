"""A model whose file is not what its name says is neither stored nor restored, and until that is
known nothing of it is: of engines on either socket.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from measure.store import samples
from ollama_tiering.client.block_client import BlockClient
from ollama_tiering.client.engine_client import EngineRefused
from ollama_tiering.errors import ServiceError
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.loaded_file import LoadedFile
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.contract.fake_engine import FakeEngine, hello, prompt
from tests.sidecar import PutStream, SidecarProcess

SECONDS = 30.0
WEIGHTS = b"the right weights" * 1000


def blob(folder: Path, data: bytes, of: bytes = b"") -> Path:
    """Named as if it were what `of` is."""
    path = folder / f"sha256-{hashlib.sha256(of or data).hexdigest()}"
    path.write_bytes(data)
    return path


def said(path: Path, **options: Any) -> m.Hello:
    """Of an engine that is about to load the file."""
    fields = {"model": path.name, **options.pop("fields", {})}
    return hello(fields=fields, files=(LoadedFile.of(path),), **options)


def planned(engine: FakeEngine, tokens: Sequence[int]) -> m.Planned:
    """As soon as the file is checked."""
    until = time.monotonic() + SECONDS
    while True:
        answer = engine.plan(tokens)
        if answer.outcome is not m.EngineOutcome.LATER or time.monotonic() > until:
            return answer
        time.sleep(0.02)


# --- the engine socket ----------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, len(WEIGHTS) // 2, len(WEIGHTS) - 1])
def test_rows_of_damaged_weights_are_never_restored_for_the_right_ones(
    daemon: SidecarProcess, tmp_path: Path, at: int
) -> None:
    tokens = prompt(1_000_000 + 1000 * at, 200)
    damaged = bytearray(WEIGHTS)
    damaged[at] ^= 1
    path = blob(tmp_path, bytes(damaged), of=WEIGHTS)
    with FakeEngine(daemon.socket, said(path)) as wrong:
        refused = planned(wrong, tokens)
        assert refused.outcome is m.EngineOutcome.REFUSED
        assert "is damaged" in refused.reason
        assert str(path) in refused.reason
        assert wrong.look_up(tokens).reason == pb.SHORTFALL_UNCHECKED
        runner = next(one for one in daemon.stat().runners if one.pid == os.getpid())
        assert (runner.tiered, runner.reason) == (False, refused.reason)
        line = f"nothing of it is stored or restored: reason={str(path)!a} is damaged"
        until = time.monotonic() + SECONDS
        while line not in daemon.log:
            assert time.monotonic() < until, daemon.log
            time.sleep(0.02)

        (tmp_path / "partial").write_bytes(WEIGHTS)
        (tmp_path / "partial").rename(path)  # pulled again
        with FakeEngine(daemon.socket, said(path)) as right:
            assert right.restore(tokens) == 0
            assert right.store(tokens)[1] == []
            assert right.restore([*tokens, 1]) == 200
            assert wrong.look_up([*tokens, 1]).rows == 0, "its weights are still the damaged ones"
            assert planned(wrong, tokens).outcome is m.EngineOutcome.REFUSED


def test_a_blob_is_stored_under_its_name_and_another_file_under_its_content(
    daemon: SidecarProcess, tmp_path: Path
) -> None:
    names = set()
    for folder, data in (("a", b"one tune"), ("b", b"two tune"), ("c", b"one tune")):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "model.gguf"
        path.write_bytes(data)
        os.utime(path, (1, 1))
        with FakeEngine(daemon.socket, said(path)) as engine:
            assert planned(engine, prompt(1, 100)).outcome is m.EngineOutcome.ALL
            again = FakeEngine(daemon.socket, said(path))
            assert again.client.welcome is not None
            names.add((data, again.client.welcome.namespace))
            again.client.close()
    assert len(names) == 2
    assert len({name for _, name in names}) == 2


def test_what_was_reserved_is_given_back_where_the_file_changes_before_the_commit(
    daemon: SidecarProcess, tmp_path: Path
) -> None:
    path, tokens = tmp_path / "model.gguf", prompt(1, 100)
    path.write_bytes(b"a tune")
    with FakeEngine(daemon.socket, said(path)) as engine:
        assert planned(engine, tokens).files
        assert daemon.stat().tiers[0].reserved_bytes > 0
        time.sleep(1.1)  # what was found before counts for a second
        path.write_bytes(b"a TUNE")
        until = time.monotonic() + SECONDS
        while daemon.stat().tiers[0].reserved_bytes and time.monotonic() < until:
            engine.client.commit(m.Commit(()))
            time.sleep(0.05)
        assert daemon.stat().tiers[0].reserved_bytes == 0


def test_nothing_is_offered_or_restored_while_the_file_is_read(
    daemon: SidecarProcess, tmp_path: Path
) -> None:
    path = tmp_path / "large.gguf"
    path.touch()
    os.truncate(path, 1 << 40)
    with FakeEngine(daemon.socket, said(path)) as engine:
        assert engine.client.welcome is not None
        assert engine.client.welcome.namespace == bytes(32)
        answer = engine.plan(prompt(1, 100))
        assert (answer.outcome, answer.files) == (m.EngineOutcome.LATER, ())
        assert "being checked" in answer.reason
        assert engine.look_up(prompt(1, 100)).reason == pb.SHORTFALL_UNCHECKED
        runner = next(one for one in daemon.stat().runners if one.pid == os.getpid())
        assert (runner.tiered, runner.reason) == (False, answer.reason)


def test_a_request_that_ends_while_the_file_is_read_is_counted(tmp_path: Path) -> None:
    """It is reported once, and over another connection than what comes after it."""
    endless = [tmp_path / "one", tmp_path / "two"]
    for path in endless:
        path.touch()
        os.truncate(path, 1 << 40)
    loaded = blob(tmp_path, WEIGHTS)
    ended = m.EngineFinished(100, *([0] * 7), 0.5, 0.0, 0.0, 0.0)
    with SidecarProcess(tmp_path) as daemon:
        with BlockClient(daemon.socket) as client:
            assert client.check_files([LoadedFile.of(path) for path in endless]) == ()
        with FakeEngine(daemon.socket, said(loaded)) as look_ups:
            look_ups.client.finished(ended)
            (runner,) = daemon.stat().runners
            assert (runner.tiered, runner.requests) == (False, 0)
            for path in endless:
                os.truncate(path, 0)
            with FakeEngine(daemon.socket, said(loaded)) as stores:
                planned(stores, prompt(1, 100))
            (runner,) = daemon.stat().runners
            assert (runner.tiered, runner.requests) == (True, 1)
            look_ups.client.finished(ended)
        (runner,) = daemon.stat().runners
        assert (runner.requests, runner.recomputed_tokens) == (2, 200)


def test_what_was_computed_before_a_file_changed_is_not_stored_after(
    daemon: SidecarProcess, tmp_path: Path
) -> None:
    path = blob(tmp_path, WEIGHTS + b"changed later")
    with FakeEngine(daemon.socket, said(path)) as engine:
        assert engine.store(prompt(2_000_000, 100))[1] == []
        time.sleep(0.02)
        with path.open("r+b") as file:
            file.write(b"T")
        time.sleep(1.1)  # a look at the file is good for a second
        answer = planned(engine, prompt(2_100_000, 100))
        assert answer.outcome is m.EngineOutcome.REFUSED
        assert "changed after it was loaded" in answer.reason
        assert engine.look_up(prompt(2_000_000, 100)).rows == 0


def test_an_engine_that_says_no_file_is_refused(daemon: SidecarProcess) -> None:
    for files in ((), (LoadedFile("relative", LoadedFile.of("/").identity),)):
        with pytest.raises(EngineRefused):
            FakeEngine(daemon.socket, hello(files=files))
    with pytest.raises(EngineRefused):
        FakeEngine(daemon.socket, hello(fields={"content": "sha256"}))


# --- gRPC -----------------------------------------------------------------------------------------


def test_a_client_learns_what_it_has_loaded(daemon: SidecarProcess, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(WEIGHTS)
    with BlockClient(daemon.socket) as client:
        found = client.check_files([LoadedFile.of(path)], SECONDS)
        assert found == (hashlib.sha256(WEIGHTS).digest(),)
        wrong = blob(tmp_path, b"?", of=WEIGHTS)
        with pytest.raises(ServiceError, match="is damaged"):
            client.check_files([LoadedFile.of(path), LoadedFile.of(wrong)], SECONDS)
        with pytest.raises(ServiceError, match="none, or more than"):
            client.check_files([], SECONDS)
        with pytest.raises(ServiceError, match="not absolute"):
            client.check_files([LoadedFile("x", LoadedFile.of(path).identity)], SECONDS)


@pytest.mark.parametrize("engine", ["ollama-go/0.16.3+0123", "llama.cpp/0.16.3+0123"])
def test_an_engine_from_before_files_were_checked_is_not_tiered(
    daemon: SidecarProcess, stub: Any, engine: str
) -> None:
    ns = dataclasses.replace(samples.namespace(engine), engine=engine, extra="devices=none")
    blocks = samples.sequence(ns, range(8))
    stream = PutStream(stub, ns)
    answers = stream.reserve(blocks)
    stream.close()
    assert {one.outcome for one in answers} == {pb.Reservation.OUTCOME_REFUSED}
    assert "older than this sidecar" in answers[0].reason
    checked = dataclasses.replace(ns, extra="devices=none;content=sha256")
    stream = PutStream(stub, checked)
    assert all(one.stored for one in stream.put(samples.sequence(checked, range(8))))
    stream.close()


def test_blocks_from_before_files_were_checked_are_not_found(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path)
    ns = dataclasses.replace(samples.namespace("old"), engine="other/1")
    old = dataclasses.replace(ns, engine="ollama-go/0.16.3+0123")
    blocks = samples.sequence(old, range(8))
    with sidecar, sidecar.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        stream = PutStream(stub, ns)
        assert all(one.stored for one in stream.put(samples.sequence(ns, range(8))))
        stream.close()
        sidecar.wait_written()
    # As a sidecar of before would have left it.
    folder = sidecar.local_dir / "v1" / ns.digest().hex()
    aside = sidecar.local_dir / "v1" / old.digest().hex()
    aside.mkdir(mode=0o700)
    text = (folder / "namespace.json").read_text().replace("other/1", old.engine)
    (aside / "namespace.json").write_text(text)
    for block in blocks:
        place = aside / block.key.hex()[:2]
        place.mkdir(mode=0o700, exist_ok=True)
        (place / f"{block.key.hex()}.kvb").write_bytes(block.data)
        (place / f"{block.key.hex()}.kvb").chmod(0o400)
    (sidecar.local_dir / "index.sqlite").unlink()
    with sidecar, sidecar.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        for one, rows in ((ns, 8), (old, 0)):
            data = tokens_to_bytes([*range(8)])
            keys = [block.key for block in samples.sequence(one, range(8))]
            request = pb.HasRequest(
                namespace=one.digest(), keys=keys, tokens=data, block_tokens=int(one.block_tokens)
            )
            assert stub.Has(request, timeout=10).matched_tokens == rows
        assert sidecar.stat().tiers[-1].blocks >= 2 * len(blocks), "they are there"


def test_a_malformed_question_is_an_error_of_its_own(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as error:
        stub.CheckFiles(pb.CheckFilesRequest(files=[pb.LoadedFile(path=b"/a\0b")]), timeout=10)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
