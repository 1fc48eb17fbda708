"""A disk that keeps what was synced, and of the rest whatever it likes: states after a power cut.

After Pillai et al., All File Systems Are Not Created Equal (OSDI 2014), the weakest disk POSIX
allows: a file's content is safe after a sync of the file, a name after a sync of its directory.
Anything else that was done before the cut may be there or not, each by itself: a name before the
content it stands for, a later name without an earlier one, a size without the bytes, some sectors
of a write. Only a single rename, link or removal is whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SECTOR_BYTES = 512
ROOT = 0


@dataclass(frozen=True, slots=True)
class Name:
    """In `directory`, `name` becomes `node`; with `old` it is a rename from there."""

    directory: int
    name: str
    node: int
    old: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Unname:
    directory: int
    name: str
    node: int


@dataclass(frozen=True, slots=True)
class Resize:
    node: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Write:
    node: int
    sectors: dict[int, bytes]  # offset -> up to SECTOR_BYTES


@dataclass(frozen=True, slots=True)
class Mode:
    node: int
    mode: int


@dataclass(frozen=True, slots=True)
class Sync:
    node: int


Op = Name | Unname | Resize | Write | Mode | Sync
# Of an operation that is not synced: what of it is on the disk. Of a write: which sectors.
Choose = Callable[[Op], "bool | set[int]"]


@dataclass(slots=True)
class Node:
    """A file, or a directory if it has `names`."""

    mode: int
    names: dict[str, int] | None = None
    content: bytearray = field(default_factory=bytearray)


class Disk:
    """Nodes by number. A node that no name leads to is not there after a cut."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {ROOT: Node(0o700, {})}

    def apply(self, op: Op, kinds: dict[int, Node], part: bool | set[int] = True) -> None:
        """`kinds` are nodes as they were made: a name may be there when nothing else of it is."""
        if part is False or isinstance(op, Sync):
            return
        node = self.nodes.get(op.node) or self._made(op.node, kinds[op.node])
        if isinstance(op, Name):
            if op.old is not None:
                self._drop(*op.old, op.node, kinds)
            self._names(op.directory, kinds)[op.name] = op.node
        elif isinstance(op, Unname):
            self._drop(op.directory, op.name, op.node, kinds)
        elif isinstance(op, Mode):
            node.mode = op.mode
        elif isinstance(op, Resize):
            del node.content[op.file_bytes :]
            node.content.extend(bytes(op.file_bytes - len(node.content)))
        else:
            for offset, data in op.sectors.items():
                if part is True or offset in part:
                    end = offset + len(data)
                    node.content.extend(bytes(max(0, end - len(node.content))))
                    node.content[offset:end] = data

    def tree(self, at: int = ROOT, path: str = "") -> Iterator[tuple[str, Node]]:
        """What names lead to, parents first."""
        for name, number in sorted((self.nodes[at].names or {}).items()):
            node = self.nodes[number]
            here = f"{path}{name}"
            yield here, node
            if node.names is not None:
                yield from self.tree(number, here + "/")

    def write_to(self, root: Path) -> None:
        root.mkdir(mode=0o700)
        for path, node in self.tree():
            if node.names is not None:
                (root / path).mkdir(mode=node.mode)
            else:
                fd = os.open(root / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, node.mode)
                os.write(fd, node.content)
                os.close(fd)

    def _made(self, number: int, like: Node) -> Node:
        node = self.nodes[number] = Node(like.mode, None if like.names is None else {})
        return node

    def _names(self, directory: int, kinds: dict[int, Node]) -> dict[str, int]:
        node = self.nodes.get(directory) or self._made(directory, kinds[directory])
        assert node.names is not None
        return node.names

    def _drop(self, directory: int, name: str, number: int, kinds: dict[int, Node]) -> None:
        names = self._names(directory, kinds)
        if names.get(name) == number:
            del names[name]


def after_cut(ops: Sequence[Op], kinds: dict[int, Node], choose: Choose) -> Disk:
    """The disk when the power fails after these operations."""
    synced: dict[int, int] = {op.node: at for at, op in enumerate(ops) if isinstance(op, Sync)}
    disk = Disk()
    for at, op in enumerate(ops):
        safe = any(at < synced.get(node, -1) for node in _needs(op))
        disk.apply(op, kinds, True if safe else choose(op))
    return disk


def _needs(op: Op) -> tuple[int, ...]:
    """A sync of any of these makes the operation safe."""
    if isinstance(op, Name):
        return (op.directory,) if op.old is None else (op.directory, op.old[0])
    return (op.directory,) if isinstance(op, Unname) else (op.node,)
