"""A program that behaves like `ollama serve`, in a directory where it leaves what it saw."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass
class FakeOllama:
    binary: Path

    def behave(self, **behaviour: Any) -> None:
        self.binary.with_name("behaviour.json").write_text(json.dumps(behaviour))

    @property
    def environment(self) -> dict[str, str]:
        return dict(json.loads(self.binary.with_name("environment.json").read_text()))

    @property
    def events(self) -> list[str]:
        file = self.binary.with_name("events")
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def fake_ollama(tmp_path: Path) -> FakeOllama:
    folder = tmp_path / "fake"
    folder.mkdir()
    source = Path(__file__).with_name("fake_ollama.py").read_text()
    binary = folder / "ollama"
    binary.write_text(f"#!{sys.executable}\n{source}")
    binary.chmod(0o755)
    return FakeOllama(binary)
