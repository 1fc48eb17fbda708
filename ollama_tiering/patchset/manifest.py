"""What the patch set consists of: patches/series (hooks, in order), patches/overlay (new files),
upstream.toml (pins), and the attention kernels if the overlay has their adapter.

Reading it checks that every file in series exists, that every hook is in series, and that all can
be parsed.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from ollama_tiering.errors import PatchConflict, UnsupportedUpstream, UsageError
from ollama_tiering.patchset import condition, kernels, stored_rows
from ollama_tiering.patchset.diff import Diff, parse

FOR_TESTS = b"//go:build kvtier_"  # files of builds with a tag of ours; the tag is in their name
LLAMA_SERVER_SINCE = (0, 30, 0)
INSTALLED = "or patch the installed Ollama: tiering patch --ollama auto"
IGNORED_NAMES = {".DS_Store", ".gitkeep", "__pycache__"}


@dataclass(frozen=True, slots=True)
class TagPin:
    """One accepted tag. `folders` and `files` hold git object names of upstream's own content."""

    tag: str
    commit: str
    tree: str
    folders: dict[str, str]
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class GoRequire:
    """A module the overlay needs; both sums as `go mod download -json` gave them."""

    module: str
    version: str
    sum: str
    mod_sum: str


@dataclass(frozen=True, slots=True)
class Hook:
    name: str  # as written in series
    path: Path
    text: str
    diff: Diff


@dataclass(frozen=True)
class Patchset:
    root: Path
    url: str
    pins: dict[str, TagPin]
    hooks: tuple[Hook, ...]
    overlay: dict[str, bytes]  # path in the tree -> content, read once
    go_requires: tuple[GoRequire, ...]
    go_ldflags: dict[str, str]

    @cached_property
    def digest(self) -> str:
        """Changes whenever applying would give another tree."""
        return self._digest(self.overlay)

    @cached_property
    def compiled_digest(self) -> str:
        """As `digest`, for what is compiled: without the overlay's tests and
        files for tests only.
        """
        return self._digest(self.compiled)

    @cached_property
    def computing_digest(self) -> str:
        """As `compiled_digest`, for what may decide the bits of a row, or its name."""
        compiled = self.compiled.items()
        return self._digest({k: v for k, v in compiled if not k.startswith(stored_rows.FILES)})

    @property
    def storing(self) -> tuple[int, str]:
        """What a build's name says of all else that is compiled."""
        return stored_rows.part_of_name(self.compiled)

    @property
    def compiled(self) -> dict[str, bytes]:
        """The overlay without tests, and files for tests only."""
        return {
            name: content
            for name, content in self.overlay.items()
            if not name.endswith("_test.go") and not condition.body(content).startswith(FOR_TESTS)
        }

    def _digest(self, overlay: dict[str, bytes]) -> str:
        state = hashlib.sha256(b"ollama-tiering patchset 1\0")
        for hook in self.hooks:
            _feed(state, "hook", hook.name, hook.text.encode())
        for name, content in sorted(overlay.items()):
            _feed(state, "overlay", name, content)
        for need in self.go_requires:
            _feed(
                state,
                "require",
                f"{need.module}@{need.version}",
                f"{need.sum} {need.mod_sum}".encode(),
            )
        for name, value in sorted(self.go_ldflags.items()):
            _feed(state, "ldflag", name, value.encode())
        return state.hexdigest()

    @cached_property
    def conditions(self) -> dict[str, condition.Condition]:
        """The conditions of overlay files that are not copied everywhere. PatchConflict if one is
        malformed.
        """
        found = {name: condition.parse(name, content) for name, content in self.overlay.items()}
        return {name: one for name, one in found.items() if one is not None}

    @cached_property
    def hooked(self) -> tuple[str, ...]:
        """The upstream files that the hooks change, in the order of the series."""
        return tuple(dict.fromkeys(path for hook in self.hooks for path in hook.diff.touched))

    def emptied(self) -> Patchset:
        """The same pins with nothing to apply, that is, stock."""
        return replace(self, hooks=(), overlay={}, go_requires=(), go_ldflags={})

    def pin(self, tag: str) -> TagPin | None:
        return self.pins.get(tag)

    def require_pin(self, tag: str) -> TagPin:
        pin = self.pins.get(tag)
        if pin is None:
            tags = list(self.pins)
            known = f"{tags[0]} … {tags[-1]}" if tags else "none"
            try_it = "or try with --allow-untested"
            raise UnsupportedUpstream(
                f"{tag} is not a supported version (supported: {known})",
                hint="choose one of them with --tag, "
                + (INSTALLED if runs_llama_server(tag) else try_it),
            )
        return pin

    def touched_pins(self, pin: TagPin) -> dict[str, str]:
        """The pinned folders and single files that hold something which this patch set touches or
        asks for; all of them if it is empty.
        """
        asked = (one.path for one in self.conditions.values())
        touched = {
            place
            for path in (*self.hooked, *self.overlay, *asked)
            if (place := _place_of(path, pin)) is not None
        }
        everything = pin.folders | pin.files
        return {place: oid for place, oid in everything.items() if not touched or place in touched}


