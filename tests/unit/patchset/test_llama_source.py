"""Where llama.cpp's source comes from: an archive, a clone, and the cache of what was fetched."""

from __future__ import annotations

import io
import shutil
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ollama_tiering.errors import FetchError, UnsupportedUpstream, UsageError
from ollama_tiering.patchset.llama_server import download, source
from ollama_tiering.patchset.llama_server.hooks import CONTEXT
from ollama_tiering.patchset.run import run
from tests.unit.patchset import fake_installed as fake
from tests.unit.patchset.conftest import git
from tests.unit.patchset.fake_build import QUIET, Fakes, clone, prepared


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return prepared(tmp_path, monkeypatch)


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


class _Archives(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def archives(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, str]]:
    """The folder of archives that is served in GitHub's place, to a machine without git; and the
    commit of the one of b10488.
    """
    clone(fakes.source)
    folder = tmp_path / "served/archive"
    folder.mkdir(parents=True)
    name = f"{fake.PIN}.tar.gz"
    git("archive", "--prefix=llama.cpp-x/", "-o", str(folder / name), "HEAD", cwd=fakes.source)
    commit = git("rev-parse", "HEAD", cwd=fakes.source)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Archives, directory=str(folder.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(source, "UPSTREAM", f"http://127.0.0.1:{server.server_port}")
    has = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **_: None if name == "git" else has(name))
    yield folder, commit
    server.shutdown()
    server.server_close()


def test_without_git_the_archive_of_the_commit_is_taken(
    fakes: Fakes, archives: tuple[Path, str]
) -> None:
    found = source.obtain(fake.PIN, None, fakes.root / "out", QUIET)
    assert found.commit == ""  # what it says of itself: all checks of the self-test are due
    assert (found.folder / CONTEXT).is_file()
    assert [path.name for path in fakes.root.glob("out*")] == ["out"]
    assert source.tag_of("abc1234", None) == ""


def test_an_archive_that_is_none_or_does_not_say_its_commit(
    fakes: Fakes, archives: tuple[Path, str]
) -> None:
    folder, _ = archives
    with pytest.raises(FetchError, match="404") as caught:
        source.obtain("b1", None, fakes.root / "out", QUIET)
    assert "install git" in str(caught.value.hint)
    (folder / "b2.tar.gz").write_bytes(b"no archive")
    with pytest.raises(FetchError, match=r"b2\.tar\.gz is no whole archive"):
        source.obtain("b2", None, fakes.root / "out", QUIET)
    with tarfile.open(folder / "b3.tar.gz", "w:gz") as archive:
        archive.add(fakes.source, "llama.cpp-x")
    with pytest.raises(FetchError, match="does not say its commit"):
        source.obtain("b3", None, fakes.root / "out", QUIET)


def test_an_archive_that_never_ends_is_given_up(
    fakes: Fakes, archives: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_MOST_BYTES", 100)
    with pytest.raises(FetchError, match="too large"):
        source.obtain(fake.PIN, None, fakes.root / "out", QUIET)


def test_an_archive_comes_by_https_alone_if_it_was_asked_for_so(
    fakes: Fakes, archives: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_SECURE", "http:")
    with pytest.raises(FetchError, match="not by https"):
        source.obtain(fake.PIN, None, fakes.root / "out", QUIET)


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


@pytest.mark.parametrize("name", ["src/../../out.h", "src/../x.h"])
def test_an_archive_writes_nowhere_else(fakes: Fakes, name: str) -> None:
    path = fakes.root / "a.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(fakes.source, "llama.cpp")
        archive.addfile(tarfile.TarInfo(f"llama.cpp/{name}"), io.BytesIO())
    with pytest.raises(UsageError, match="leads out of it"):
        source.obtain(fake.PIN, str(path), fakes.root / "to", QUIET)
    assert not (fakes.root / "out.h").exists()


def test_an_archive_is_unpacked_by_an_older_python(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 3.11.4 a member cannot be renamed, and `extract` knows no filter."""
    for owner, name in ((tarfile.TarInfo, "replace"), (tarfile.TarFile, "extract")):
        monkeypatch.delattr(owner, name)
    test_an_archive_with_llama_cpp_somewhere_in_it(fakes)


def test_a_damaged_cache_of_sources_is_said(fakes: Fakes) -> None:
    clone(fakes.source)
    fake.script(fakes.installation.server, "#!/bin/sh\necho 'version: 10488 (unknown)'\n")
    fakes.make()
    (source.cache_folder() / "config").write_text("[core\n")
    (fakes.installation.lib / "libllama.so").write_text("updated")
    with pytest.raises(FetchError, match=r"llama\.cpp\.git is damaged: ") as caught:
        fakes.make()
    assert caught.value.hint == "remove that folder"


def test_the_tag_of_a_commit(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = clone(fakes.source)
    for named in (str(fakes.source), f"file://{fakes.source}"):
        assert source.tag_of(commit[:9], named) == fake.PIN
        assert source.tag_of("0123456", named) == ""
    monkeypatch.setattr(source, "UPSTREAM", f"file://{fakes.source}")
    assert source.tag_of(commit[:9], None) == fake.PIN
    monkeypatch.setattr(source, "UPSTREAM", f"file://{fakes.root}/nowhere")
    with pytest.raises(FetchError, match="nowhere"):
        source.tag_of(commit[:9], None)


def test_the_tag_of_a_commit_that_has_a_message_of_its_own(fakes: Fakes) -> None:
    """Git lists such a tag twice: as it is, and as the commit that it leads to."""
    commit = clone(fakes.source, tag="before")
    git("tag", "-d", "before", cwd=fakes.source)
    git("tag", "-am", "annotated", fake.PIN, cwd=fakes.source)
    assert source.tag_of(commit[:9], str(fakes.source)) == fake.PIN


def test_a_folder_or_an_archive_has_no_tags(fakes: Fakes) -> None:
    (fakes.root / "a.tar").touch()
    for named in (fakes.source, fakes.root / "a.tar"):
        assert source.tag_of("abc1234", str(named)) == ""
