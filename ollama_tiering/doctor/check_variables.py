"""Environment variables that begin as ours do and that nothing reads: a mistyped name is no error,
and has no effect.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ollama_tiering.config.environment import KNOWN, unknown
from ollama_tiering.doctor.check import Check, warn
from ollama_tiering.errors import did_you_mean


def checks() -> Iterator[Check]:
    for name in unknown(os.environ):
        finding = f"{name} is set, and nothing reads it{did_you_mean(name, KNOWN)}"
        yield warn("variables", finding, f"correct its name, or: unset {name}")
