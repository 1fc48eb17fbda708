"""Prints the product's native build tree of TIERING_TEST_TAG, else of the default version; exits 1
where it is not built.
"""

from __future__ import annotations

import os
import sys

from ollama_tiering.config import DEFAULT_TAG
from ollama_tiering.patchset import finished
from ollama_tiering.patchset.plan import BuildOptions, plan

tag = os.environ.get("TIERING_TEST_TAG", DEFAULT_TAG)
native = plan(BuildOptions(tag=tag, cpu="native", cuda="off"))
if not finished.programs(native.name):
    sys.exit(1)
print(native.tree)
