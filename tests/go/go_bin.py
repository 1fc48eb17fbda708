"""Prints the directory of the Go toolchain that the product would build with, or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from ollama_tiering.config import cache_dir

found = shutil.which("go")
fetched = sorted(cache_dir().glob("tools/**/bin/go"))
print(Path(found).parent if found else fetched[-1].parent if fetched else "")
