"""scripts/engines: what it names is there, and a slip in its arguments is no success."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ollama_tiering.patchset import manifest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/engines"


def listed(name: str) -> list[str]:
    """An array of the script's, as bash reads it."""
    line = re.search(rf"^{name}=\(.*?\)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert line
    command = f'{line[0]}; printf "%s\\n" "${{{name}[@]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_its_versions_are_supported_ones() -> None:
    assert set(listed("VERSIONS")) <= set(manifest.load().pins)


def test_its_few_tests_are_there() -> None:
    few = listed("FEW")
    assert "tests/engine/test_recurrent.py" in few
    assert [name for name in few if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("given", [["-x"], ["--turn", "v0.24.0"], ["0.24.0"], ["v0.24"]], ids=str)
def test_what_is_no_version_is_refused_before_any_work(given: list[str]) -> None:
    done = subprocess.run([SCRIPT, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert given[-1] in done.stderr
    assert not done.stdout
