"""Maintainer: sdists of llama-cpp-python, each with a llama.cpp in it, out of PyPI by pip.

They are kept in a folder of the product's cache, 75 MB each. No code of an sdist runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.errors import FetchError
from ollama_tiering.patchset import pip as pips

PROJECT = "llama-cpp-python"
CACHE = config.cache_dir() / "llama-cpp"
LOOK_EVERY_S = 7 * 24 * 3600
PATIENCE = ("--timeout", "20", "--retries", "1", "--disable-pip-version-check")

# Before pip keeps an sdist it asks its build system for metadata. That would install compilers'
# tools and may run code of the sdist. This stands in for the build system (scikit-build-core): it
# says what the sdist says of itself.
STAND_IN = '''\
"""In the place of a build system: nothing is built."""

import re
import shutil
from pathlib import Path


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    said = Path("PKG-INFO").read_text(encoding="utf-8")
    name, version = (re.search(rf"^{part}: (.+)$", said, re.M)[1] for part in ("Name", "Version"))
    made = Path(metadata_directory, f"{name.replace('-', '_')}-{version}.dist-info")
    made.mkdir()
    shutil.copyfile("PKG-INFO", made / "METADATA")
    return made.name
'''


def sdist_path(version: str, cache: Path) -> Path:
    return cache / f"llama_cpp_python-{version}.tar.gz"


def sdist(version: str, cache: Path) -> Path:
    """From the cache, or from PyPI. FetchError if pip does not get it."""
    path = sdist_path(version, cache)
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        work = Path(name)
        module = work / "scikit_build_core" / "build.py"
        module.parent.mkdir()
        module.write_text(STAND_IN, encoding="utf-8")
        only = ["--no-deps", "--no-build-isolation", "--no-binary", PROJECT]
        pip("download", "-q", *only, f"{PROJECT}=={version}", "-d", name, PYTHONPATH=name)
        (work / path.name).replace(path)  # whole, or not there
    return path


def newest(cache: Path) -> str:
    """The newest version, as of a look within the last week; FetchError if pip cannot look.

    Its name and the time of the look are a file of the cache.
    """
    noted = cache / "newest"
    if noted.exists() and 0 <= time.time() - noted.stat().st_mtime < LOOK_EVERY_S:
        return noted.read_text(encoding="utf-8")
    said = pip("index", "versions", "--no-binary", PROJECT, PROJECT)
    found = re.match(rf"{PROJECT} \(([\w.]+)\)", said)
    if found is None:
        raise FetchError(f"pip says nothing of a version: {said[:200]!r}")
    cache.mkdir(parents=True, exist_ok=True)
    noted.write_text(found[1], encoding="utf-8")
    return found[1]


def noted_newest(cache: Path) -> str | None:
    """The newest version as of the last look, however long ago."""
    noted = cache / "newest"
    return noted.read_text(encoding="utf-8") if noted.exists() else None


def pip(*arguments: str, **environment: str) -> str:
    """What pip prints. FetchError with its last word where it fails."""
    with pips.pip() as (command, needs):  # a checkout's .venv has none
        paths = [found for e in (environment, needs, os.environ) if (found := e.get("PYTHONPATH"))]
        ran = subprocess.run(
            [*command, *arguments, *PATIENCE],
            env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
    if ran.returncode:
        broken = re.search(r"connection broken by '(\w+)", ran.stderr)
        lines = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
        raise FetchError(f"pip {arguments[0]}: {broken[1] if broken else lines[-1][:200]}")
    return ran.stdout
