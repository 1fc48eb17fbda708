"""Which patched Ollama becomes a service, if none is named: the one that `tiering up` starts."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.config.environment import ENV_CACHE
from ollama_tiering.errors import UnsupportedUpstream, UsageError
from ollama_tiering.patchset.binary import ready_binary
from ollama_tiering.patchset.llama_server import built
from ollama_tiering.patchset.llama_server.choose import chosen
from ollama_tiering.patchset.llama_server.installation import is_usual


def usual_binary() -> Path:
    """Its `ollama`: of a tree of links, or of the newest build. With sudo, what whoever called it
    has patched counts, too; of two the one that is made for what is installed now. UsageError where
    nothing is patched.
    """
    stale: Path | None = None
    refused: UnsupportedUpstream | UsageError | None = None
    for cache, is_own in _caches():
        with _looking_in(cache):
            try:
                found, fits = _patched(is_own=is_own)
            except (UnsupportedUpstream, UsageError) as error:  # what was patched there is gone
                refused = refused or error
                continue
        if found and fits:
            return found
        stale = stale or found
    if stale:
        return stale  # the install says why it cannot be
    raise refused or UsageError(
        "no patched Ollama is built yet",
        hint="build one: tiering patch; or name one with --binary; or --sidecar-only",
    )


def _patched(*, is_own: bool) -> tuple[Path | None, bool]:
    """And whether it can be installed as it is."""
    installed = chosen(None, {})
    if installed and (tree := built.tree_of(installed)):
        if not is_own and not is_usual(installed.program):
            raise UsageError(
                f"{installed.program}, which another user has patched, is not in the usual places",
                hint=f"if it is to be the service's: --binary {tree.binary}",
            )
        return tree.binary, tree.fits(installed)
    return ready_binary(), True


def _caches() -> Iterator[tuple[Path, bool]]:
    """Tells of each whether it is this user's own: another one's may name any program."""
    yield config.cache_dir(), True
    caller = os.environ.get("SUDO_USER", "")
    if os.geteuid() == 0 and caller not in ("", "root"):
        with contextlib.suppress(KeyError):
            yield Path(pwd.getpwnam(caller).pw_dir) / ".cache" / config.APP_NAME, False


@contextlib.contextmanager
def _looking_in(cache: Path) -> Iterator[None]:
    before = os.environ.get(ENV_CACHE)
    os.environ[ENV_CACHE] = str(cache)
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENV_CACHE]
        else:
            os.environ[ENV_CACHE] = before
