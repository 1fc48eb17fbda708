"""A plain source tree, and the record of what was done to it: the mechanism of apply and revert.

`TREE/.tiering/` holds `record.json` and, in `pristine/`, upstream's own bytes of every changed
file. The intent is recorded before the first file is moved in, so a write that was killed or ran
out of space can be undone. Not safe for two processes on one tree at once; the build holds a lock.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from ollama_tiering.errors import BuildError, PatchConflict, TieringError, UsageError
from ollama_tiering.patchset import gittree
from ollama_tiering.patchset.manifest import Patchset, TagPin

RECORD_DIR = ".tiering"
RECORD_FORMAT = 1
ReadFile = Callable[[str], bytes | None]


@dataclass
class TreeRecord:
    """What an apply did to a tree: each path with the SHA-256 of what was written there."""

    tag: str
    digest: str
    done: bool
    changed: dict[str, str] = field(default_factory=dict)  # upstream files; originals in pristine/
    added: dict[str, str] = field(default_factory=dict)  # overlay files
    folders: list[str] = field(default_factory=list)  # folders that did not exist before
    format: int = RECORD_FORMAT


class Tree:
    """A plain source tree, and what we did to it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.record_dir = self.root / RECORD_DIR
        if not self.root.is_dir():
            raise UsageError(
                f"{root}: no such directory", hint="name a source tree of Ollama with --tree"
            )

    def record(self) -> TreeRecord | None:
        path = self.record_dir / "record.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            raise PatchConflict(
                f"{path}: damaged", hint=f"delete {self.root} and make the tree anew"
            ) from None
        if data.get("format") != RECORD_FORMAT:
            raise PatchConflict(f"{path}: made by another version", hint=f"delete {self.root}")
        return TreeRecord(**data)

    def identify(self, patchset: Patchset, wanted: str | None) -> tuple[TagPin | None, list[str]]:
        """The accepted tag that this tree is, not counting our own changes; else None and the
        places that differ.

        A tag fits if every folder that the patch set touches has the pinned name; what lies
        elsewhere does not matter. If several fit, the wanted one is taken, else the one that fits
        in most of the other places, too.
        """
        record = self.record()
        without = frozenset(record.added if record else ())
        instead = {p: self.record_dir / "pristine" / p for p in record.changed} if record else {}
        seen: dict[str, str | None] = {}

        def differing(pins: dict[str, str]) -> list[str]:
            for place in pins.keys() - seen.keys():
                seen[place] = self._oid(place, without, instead)
            return [place for place, oid in pins.items() if seen[place] != oid]

        candidates = [patchset.require_pin(wanted)] if wanted else list(patchset.pins.values())
        fits: list[tuple[int, TagPin]] = []
        nearest: tuple[int, list[str]] | None = None
        for pin in candidates:
            wrong = differing(patchset.touched_pins(pin))
            if not wrong:
                fits.append((len(differing(pin.folders | pin.files)), pin))
            elif nearest is None or len(wrong) < nearest[0]:
                nearest = (len(wrong), wrong)
        if fits:
            return min(fits, key=lambda item: item[0])[1], []
        return None, nearest[1] if nearest else []

    def _oid(self, place: str, without: frozenset[str], instead: dict[str, Path]) -> str | None:
        path = instead.get(place, self.root / place)
        if path.is_file():
            return gittree.file_oid(path)
        return gittree.folder_oid(self.root, place, without=without, instead=instead)

    def edited(self, record: TreeRecord) -> list[str]:
        """Files of ours that somebody changed after we wrote them."""
        ours = record.changed | record.added
        return sorted(path for path, digest in ours.items() if _sha256(self.root / path) != digest)

    def upstream_read(self, record: TreeRecord | None) -> ReadFile:
        """Reads upstream's own content, even of a file that we changed."""

        def read(path: str) -> bytes | None:
            kept = self.record_dir / "pristine" / path
            place = kept if record and path in record.changed else self.root / path
            return place.read_bytes() if place.is_file() else None

        return read

    def write(
        self,
        old: TreeRecord | None,
        new: TreeRecord,
        changed: dict[str, bytes],
        added: dict[str, bytes],
    ) -> list[str]:
        """Keeps the originals, records the intent, moves the files in, and records success.
        `changed` are files of upstream's, `added` ours. If it fails half-way, it undoes what was
        done.
        """
        read = self.upstream_read(old)
        originals = {path: read(path) for path in {*changed, *(old.changed if old else ())}}
        contents = (
            {path: originals[path] or b"" for path in originals.keys() - changed.keys()}
            | changed
            | added
        )
        new.changed = {path: _digest(content) for path, content in changed.items()}
        new.added = {path: _digest(content) for path, content in added.items()}
        new.folders = sorted({*(old.folders if old else ()), *self._new_folders(added)})
        stale = sorted((old.added.keys() if old else set()) - added.keys())
        touched = []
        try:
            for path, original in originals.items():
                kept = self.record_dir / "pristine" / path
                if not (old and path in old.changed):
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    self._put(kept, original or b"")
                    shutil.copymode(self.root / path, kept)
            intent = TreeRecord(
                new.tag, new.digest, False, dict.fromkeys(originals, ""), {}, new.folders
            )
            intent.added = dict.fromkeys([*added, *stale], "")
            self._save(intent)
            for path, content in contents.items():
                target = self.root / path
                if not target.is_file() or target.read_bytes() != content:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._put(target, content)
                    touched.append(path)
            for path in stale:
                (self.root / path).unlink(missing_ok=True)
                touched.append(path)
            self._remove_empty(new.folders)
            new.done = True
            self._save(new)
        except OSError as error:
            with contextlib.suppress(OSError):  # then the next command undoes it
                self.undo_interrupted()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise disk_full(self.root) from None
            raise TieringError(
                f"cannot write into {self.root}: {error.strerror} ({error.filename})",
                hint="run it as the owner of that tree, or set OLLAMA_TIERING_CACHE",
            ) from None
        return sorted(touched)

    def undo_interrupted(self) -> None:
        """Goes back to upstream after a write or a revert that did not reach its end."""
        record = self.record()
        if record is not None and not record.done:
            self.restore(record)
        elif record is None and self.record_dir.is_dir():
            shutil.rmtree(self.record_dir)  # killed before the intent was noted: nothing changed

    def restore(self, record: TreeRecord) -> list[str]:
        """Puts upstream's bytes back, and removes our files and the record. If it is killed
        half-way, it can be continued.
        """
        record.done = False
        self._save(record)
        touched = []
        for path in record.changed:
            kept, place = self.record_dir / "pristine" / path, self.root / path
            if not place.is_file() or kept.read_bytes() != place.read_bytes():
                self._put(place, kept.read_bytes())
                touched.append(path)
            shutil.copymode(kept, place)
        for path in record.added:
            (self.root / path).unlink(missing_ok=True)
            touched.append(path)
        self._remove_empty(record.folders)
        (self.record_dir / "record.json").unlink()
        shutil.rmtree(self.record_dir)
        return sorted(touched)

    def refuse_edited(self, record: TreeRecord) -> None:
        """PatchConflict if somebody changed a file of ours since."""
        edited = self.edited(record)
        if edited:
            more = f" and {len(edited) - 3} more" if len(edited) > 3 else ""
            raise PatchConflict(
                f"{', '.join(edited[:3])}{more} in {self.root} changed after patching",
                hint=f"carry the change into patches/ and undo it there, or delete {self.root}",
            )

    def _new_folders(self, added: dict[str, bytes]) -> set[str]:
        parents = {str(parent) for path in added for parent in PurePosixPath(path).parents}
        return {parent for parent in parents if not (self.root / parent).exists()}

    def _remove_empty(self, folders: list[str]) -> None:
        for folder in sorted(folders, key=len, reverse=True):
            place = self.root / folder
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()

    def _put(self, target: Path, content: bytes) -> None:
        """Writes below the record and moves over, so that a kill leaves nothing beside upstream's
        files.
        """
        self.record_dir.mkdir(exist_ok=True)
        incoming = self.record_dir / "incoming"
        incoming.write_bytes(content)
        if target.exists():
            shutil.copymode(target, incoming)
        else:
            incoming.chmod(0o644)
        incoming.replace(target)

    def _save(self, record: TreeRecord) -> None:
        self._put(self.record_dir / "record.json", json.dumps(asdict(record), indent=1).encode())


def disk_full(where: Path) -> BuildError:
    return BuildError(
        f"no space left on the disk of {where}",
        hint="free some (a first build takes about 3 GB), or set OLLAMA_TIERING_CACHE to a folder "
        "on another disk",
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sha256(path: Path) -> str | None:
    try:
        return _digest(path.read_bytes())
    except OSError:
        return None
