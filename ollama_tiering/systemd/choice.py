"""Which patched Ollama becomes a service, if none is named: the one that `tiering up` starts."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.config.environment import ENV_CACHE
from ollama_tiering.errors import UsageError
from ollama_tiering.patchset.binary import ready_binary
from ollama_tiering.patchset.llama_server import built
from ollama_tiering.patchset.llama_server.choose import chosen


def usual_binary() -> Path:
    """Its `ollama`: of a tree of links, or of the newest build. With sudo, what whoever called it
    has patched counts, too. UsageError where nothing is patched.
    """
    for cache in _caches():
        with _looking_in(cache):
            if found := _patched():
                return found
    raise UsageError(
        "no patched Ollama is built yet",
        hint="build one: tiering patch; or name one with --binary; or --sidecar-only",
    )


def _patched() -> Path | None:
    installed = chosen(None, {})
    if installed and (tree := built.tree_of(installed)):
        return tree.binary
    return ready_binary()


def _caches() -> Iterator[Path]:
    yield config.cache_dir()
    caller = os.environ.get("SUDO_USER", "")
    if os.geteuid() == 0 and caller not in ("", "root"):
        with contextlib.suppress(KeyError):
            yield Path(pwd.getpwnam(caller).pw_dir) / ".cache" / config.APP_NAME


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
