"""From an installed Ollama to a tree of links, with a compiler that only says that it compiled."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.errors import (
    BuildError,
    MissingTool,
    PatchConflict,
    ResultDiffers,
    TieringError,
    UnsupportedUpstream,
)
from ollama_tiering.patchset import elf
from ollama_tiering.patchset.llama_server import built, exported, guard, link_tree
from ollama_tiering.patchset.llama_server.hooks import CONTEXT
from ollama_tiering.patchset.llama_server.installation import IMPLEMENTATION
from ollama_tiering.patchset.llama_server.link_tree import RECORD, LinkTree
from ollama_tiering.patchset.llama_server.outcome import SelfTestOutcome
from tests.unit.patchset import fake_installed as fake
from tests.unit.patchset.fake_build import Fakes, clone, prepared
from tests.unit.patchset.test_llama_server import edit


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return prepared(tmp_path, monkeypatch)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_one_library_is_ours_and_all_else_is_installed(fakes: Fakes) -> None:
    before = contents(fakes.root / "installed")
    tree = fakes.make()
    assert (tree.lib / IMPLEMENTATION).read_text() == "made\n"
    assert tree.binary.read_bytes() == fakes.installation.program.read_bytes()
    assert not tree.binary.is_symlink()  # `ollama` looks for its libraries without links
    assert not (tree.lib / "llama-server").is_symlink()
    for name in ("libllama.so", "libggml-base.so", "cuda_v12"):
        assert (tree.lib / name).resolve() == fakes.installation.lib / name
    names = {path.name for path in fakes.installation.lib.iterdir()}
    assert {path.name for path in tree.lib.iterdir()} == names | {guard.COPY}
    assert (tree.lib / guard.COPY).read_bytes() == fakes.installation.server.read_bytes()
    assert contents(fakes.root / "installed") == before
    assert fakes.left() == [tree.folder.name]
    assert (tree.version, tree.pin) == (fake.VERSION, fake.PIN)


def test_what_is_compiled_and_how_it_is_linked(fakes: Fakes) -> None:
    fakes.make()
    calls = (fakes.compiler / "calls").read_text().splitlines()
    compiled = {
        line.split(" -c ")[1].split()[0].rpartition("/")[2] for line in calls if " -c " in line
    }
    ours = {path.name for path in built.default_sources().rglob("*.cpp")}
    made = {"ui.cpp", "kvt_linked_table.cpp"}
    assert (
        compiled
        == {"server.cpp", "server-common.cpp", "server-context.cpp", "httplib.cpp"} | made | ours
    )
    (link,) = [line for line in calls if line.startswith("-shared ")]
    assert "-Wl,-z,defs -Wl,-z,now" in link
    assert f"{fakes.installation.lib}/libllama.so" in link
    (http,) = [line for line in calls if line.endswith("httplib.o")]
    assert "-DCPPHTTPLIB_LISTEN_BACKLOG=512" in http


def test_again_nothing_is_done(fakes: Fakes) -> None:
    first = fakes.make()
    calls = (fakes.compiler / "calls").read_text()
    assert fakes.make() == first
    assert (fakes.compiler / "calls").read_text() == calls
    assert len(fakes.tested) == 1


def test_without_a_compiler_what_is_made_already_serves(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fakes.make()
    monkeypatch.setenv("CXX", "/no/compiler")
    assert fakes.make() == first


def test_an_update_makes_another_tree(fakes: Fakes) -> None:
    first = fakes.make()
    assert built.tree_of(fakes.installation) == first
    assert first.fits(fakes.installation)
    (fakes.installation.lib / "libllama.so").write_text("updated")
    assert not first.fits(fakes.installation)
    assert built.tree_of(fakes.installation) == first
    second = fakes.make()
    assert second.folder != first.folder
    assert built.tree_of(fakes.installation) == second
    assert second.fits(fakes.installation)


def test_other_sources_of_ours_make_another_tree(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fakes.make()
    (fakes.root / "ours").mkdir()
    (fakes.root / "ours/kvt_new.cpp").write_text("\n")
    monkeypatch.setattr(built, "default_sources", lambda: fakes.root / "ours")
    assert fakes.make().folder != first.folder


def test_another_guard_makes_another_tree(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fakes.make()
    monkeypatch.setattr(guard, "SCRIPT", guard.SCRIPT + "# newer")
    assert fakes.make().folder != first.folder


def test_no_stat_is_said_before_anything_is_compiled(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.script(fakes.root / "bin/stat", "#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", f"{fakes.root}/bin:{os.environ['PATH']}")
    with pytest.raises(MissingTool, match="`stat` does not say"):
        fakes.make()
    assert " -c " not in (fakes.compiler / "calls").read_text()


def test_a_tree_that_fails_its_test_is_not_kept(fakes: Fakes) -> None:
    fakes.error = ResultDiffers("self-test: the answer differs")
    with pytest.raises(ResultDiffers):
        fakes.make()
    assert fakes.left() == []
    assert built.trees() == []


def test_an_update_while_it_is_made_is_noticed(fakes: Fakes) -> None:
    fakes.updates_meanwhile = True
    with pytest.raises(BuildError, match="changed meanwhile"):
        fakes.make()
    assert fakes.left() == []


def test_a_damaged_record_is_no_tree(fakes: Fakes) -> None:
    tree = fakes.make()
    record = tree.folder / RECORD
    for text in ("", "[]", "{}", '{"format": 99}', record.read_text().replace('"pin"', '"pun"')):
        record.write_text(text)
        assert built.trees() == []
    assert fakes.make().folder == tree.folder
    assert [one.folder for one in built.trees()] == [tree.folder]


def test_a_record_of_the_version_before_is_read(fakes: Fakes) -> None:
    """A service starts what it was installed with, and says what it was made for."""
    tree = fakes.make()
    values = json.loads((tree.folder / RECORD).read_text())
    older = {
        name: value
        for name, value in values.items()
        if name not in ("is_tested", "checks", "refused")
    }
    (tree.folder / RECORD).write_text(json.dumps({**older, "format": 2}))
    assert link_tree.read(tree.folder) == tree
    (tree.folder / RECORD).write_text(json.dumps({**older, "format": 3}))
    assert link_tree.read(tree.folder) is None
    (tree.folder / RECORD).write_text(json.dumps({**values, "format": 1}))
    assert link_tree.read(tree.folder) is None


def test_a_tree_without_its_program_is_none(fakes: Fakes) -> None:
    tree = fakes.make()
    tree.binary.unlink()
    assert built.trees() == []


def test_a_stripped_library_is_named(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one that is read: the first look is for what `libllama.so` exports."""

    def read(path: Path) -> elf.Library:
        if "common" in path.name:
            raise ValueError("section headers of another size")
        return fake.all_exported(path)

    monkeypatch.setattr(elf, "read", read)
    with pytest.raises(UnsupportedUpstream, match=r"libllama-common\.so: section headers"):
        fakes.make()


