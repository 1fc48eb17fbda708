"""A program of an installed Ollama that never answers: a driver that hangs may be behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.errors import TieringError
from ollama_tiering.patchset.llama_server import installation
from tests.unit.patchset import fake_installed as fake


def test_it_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_ANSWER_SECONDS", 0.2)
    found = fake.at(fake.installed(tmp_path))
    for program, ask in ((found.program, found.version), (found.server, found.build)):
        fake.script(program, "#!/bin/sh\nexec sleep 5\n")
        with pytest.raises(TieringError, match=f"{program} --version did not end within"):
            ask()
