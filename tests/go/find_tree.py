"""Prints the newest patched and built tree of the product's cache; exits 1 where there is none."""

from __future__ import annotations

import sys

from ollama_tiering.patchset.build import built_binaries

binaries = sorted(built_binaries(), key=lambda path: path.stat().st_mtime)
if not binaries:
    sys.exit(1)
print(binaries[-1].parent)
