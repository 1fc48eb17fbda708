"""From an installed Ollama to a tree of links, with a compiler that only says that it compiled."""

from __future__ import annotations

import contextlib
import errno
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.errors import (
    BuildError,
    FetchError,
    MissingTool,
    PatchConflict,
    ResultDiffers,
    TieringError,
    UnsupportedUpstream,
    UsageError,
)
from ollama_tiering.patchset import elf
from ollama_tiering.patchset.llama_server import built, exported, guard, source
from ollama_tiering.patchset.llama_server.built import BuildRequest
from ollama_tiering.patchset.llama_server.hooks import CONTEXT
from ollama_tiering.patchset.llama_server.installation import IMPLEMENTATION, InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import RECORD, LinkTree
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run
from tests.unit.patchset import fake_installed as fake
from tests.unit.patchset.conftest import git
from tests.unit.patchset.test_llama_server import edit

QUIET = Report(quiet=True)


class Fakes:
    """`make` builds for `installation`, and counts the self-tests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.installation = fake.at(fake.installed(root / "installed"))
        self.source = fake.llama_source(root / "llama.cpp")
        self.compiler = root / "compiler"
        fake.compiler(self.compiler)
        self.tested: list[InstalledOllama] = []
        self.error: TieringError | None = None
        self.updates_meanwhile = False

    def make(self, *, allow_untested: bool = False, named: str = "") -> LinkTree:
        request = BuildRequest(named or str(self.source), allow_untested)
        return built.ensure(self.installation, request, self._self_test, QUIET)

    def _self_test(
        self, installed: InstalledOllama, tree: InstalledOllama, _report: Report
    ) -> None:
        assert installed == self.installation
        assert tree.server.is_file()
        self.tested.append(tree)
        if self.updates_meanwhile:
            (installed.lib / "libllama.so").write_text("updated")
        if self.error:
            raise self.error

    def left(self) -> list[str]:
        """In the cache, but for the lock."""
        return sorted(path.name for path in built.folder().glob("*") if path.name != "lock")


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tmp_path / "compiler/c++"))
    monkeypatch.setattr(elf, "read", fake.all_exported)
    return Fakes(tmp_path)


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
    assert compiled == {"server.cpp", "server-context.cpp", "httplib.cpp"} | made | ours
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
    assert built.trees() == [tree]


def test_a_tree_without_its_program_is_none(fakes: Fakes) -> None:
    tree = fakes.make()
    tree.binary.unlink()
    assert built.trees() == []


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
    def locked(*_: object) -> Iterator[None]:
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


def test_an_untested_version_is_refused_and_taken_if_wanted(fakes: Fakes) -> None:
    fake.script(fakes.installation.program, "#!/bin/sh\necho 'ollama version is 0.32.14'\n")
    fake.script(fakes.installation.server, "#!/bin/sh\necho 'version: 10434 (abc1234)'\n")
    with pytest.raises(UnsupportedUpstream, match="not tested"):
        fakes.make()
    assert fakes.make(allow_untested=True).pin == "b10434"


# --- the source ---------------------------------------------------------------------------------


def test_an_archive_with_llama_cpp_somewhere_in_it(fakes: Fakes) -> None:
    path = fakes.root / "sdist.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(fakes.source, "python-1.0/vendor/llama.cpp")
    found = source.obtain(fake.PIN, str(path), fakes.root / "out", QUIET)
    assert found.commit == ""
    assert (found.folder / CONTEXT).is_file()
    assert (found.folder / "ggml/include/ggml.h").is_file()
    assert not (found.folder / "docs").exists()


def test_a_clone_says_its_commit(fakes: Fakes) -> None:
    clone(fakes.source)
    found = source.obtain(fake.PIN, str(fakes.source), fakes.root / "out", QUIET)
    assert found.commit == git("rev-parse", "HEAD", cwd=fakes.source)
    assert (found.folder / CONTEXT).is_file()
    with pytest.raises(FetchError, match="b1"):
        source.obtain("b1", str(fakes.source), fakes.root / "other", QUIET)


def clone(folder: Path, *, tag: str = fake.PIN) -> str:
    """The commit that has the tag."""
    git("init", "-q", cwd=folder)
    git("add", ".", cwd=folder)
    git("commit", "-qm", "all", cwd=folder)
    git("tag", tag, cwd=folder)
    return git("rev-parse", "HEAD", cwd=folder)


def test_a_tag_of_a_wrong_source_is_not_kept(fakes: Fakes) -> None:
    wrong = fake.llama_source(fakes.root / "wrong")
    (wrong / "README.txt").write_text("another project with the same tag")
    clone(wrong)
    commit = clone(fakes.source)
    said = f"#!/bin/sh\necho 'version: 10488 ({commit[:9]})' >&2\n"
    fake.script(fakes.installation.server, said)
    with pytest.raises(UnsupportedUpstream, match="the installed llama-server is of") as caught:
        fakes.make(named=str(wrong))
    assert "--llama-source" in str(caught.value.hint)
    assert fakes.make().pin == fake.PIN


def test_only_the_source_of_the_trees_is_kept(fakes: Fakes) -> None:
    commits = {}
    for pin in ("b1", "b2"):
        (fakes.source / "README.txt").write_text(pin)
        commits[pin] = clone(fakes.source, tag=pin)
        source.obtain(pin, str(fakes.source), fakes.root / pin, QUIET)
    cache = source.SourceCache(source.cache_folder())
    source.keep_only({"b2"}, QUIET)
    assert cache.tags() == ["b2"]
    there = [
        run("git", f"--git-dir={cache.root}", "cat-file", "-e", one) for one in commits.values()
    ]
    assert [done.returncode == 0 for done in there] == [False, True]
    source.obtain("b2", "/no/clone", fakes.root / "again", QUIET)
    source.keep_only((), QUIET)
    assert not cache.root.exists()
    source.keep_only((), QUIET)


def test_what_is_no_source_of_llama_cpp(fakes: Fakes) -> None:
    (fakes.root / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no source of llama\.cpp"):
        source.obtain(fake.PIN, str(fakes.root / "empty"), fakes.root / "out", QUIET)
    text = fakes.root / "text"
    text.write_text("text")
    with pytest.raises(UsageError, match="no whole tar archive"):
        source.obtain(fake.PIN, str(text), fakes.root / "out", QUIET)
    with tarfile.open(fakes.root / "a.tar", "w") as archive:
        archive.add(text, "x/text")
    with pytest.raises(UsageError, match="has no tools/server"):
        source.obtain(fake.PIN, str(fakes.root / "a.tar"), fakes.root / "out", QUIET)
    with pytest.raises(FetchError, match="no such directory"):
        source.obtain(fake.PIN, str(fakes.root / "gone"), fakes.root / "out", QUIET)
