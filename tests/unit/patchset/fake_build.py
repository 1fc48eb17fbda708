"""What making a tree of links needs, made up; its self-test only counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.errors import TieringError
from ollama_tiering.patchset import elf
from ollama_tiering.patchset.llama_server import built
from ollama_tiering.patchset.llama_server.built import BuildRequest
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.llama_server.outcome import SelfTestOutcome
from ollama_tiering.patchset.report import Report
from tests.unit.patchset import fake_installed as fake
from tests.unit.patchset.conftest import git

QUIET = Report(quiet=True)


class Fakes:
    """`make` builds for `installation`, and counts the self-tests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.installation = fake.at(fake.installed(root / "installed"))
        self.source = fake.llama_source(root / "llama.cpp")
        self.compiler = root / "compiler"
        fake.compiler(self.compiler)
        self.tested: list[InstalledOllama] = []
        self.all_checks: list[bool] = []
        self.outcome = SelfTestOutcome(1)
        self.error: TieringError | None = None
        self.updates_meanwhile = False

    def make(self, *, named: str = "") -> LinkTree:
        request = BuildRequest(named or str(self.source))
        return built.ensure(self.installation, request, self._self_test, QUIET)

    def _self_test(
        self, installed: InstalledOllama, tree: InstalledOllama, is_whole: bool, _report: Report
    ) -> SelfTestOutcome:
        assert installed == self.installation
        assert tree.server.is_file()
        self.tested.append(tree)
        self.all_checks.append(is_whole)
        if self.updates_meanwhile:
            (installed.lib / "libllama.so").write_text("updated")
        if self.error:
            raise self.error
        return self.outcome

    def left(self) -> list[str]:
        """In the cache, but for the lock."""
        return sorted(path.name for path in built.folder().glob("*") if path.name != "lock")


def clone(folder: Path, *, tag: str = fake.PIN) -> str:
    """Makes the folder a git clone with one commit, which has the tag; its name."""
    git("init", "-q", cwd=folder)
    git("add", ".", cwd=folder)
    git("commit", "-qm", "all", cwd=folder)
    git("tag", tag, cwd=folder)
    return git("rev-parse", "HEAD", cwd=folder)


def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(tmp_path / "compiler/c++"))
    monkeypatch.setattr(elf, "read", fake.all_exported)
    return Fakes(tmp_path)
