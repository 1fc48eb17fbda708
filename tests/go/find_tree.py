"""Prints the product's native build tree of the default version; exits 1 where it is not built."""

from __future__ import annotations

import sys

from ollama_tiering.config import DEFAULT_TAG
from ollama_tiering.patchset.build import BuildOptions, binary_path

binary = binary_path(BuildOptions(tag=DEFAULT_TAG, cpu="native", cuda="off"))
if not binary.is_file():
    sys.exit(1)
print(binary.parent)
