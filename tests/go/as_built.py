"""Runs a command with the C compilers' flags of the product's native build, of TIERING_TEST_TAG or
the default version.

    as_built.py COMMAND...

Go's cache knows packages by these flags: with others all of GGML would be compiled again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ollama_tiering.config import DEFAULT_TAG
from ollama_tiering.patchset.build import BuildOptions, compiler_environment, plan
from ollama_tiering.patchset.go_env import go_environment
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report

tag = os.environ.get("TIERING_TEST_TAG", DEFAULT_TAG)
native = plan(BuildOptions(tag=tag, cpu="native", cuda="off"))
go = Path(shutil.which("go") or "go")
with (
    locked(native.folder / "lock", "a build is at work", Report()),
    compiler_environment(native, go) as flags,
):
    merged = {**os.environ, **go_environment(), **flags}
    environment = {name: value for name, value in merged.items() if value is not None}
    done = subprocess.run(sys.argv[1:], env=environment, check=False)
sys.exit(done.returncode)
