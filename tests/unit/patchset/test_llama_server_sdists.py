"""Sdists of llama-cpp-python come by pip, and nothing of them runs: tried with pip and a made-up
one, without a network.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import platformdirs
import pytest

from ollama_tiering.errors import FetchError
from scripts import llama_server_sdists as sdists

REPO = Path(__file__).parents[3]
BUILD = (
    '[build-system]\nrequires = ["scikit-build-core"]\nbuild-backend = "scikit_build_core.build"\n'
)
SAID = "Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {}\n"
SETUP = "raise SystemExit('it runs')"


def publish(index: Path, version: str) -> None:
    folder = f"llama_cpp_python-{version}"
    with tarfile.open(index / f"{folder}.tar.gz", "w:gz") as opened:
        for name, text in {
            "pyproject.toml": BUILD,
            "PKG-INFO": SAID.format(version),
            "setup.py": SETUP,
        }.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(text)
            opened.addfile(info, io.BytesIO(text.encode()))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that pip finds."""
    folder = tmp_path / "index"
    folder.mkdir()
    publish(folder, "9.8")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_an_sdist_is_kept_as_it_is_published_without_a_build_system(
    index: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    path = sdists.sdist("9.8", cache)
    assert path.read_bytes() == (index / path.name).read_bytes()
    assert list(cache.iterdir()) == [path]
    (index / path.name).unlink()
    assert sdists.sdist("9.8", cache) == path  # pip is not asked again


@pytest.mark.slow
def test_a_checkouts_python_has_no_pip_and_gets_one_anyway(index: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    ask = (
        "import sys; from pathlib import Path; from scripts import llama_server_sdists as sdists; "
        "print(sdists.newest(Path(sys.argv[1])), sdists.sdist('9.8', Path(sys.argv[1])))"
    )
    needed = tmp_path / "needed"  # of our own packages' needs
    shutil.copytree(Path(platformdirs.__file__).parent, needed / "platformdirs")
    environment = os.environ | {"PYTHONPATH": f"{REPO}{os.pathsep}{needed}"}
    done = subprocess.run(
        [bare / "bin/python", "-c", ask, tmp_path / "cache"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["9.8", str(tmp_path / "cache/llama_cpp_python-9.8.tar.gz")]


def test_one_that_is_not_there_is_an_error_with_pips_reason(index: Path, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"pip download: .*llama-cpp-python==1\.0"):
        sdists.sdist("1.0", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_newest_is_looked_for_once_a_week(index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert sdists.noted_newest(cache) is None
    assert sdists.newest(cache) == "9.8"
    publish(index, "9.10")
    assert sdists.newest(cache) == sdists.noted_newest(cache) == "9.8"
    then = (cache / "newest").stat().st_mtime - sdists.LOOK_EVERY_S
    os.utime(cache / "newest", (then, then))
    assert sdists.newest(cache) == sdists.noted_newest(cache) == "9.10"


def test_a_look_that_fails_is_an_error_and_keeps_what_is_known(index: Path, tmp_path: Path) -> None:
    for path in index.iterdir():
        path.unlink()
    (tmp_path / "newest").write_text("9.7")
    os.utime(tmp_path / "newest", (0, 0))
    with pytest.raises(FetchError, match="pip index: ERROR: No matching distribution"):
        sdists.newest(tmp_path)
    assert sdists.noted_newest(tmp_path) == "9.7"


def test_without_a_network_that_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(FetchError, match=r"^pip index: NewConnectionError$"):
        sdists.newest(tmp_path)
