"""A tree of links in the cache is whole or none, and is found by the name that an update keeps."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ollama_tiering.patchset.llama_server import built, guard, tree_use
from ollama_tiering.patchset.llama_server.installation import IMPLEMENTATION
from tests.unit.patchset import fake_installed as fake
from tests.unit.patchset.fake_build import Fakes, prepared


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return prepared(tmp_path, monkeypatch)


OWN = {
    "bin/ollama": "gone",
    f"lib/ollama/{IMPLEMENTATION}": "cut short",
    f"lib/ollama/{guard.COPY}": "gone",
    "lib/ollama/llama-server": "cut short",
    "lib/ollama/libllama.so": "gone",
    "lib/ollama/cuda_v12": "leads elsewhere",
}


@pytest.mark.parametrize("name", list(OWN))
def test_half_a_tree_is_none_and_is_made_again(fakes: Fakes, name: str) -> None:
    """As a cleaner of caches, a killed removal or a power cut leaves it."""
    tree = fakes.make()
    part = tree.folder / name
    content = part.read_bytes() if part.is_file() else b""
    if OWN[name] == "cut short":
        os.truncate(part, 3)
    else:
        part.unlink()
    if OWN[name] == "leads elsewhere":
        part.symlink_to(fakes.root)
    assert built.trees() == []
    assert built.current(fakes.installation) is None
    assert fakes.make().folder == tree.folder
    assert len(fakes.tested) == 2
    assert not content or part.read_bytes() == content


def test_a_tree_is_whole_in_an_image(fakes: Fakes) -> None:
    """A layer keeps times in whole seconds; there the record is readable, and nothing else."""
    tree = fakes.make()
    for path in (tree.binary, *tree.lib.iterdir()):
        if not path.is_symlink() and not path.samefile(fakes.installation.program):
            whole = int(path.stat().st_mtime)
            os.utime(path, (whole, whole))
    assert built.trees() == [tree]
    assert built.current(fakes.installation) == tree


def test_a_program_that_an_update_writes_into_is_changed_and_not_damaged(fakes: Fakes) -> None:
    """A tree has a hard link to it, so that it is said why the installed one is started."""
    tree = fakes.make()
    assert tree.binary.samefile(fakes.installation.program)
    fakes.installation.program.write_text("updated in place")
    assert built.trees() == [tree]
    assert "was updated or changed" in tree.why_stock(fakes.installation)


def test_all_of_a_tree_is_durable_before_it_has_its_name(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.add(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    tree = fakes.make()
    own = {path.name for path in tree.folder.rglob("*") if not path.is_symlink()}
    assert own | {"tree"} <= {path.name for path in synced}
    assert built.folder() in synced


def test_a_removal_that_is_killed_leaves_no_half_tree(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = fakes.make()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **_more: os._exit(9))
        if (child := os.fork()) == 0:
            tree_use.put_away(tree.folder)
        assert os.waitpid(child, 0)[1] == 9 << 8
    assert not tree.folder.exists()
    assert built.trees() == []
    (left,) = fakes.left()
    assert built.leftovers() == [built.folder() / left]
    assert fakes.make().folder == tree.folder
    assert fakes.left() == [tree.folder.name]


def test_a_tree_is_of_the_name_that_an_update_leads_elsewhere(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some installers put each version into a folder of its own, and change a link."""
    name = fakes.root / "path/ollama"
    name.parent.mkdir()
    name.symlink_to(fakes.installation.program)
    monkeypatch.setenv("PATH", f"{name.parent}:/usr/bin:/bin")
    tree = fakes.make()
    assert tree.program == str(name)
    assert built.current(fakes.installation) == tree
    newer = fake.at(fake.installed(fakes.root / "newer"))
    name.unlink()
    name.symlink_to(newer.program)
    assert built.tree_of(fakes.installation) is None
    assert built.tree_of(newer) == tree
    assert f"{name} was updated or changed" in tree.why_stock(newer)


@pytest.mark.parametrize("key", ["version", "pin"])
@pytest.mark.parametrize("value", ["v1; reboot", "", "$(x)", 7])
def test_a_record_with_shell_in_it_is_none(fakes: Fakes, key: str, value: object) -> None:
    record = fakes.make().folder / built.RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | {key: value}))
    assert built.trees() == []


def test_a_record_is_a_regular_file(fakes: Fakes) -> None:
    """Root reads those of others: a link leads elsewhere, and a pipe never ends."""
    tree = fakes.make()
    record = tree.folder / built.RECORD
    record.rename(tree.folder / "real")
    record.symlink_to("real")
    assert built.trees() == []
    record.unlink()
    os.mkfifo(record)
    assert built.trees() == []


def test_another_stat_makes_another_guard(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that writes a time in another way, as after an upgrade of the system."""
    fakes.make()
    real = shutil.which("stat")
    text = f"#!/bin/sh\n{real} \"$@\" | sed -E 's/([0-9]+ [0-9]+\\.[0-9]{{4}})[0-9]*/\\1/'\n"
    fake.script(fakes.root / "bin/stat", text)
    monkeypatch.setenv("PATH", f"{fakes.root}/bin:{os.environ['PATH']}")
    assert built.current(fakes.installation) is None
    fakes.make()
    assert built.current(fakes.installation) is not None
