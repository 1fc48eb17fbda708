"""The source cache: a bare git repository with the fetched tags of stock Ollama, each one commit
deep.

It is filled from a URL (shallow fetch) or from any local clone: ordinary, bare, a linked worktree,
partial, or a git directory without its config. The objects of a local clone are copied, so the
clone may be deleted afterwards. One process fetches at a time (file lock); reading needs no lock.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from ollama_tiering import config
from ollama_tiering.errors import FetchError, MissingTool, UnsupportedUpstream
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.manifest import Patchset, TagPin, runs_llama_server, version_key
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import forget_git_environment
from ollama_tiering.patchset.tree import disk_full

if TYPE_CHECKING:
    import git

# A build reads nothing below these; a partial clone may lack them.
SPARE_FOLDERS = {"app", "docs", "integration", ".github"}
SPARE_ANYWHERE = "testdata"


def normal_tag(tag: str) -> str:
    """`0.16.3` is `v0.16.3`."""
    return f"v{tag}" if tag[:1].isdigit() else tag


def is_spare(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return parts[0] in SPARE_FOLDERS or SPARE_ANYWHERE in parts


class SourceCache:
    """The cached tags, their files, and how they are extracted. Safe for concurrent readers;
    `fetch` takes the lock.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or config.cache_dir() / "source.git"

    # --- looking ----------------------------------------------------------------------------------

    def tags(self) -> list[str]:
        if not (self.root / "HEAD").is_file():
            return []
        listed = str(self._git.for_each_ref("--format=%(refname:strip=2)", "refs/tags"))
        return sorted(listed.split(), key=version_key)

    def has(self, tag: str) -> bool:
        return tag in self.tags()

    def commit(self, tag: str) -> str:
        return str(self._git.rev_parse("--verify", f"refs/tags/{tag}^{{commit}}"))

    def tree(self, tag: str, folder: str = "") -> str | None:
        """Object name of the root tree or of a path in it; None if the tag has no such path."""
        target = f"refs/tags/{tag}:{folder}" if folder else f"refs/tags/{tag}^{{tree}}"
        try:
            return str(self._git.rev_parse("--verify", "--quiet", target))
        except _git_error():
            return None

    def files(self, tag: str) -> dict[str, tuple[str, str]]:
        """Path -> (mode, object name) of every file of the tag."""
        listing = str(self._git.ls_tree("-r", "-z", "--full-tree", f"refs/tags/{tag}"))
        found = {}
        for line in filter(None, listing.split("\0")):
            meta, _, path = line.partition("\t")
            mode, _, oid = meta.split(" ")
            found[path] = (mode, oid)
        return found

    def read(self, tag: str, path: str) -> bytes | None:
        """Content of one file; None if the tag does not have it."""
        try:
            exact = {"stdout_as_string": False, "strip_newline_in_stdout": False}
            content = self._git.cat_file("blob", f"refs/tags/{tag}:{path}", **exact)
        except _git_error():
            return None
        assert isinstance(content, bytes)
        return content

    def absent(self, tag: str) -> list[str]:
        """Files of the tag whose content is missing (they came from a partial clone)."""
        objects = str(
            self._git.rev_list(
                "--objects", "--no-walk", "--missing=print", f"refs/tags/{tag}^{{tree}}"
            )
        )
        missing = {line[1:] for line in objects.splitlines() if line.startswith("?")}
        return (
            sorted(path for path, (_, oid) in self.files(tag).items() if oid in missing)
            if missing
            else []
        )

    def verify(self, tag: str, pin: TagPin) -> None:
        """UnsupportedUpstream unless commit and root tree are the pinned ones."""
        for what, found, wanted in (
            ("commit", self.commit(tag), pin.commit),
            ("root tree", self.tree(tag), pin.tree),
        ):
            if found != wanted:
                raise UnsupportedUpstream(
                    f"{tag} in {self.root} has {what} {str(found)[:12]}, pinned is {wanted[:12]}",
                    hint=f"the tag was moved or the source is a fork; delete {self.root} "
                    "and fetch from upstream",
                )

    # --- filling ----------------------------------------------------------------------------------

    def fetch(self, tags: list[str], source: str, patchset: Patchset, report: Report) -> list[str]:
        """Fetches `tags` and verifies them against the pins. Returns those that were not here
        before.
        """
        with locked(self.root.with_suffix(".lock"), "another `tiering fetch` is at work", report):
            self._create()
            wanted = [tag for tag in tags if not self.has(tag)]
            if wanted:
                local = local_git_dir(source)
                with report.stage(f"fetching {_names(wanted)} from {source}"):
                    self._fill(source, local, wanted)
            for tag in tags:
                self._admit(tag, source, patchset, report)
        return wanted

    def _fill(self, source: str, local: Path | None, tags: list[str]) -> None:
        try:
            if local is not None:
                self._copy_from(local, tags)
            else:
                self._fetch_url(source, tags)
        except OSError as error:
            self._refuse_full_disk(str(error))
            raise

    def _admit(self, tag: str, source: str, patchset: Patchset, report: Report) -> None:
        """Decides about a fetched tag: pins and completeness. A refused tag is forgotten."""
        try:
            if pin := patchset.pin(tag):
                self.verify(tag, pin)
            elif patchset.pins and runs_llama_server(tag):
                report.say(
                    f"{tag} runs llama-server: not its source is patched but the installed Ollama "
                    "(tiering patch --ollama auto)"
                )
            elif patchset.pins:
                report.warn(
                    f"{tag} is not one of the pinned versions; patching it needs --allow-untested"
                )
            absent = self._absent_in(tag, source)
            needed = [path for path in absent if not is_spare(path)]
            if needed:
                raise FetchError(
                    f"{source} is a partial clone: {tag} lacks {_some(needed)}, needed to build",
                    hint="complete it (`git -C CLONE fetch --refetch`), or name a full clone "
                    "with --source",
                )
        except (FetchError, UnsupportedUpstream):
            self._git.update_ref("-d", f"refs/tags/{tag}")
            raise
        if absent:
            report.say(f"{tag}: partial clone, without {_some(absent)} (not needed to build)")

    def _absent_in(self, tag: str, source: str) -> list[str]:
        try:
            return self.absent(tag)
        except _git_error() as error:
            raise _unreadable(tag, source, str(error.stderr)) from None

    def _create(self) -> None:
        if (self.root / "HEAD").is_file():
            return
        self.root.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="source-", dir=self.root.parent))
        _git_at(fresh).init("--quiet", "--bare")  # `Repo.init` replaces variables in the path
        fresh.rename(self.root)

    def _fetch_url(self, url: str, tags: list[str]) -> None:
        refspecs = [f"+refs/tags/{tag}:refs/tags/{tag}" for tag in tags]
        network = {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes"}
        slow = ["-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60"]
        command = ["git", *slow, "fetch", "--quiet", "--no-tags", "--depth=1", "--", url, *refspecs]
        try:
            self._git.execute(command, env=network)
        except _git_error() as error:
            self._refuse_full_disk(str(error.stderr))
            reason = _reason(str(error.stderr))
            if "find remote ref" in reason:
                missing = reason.rpartition("refs/tags/")[2].strip(" '\"")
                raise FetchError(
                    f"{url} has no tag {missing}", hint="list versions: tiering fetch --list"
                ) from None
            raise FetchError(
                f"cannot fetch from {url}: {reason}",
                hint="without network: --source PATH of a local clone (or OLLAMA_TIERING_SOURCE)",
            ) from None

    def _copy_from(self, git_dir: Path, tags: list[str]) -> None:
        """Copies commits, trees and the blobs that are there as one pack. Works on clones that git
        itself cannot clone.
        """
        other = _git_at(git_dir)
        commits = {}
        for tag in tags:
            try:
                commits[tag] = str(
                    other.rev_parse("--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
                )
            except _git_error():
                raise _no_such_tag(tag, git_dir, other) from None
        try:
            self._copy_objects(other, list(commits.values()))
        except _git_error() as error:
            self._refuse_full_disk(str(error.stderr))
            raise _unreadable(_names(tags), str(git_dir), str(error.stderr)) from None
        shallow = self.root / "shallow"
        known = set(shallow.read_text(encoding="ascii").split()) if shallow.is_file() else set()
        parted = self.root / "shallow.new"
        parted.write_text("".join(f"{oid}\n" for oid in sorted(known | set(commits.values()))))
        parted.replace(shallow)
        for tag, commit in commits.items():
            self._git.update_ref(f"refs/tags/{tag}", commit)

    def _copy_objects(self, other: git.Git, commits: list[str]) -> None:
        roots = [f"{commit}^{{tree}}" for commit in commits]
        listed = str(other.rev_list("--objects", "--no-walk", "--missing=print", *roots))
        oids = [line.split(" ", 1)[0] for line in listed.splitlines() if not line.startswith("?")]
        wanted = "".join(f"{oid}\n" for oid in [*commits, *oids]).encode()
        with (
            tempfile.TemporaryFile(dir=self.root) as names,
            tempfile.TemporaryFile(dir=self.root) as pack,
        ):
            names.write(wanted)
            names.seek(0)
            # to stdout: pack files would be prepared inside the other clone, which is not ours
            fast = ("-q", "--delta-base-offset", "--window=0", "--stdout")
            other.pack_objects(*fast, istream=names, output_stream=pack)
            pack.seek(0)
            self._git.index_pack("--stdin", istream=pack)

    # --- extracting -------------------------------------------------------------------------------

    def extract(self, tag: str, target: Path) -> None:
        """Makes a plain tree of the tag at `target`, which must not exist; all of it or nothing."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            tree = Path(scratch) / "tree"
            tree.mkdir()
            try:
                self._check_out(tag, tree, Path(scratch))
            except _git_error() as error:
                self._refuse_full_disk(str(error.stderr))
                raise FetchError(
                    f"cannot extract {tag} from {self.root}: {_reason(str(error.stderr))}",
                    hint=f"delete {self.root} and fetch again",
                ) from None
            tree.rename(target)

    def _check_out(self, tag: str, tree: Path, scratch: Path) -> None:
        plain = {
            "GIT_DIR": str(self.root),
            "GIT_WORK_TREE": str(tree),
            "GIT_INDEX_FILE": str(scratch / "index"),
            "GIT_ATTR_NOSYSTEM": "1",
        }
        exact = ["-c", "core.autocrlf=false", "-c", "core.eol=lf"]
        exact += ["-c", "core.attributesFile=/dev/null"]
        read = ["git", *exact, "read-tree", f"refs/tags/{tag}^{{tree}}"]
        self._git.execute(read, env=plain)
        if absent := self.absent(tag):
            names = scratch / "absent"
            names.write_bytes(b"\0".join(os.fsencode(path) for path in absent))
            with names.open("rb") as stdin:
                forget = ["git", "update-index", "-z", "--force-remove", "--stdin"]
                self._git.execute(forget, env=plain, istream=stdin)
        write = ["git", *exact, "checkout-index", "--all", "--quiet", "--force"]
        self._git.execute(write, env=plain)

    def _refuse_full_disk(self, said: str) -> None:
        if "No space left" in said or "quota exceeded" in said:
            raise disk_full(self.root) from None

    @property
    def _git(self) -> git.Git:
        return _git_at(self.root)


# --- git, by GitPython ----------------------------------------------------------------------------


def import_git() -> Any:
    """GitPython is imported late, because it looks for the program `git` at once."""
    if shutil.which("git") is None:
        raise MissingTool(
            "git: not found; sources are fetched and kept with it",
            hint="install git (Debian, Ubuntu: apt-get install git)",
        )
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    forget_git_environment()
    import git

    return git


def _git_error() -> type[git.GitCommandError]:
    error = import_git().GitCommandError
    assert isinstance(error, type)
    return error


def _git_at(git_dir: Path) -> git.Git:
    """Git bound to one git directory by name, so that neither ownership checks nor discovery
    interfere.
    """
    bound: git.Git = import_git().Git(str(git_dir))
    bound.update_environment(GIT_DIR=str(git_dir), GIT_NO_LAZY_FETCH="1", LC_ALL="C")
    return bound


def local_git_dir(source: str) -> Path | None:
    """The git directory of a local clone; None if `source` is a URL."""
    if source.startswith("file://"):
        source = os.fsdecode(unquote_to_bytes(source.removeprefix("file://")))
    elif "://" in source or (
        re.match(r"([\w.-]+@)?[\w.-]+:", source) and not Path(source).exists()
    ):
        return None
    path = config.expanded(source).absolute()
    if not path.is_dir():
        raise FetchError(
            f"{source}: no such directory", hint="--source takes a URL or the path of a clone"
        )
    dot_git = path / ".git"
    if dot_git.is_file():  # a linked worktree or a submodule
        named = dot_git.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
        if (path / named).is_dir():
            return (path / named).resolve()
    for candidate in (dot_git, path):
        if (candidate / "HEAD").is_file() and (candidate / "objects").is_dir():
            return candidate
    raise FetchError(
        f"{source}: not a git clone", hint="--source takes a URL or the path of a clone of Ollama"
    )


def _no_such_tag(tag: str, git_dir: Path, other: git.Git) -> FetchError:
    tags = str(other.for_each_ref("--format=%(refname:strip=2)", "refs/tags")).split()
    near = difflib.get_close_matches(tag, tags, n=3)
    if near:
        hint = f"it has {', '.join(near)}"
    elif tags:
        hint = "list versions: tiering fetch --list"
    else:
        hint = "that clone has no tags at all: run `git fetch --tags` there"
    return FetchError(f"{git_dir} has no tag {tag}", hint=hint)


def _unreadable(what: str, source: str, stderr: str) -> FetchError:
    return FetchError(
        f"cannot read {what} from {source}: {_reason(stderr)}",
        hint="the clone is damaged (`git fsck`); name another one with --source",
    )


def _reason(stderr: str) -> str:
    """The line of git's output that says why, without GitPython's wrapping."""
    lines = [line.strip(" '\"") for line in stderr.replace("stderr:", "").splitlines()]
    lines = [re.sub(r"^(fatal|error): ", "", line) for line in lines if line]
    return lines[0] if lines else "git failed without a word"


def _names(tags: list[str]) -> str:
    return (
        ", ".join(tags)
        if len(tags) < 4
        else f"{tags[0]} … {tags[-1]} ({config.count(len(tags), 'tag')})"
    )


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return ", ".join(paths[:4]) + more
