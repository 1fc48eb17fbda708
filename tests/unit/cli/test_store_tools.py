"""`tiering ls`, `rm`, `pin`, `verify`, `gc`, `export`, `import`: with a sidecar and without."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering import cli
from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.running_up import RunningUp, hold
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import VERSION_DIRECTORY, FsTier
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.tools.exporting import export_chain
from ollama_tiering.store.values import PinResult
from ollama_tiering.system.locks import lock_file
from tests.places import short_directory
from tests.sidecar import PutStream, SidecarProcess
from tests.unit.sidecar.ollama_models import name_model

MODEL = "sha256-" + "ab" * 32
NS = samples.namespace(MODEL, layers=1)
OTHER = samples.namespace("other-model", layers=1)
FILE_BYTES = len(samples.sequence(NS, [0])[0].data)
SHARED = list(range(8))
ONE = samples.sequence(NS, [*SHARED, 50])
TWO = samples.sequence(NS, [*SHARED, 60, 61])
THREE = samples.sequence(OTHER, list(range(20)))


def ident(blocks: list[samples.SampleBlock]) -> str:
    return blocks[-1].key.hex()


class Place:
    """A filled store, and the commands on it."""

    def __init__(self, daemon: SidecarProcess, capsys: pytest.CaptureFixture[str]) -> None:
        self.daemon = daemon
        self.root = daemon.root
        self._capsys = capsys

    def run(self, *args: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(arg) for arg in args])
        assert isinstance(caught.value.code, int)
        out, err = self._capsys.readouterr()
        return caught.value.code, out, err

    def ok(self, *args: str | Path) -> str:
        code, out, err = self.run(*args)
        assert code == 0, err
        return out

    def json(self, *args: str | Path) -> Any:
        return json.loads(self.ok(*args, "--json"))

    def ids(self, *args: str) -> set[str]:
        return {chain["id"] for chain in self.json("ls", *args)["chains"]}

    def file(self, block: samples.SampleBlock, tier: str = "local") -> Path:
        (path,) = (self.root / tier).rglob(f"{block.key.hex()}.kvb")
        return path

    def flip(self, block: samples.SampleBlock, tier: str = "local") -> None:
        path = self.file(block, tier)
        path.chmod(0o600)
        content = bytearray(path.read_bytes())
        content[4100] ^= 1
        path.write_bytes(content)

    def contents(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in sorted(self.root.rglob("*.kvb*"))
        }


@pytest.fixture(params=["sidecar", "files"])
def place(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Place]:
    with short_directory() as directory, SidecarProcess(directory) as daemon:
        for name in [name for name in os.environ if name.startswith(("OLLAMA", "XDG_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(directory))
        monkeypatch.setenv("OLLAMA_KV_TIER_SOCKET", str(daemon.socket))
        monkeypatch.setenv("OLLAMA_KV_TIER_MIN_TOKENS", "1")
        monkeypatch.setenv("OLLAMA_KV_TIER_RAM", str(daemon.ram_dir))
        monkeypatch.setenv("OLLAMA_KV_TIER_LOCAL", str(daemon.local_dir))
        monkeypatch.setenv("OLLAMA_KV_TIER_RAM_GB", str(daemon.budgets[0]))
        monkeypatch.setenv("OLLAMA_KV_TIER_LOCAL_GB", str(daemon.budgets[1]))
        monkeypatch.setenv("OLLAMA_KV_TIER_MIN_TOKENS", "1")
        put(daemon)
        if request.param == "files":
            daemon.stop()
        yield Place(daemon, capsys)


def put(daemon: SidecarProcess) -> None:

    with daemon.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        for ns, blocks in ((NS, ONE), (NS, TWO), (OTHER, THREE)):
            stream = PutStream(stub, ns)
            assert all(result.stored for result in stream.put(blocks))
            stream.close()
    daemon.wait_written()


def test_ls_as_a_table(place: Place) -> None:
    lines = place.ok("ls", "--sort", "tokens").splitlines()
    assert "\x1b" not in "".join(lines)
    assert " ".join(lines[0].split()) == "ID MODEL TOKENS SIZE BLOCKS OWN TIERS USED HITS"
    assert re.sub(" +", " ", lines[1]).startswith(
        f"{ident(THREE)[:8]} other-model 20 60.0 KiB 5 60.0 KiB ram local "
    )
    assert lines[2].split()[1] == "abababababab"
    total = format_kib(9 * FILE_BYTES)
    assert lines[-1] == f"3 conversations, 9 blocks, {total} (ram {total}, local {total})"


def format_kib(size: int) -> str:
    return f"{size / 1024:.1f} KiB"


def test_ls_as_json(place: Place) -> None:
    document = place.json("ls", "--sort", "size", "--limit", "1")
    (chain,) = document["chains"]
    tiers = [
        {"tier": tier, "blocks": 5, "stored_bytes": 5 * FILE_BYTES} for tier in ("ram", "local")
    ]
    assert chain.pop("last_use") > chain.pop("created") > 0
    assert chain == {
        "id": ident(THREE),
        "namespace": OTHER.digest().hex(),
        "model": "other-model",
        "tokens": 20,
        "blocks": 5,
        "file_bytes": 5 * FILE_BYTES,
        "own_blocks": 5,
        "own_bytes": 5 * FILE_BYTES,
        "tiers": tiers,
        "hits": 0,
        "pinned": False,
        "leased": False,
        "complete": True,
        "text": "",
    }
    assert document["namespaces"][OTHER.digest().hex()] == dict(OTHER.fields())
    assert document["stored"]["blocks"] == 9
    assert document["version"] == 1


def test_ls_selects_sorts_and_shows_blocks(place: Place) -> None:
    assert place.ids("--model", "other") == {ident(THREE)}
    assert place.ids("--min-tokens", "10") == {ident(TWO), ident(THREE)}
    assert place.ids("--older-than", "1h") == set()
    assert place.ids("--tier", "remote") == set()
    assert place.ids("--min-size", f"{5 * FILE_BYTES}") == {ident(THREE)}
    blocks = place.json("ls", "--blocks", ident(TWO)[:10])["blocks"]
    assert [block["id"] for block in blocks] == [block.key.hex() for block in TWO]
    assert [block["tokens"] for block in blocks] == [4, 8, 10]
    assert [block["children"] for block in blocks] == [1, 2, 0]
    assert "nothing" not in place.ok("ls", "--model", "none")
    out = place.ok("ls", "--reverse", "--sort", "model", "--limit", "2")
    assert [line.split()[1] for line in out.splitlines()[1:3]] == ["other-model", "abababababab"]


@pytest.mark.parametrize("where", ["OLLAMA_MODELS", "up"])
def test_names_of_models_come_from_ollama(
    place: Place, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Also from a directory that only a `tiering up` was told of."""
    models = place.root / "models"
    name_model(models, "qwen3:0.6b", MODEL)
    name_model(models, "mine:latest", MODEL).with_name("broken").write_text("[1")
    if where == "OLLAMA_MODELS":
        monkeypatch.setenv("OLLAMA_MODELS", str(models))
    else:
        with hold(Address(port=1)) as held:
            held.write(RunningUp(pid=os.getpid(), url="u", models=str(models)))
    assert [line.split()[1] for line in place.ok("ls", "--model", "MINE").splitlines()[1:-1]] == [
        "mine:latest",
        "mine:latest",
    ]
    mine = {ident(ONE), ident(TWO)}
    assert place.ids("--model", "qwen3") == place.ids("--model", "abab") == mine
    assert f"{ident(ONE)[:12]} of mine:latest pinned: 3 blocks" in place.ok("pin", ident(ONE))
    assert f"{ident(ONE)[:12]} of mine:latest unpinned" in place.ok("unpin", ident(ONE))
    archive = place.root / "x.tar"
    assert f"exported {ident(TWO)[:12]} of mine:latest: " in place.ok("export", ident(TWO), archive)
    assert f"{ident(TWO)[:12]} of mine:latest: all 3" in place.ok("import", archive)
    place.flip(ONE[0])
    assert re.search(
        rf"damaged  local v1/{NS.digest().hex()}/\S+ \(mine:latest\): ", place.run("verify")[1]
    )
    place.run("verify", "--repair")
    out = place.ok("rm", "--model", "qwen3", "--yes")
    assert out.startswith("removed 2 conversations of mine:latest, ")
    assert place.ids() == {ident(THREE)}


