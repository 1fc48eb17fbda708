"""What scripts/venv.sh makes smaller may be in use by the command that asked for an extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import zstandard.backend_c

REPO = Path(__file__).parents[2]


def test_a_library_that_is_loaded_is_not_written_to(tmp_path: Path) -> None:
    """In place, `strip` takes from a running process what its loader had put right."""
    library = Path(zstandard.backend_c.__file__)
    site = tmp_path / f"lib/python3.{sys.version_info.minor}/site-packages"
    (site / "zstandard").mkdir(parents=True)
    light = site / "zstandard" / library.name
    light.write_bytes(library.read_bytes())
    light.chmod(0o755)
    loaded = tmp_path / "loaded"
    loaded.hardlink_to(light)
    words = f'repo=/nowhere; . {REPO}/scripts/venv.sh; venv="{tmp_path}"; lighten'
    subprocess.run(["bash", "-euc", words], check=True)
    assert loaded.read_bytes() == library.read_bytes()
    assert not light.samefile(loaded)
    assert light.stat().st_size <= library.stat().st_size
    assert light.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in light.parent.iterdir()] == [library.name]
