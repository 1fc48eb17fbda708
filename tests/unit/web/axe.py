"""axe-core, which finds what people with other eyes or without a mouse cannot use. It is fetched
from npm's registry once, into the cache.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from ollama_tiering.config import cache_dir

VERSION = "4.14.1"
_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
_FETCH_SECONDS = 100


def axe_script() -> str:
    """The test is skipped where it cannot be had."""
    file = cache_dir() / "web-test" / f"axe-{VERSION}.min.js"
    if not file.is_file():
        _fetch(file)
    text = file.read_bytes()
    assert hashlib.sha256(text).hexdigest() == _SHA256, f"{file} is another one"
    return text.decode()


def _fetch(file: Path) -> None:
    npm = shutil.which("npm")
    if not npm:
        pytest.skip("axe-core is not in the cache, and there is no npm to fetch it")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "install", "--ignore-scripts", "--no-save", "--prefix", folder]
        try:
            done = subprocess.run(
                [*command, f"axe-core@{VERSION}"],
                capture_output=True,
                text=True,
                timeout=_FETCH_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            pytest.skip("npm does not answer, so axe-core cannot be fetched")
        if done.returncode:
            last = done.stderr.strip().splitlines() or [""]
            pytest.skip(f"npm cannot fetch axe-core: {last[-1][:200]}")
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        shutil.copy(Path(folder, "node_modules/axe-core/axe.min.js"), new)
        new.rename(file)
