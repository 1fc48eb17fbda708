"""Every failure that a person can act on. Each class has one exit code. The message says what went
wrong and where; the hint says what to do.

Exit codes are part of the interface; docs/commands.md lists them with the classes' docstrings.
Click also uses code 2 for bad usage.
"""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'status'?` with the names nearest to a mistyped one; empty where none is."""
    import difflib  # only where something went wrong

    near = difflib.get_close_matches(word[:100], known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def plain(text: str) -> str:
    """One line that a terminal shows as it is: a path or a name may have line ends, control codes
    and bytes that are no text.
    """
    return text if text.isprintable() else "".join(map(_plain, text))


def _plain(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


class TieringError(Exception):
    """Base of all expected failures. Raised by itself for a failure that no other class names.

    `message` and `hint` are a line each. `told`: lines of a log that follow the message.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, told: str = "") -> None:
        lines = "".join(f"\n{plain(line.expandtabs())}" for line in told.splitlines())
        self.message = plain(message) + lines
        self.hint = plain(hint) if hint is not None else None
        super().__init__(self.message)


class ResultDiffers(TieringError):
    """A check ran to its end, and its result is not what it must be."""

    exit_code = 1


class UsageError(TieringError):
    """Usage: an unknown command, option or name, or a path of the wrong kind."""

    exit_code = 2


class FetchError(TieringError):
    """Fetch: no network, an unknown tag, or an incomplete clone."""

    exit_code = 3


class UnsupportedUpstream(TieringError):
    """Unsupported upstream: not a supported version of Ollama, a changed tree, or a moved tag."""

    exit_code = 4


class PatchConflict(TieringError):
    """Patch conflict: a hook does not apply, an overlay file exists already, or a patched file was
    changed.
    """

    exit_code = 5


class MissingTool(TieringError):
    """Missing: a tool or a package (git, a compiler, make, Python, CUDA, gguf)."""

    exit_code = 6


class BuildError(TieringError):
    """Build: CMake, the compiler or Go failed, or no space is left."""

    exit_code = 7


class StoreDamaged(TieringError):
    """Damage: a stored block, or an archive to import, is damaged."""

    exit_code = 8


class ServiceError(TieringError):
    """Service: a port, socket or directory is taken, the sidecar cannot be reached, or a link or a
    file of somebody else lies where the store keeps its own.
    """

    exit_code = 9


class ConfigError(TieringError):
    """Configuration: an invalid value in the settings file, a variable or a flag."""

    exit_code = 10