def test_the_trees_of_one_installation_and_of_all(fakes: Fakes) -> None:
    tree = fakes.make()
    other = fake.at(fake.installed(fakes.root / "other"))
    assert built.trees_of(str(other.lib.parents[1])) == []
    assert built.trees_of(str(fakes.root / "installed")) == [tree]
    assert built.trees_of("auto") == [tree]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"gcc": 9}, MissingTool, "g\\+\\+ 11 or clang"),
        ({"failing": "server.cpp"}, BuildError, "compiling server.cpp failed: .*no such thing"),
        (
            {"undefined": "llama_kv_cache::get_size() const"},
            UnsupportedUpstream,
            r"does not export .*llama_kv_cache::get_size\(\) const",
        ),
        ({"failing": "-shared"}, BuildError, "no such thing"),
    ],
)
def test_a_compiler_that_fails(
    fakes: Fakes, options: dict[str, object], error: type[TieringError], said: str
) -> None:
    fake.compiler(fakes.compiler, **options)  # type: ignore[arg-type]
    with pytest.raises(error, match=said):
        fakes.make()
    assert fakes.left() == []


@pytest.mark.parametrize(
    ("says", "message", "hint"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "compiling", "--jobs 1"),
        ("collect2: fatal error: ld terminated with signal 9 [Killed]", "failed", "--jobs 1"),
        ("cc1plus: out of memory allocating 65536 bytes", "compiling", "--jobs 1"),
        ("fatal error: ggml.o: No space left on device", "no space left", "OLLAMA_TIERING_CACHE"),
        ("error: cannot allocate an object of abstract type", "compiling", "does not fit"),
    ],
)
def test_a_compiler_that_fails_for_want_of_something(
    fakes: Fakes, says: str, message: str, hint: str
) -> None:
    text = (fakes.compiler / "c++").read_text()
    failing = "*-shared*" if "ld " in says else "*server.cpp*"
    fails = f"{failing}) echo '{says}' >&2; exit 1;;"
    fake.script(fakes.compiler / "c++", text.replace("*-shared*)", f"{fails}\n*-shared*)", 1))
    with pytest.raises(BuildError, match=message) as caught:
        fakes.make()
    assert hint in str(caught.value.hint)


