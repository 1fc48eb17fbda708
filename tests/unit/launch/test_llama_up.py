"""What `tiering up` starts of an installed Ollama, and with which variables."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from ollama_tiering.errors import (
    FetchError,
    MissingTool,
    ResultDiffers,
    ServiceError,
    TieringError,
    UnsupportedUpstream,
)
from ollama_tiering.launch import llama_up
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.up import UpRequest
from ollama_tiering.patchset.llama_server import built, link_tree, tree_use
from ollama_tiering.patchset.llama_server.built import BuildRequest
from ollama_tiering.patchset.llama_server.installation import PROGRAM_MAGIC, InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report

QUIET = Report(quiet=True)
SOCKET = "OLLAMA_KV_TIER_ENGINE_SOCKET"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def installation(tmp_path: Path) -> InstalledOllama:
    lib = tmp_path / "lib/ollama"
    lib.mkdir(parents=True)
    (lib / "libllama.so").write_text("as installed")
    (tmp_path / "ollama").write_bytes(PROGRAM_MAGIC + b" program")
    return InstalledOllama(tmp_path / "ollama", lib)


@pytest.fixture
def tree(
    installation: InstalledOllama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> LinkTree:
    folder = tmp_path / "tree"
    (folder / "bin").mkdir(parents=True)
    state, program = installation.state(), str(installation.program)
    made = LinkTree(folder, program, "v0.32.15", "b10488", state, "ours")
    (folder / link_tree.RECORD).write_text(link_tree.text_of(made))
    monkeypatch.setattr(built, "trees", lambda: [made])
    monkeypatch.setattr(built, "ensure", lambda *_: made)
    monkeypatch.setattr(built, "current", lambda _installed: made)
    return made


def program_for(installation: InstalledOllama) -> tuple[Path, str]:
    with ExitStack() as uses:
        return llama_up.program_for(installation, QUIET, uses)


PATIENT = BuildRequest(patience=llama_up.PATIENCE_SECONDS)


def test_its_tree_is_started(installation: InstalledOllama, tree: LinkTree) -> None:
    assert program_for(installation) == (tree.binary, "")


def test_without_a_tree_one_is_made(
    installation: InstalledOllama, tree: LinkTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(built, "trees", list)
    monkeypatch.setattr(built, "current", lambda _installed: None)
    monkeypatch.setattr(built, "ensure", lambda *given: asked.append(given) or tree)
    assert program_for(installation) == (tree.binary, "")
    assert [given[:2] for given in asked] == [(installation, PATIENT)]


def test_after_an_update_it_is_patched_again(
    installation: InstalledOllama, tree: LinkTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(built, "current", lambda _installed: None)
    monkeypatch.setattr(built, "ensure", lambda *given: asked.append(given) or tree)
    (installation.lib / "libllama.so").write_text("updated")
    assert program_for(installation) == (tree.binary, "")
    assert [given[:2] for given in asked] == [(installation, PATIENT)]


def test_after_an_update_for_which_none_can_be_made_the_installed_one_is_stock(
    installation: InstalledOllama, tree: LinkTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tree)
    upgrade(tree, OFFLINE, monkeypatch)
    (installation.lib / "libllama.so").write_text("updated")
    program, why = program_for(installation)
    assert program == installation.program
    assert "no network (connect it)" in why


OFFLINE = FetchError("no network", hint="connect it")


def upgrade(tree: LinkTree, error: TieringError, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tiering` is newer than the tree, and making another one fails."""

    def fail(*_: object) -> LinkTree:
        raise error

    monkeypatch.setattr(built, "current", lambda _installed: None)
    monkeypatch.setattr(built, "ensure", fail)


def made(tree: LinkTree, **changed: object) -> None:
    values = {"named_source": None, "protocol": llama_up.VERSION}
    (tree.folder / "made.json").write_text(json.dumps(values | changed))


