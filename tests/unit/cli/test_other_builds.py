"""What builds of Ollama stored that are gone: `status` counts it, `gc` removes it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering import cli, config
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.sidecar import PutStream, SidecarProcess

HERE, GONE, RUNNING = "ab" * 8, "cd" * 8, "ef" * 8
BY_HAND = "exe-" + "0" * 16  # nobody knows where that one is: neither counted nor removed


def engine(build: str) -> str:
    return f"ollama-go/0.16.3+{build}"


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SidecarProcess]:
    """Two blocks of each of four builds."""
    with SidecarProcess(tmp_path) as daemon, daemon.channel() as channel:
        for name in [name for name in os.environ if name.startswith(("OLLAMA", "XDG_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("OLLAMA_KV_TIER_SOCKET", str(daemon.socket))
        stub = rpc.BlockStoreStub(channel)
        for build in (HERE, GONE, RUNNING, BY_HAND):
            ns = samples.namespace(layers=1)
            ns = dataclasses.replace(ns, engine=engine(build), extra="content=sha256")
            stream = PutStream(stub, ns)
            assert all(result.stored for result in stream.put(samples.sequence(ns, range(8))))
            stream.close()
        daemon.wait_written()
        stub.ReportRunner(
            pb.RunnerReport(pid=os.getpid(), engine=engine(RUNNING), tiered=True), timeout=5
        )
        yield daemon


def have_build(name: str) -> None:
    stamp = config.cache_dir() / "trees/v0.16.3-native/stamp.json"
    stamp.parent.mkdir(parents=True)
    stamp.write_text(json.dumps({"stamp": "", "binary": [], "build": name}))


def output(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(args))
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_status_counts_and_gc_removes_them(
    daemon: SidecarProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    have_build(HERE)
    said = "2 blocks were stored by builds that are not on this machine any more"
    assert said in output(capsys, "status")
    assert json.loads(output(capsys, "status", "--json"))["other_builds_blocks"] == 2
    planned = json.loads(output(capsys, "gc", "--dry-run", "--json"))["waste"]
    assert [w["files"] for w in planned if w["kind"] == "other build"] == [2]
    removed = output(capsys, "gc")
    assert removed.startswith("removed 2 blocks of builds that are not on this machine any more")
    assert json.loads(output(capsys, "status", "--json"))["other_builds_blocks"] == 0
    left = {(use.engine, use.blocks) for use in daemon.stat().namespaces}
    assert left == {(engine(HERE), 2), (engine(RUNNING), 2), (engine(BY_HAND), 2)}


def test_without_a_build_to_compare_with_nothing_is_said_or_removed(
    daemon: SidecarProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine with a sidecar only, or a cache that was deleted."""
    assert "builds that are not on this machine" not in output(capsys, "status")
    assert output(capsys, "gc") == "nothing to remove\n"


def test_a_build_that_is_installed_as_a_service_is_here(
    daemon: SidecarProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / ".local/lib/ollama-tiering/bin/ollama"
    binary.parent.mkdir(parents=True)
    binary.write_bytes(b"\x7fELF" + b"kvtier-build:" + b"x" * 50)  # the mark alone is no name
    assert output(capsys, "gc") == "nothing to remove\n"
    binary.write_bytes(b"\x7fELF" + bytes(5000) + b"kvtier-build:" + GONE.encode() + b"tail")
    assert "2 blocks were stored by builds" in output(capsys, "status")  # those of HERE
    output(capsys, "gc")
    left = {use.engine for use in daemon.stat().namespaces}
    assert left == {engine(GONE), engine(RUNNING), engine(BY_HAND)}