def test_part_of_a_digest_is_no_name(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--model ba` would remove what only has these letters somewhere in its digest."""
    assert place.ids("--model", "ba") == set()
    assert place.ids("--model", MODEL) == place.ids("--model", "sha256-ab")
    models = place.root / "models"
    name_model(models, "abba:1b", "sha256-" + "cd" * 32)
    monkeypatch.setenv("OLLAMA_MODELS", str(models))
    assert place.ids("--model", "ab") == set()  # a name fits, so the digest is not meant


def test_rm_leaves_what_others_need(place: Place) -> None:
    planned = place.json("rm", ident(ONE)[:12], "--dry-run")
    assert planned["kept"] == {"needed by another chain": 2}
    assert place.ids() == {ident(ONE), ident(TWO), ident(THREE)}
    out = place.ok("rm", ident(ONE)[:12], "--yes")
    start = "removed 1 conversation of abababababab, 1 block, 24.0 KiB; stays: 2 blocks needed by"
    assert out.startswith(start)
    assert place.ids() == {ident(TWO), ident(THREE)}
    place.ok("rm", "--all", "--yes")
    assert place.ok("ls") == "nothing is stored\n"
    assert place.contents() == {}


def test_rm_of_a_pinned_conversation_is_refused_with_the_way_out(place: Place) -> None:
    place.ok("pin", ident(ONE))
    before = place.contents()
    for options in (("--yes",), ("--yes", "--json"), ("--dry-run",)):
        code, out, err = place.run("rm", ident(ONE)[:12], ident(THREE), *options)
        assert (code, out) == (1, "")
        assert f"error: {ident(ONE)[:8]} is pinned; nothing was removed\n" in err
        assert f"hint: tiering unpin {ident(ONE)[:8]}\n" in err
    assert place.contents() == before
    # The pin is on a conversation that goes on from here: unpinning this block would do nothing.
    code, _, err = place.run("rm", ONE[0].key.hex(), "--yes")
    assert code == 1
    assert "hint: tiering ls --pinned" in err
    place.ok(*err_command(place.run("rm", ident(ONE), "--yes")[2]))
    assert place.ok("rm", ident(ONE), "--yes").startswith("removed 1 conversation")


def err_command(err: str) -> list[str]:
    """What the hint says to run."""
    return err.partition("hint: tiering ")[2].split()


@pytest.mark.parametrize("which", [("--all",), ("--min-tokens", "1")])
def test_rm_of_many_keeps_pinned_conversations_and_counts_them(
    place: Place, which: tuple[str, ...]
) -> None:
    place.ok("pin", ident(ONE))
    place.ok("pin", ident(THREE))
    assert "; 2 pinned conversations kept" in place.ok("rm", *which, "--dry-run")
    assert place.json("rm", *which, "--dry-run")["pinned_chains"] == 2
    out = place.ok("rm", *which, "--yes")
    assert out.startswith("removed 1 conversation of abababababab, ")
    assert "; 2 pinned conversations kept" in out
    assert place.ids() == {ident(ONE), ident(THREE)}
    place.ok("unpin", ident(ONE), ident(THREE))
    assert "pinned" not in place.ok("rm", *which, "--yes")
    assert place.ids() == set()


def test_rm_asks_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    code, _, err = place.run("rm", "--all")
    assert (code, "hint: add --yes" in err) == (2, True)
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    code, _, err = place.run("rm", "--model", "other")
    assert code == 130
    assert "would remove 1 conversation of other-model, 5 blocks" in err
    assert len(place.ids()) == 3
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert place.ok("rm", "--model", "other").startswith("removed 1 conversation of other-model, 5")
    assert len(place.ids()) == 2


def test_a_pin_keeps_and_outlives_everything(place: Place) -> None:
    assert "pinned: 3 blocks" in place.ok("pin", ident(ONE)[:12])
    assert "was pinned already" in place.ok("pin", ident(ONE)[:12])
    assert place.json("rm", "--all", "--yes")["kept"] == {"pinned": 3}
    assert place.ids("--pinned") == {ident(ONE)}
    if place.daemon.running:
        place.daemon.stop()
    for path in place.daemon.local_dir.glob("index.sqlite*"):
        path.unlink()
    with place.daemon:
        assert place.ids("--pinned") == {ident(ONE)}
        assert place.json("unpin", ident(ONE))["pins"][0]["changed"] is True
    assert place.ids("--pinned") == set()


def test_a_pin_that_follows_says_so(place: Place) -> None:
    assert "pinned: 3 blocks" in place.ok("pin", ident(ONE))
    said = place.ok("pin", "--follow", ident(ONE))
    assert "pinned, and what is added to it later: 3 blocks" in said
    (pin,) = place.json("pin", "--follow", ident(ONE))["pins"]
    assert (pin["follows"], pin["changed"]) == (True, False)
    (lifted,) = place.json("unpin", ident(ONE))["pins"]
    assert (lifted["follows"], lifted["changed"]) == (False, True)
    (plain,) = place.json("pin", ident(ONE))["pins"]
    assert (plain["follows"], plain["changed"]) == (False, True)


def test_a_sidecar_that_does_not_follow_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an older version does not know that it is asked to."""
    done = PinResult(ONE[-1].key, 3, 0, 0, 0, changed=True)
    for kind in (SidecarAdministration, Administration):
        monkeypatch.setattr(kind, "pin", lambda *_, **__: done)
    code, _, err = place.run("pin", "--follow", ident(ONE))
    assert (code, "does not follow" in err) == (9, True)


@pytest.mark.parametrize("place", ["files"], indirect=True)
def test_too_many_pins_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_KV_TIER_LOCAL_GB", f"{8 * FILE_BYTES}B")
    code, _, err = place.run("pin", ident(THREE))
    assert code == 1
    assert "60.0 KiB more would pin" in err
    assert "hint: unpin something" in err
    assert place.run("pin", ident(THREE), "--dry-run")[0] == 1
    place.ok("pin", ident(ONE))
    assert len(place.contents()) == 18  # a small budget alone made a tool evict nothing


def test_verify_finds_damage_and_repair_moves_it_aside(place: Place) -> None:
    assert place.ok("verify").startswith("read 18 blocks, 216.0 KiB: all sound")
    place.flip(THREE[2])
    before = place.contents()
    code, out, err = place.run("verify")
    assert code == 8
    assert f"damaged  local v1/{OTHER.digest().hex()}" in out
    assert "hint: `tiering verify --repair`" in err
    assert place.contents() == before
    code, out, _ = place.run("verify", "--repair", "--json")
    assert code == 8
    (finding,) = json.loads(out)["findings"]
    assert (finding["what"], finding["tier"], finding["repaired"]) == ("damaged", "local", True)
    bad = [name for name in place.contents() if name.endswith(".bad")]
    assert len(bad) == 1
    assert len(place.contents()) == len(before)
    assert place.run("verify")[0] == 0


def test_gc_removes_waste(place: Place) -> None:
    assert place.ok("gc") == "nothing to remove\n"
    for tier in ("ram", "local"):
        place.flip(THREE[0], tier)
    assert place.run("verify", "--repair")[0] == 8
    models = place.root / "models"
    (models / "blobs").mkdir(parents=True)
    code, _, err = place.run("gc", "--models", models)
    assert (code, "holds no model" in err) == (2, True)
    (models / "blobs" / ("sha256-" + "cd" * 32)).touch()
    before = place.contents()
    planned = {w["kind"]: w["files"] for w in place.json("gc", "--dry-run")["waste"] if w["files"]}
    assert planned == {"unreachable": 4, "quarantined": 2}
    assert place.contents() == before
    out = place.ok("gc", "--models", models)
    *lines, last = out.splitlines()
    assert lines == [
        "removed 4 blocks of models that are gone, 96.0 KiB",
        "removed 4 blocks whose start is missing, 96.0 KiB",
        "removed 2 blocks quarantined, 24.0 KiB",
    ]
    assert place.contents() == {}
    assert last.startswith("removed 2 models without a block, ")
    for tier in ("ram", "local"):
        assert [*(place.root / tier / "v1").iterdir()] == []


def test_gc_removes_what_is_left_of_a_model_without_blocks(place: Place) -> None:
    place.ok("rm", ident(THREE), "--yes")
    left = {path for path in place.root.rglob(f"{OTHER.digest().hex()}/*")}
    assert {path.name for path in left} >= {"namespace.json"}
    used = place.root / "local" / "v1" / NS.digest().hex()
    before = everything(used)
    (planned,) = [w for w in place.json("gc", "--dry-run")["waste"] if w["files"]]
    assert (planned["kind"], planned["files"]) == ("vacant", 1)
    assert planned["stored_bytes"] > 0
    assert {path for path in place.root.rglob(f"{OTHER.digest().hex()}/*")} == left
    assert place.ok("gc").startswith("removed 1 model without a block, ")
    assert not [*place.root.rglob(OTHER.digest().hex())]
    assert everything(used) == before
    assert place.ok("gc") == "nothing to remove\n"
    assert place.ids() == {ident(ONE), ident(TWO)}


@pytest.mark.parametrize("name", ["notes.txt", f"00/{'00' * 32}.kvb.x", "ab"])
def test_gc_leaves_a_models_directory_with_anything_else_in_it(place: Place, name: str) -> None:
    place.ok("rm", ident(THREE), "--yes")
    for tier in ("ram", "local"):
        foreign = place.root / tier / "v1" / OTHER.digest().hex() / name
        foreign.parent.mkdir(mode=0o700, exist_ok=True)
        foreign.write_text("mine")
    assert place.ok("gc") == "nothing to remove\n"
    assert len([*place.root.rglob(f"{OTHER.digest().hex()}/{name}")]) == 2
    assert len([*place.root.rglob(f"{OTHER.digest().hex()}/namespace.json")]) == 2


@pytest.mark.parametrize("place", ["sidecar"], indirect=True)
def test_gc_leaves_the_directory_of_a_model_that_is_being_stored(place: Place) -> None:
    place.ok("rm", ident(THREE), "--yes")
    with place.daemon.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), OTHER)
        assert len(stream.commit([0])) == 1  # it is open now
        assert place.ok("gc") == "nothing to remove\n"
        stream.close()
    assert place.ok("gc").startswith("removed 1 model without a block")


def test_export_and_import(place: Place) -> None:
    for name, options in (("x.tar", ()), ("x", ("--directory",))):
        archive = place.root / name
        place.ok("export", ident(TWO)[:10], archive, "--dry-run", *options)
        assert not archive.exists()
        place.ok("export", ident(TWO)[:10], archive, *options)
        assert place.run("export", ident(TWO)[:10], archive, *options)[0] == 2
        stored = place.contents()
        place.ok("rm", ident(TWO), "--yes")
        planned = place.json("import", archive, "--dry-run")
        assert (planned["present"], planned["stored"]) == (2, 1)
        assert place.json("import", archive)["stored"] == 1
        assert place.json("import", archive)["stored"] == 0
        assert "all 3 blocks stored already" in place.ok("import", archive)
        if place.daemon.running:
            place.daemon.wait_written()
        assert set(place.contents()) >= {name for name in stored if name.startswith("local/")}
    assert place.run("verify")[0] == 0


TWO_WINDOW = samples.window(NS, TWO[1], SHARED[4:], 4, first=2)
TWO_END = samples.window(NS, TWO[2], [60, 61], 8, others=[TWO_WINDOW])


def archive_with_windows(root: Path) -> Path:
    """Of TWO, exported from another store."""
    root.mkdir()
    tier = FsTier(TierKind.LOCAL, root / "store")
    store = TieredStore([(tier, 64 << 20)], background=False, measure=False)
    with store.open_session(NS.digest(), NS.fields(), int(NS.block_tokens)) as session:
        for block in (*TWO, TWO_WINDOW, TWO_END):
            assert session.put_inline(block.key, block.data, last=True)
    admin = Administration(store, alone=True)
    chain = admin.chain(ident(TWO))
    opened = admin.opened(chain)
    export_chain(chain, opened, root / "x.tar", as_directory=False, progress=lambda _: None)
    store.close()
    return root / "x.tar"


def test_windows_belong_to_their_conversation(place: Place) -> None:
    archive = archive_with_windows(place.root / "elsewhere")
    for _ in range(2):
        planned = place.json("import", archive, "--dry-run")
        assert (planned["blocks"], planned["present"], planned["stored"]) == (5, 3, 2)
    assert place.json("import", archive)["stored"] == 2
    assert "all 5 blocks stored already" in place.ok("import", archive)
    lines = place.json("ls", ident(TWO), "--blocks")["blocks"]
    wanted = [TWO[0], TWO[1], TWO_WINDOW, TWO[2], TWO_END]
    assert [line["id"] for line in lines] == [block.key.hex() for block in wanted]
    assert place.ok("ls", ident(TWO), "--blocks").count(" window") == 2
    (line,) = place.json("ls", ident(TWO))["chains"]
    assert (line["blocks"], line["tokens"]) == (5, 10)
    assert place.json("pin", ident(TWO))["pins"][0]["blocks"] == 5
    again = place.json("export", ident(TWO), place.root / "again.tar")
    assert (again["blocks"], again["left_out"]) == (5, [])
    assert (place.root / "again.tar").read_bytes() == archive.read_bytes()
    for path in place.root.rglob(f"{TWO_WINDOW.key.hex()}.kvb"):
        if "elsewhere" not in path.parts:
            content = bytearray(path.read_bytes())
            content[4100] ^= 1
            path.chmod(0o600)
            path.write_bytes(content)
    out = place.ok("export", ident(TWO), place.root / "less.tar")
    assert "3 blocks" in out
    short = [window.key.hex()[:12] for window in (TWO_WINDOW, TWO_END)]
    assert f"left out: window block {short[0]}: checksum of child 0" in out
    assert f"left out: window block {short[1]}: another block of its window is not there" in out
    place.ok("unpin", ident(TWO))
    assert place.json("rm", ident(TWO), "--yes")["blocks"] == 2  # the rest is shared
    assert place.json("import", place.root / "less.tar")["stored"] == 1


def test_import_refuses_what_is_damaged(place: Place) -> None:
    archive = place.root / "x.tar"
    place.ok("export", ident(TWO), archive)
    content = bytearray(archive.read_bytes())
    content[content.index(b"KVTBLK") + 4100] ^= 1
    archive.write_bytes(content)
    place.ok("rm", "--all", "--yes")
    code, _, err = place.run("import", archive)
    assert code == 8
    assert "checksum" in err
    assert place.ids() == set()


def test_unknown_and_malformed_ids_are_usage_errors(place: Place) -> None:
    for args in (("ls", "0000"), ("pin", "0000"), ("rm", "0000", "--yes"), ("export", "0000", "x")):
        code, _, err = place.run(*args)
        assert code == 2
        assert "no block with id 0000" in err
        assert "hint: `tiering ls` shows ids" in err
    assert place.run("pin", "../etc")[0] == 2
    for args in (("rm",), ("rm", "--all", "--model", "x"), ("ls", "--older-than", "soon")):
        assert place.run(*args)[0] == 2


def test_looking_at_nothing_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith(("OLLAMA", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_KV_TIER_RAM", str(tmp_path / "ram"))
    place = Place(SidecarProcess(tmp_path), capsys)
    assert place.ok("ls") == "nothing is stored\n"
    assert place.ok("verify").startswith("read 0 blocks")
    assert place.ok("gc") == "nothing to remove\n"
    assert list(tmp_path.iterdir()) == []
    code, _, err = place.run("ls", "--socket", tmp_path / "s")
    assert (code, "no sidecar listens" in err) == (9, True)


def test_a_directory_that_another_process_uses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    local = tmp_path / "local"
    local.mkdir(mode=0o700)
    monkeypatch.setenv("OLLAMA_KV_TIER_SOCKET", str(tmp_path / "s"))
    monkeypatch.setenv("OLLAMA_KV_TIER_LOCAL", str(local))
    monkeypatch.setenv("OLLAMA_KV_TIER_RAM_GB", "0")
    held = lock_file(local / ".lock", "test")
    place = Place(SidecarProcess(tmp_path), capsys)
    code, _, err = place.run("ls")
    assert code == 9
    assert f"in use by process {os.getpid()}" in err
    os.close(held)


@pytest.mark.parametrize("place", ["files"], indirect=True)
def test_offline_looking_leaves_what_a_start_would_clean_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.flip(THREE[0])
    path = place.file(THREE[0])
    content = bytearray(path.read_bytes())
    content[40] ^= 1  # its header too: a start would quarantine it
    path.write_bytes(content)
    for index in place.daemon.local_dir.glob("index.sqlite*"):
        index.unlink()
    (path.parent / f"{THREE[0].key.hex()}.00.tmp").write_bytes(b"half")
    monkeypatch.setenv("OLLAMA_KV_TIER_LOCAL_GB", f"{FILE_BYTES}B")
    before = everything(place.root)
    place.ok("ls")
    place.ok("gc", "--dry-run")
    place.ok("rm", "--all", "--dry-run")
    code, out, _ = place.run("verify")
    assert code == 8
    words = sorted(line.split()[0] for line in out.splitlines())
    assert words == ["damaged", "read", "temporary"]
    assert everything(place.root) == before
    code, out, _ = place.run("verify", "--repair")
    assert code == 8
    assert "header checksum does not match (repaired)" in out
    assert place.run("verify")[0] == 0


@pytest.fixture
def remote(place: Place, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that was stored lies in a remote tier, and nowhere else."""
    directory = place.root / "remote"
    directory.mkdir(mode=0o700)
    (place.daemon.local_dir / VERSION_DIRECTORY).rename(directory / VERSION_DIRECTORY)
    shutil.rmtree(place.daemon.ram_dir / VERSION_DIRECTORY)
    monkeypatch.setenv("OLLAMA_KV_TIER_REMOTE", str(directory))
    config = place.root / "without.toml"
    config.write_text("[sidecar]\nremote_mac = false\n")  # the files are as they lay elsewhere
    monkeypatch.setenv("OLLAMA_TIERING_CONFIG", str(config))
    return directory


@pytest.mark.parametrize("place", ["files"], indirect=True)
def test_offline_tools_see_a_remote_tier_and_leave_it_as_it_is(place: Place, remote: Path) -> None:
    place.ok("ls")  # makes directories for the tiers where there are none
    before = everything(place.root)
    assert place.ids() == place.ids("--tier", "remote") == {ident(b) for b in (ONE, TWO, THREE)}
    assert place.ids("--tier", "local") == set()
    assert place.ok("verify").startswith("read ")
    place.ok("gc", "--dry-run")
    place.ok("rm", "--all", "--dry-run")
    assert everything(place.root) == before
    assert not list(remote.glob(".*"))  # neither locked nor announced to other sidecars


@pytest.mark.parametrize("place", ["files"], indirect=True)
def test_offline_tools_change_in_a_remote_tier_what_they_are_asked_for(
    place: Place, remote: Path
) -> None:
    place.flip(THREE[0], "remote")
    code, out, _ = place.run("verify", "--repair")
    assert code == 8
    assert "does not match (repaired)" in out
    assert [path.stem for path in remote.rglob("*.bad")] == [f"{THREE[0].key.hex()}.kvb"]
    place.ok("rm", ident(TWO), "--yes")
    left = {path.stem for path in remote.rglob("*.kvb")}
    assert left == {block.key.hex() for block in [*ONE, *THREE[1:]]}
    (young,) = remote.glob(f"{VERSION_DIRECTORY}/{NS.digest().hex()}/{ONE[0].key.hex()[:2]}")
    (young / f"{ONE[0].key.hex()}.00.tmp").write_bytes(b"another sidecar is writing it")
    place.ok("gc")
    assert [path.name for path in remote.rglob("*.tmp")] == [f"{ONE[0].key.hex()}.00.tmp"]
    assert {path.stem for path in remote.rglob("*.kvb")} == {block.key.hex() for block in ONE}


@pytest.mark.parametrize("place", ["files"], indirect=True)
def test_offline_a_chain_is_not_broken_while_a_remote_tier_is_out_of_sight(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tier in ("ram", "local"):
        for path in (place.root / tier).rglob(f"{THREE[0].key.hex()}.kvb"):
            path.unlink()

    def unreachable() -> int:
        waste = place.json("gc", "--dry-run")["waste"]
        (files,) = [one["files"] for one in waste if one["kind"] == "unreachable"]
        return int(files)

    assert unreachable() == len(THREE) - 1
    monkeypatch.setenv("OLLAMA_KV_TIER_REMOTE", str(place.root / "gone"))
    assert unreachable() == 0
    assert not (place.root / "gone").exists()


def everything(root: Path) -> dict[str, bytes]:
    """All files, but the locks: they name the process that has them."""
    paths = (path for path in root.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path): path.read_bytes() for path in paths}