def test_an_older_tree_serves_where_no_new_one_can_be_made(
    installation: InstalledOllama,
    tree: LinkTree,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made(tree)
    upgrade(tree, OFFLINE, monkeypatch)
    assert program_for(installation) == (tree.binary, "")
    assert "no network (connect it)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "error"),
    [({"protocol": 1}, OFFLINE), ({}, ResultDiffers("other bits", hint="report it"))],
    ids=["it speaks to no sidecar of today", "the self-test"],
)
def test_an_older_tree_that_would_do_harm_or_nothing_is_not_served(
    changed: dict[str, object],
    error: TieringError,
    installation: InstalledOllama,
    tree: LinkTree,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made(tree, **changed)
    upgrade(tree, error, monkeypatch)
    program, why = program_for(installation)
    assert program == installation.program
    assert f"{error.message} ({error.hint})" in why


def test_an_older_tree_whose_files_changed_meanwhile_is_not_served(
    installation: InstalledOllama, tree: LinkTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tree)
    monkeypatch.setattr(built, "current", lambda _installed: None)

    def ensure(*_: object) -> LinkTree:
        (installation.lib / "libllama.so").write_text("updated")
        raise OFFLINE

    monkeypatch.setattr(built, "ensure", ensure)
    assert program_for(installation)[0] == installation.program


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedUpstream("v9.9.9 is not known", hint="wait"),
        MissingTool("no compiler", hint="install one"),
        OSError(28, "No space left on device"),
        ValueError("section headers of another size"),
        ImportError("numpy: cannot open shared object file"),
    ],
)
def test_what_cannot_be_patched_serves_as_stock(
    error: Exception, installation: InstalledOllama, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> LinkTree:
        raise error

    monkeypatch.setattr(built, "trees", list)
    monkeypatch.setattr(built, "ensure", fail)
    program, why = program_for(installation)
    assert program == installation.program
    assert why.startswith(f"{installation.program} cannot be patched: ")
    assert str(error) in why


def test_a_tree_is_made_again_as_it_was_made(
    installation: InstalledOllama, tree: LinkTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[BuildRequest] = []
    monkeypatch.setattr(built, "ensure", lambda _one, wanted, *_: asked.append(wanted) or tree)
    llama_up.make_tree(installation, BuildRequest("/a/clone", jobs=3), QUIET)
    monkeypatch.setattr(built, "current", lambda _installed: None)  # `tiering` was upgraded
    assert program_for(installation) == (tree.binary, "")
    assert asked[1] == replace(PATIENT, named_source="/a/clone")


def test_a_patch_that_is_suspended_keeps_nobody_from_starting(
    installation: InstalledOllama, tree: LinkTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tree)

    def ensure(_one: object, wanted: BuildRequest, *_: object) -> LinkTree:
        with locked(built.folder() / "lock", "another is at work", QUIET, seconds=wanted.patience):
            pytest.fail("the lock is another's")

    monkeypatch.setattr(built, "ensure", ensure)
    monkeypatch.setattr(llama_up, "PATIENCE_SECONDS", 0.3)
    with locked(built.folder() / "lock", "nobody", QUIET):
        assert program_for(installation) == (tree.binary, "")
        (tree.folder / "made.json").unlink()  # nobody knows whether it speaks to this sidecar
        program, why = program_for(installation)
    assert program == installation.program
    assert "another is at work, and has not ended within 0 s" in why


def test_a_failure_of_the_look_itself_costs_the_tree_and_not_the_server(
    installation: InstalledOllama, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[LinkTree]:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(built, "trees", fail)
    program, why = program_for(installation)
    assert program == installation.program
    assert why.endswith("cannot be patched: RuntimeError: two lines")


def test_a_script_is_never_made_a_tree_of(
    installation: InstalledOllama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built, "trees", list)
    monkeypatch.setattr(built, "ensure", lambda *_: pytest.fail("it is compiled"))
    installation.program.write_text("#!/bin/sh\nexec /opt/ollama/bin/ollama\n")
    with pytest.raises(UnsupportedUpstream, match="a script that starts one"):
        llama_up.make_tree(installation, BuildRequest(), QUIET)
    program, why = program_for(installation)
    assert program == installation.program
    assert "--ollama DIR" in why


def test_the_variables_of_a_tiered_server(tmp_path: Path) -> None:
    request = UpRequest(
        Address(), tmp_path / "s", tmp_path, llama_server=True, engine_socket=tmp_path / "e"
    )
    env = request.environment(tiered=True)
    assert env == {
        "OLLAMA_HOST": "127.0.0.1:11434",
        "OLLAMA_MODELS": str(tmp_path),
        "OLLAMA_CPU_ATTENTION": "exact",
        SOCKET: str(tmp_path / "e"),
    }  # its own cache of prompts stays as it is: a model may be refused
    stock = request.environment(tiered=False)
    assert stock[SOCKET] is None  # also one that is inherited


def test_a_tree_that_serves_is_not_removed(installation: InstalledOllama, tree: LinkTree) -> None:
    """Whoever removes it, and whatever user's `tiering up` it is: nobody reads a record for it."""
    with ExitStack() as uses:
        assert llama_up.program_for(installation, QUIET, uses) == (tree.binary, "")
        with pytest.raises(ServiceError, match=f"serves from {tree.folder}"):
            llama_up.remove_trees([tree], QUIET)
        assert not tree_use.remove_unused(tree.folder)
        assert tree.binary.parent.is_dir()
    llama_up.remove_trees([tree], QUIET)
    assert not tree.folder.exists()


def test_of_several_trees_none_is_removed_where_one_serves(
    installation: InstalledOllama, tree: LinkTree, tmp_path: Path
) -> None:
    other = replace(tree, folder=tmp_path / "other")
    shutil.copytree(tree.folder, other.folder)
    with ExitStack() as uses:
        assert tree_use.hold(tree.folder, uses)
        with pytest.raises(ServiceError):
            llama_up.remove_trees([other, tree], QUIET)
        assert other.folder.is_dir()


def test_two_serve_from_one_tree_and_none_from_one_that_is_being_removed(tree: LinkTree) -> None:
    with ExitStack() as uses:
        assert tree_use.hold(tree.folder, uses)
        assert tree_use.hold(tree.folder, uses)
    with (tree.folder / link_tree.RECORD).open() as record, ExitStack() as uses:
        fcntl.flock(record, fcntl.LOCK_EX)
        assert not tree_use.hold(tree.folder, uses)
    tree_use.put_away(tree.folder)
    with ExitStack() as uses:
        assert not tree_use.hold(tree.folder, uses)


def test_a_tree_that_is_removed_before_it_is_held_is_made_again(
    installation: InstalledOllama, tree: LinkTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    (tree.folder / link_tree.RECORD).unlink()

    def ensure(*_: object) -> LinkTree:
        asked.append(None)
        if len(asked) == 2:
            (tree.folder / link_tree.RECORD).write_text(link_tree.text_of(tree))
        return tree

    monkeypatch.setattr(built, "ensure", ensure)
    assert program_for(installation) == (tree.binary, "")
    assert len(asked) == 2
    (tree.folder / link_tree.RECORD).unlink()
    program, why = program_for(installation)
    assert program == installation.program
    assert "is removed again and again" in why


def test_without_the_extra_up_can_be_started() -> None:
    """Only making a tree needs it."""
    blocked = "import sys; sys.modules['gguf'] = None; import ollama_tiering.launch.llama_up"
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
