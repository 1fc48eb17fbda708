"""Where tests of the store lie: as its modules do, and what they have in common in files beside."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
STORE = HERE.parents[2] / "ollama_tiering" / "store"
FEATURES = "features"  # of what spans several packages


def test_folders_are_those_of_the_store() -> None:
    folders = {path.parent.name for path in HERE.glob("*/test_*.py")} - {FEATURES}
    assert folders == {path.parent.name for path in STORE.glob("*/__init__.py")}


def test_no_test_imports_one() -> None:
    imports = re.compile(r"^from tests\.unit\.store\.(?:\w+\.)*test_|^import test_", re.MULTILINE)
    tests = list(HERE.parents[1].rglob("*.py"))
    assert len(tests) > 300
    assert [path.name for path in tests if imports.search(path.read_text())] == []
