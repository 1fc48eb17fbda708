"""llama.cpp's source at a pin: from GitHub, a clone, a folder or an archive; only the parts that
are compiled or included.

What is fetched with git lies in a cache of its own, one commit deep, beside Ollama's. Without git,
GitHub's archive of the commit is taken, and is not kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import tarfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering import config
from ollama_tiering.errors import FetchError, MissingTool, UsageError
from ollama_tiering.patchset import manifest
from ollama_tiering.patchset.llama_server import download
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run
from ollama_tiering.patchset.upstream import SourceCache, import_git, local_git_dir

UPSTREAM: Final = "https://github.com/ggml-org/llama.cpp"
# Folders, each with all below it; other files of a source are not needed.
PARTS: Final = ("tools/server/", "tools/mtmd/", "tools/ui/", "common/", "include/", "src/")
PARTS_DEEPER: Final = ("ggml/include/", "ggml/src/", "vendor/")
_OTHER_BACKENDS: Final = re.compile(r"ggml/src/ggml-(?!cpu/)[^/]+/")  # not the CPU's
_MARK: Final = "tools/server/server-context.cpp"
_KINDS: Final = (".h", ".hpp", ".c", ".cpp", ".txt", ".in", ".inc", ".cmake")
_HINT: Final = "--llama-source takes a git clone, a folder, or a tar archive of llama.cpp"


@dataclass(frozen=True, slots=True)
class LlamaSource:
    """`commit` is empty where the source does not say it."""

    folder: Path
    commit: str


def obtain(pin: str, named: str | None, to: Path, report: Report) -> LlamaSource:
    """Puts the source at `to`, which must not exist. FetchError where it cannot be had, UsageError
    where `named` is no source of llama.cpp.
    """
    place = config.expanded(named).absolute() if named else None
    if place is not None and place.is_file():
        with report.stage(f"unpacking {place}"):
            _unpack(place, to)
        return LlamaSource(to, "")
    if place is not None and place.is_dir() and not _is_clone(place):
        _copy(place, to)
        return LlamaSource(to, "")
    if named is None and shutil.which("git") is None:
        archive = to.with_name(f"{to.name}.tar.gz")
        download.archive(f"{UPSTREAM}/archive/{pin}.tar.gz", archive, report)
        _unpack(archive, to)
        archive.unlink()
        return LlamaSource(to, "")  # the commit that it names is not that of its content
    cache = SourceCache(cache_folder())
    try:
        cache.fetch([pin], named or UPSTREAM, _nothing_pinned(), report)
        cache.extract(pin, to)
        commit = cache.commit(pin)
    except FetchError as error:
        raise FetchError(
            error.message, hint=f"without network: --llama-source PATH; {_HINT}"
        ) from None
    except import_git().GitCommandError as error:
        said = str(error.stderr).strip(" '\n").splitlines() or [f"git ended with {error.status}"]
        raise _damaged(said[-1]) from None
    _require(to, named or UPSTREAM)
    return LlamaSource(to, commit)


def tag_of(commit: str, named: str | None) -> str:
    """The tag of a commit that is given by its first digits, as the source's repository has it;
    empty where none is that commit, for a folder or an archive, which have no tags, and without
    git. FetchError where it cannot be asked.
    """
    place = config.expanded(named).absolute() if named else None
    if place is not None and (place.is_file() or (place.is_dir() and not _is_clone(place))):
        return ""
    if named is None and shutil.which("git") is None:
        return ""
    asked = str(place) if place is not None and place.exists() else named or UPSTREAM
    done = run("git", "ls-remote", "--tags", asked)
    if done.returncode:
        last = done.tail[-1] if done.tail else f"git ended with {done.returncode}"
        raise FetchError(f"{asked}: {last}", hint=f"without network: --llama-source PATH; {_HINT}")
    found = (line.split() for line in done.stdout.splitlines())
    names = [ref for sha, ref in found if sha.startswith(commit)]
    return names[0].removeprefix("refs/tags/").removesuffix("^{}") if names else ""


def cache_folder() -> Path:
    return config.cache_dir() / "llama.cpp.git"


def forget(pin: str) -> None:
    """The next `obtain` takes that tag from its source again. Nothing, if it is not in the cache:
    it came from a folder or an archive.
    """
    with contextlib.suppress(MissingTool):  # without git it did not come from there
        if SourceCache(cache_folder()).has(pin):
            _git("update-ref", "-d", f"refs/tags/{pin}")


def keep_only(pins: Collection[str], report: Report) -> None:
    """Removes all other tags from the cache, with their files; without `pins` the cache itself."""
    root = cache_folder()
    if not root.exists():
        return
    with locked(root.with_suffix(".lock"), "another `tiering patch` is at work", report):
        if not pins:
            shutil.rmtree(root)
            return
        other = [tag for tag in SourceCache(root).tags() if tag not in pins]
        for tag in other:
            forget(tag)
        if other:
            _git("gc", "--quiet", "--prune=now")


def _git(*words: str) -> None:
    done = run("git", f"--git-dir={cache_folder()}", *words)
    if done.returncode:
        last = done.tail[-1] if done.tail else f"it ended with {done.returncode}"
        raise _damaged(f"git {words[0]}: {last}")


def _damaged(said: str) -> FetchError:
    return FetchError(f"{cache_folder()} is damaged: {said}", hint="remove that folder")


def _nothing_pinned() -> manifest.Patchset:
    return dataclasses.replace(manifest.load().emptied(), pins={})


def _is_clone(place: Path) -> bool:
    try:
        return local_git_dir(str(place)) is not None
    except FetchError:
        return False


def _wanted(name: str) -> bool:
    if _OTHER_BACKENDS.match(name):
        return False
    return name.startswith(PARTS + PARTS_DEEPER) and name.endswith(_KINDS)


def _copy(place: Path, to: Path) -> None:
    _require(place, str(place))
    for part in PARTS + PARTS_DEEPER:
        for path in (place / part).rglob("*"):
            name = path.relative_to(place).as_posix()
            if _wanted(name) and path.is_file():
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, to / name)


def _unpack(archive: Path, to: Path) -> None:
    """One of llama.cpp, or of what has llama.cpp in it, as an sdist of llama-cpp-python."""
    try:
        with tarfile.open(archive) as members:
            all_ = members.getmembers()
            mark = next((m.name for m in all_ if m.name.endswith(f"/{_MARK}")), None)
            if mark is None:
                raise UsageError(f"{archive} has no {_MARK}", hint=_HINT)
            root = mark.removesuffix(_MARK)
            for member in all_:
                name = member.name.removeprefix(root)
                if member.name.startswith(root) and member.isfile() and _wanted(name):
                    _write(members, member, name, to)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UsageError(f"{archive} is no whole tar archive: {error}", hint=_HINT) from None


def _write(members: tarfile.TarFile, member: tarfile.TarInfo, name: str, to: Path) -> None:
    """Python before 3.11.4 has neither the filter nor the renaming of members for this."""
    if ".." in Path(name).parts:
        raise UsageError(f"{member.name} leads out of it", hint=_HINT)
    (to / name).parent.mkdir(parents=True, exist_ok=True)
    content = members.extractfile(member)
    assert content is not None  # it is a file
    with content, (to / name).open("wb") as sink:
        shutil.copyfileobj(content, sink)


def _require(folder: Path, named: str) -> None:
    if not (folder / _MARK).is_file():
        raise UsageError(f"{named} is no source of llama.cpp: it has no {_MARK}", hint=_HINT)
