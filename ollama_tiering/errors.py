"""Every failure a person can act on. One class, one exit code; the message says cause and place,
the hint the cure.

Exit codes are part of the interface; docs/commands.md lists them, with the classes' docstrings.
Code 2 is also what Click uses for bad usage.
"""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'status'?` with the names nearest to a mistyped one; empty where none is."""
    import difflib  # only where something went wrong

    near = difflib.get_close_matches(word[:100], known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


class TieringError(Exception):
    """Base of all expected failures. Alone: something is wrong that no other class names."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ResultDiffers(TieringError):
    """A check ran to its end and the result is not what it must be."""

    exit_code = 1


class UsageError(TieringError):
    """Usage: no such command, option or name, a path that is not what it should be."""

    exit_code = 2


class FetchError(TieringError):
    """Fetch: no network, unknown tag, incomplete clone."""

    exit_code = 3


class UnsupportedUpstream(TieringError):
    """Unsupported upstream: not a supported version, changed tree, moved tag."""

    exit_code = 4


class PatchConflict(TieringError):
    """Patch conflict: a hook does not apply, an overlay file collides, a patched file changed."""

    exit_code = 5


class MissingTool(TieringError):
    """A tool or an extra is missing: git, compiler, make, Python, CUDA, gguf, matplotlib."""

    exit_code = 6


class BuildError(TieringError):
    """Build: CMake, compiler or Go failed, no space left."""

    exit_code = 7


class StoreDamaged(TieringError):
    """Store damaged, or an archive to import that is."""

    exit_code = 8


class ServiceError(TieringError):
    """Service: port, socket or directory taken, sidecar unreachable; something planted where a
    directory or file of the store belongs.
    """

    exit_code = 9


class ConfigError(TieringError):
    """Configuration: file, variable or flag holds an invalid value."""

    exit_code = 10
