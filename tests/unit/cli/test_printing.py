"""Every command prints in every locale and encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENCODINGS = {
    "C, strictly": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "POSIX": {"LC_ALL": "POSIX"},
    "LANG=C": {"LANG": "C"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "latin-1, strictly": {"PYTHONIOENCODING": "latin-1:strict"},
    "EBCDIC": {"PYTHONIOENCODING": "cp037"},
}
ODD = "caf\u00e9 \u2192 \u4f60\u597d\u2026"  # Latin-1 has the first word of it only


def run(place: Path, encoding: dict[str, str], *args: str) -> subprocess.CompletedProcess[bytes]:
    dropped = ("LC_", "LANG", "PYTHON", "OLLAMA_", "XDG_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    homes = {f"XDG_{kind}_HOME": str(place / kind) for kind in ("STATE", "DATA", "CACHE", "CONFIG")}
    return subprocess.run(
        [sys.executable, "-m", "ollama_tiering", *args],
        env=clean | homes | {"XDG_RUNTIME_DIR": str(place), "COLUMNS": "200"} | encoding,
        capture_output=True,
        check=False,
    )


def require_no_bug(done: subprocess.CompletedProcess[bytes]) -> None:
    for said in (done.stdout, done.stderr):
        assert b"codec can't" not in said
        assert b"unexpected" not in said
        assert b"Traceback" not in said


@pytest.mark.parametrize("name", ENCODINGS)
def test_doctor_speaks_every_encoding(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, ENCODINGS[name], "doctor")
    require_no_bug(done)
    if name != "EBCDIC":
        assert b"RAM tier directory: " in done.stdout


@pytest.mark.parametrize("name", ["C, strictly", "latin-1, strictly", "EBCDIC"])
def test_names_of_people_are_printed_in_every_encoding(tmp_path: Path, name: str) -> None:
    """A path in a setting, and one that no directory can have in that locale."""
    for text in (ODD, os.fsdecode(b"not-\xff-utf-8")):
        file = tmp_path / "CONFIG/ollama-tiering/config.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        shown = json.dumps(text) if text == ODD else '"x"'
        file.write_text(f"[sidecar]\nlocal_dir = {shown}\n", encoding="utf-8")
        for args in (("config",), ("status", "--socket", text), ("ls",), ("config", text)):
            done = run(tmp_path, ENCODINGS[name], *args)
            require_no_bug(done)
            assert done.stdout or done.stderr


def test_no_path_of_ours_has_a_character_that_a_locale_may_lack() -> None:
    from ollama_tiering.config import places
    from ollama_tiering.doctor import check_storage

    assert str(check_storage._TO_BE_CHOSEN).isascii()
    assert places.APP_NAME.isascii()