def _place_of(path: str, pin: TagPin) -> str | None:
    if path in pin.files:
        return path
    parents = [str(parent) for parent in PurePosixPath(path).parents]
    return next((parent for parent in parents if parent in pin.folders), None)


def _feed(state: Any, kind: str, name: str, content: bytes) -> None:
    for part in (kind.encode(), name.encode(), content):
        state.update(len(part).to_bytes(8, "little") + part)


def default_root() -> Path:
    """`patches/` of the checkout, or the copy in an installed package."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "patches"
    return checkout if (checkout / "upstream.toml").is_file() else package / "_patches"


def load(root: Path | None = None) -> Patchset:
    """The patch set at `root`. PatchConflict if its parts do not fit together."""
    root = root or default_root()
    document = _read_toml(root / "upstream.toml")
    go = document.get("go", {})
    overlay = _overlay(root / "overlay")
    if kernels.ADAPTER in overlay:
        overlay |= kernels.overlay(kernels.default_include(root))
    patchset = Patchset(
        root=root,
        url=str(document.get("url", "")),
        pins=_pins(document),
        hooks=_hooks(root),
        overlay=overlay,
        go_requires=tuple(
            GoRequire(module, need["version"], need["sum"], need["mod_sum"])
            for module, need in go.get("require", {}).items()
        ),
        go_ldflags=dict(go.get("ldflags", {})),
    )
    _ = patchset.conditions  # read now: what is wrong with them is wrong with the patch set
    return patchset


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file; this is not a patch set", hint="install the package again"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise PatchConflict(
            f"{path}: {error}", hint="write it with scripts/refresh_pins.py"
        ) from None


def _pins(document: dict[str, Any]) -> dict[str, TagPin]:
    """Of a tag the document has what is not as in the version before; "" is what went."""
    pins: dict[str, TagPin] = {}
    names: dict[str, dict[str, str]] = {"folders": {}, "files": {}}
    for tag, entry in sorted(document.get("tags", {}).items(), key=lambda one: version_key(one[0])):
        for kind, before in names.items():
            now = before | entry.get(kind, {})
            names[kind] = {name: oid for name, oid in now.items() if oid}
        pins[tag] = TagPin(tag, entry["commit"], entry["tree"], **names)
    return pins


def version_key(tag: str) -> tuple[int, ...]:
    """Sorts v0.9.0 before v0.16.3. What is not a plain version comes first."""
    parts = tag.removeprefix("v").split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (-1,)


def runs_llama_server(tag: str) -> bool:
    """Whether that version has no Go engine any more, so that its source is not what is patched."""
    return version_key(tag) >= LLAMA_SERVER_SINCE


def _hooks(root: Path) -> tuple[Hook, ...]:
    series = root / "series"
    names = []
    if series.is_file():
        lines = (
            line.split("#", 1)[0].strip()
            for line in series.read_text(encoding="utf-8").splitlines()
        )
        names = [line for line in lines if line]
    for name in names:
        if names.count(name) > 1:
            raise PatchConflict(f"{series}: {name} is listed twice", hint="list it once")
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            raise PatchConflict(
                f"{series}: {name} is outside of {root}", hint="list paths below patches/"
            )
    present = {path.relative_to(root).as_posix() for path in (root / "hooks").rglob("*.patch")}
    # an entry may be written with or without the leading hooks/
    located = {name: name if (root / name).is_file() else f"hooks/{name}" for name in names}
    for name, place in located.items():
        if not (root / place).is_file():
            raise PatchConflict(
                f"{series}: {name}: no such file", hint="remove the line or add the hook"
            )
    if unused := sorted(present - set(located.values())):
        raise PatchConflict(f"{unused[0]} is not in {series}", hint="add it to series or delete it")
    hooks = []
    for name, place in located.items():
        text = (root / place).read_text(encoding="utf-8")
        hooks.append(Hook(name, root / place, text, parse(place, text)))
    return tuple(hooks)


def _overlay(root: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if IGNORED_NAMES & set(relative.parts) or path.name.endswith(
            (".orig", ".rej", ".swp", "~")
        ):
            continue
        if path.is_symlink():
            raise PatchConflict(
                f"{path}: a link cannot be an overlay file", hint="put the file itself there"
            )
        if path.is_file():
            files[relative.as_posix()] = path.read_bytes()
    return files
