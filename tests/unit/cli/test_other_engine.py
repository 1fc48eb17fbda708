"""What another engine computed can never be used here: `import` and `ls` say so."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering import cli
from ollama_tiering.doctor.engines import EnginesHere
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.sidecar import PutStream, SidecarProcess

HERE = "ab" * 8
GO = f"ollama-go/0.16.3+{HERE}"
LLAMA = "llama-server/b7437-0123456+" + "cd" * 8
MODEL = "sha256-" + "12" * 32
NS = dataclasses.replace(samples.namespace(MODEL, layers=1), engine=GO, extra="content=sha256")
BLOCKS = samples.sequence(NS, range(8))


@pytest.fixture
def daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SidecarProcess]]:
    """One in which the Go engine stored a conversation, and an empty one."""
    for name in [name for name in os.environ if name.startswith(("OLLAMA", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "cache"))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with SidecarProcess(tmp_path / "one") as one, SidecarProcess(tmp_path / "two") as two:
        with one.channel() as channel:
            stream = PutStream(rpc.BlockStoreStub(channel), NS)
            assert all(result.stored for result in stream.put(BLOCKS))
            stream.close()
        yield [one, two]


def output(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert caught.value.code == 0, err
    return out


def runs(daemon: SidecarProcess, engine: str) -> None:
    report = pb.RunnerReport(pid=os.getpid(), engine=engine, model=MODEL, tiered=True)
    with daemon.channel() as channel:
        rpc.BlockStoreStub(channel).ReportRunner(report, timeout=5)


@pytest.mark.parametrize("built_here", [True, False])
def test_an_archive_of_another_engine_is_stored_and_said_to_be_of_no_use(
    daemons: list[SidecarProcess],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    built_here: bool,
) -> None:
    one, two = daemons
    if built_here:  # also where a build of that engine is in the cache, which nobody runs
        stamp = tmp_path / "cache/trees/v0.16.3-native/stamp.json"
        stamp.parent.mkdir(parents=True)
        stamp.write_text(json.dumps({"stamp": "", "binary": [], "build": HERE}))
    archive = tmp_path / "x.tar"
    output(capsys, "export", BLOCKS[-1].key.hex(), archive, "--socket", one.socket)
    runs(two, LLAMA)
    words = "computed by ollama-go/0.16.3, and this machine computes that model with llama-server"
    for args, verb in ((("--dry-run",), "would store"), ((), "stored"), ((), "stored already")):
        said = output(capsys, "import", archive, "--socket", two.socket, *args).splitlines()
        assert len(said) == 2
        assert verb in said[0]
        assert said[1] == f"of no use here: it was {words}"
    document = json.loads(output(capsys, "import", archive, "--socket", two.socket, "--json"))
    assert document["useless_here"] == "this machine computes that model with llama-server"
    listed = output(capsys, "ls", "--socket", two.socket)
    assert "other engine" in listed
    assert list(json.loads(output(capsys, "ls", "--socket", two.socket, "--json"))["useless_here"])
    assert "other engine" not in output(capsys, "ls", "--socket", one.socket)


@pytest.mark.parametrize("engine", [GO, "", f"ollama-go/0.17.0+{'ef' * 8}"])
def test_what_may_be_used_is_not_marked(
    daemons: list[SidecarProcess],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    engine: str,
) -> None:
    """The same engine, none that is known, and another version of it, which `gc` knows."""
    one, two = daemons
    archive = tmp_path / "x.tar"
    output(capsys, "export", BLOCKS[-1].key.hex(), archive, "--socket", one.socket)
    if engine:
        runs(two, engine)
    said = output(capsys, "import", archive, "--socket", two.socket)
    assert len(said.splitlines()) == 1
    assert "other engine" not in output(capsys, "ls", "--socket", two.socket)


def test_what_a_machine_has_decides_where_the_model_was_not_computed_yet() -> None:
    def why(engine: str, *, builds: frozenset[str] = frozenset(), patched: bool = False) -> str:
        here = EnginesHere(builds, patched, {})
        return here.why_useless((("engine", engine), ("model", MODEL)))

    assert why(GO) == why(LLAMA) == "", "nothing is known of this machine"
    assert why(GO, builds=frozenset({HERE})) == ""
    assert why(GO, builds=frozenset({"cd" * 8})) == "no such build is on this machine"
    assert why(GO, patched=True) == "no such build is on this machine"
    assert why(LLAMA, builds=frozenset({HERE})) == "no installed Ollama is patched here"
    assert why(LLAMA, builds=frozenset({HERE}), patched=True) == ""
    assert why("reference", patched=True) == ""
