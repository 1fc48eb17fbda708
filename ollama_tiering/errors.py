"""Every failure a person can act on. One class, one exit code; the message says cause and place,
the hint the cure.

Exit codes are part of the interface and listed in docs/cli.md. Code 2 is also what Click uses for
bad usage.
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
    """The request itself makes no sense: an unknown name, a path that is not what it should be."""

    exit_code = 2


class FetchError(TieringError):
    """Upstream source could not be had: network, unknown tag, missing objects."""

    exit_code = 3


class UnsupportedUpstream(TieringError):
    """The source tree is not one this patch set was made for."""

    exit_code = 4


class PatchConflict(TieringError):
    """A hook does not apply, an overlay file collides, or a patched file was edited."""

    exit_code = 5


class MissingTool(TieringError):
    """A program the work needs is not there and could not be installed."""

    exit_code = 6


class BuildError(TieringError):
    """CMake, the compiler or the Go tool failed."""

    exit_code = 7


class StoreDamaged(TieringError):
    """The block store, or a block in it, is not readable as what it claims to be."""

    exit_code = 8


class ServiceError(TieringError):
    """A service cannot start or be reached: port or socket taken, sidecar down."""

    exit_code = 9


class ConfigError(TieringError):
    """A configuration file, environment variable or flag holds an invalid value."""

    exit_code = 10
