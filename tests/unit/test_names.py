"""One word, one meaning: what the package names, it names once."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ollama_tiering"


def classes_by_name(root: Path) -> dict[str, list[str]]:
    """Every class below `root`, nested ones too, with the places that define it. Generated code
    repeats the names of the protocol's messages, so it is left out.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for file in sorted(root.rglob("*.py")):
        if file.parent.name == "pb":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(root)}:{node.lineno}")
    return places


def test_no_two_classes_have_one_name() -> None:
    found = classes_by_name(PACKAGE)
    assert len(found) > 200
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_a_second_class_of_one_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Claim:\n    pass\n")
    (tmp_path / "two.py").write_text("def make():\n    class Claim:\n        pass\n")
    assert classes_by_name(tmp_path)["Claim"] == ["one.py:1", "two.py:2"]
