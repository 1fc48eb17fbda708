"""The store's face: what it names for type checkers is what it has, and nothing is loaded early."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from ollama_tiering import store

_FILE = Path(store.__file__ or "")
_HEAVY = ("sqlite3", "zstandard", "google.protobuf")


def named() -> dict[str, str]:
    """Name -> module, as the imports for type checkers say."""
    tree = ast.parse(_FILE.read_text(encoding="utf-8"))
    return {
        alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(store.__name__)
        for alias in node.names
    }


def test_both_lists_are_the_same() -> None:
    found = {name: f"{store.__name__}.{module}" for name, module in store._MODULE_OF.items()}
    whole = {name for name, module in found.items() if module.endswith(f".{name}")}
    assert {n: m.removesuffix(f".{n}") if n in whole else m for n, m in found.items()} == named()


@pytest.mark.parametrize("name", sorted(named()))
def test_every_name_is_there(name: str) -> None:
    assert getattr(store, name) is not None


def test_the_store_is_packages_and_few_files() -> None:
    assert len(list(_FILE.parent.glob("*.py"))) <= 8


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        store.nothing  # noqa: B018


@pytest.mark.parametrize("code", ["store", "store.BlockKey", "store.TierKind", "store.values"])
def test_a_value_costs_no_heavy_import(code: str) -> None:
    check = (
        "import sys, ollama_tiering.store as store, ollama_tiering.store.values\n"
        f"{code}\n"
        f"print(*(name for name in {_HEAVY!r} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
