"""Which builds of the engine are on this machine: what others stored nobody here finds."""

from __future__ import annotations

import os
from pathlib import Path

from ollama_tiering.launch import record
from ollama_tiering.patchset import identity
from ollama_tiering.patchset.binary import ENV_BINARY
from ollama_tiering.systemd.plan import Request

SERVER = "bin/ollama"  # in a service's prefix


def builds_here() -> frozenset[str]:
    """Those in the cache, those that are installed as a service in the usual places, and those
    that `tiering up` serves or would serve.
    """
    binaries = [Request(user_mode=user_mode).place / SERVER for user_mode in (False, True)]
    binaries += record.binaries()
    if named := os.environ.get(ENV_BINARY):
        binaries.append(Path(named).expanduser())
    names = map(identity.build_id_of, binaries)
    return identity.known_build_ids() | frozenset(name for name in names if name)