def test_a_compiler_that_speaks_another_language(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it lacks is read from what it says."""
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    fake.compiler(fakes.compiler, undefined="llama_kv_cache::get_size() const")
    text = (fakes.compiler / "c++").read_text()
    german = 'if [ "$LC_ALL" != C ]; then echo Fehler >&2; exit 1; fi\n'
    fake.script(fakes.compiler / "c++", text.replace("    if [ -n", f"    {german}    if [ -n", 1))
    with pytest.raises(UnsupportedUpstream, match="does not export"):
        fakes.make()


def test_a_compiler_that_is_killed(fakes: Fakes) -> None:
    text = (fakes.compiler / "c++").read_text()
    killed = "*server.cpp*) kill -9 $$;;\n*-shared*)"
    fake.script(fakes.compiler / "c++", text.replace("*-shared*)", killed, 1))
    with pytest.raises(BuildError, match="compiling") as caught:
        fakes.make()
    assert "--jobs 1" in str(caught.value.hint)


def test_a_full_disk_is_said(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    def lay(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(built.links, "lay", lay)
    with pytest.raises(BuildError, match=r"no space left on the disk of .*llama-server"):
        fakes.make()


def test_what_a_killed_process_left_is_removed(fakes: Fakes) -> None:
    (built.folder() / ".building-abc/source").mkdir(parents=True)
    tree = fakes.make()
    assert fakes.left() == [tree.folder.name]


def test_what_another_process_made_meanwhile_is_taken(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tiering up` may serve from it already."""
    made: list[LinkTree] = []
    real = built.locked

    @contextlib.contextmanager
    def locked(*_: object, **_more: object) -> Iterator[None]:
        monkeypatch.setattr(built, "locked", real)
        made.append(fakes.make())
        yield

    monkeypatch.setattr(built, "locked", locked)
    assert [fakes.make()] == made
    assert len(fakes.tested) == 1


def test_no_compiler(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/compiler")
    with pytest.raises(MissingTool, match="/no/compiler"):
        fakes.make()


def test_a_symbol_that_is_not_exported_is_said_before_anything_is_compiled(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = frozenset(list(exported.NEEDED)[1:])
    library = elf.Library(62, some, frozenset(), ())
    monkeypatch.setattr(elf, "read", lambda _path: library)
    with pytest.raises(UnsupportedUpstream, match=r"libllama\.so.* llama_context::get_cparams$"):
        fakes.make()
    assert " -c " not in (fakes.compiler / "calls").read_text()


def test_a_symbol_that_our_part_can_do_without_is_not_asked_for() -> None:
    """llama.cpp before July 2026 has no such function; kvt_cells.cpp takes another way then."""
    assert not [name for name in exported.NEEDED.values() if "get_cells" in name]


@pytest.mark.parametrize("name", [IMPLEMENTATION, "libmtmd.so"])
def test_an_ollama_that_is_built_in_another_way(fakes: Fakes, name: str) -> None:
    (fakes.installation.lib / name).unlink()
    with pytest.raises(UnsupportedUpstream, match=f"no {name}"):
        fakes.make()


def test_a_source_without_an_anchor(fakes: Fakes) -> None:
    edit(fakes.source, CONTEXT, "void update_slots() {", "void slots_update() {")
    with pytest.raises(PatchConflict, match="what is done in each turn is not there"):
        fakes.make()
    assert fakes.left() == []


def test_a_version_that_is_not_on_the_list_has_to_pass_all_checks(
    fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.script(fakes.installation.program, "#!/bin/sh\necho 'ollama version is 0.32.14'\n")
    fake.script(fakes.installation.server, "#!/bin/sh\necho 'version: 10434 (abc1234)'\n")
    fakes.outcome = SelfTestOutcome(14)
    tree = fakes.make()
    assert (tree.pin, tree.is_tested, tree.checks) == ("b10434", False, 14)
    assert fakes.all_checks == [True]
    assert tree.engine == (
        "llama-server of llama.cpp b10434, not on the list of tested ones: 14 checks passed"
    )
    assert fakes.make() == tree


def test_where_nobody_can_tell_the_commit_all_checks_have_to_pass(fakes: Fakes) -> None:
    fake.script(fakes.installation.server, "#!/bin/sh\necho 'version: 1 (unknown)'\n")
    tree = fakes.make()
    assert (tree.pin, tree.is_tested, fakes.all_checks) == (fake.PIN, False, [True])


def test_one_on_the_list_has_to_pass_one_check(fakes: Fakes) -> None:
    tree = fakes.make()
    assert fakes.all_checks == [False]
    assert (tree.is_tested, tree.engine) == (True, f"llama-server of llama.cpp {fake.PIN}")


def refused_kinds(tree: LinkTree, folder: Path) -> str:
    """As the tree's llama-server gets them."""
    said = folder / "said"
    copy = tree.lib / guard.COPY
    fake.script(copy, f'#!/bin/sh\necho "$OLLAMA_KV_TIER_REFUSED_KINDS" > {said}\n')
    subprocess.run([tree.lib / "llama-server"], check=True)
    return said.read_text().removesuffix("\n")


def test_a_kind_that_failed_its_check_is_refused_by_the_trees_server(
    fakes: Fakes, tmp_path: Path
) -> None:
    fakes.outcome = SelfTestOutcome(12, {"windows": "other bits", "states": "the server died"})
    tree = fakes.make()
    assert tree.engine.endswith("12 checks passed; as stock: windows, states")
    assert built.tree_of(fakes.installation) == tree
    assert fakes.make() == tree, "its guard is the one that it should have"
    assert refused_kinds(tree, tmp_path) == "states,windows"


def test_without_such_a_kind_a_variable_of_the_caller_refuses_nothing(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OLLAMA_KV_TIER_REFUSED_KINDS", "windows")
    assert refused_kinds(fakes.make(), tmp_path) == ""


def test_the_commit_of_a_version_that_nobody_knows_is_asked_for(fakes: Fakes) -> None:
    """Ollama clones one commit deep: llama-server counts it as 1, and says which one it is."""
    commit = clone(fakes.source)
    fake.script(fakes.installation.program, "#!/bin/sh\necho 'ollama version is 0.40.0'\n")
    said = f"version: 0.1.0-dev (build 1, commit {commit[:9]})"
    fake.script(fakes.installation.server, f"#!/bin/sh\necho '{said}'\n")
    tree = fakes.make()
    assert (tree.pin, tree.is_tested, fakes.all_checks) == (fake.PIN, True, [False])
