"""Finished builds: `<cache>/builds/<tag>-<kind>/<digest>/` has the program, its libraries in
`build/lib/ollama`, and `build.json`.

A folder is named by what decides its content, appears whole by a rename, and no build writes into
it again. Whoever starts its program holds it until the own process ends. What is older goes with
the next build of its kind, unless it is held.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from ollama_tiering import config
from ollama_tiering.patchset.llama_server import tree_use
from ollama_tiering.patchset.llama_server.tree_use import UNFINISHED
from ollama_tiering.patchset.report import Report
from ollama_tiering.system.files import without_links

RECORD: Final = "build.json"
LIBRARIES: Final = Path("build/lib/ollama")  # where Ollama looks, from its program
PROGRAM: Final = "ollama"
STOCK: Final = "-stock"  # ends the name of a kind without the patch set
ELSEWHERE: Final = "-for-"  # in that of a kind for another processor than this one
FORMAT: Final = 1

_held = ExitStack()


def root() -> Path:
    """Below it: a folder for each tag and kind, and in that one for each build."""
    return config.cache_dir() / "builds"


def folder_of(program: Path) -> Path | None:
    """The folder of a program that was built here; None for any other."""
    folder = program.parent
    return folder if without_links(folder.parent.parent) == without_links(root()) else None


def source_of(program: Path) -> Path:
    """The tree that a program was built in: its sources, if nothing was built there since."""
    folder = folder_of(program)
    return config.cache_dir() / "trees" / folder.parent.name / "src" if folder else program.parent


@contextmanager
def filling(target: Path, program: str, build_id: str) -> Iterator[Path]:
    """A folder to fill, which becomes `target` at the end of the block; nothing does if that is
    left by an error, an interrupt or a kill.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=UNFINISHED) as place:
        fresh = Path(place, target.name)
        (fresh / LIBRARIES).mkdir(parents=True)  # else Ollama would look in its working directory
        yield fresh
        files = {str(path.relative_to(fresh)): _state(path) for path in _files(fresh)}
        record = {"format": FORMAT, "program": program, "build": build_id, "files": files}
        (fresh / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if target.exists():  # and is not whole
            tree_use.put_away(target)
        fresh.rename(target)


def link_files(source: Path, target: Path) -> None:
    """The files below `source`, links as links, without the bytes where the disk can do that."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without such links
        shutil.copy2(source, target)


def unshare(folder: Path) -> None:
    """Removes those files of a work tree's folder that a finished build has, too: a linker may
    write into the file that it finds.
    """
    for path in folder.glob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1:
            path.unlink()


def is_whole(folder: Path) -> bool:
    return bool(record := read_record(folder)) and not changed_since(folder, record)


def read_record(folder: Path) -> dict[str, Any]:
    """Empty where there is none, or none that this version wrote."""
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        good = content["format"] == FORMAT and isinstance(content["build"], str)
        return content if good and isinstance(content["files"], dict) else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def changed_since(folder: Path, record: dict[str, Any]) -> list[str]:
    """Files of the record that are gone, or not what they were."""
    return [name for name, state in record["files"].items() if _state(folder / name) != state]


def harm(program: Path) -> str:
    """What of a program's build is gone, in words; empty where all is there, or it is no build."""
    folder = folder_of(program)
    if folder is None:
        return ""
    record = read_record(folder)
    if not record:
        return f"{folder} is gone or damaged"
    if changed := changed_since(folder, record):
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"{folder / changed[0]}{more} is gone or was changed"
    return ""


def hold(program: Path) -> Path:
    """The program, whose build nobody removes before this process ends."""
    if folder := folder_of(program):
        tree_use.hold(folder, _held, RECORD)
    return program


def release() -> None:
    """Lets go of all that this process holds."""
    _held.close()


def remove_older(newest: Path, program: str, report: Report) -> None:
    """Of its kind, what was finished before, unless it is held; and what was left unfinished. The
    caller keeps others from building that kind.
    """
    for other in newest.parent.iterdir():
        if other.name.startswith(UNFINISHED):
            shutil.rmtree(other, ignore_errors=True)
            continue
        its = read_record(other).get("program", program)
        if other != newest and its == program and tree_use.remove_unused(other, RECORD):
            report.say(f"removed the build before it, {other}")


def programs(kind: str = "*", program: str = PROGRAM) -> list[Path]:
    """Every finished program of that name, newest first. `kind`: `<tag>-<kind>`."""
    found = []
    for record in root().glob(f"{kind}/*/{RECORD}"):
        path = record.with_name(program)
        if not record.parent.name.startswith(UNFINISHED) and path.is_file():
            found.append((record.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file())


def _state(path: Path) -> list[int] | str | None:
    """Size and time, of a link where it leads; None where it is not there, or leads nowhere."""
    try:
        info = path.stat()
        return str(path.readlink()) if path.is_symlink() else [info.st_size, info.st_mtime_ns]
    except OSError:
        return None
