"""Which builds of the engine are on this machine. What other builds stored,
nobody here can find.
"""

from __future__ import annotations

import contextlib
import os

from ollama_tiering.config import expanded
from ollama_tiering.errors import ConfigError
from ollama_tiering.launch import running_up
from ollama_tiering.patchset import identity
from ollama_tiering.patchset.binary import ENV_BINARY
from ollama_tiering.systemd.plan import InstallRequest

SERVER = "bin/ollama"  # in a service's prefix


def builds_here() -> frozenset[str]:
    """The builds in the cache, those installed as a service in the usual places, and those that a
    `tiering up` runs or would run.
    """
    binaries = running_up.binaries()
    for user_mode in (False, True):
        with contextlib.suppress(ConfigError):  # a user without a home
            binaries.append(InstallRequest(user_mode=user_mode).place / SERVER)
    if named := os.environ.get(ENV_BINARY):
        binaries.append(expanded(named))
    names = map(identity.build_id_of, binaries)
    return identity.known_build_ids() | frozenset(name for name in names if name)
