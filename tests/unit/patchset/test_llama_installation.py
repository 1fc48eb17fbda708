"""The installed Ollama: where it is looked for, what it says of itself, which pin it has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ollama_tiering.errors import MissingTool, UnsupportedUpstream, UsageError
from ollama_tiering.patchset.llama_server import installation, pins
from ollama_tiering.patchset.llama_server.installation import AUTO, InstalledOllama, ServerBuild
from ollama_tiering.patchset.llama_server.pins import LlamaPin, Pins, pin_of, require_same
from tests.unit.patchset import fake_installed as fake

RELEASE = ServerBuild(1, "abc1234")  # of a shallow clone, which has one commit
NAMELESS = ServerBuild(0, "")
PINS = Pins({"v0.32.15": "b10488", "v0.32.14": "b10434"}, ("b10488",))


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/path:/usr/bin:/bin")
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(installation, "_UNITS", (tmp_path / "ollama.service",))
    monkeypatch.setattr(installation, "_PREFIXES", (tmp_path / "usr",))


def test_a_folder_that_is_named(tmp_path: Path) -> None:
    place = fake.installed(tmp_path / "here")
    found = installation.find(str(place))
    assert found == fake.at(place)
    assert found.version() == "v0.32.15"
    assert found.build() == ServerBuild(10488, "abc1234")


def test_what_newer_llama_servers_say(tmp_path: Path) -> None:
    place = fake.installed(tmp_path, build="0.1.0-dev (build 7, commit unknown)")
    assert fake.at(place).build() == ServerBuild(7, "")


@pytest.mark.parametrize("where", ["PATH", "service", "prefix"])
def test_found_where_it_usually_is(tmp_path: Path, where: str) -> None:
    place = fake.installed(tmp_path / ("usr" if where == "prefix" else "other"))
    if where == "PATH":
        (tmp_path / "path").mkdir()
        (tmp_path / "path/ollama").symlink_to(place / "bin/ollama")
    if where == "service":
        unit = f"[Service]\nExecStart={place}/bin/ollama serve\n"
        (tmp_path / "ollama.service").write_text(unit)
    assert installation.find(AUTO) == fake.at(place)
    assert installation.usual() == fake.at(place)


def test_our_own_tree_on_path_is_not_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.installed(tmp_path / "cache/llama-server/x")
    monkeypatch.setenv("PATH", f"{tmp_path}/cache/llama-server/x/bin")
    assert installation.usual() is None
    with pytest.raises(MissingTool):
        installation.find(AUTO)


def test_none_an_older_one_and_no_ollama_at_all(tmp_path: Path) -> None:
    with pytest.raises(MissingTool, match="no installed Ollama"):
        installation.find(AUTO)
    with pytest.raises(UsageError, match="no bin/ollama"):
        installation.find(str(tmp_path))
    fake.script(tmp_path / "usr/bin/ollama", "#!/bin/sh\n")
    with pytest.raises(UnsupportedUpstream, match=r"older than v0\.30"):
        installation.find(AUTO)
    assert installation.usual() is None


def test_a_program_that_does_not_say_what_it_is(tmp_path: Path) -> None:
    place = fake.installed(tmp_path)
    fake.script(place / "bin/ollama", "#!/bin/sh\necho what\n")
    with pytest.raises(UnsupportedUpstream, match="what"):
        fake.at(place).version()
    fake.script(place / "lib/ollama/llama-server", "#!/bin/sh\necho no such library >&2; exit 127")
    with pytest.raises(UnsupportedUpstream, match="no such library"):
        fake.at(place).build()
    (place / "lib/ollama/llama-server").write_text("no program")
    with pytest.raises(UnsupportedUpstream, match="Exec format error"):
        fake.at(place).build()


def test_the_state_changes_with_every_file(tmp_path: Path) -> None:
    found = fake.at(fake.installed(tmp_path))
    before = found.state()
    assert found.state() == before
    (found.lib / "cuda_v12/libggml-cuda.so").write_text("another CUDA..")
    assert found.state() != before
    after = found.state()
    (found.lib / "new.so").touch()
    assert found.state() != after


def test_a_state_can_be_told_while_files_go_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fake.at(fake.installed(tmp_path))
    before = found.state()
    gone = found.lib / "libllama.so"
    listed = [Path(str(path)) for path, _, _ in before]
    monkeypatch.setattr(InstalledOllama, "_files", lambda _: iter(listed))
    gone.unlink()
    assert found.state() == [one for one in before if one[0] != str(gone)]


def test_a_folder_that_is_a_link_is_looked_into(tmp_path: Path) -> None:
    found = fake.at(fake.installed(tmp_path / "one"))
    (tmp_path / "elsewhere").mkdir()
    library = tmp_path / "elsewhere/libggml-cuda.so"
    library.write_text("CUDA")
    (found.lib / "cuda_v13").symlink_to(tmp_path / "elsewhere")
    (found.lib / "loop").symlink_to(found.lib)
    before = found.state()
    assert [name for name, *_ in before if "cuda_v13" in str(name)]
    assert not [name for name, *_ in before if "loop" in str(name)]
    library.write_text("another CUDA")
    assert found.state() != before


def test_what_this_user_may_not_look_at_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 raises for a file in a folder that may not be searched."""
    place = fake.installed(tmp_path / "usr")
    (tmp_path / "ollama.service").write_text("[Service]\nExecStart=/locked/ollama serve\n")
    real = Path.is_file

    def is_file(path: Path) -> bool:
        if path.is_relative_to("/locked"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert installation.usual() == fake.at(place)


def test_a_program_that_may_be_run_and_not_read_is_no_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fake.at(fake.installed(tmp_path))

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    installation.require_program(found)


def test_a_script_is_no_program(tmp_path: Path) -> None:
    found = fake.at(fake.installed(tmp_path))
    with pytest.raises(UnsupportedUpstream, match="a script that starts one"):
        installation.require_program(found)
    found.program.write_bytes(Path(sys.executable).read_bytes()[:64])
    installation.require_program(found)


def no_tag(commit: str) -> str:
    raise AssertionError(f"nobody had to ask for the tag of {commit}")


def test_a_tested_version_has_its_pin() -> None:
    assert pin_of(PINS, "v0.32.15", RELEASE, no_tag) == LlamaPin("b10488", is_tested=True)


def test_any_other_version_has_one_too_and_has_to_pass_all_checks() -> None:
    assert pin_of(PINS, "v0.32.14", RELEASE, no_tag) == LlamaPin("b10434", is_tested=False)
    counted = ServerBuild(11000, "f")
    assert pin_of(PINS, "v0.40.0", counted, no_tag) == LlamaPin("b11000", is_tested=False)
    assert pin_of(PINS, "v0.40.0", ServerBuild(10488, "f"), no_tag).is_tested


def test_a_server_of_a_shallow_clone_says_its_commit_alone() -> None:
    shallow = ServerBuild(1, "abc1234")
    tags = {"abc1234": "b11002"}
    assert pin_of(PINS, "v0.40.0", shallow, tags.__getitem__) == LlamaPin("b11002", is_tested=False)
    assert pin_of(PINS, "v0.40.0", shallow, lambda _: "").name == "abc1234"


def test_where_nothing_says_it_nothing_is_guessed() -> None:
    with pytest.raises(UnsupportedUpstream, match="not known here, and its llama-server does not"):
        pin_of(PINS, "v0.40.0", NAMELESS, no_tag)


@pytest.mark.parametrize(
    ("build", "commit"),
    [(RELEASE, "abc1234ffff"), (ServerBuild(10488, "abc1234"), ""), (ServerBuild(10488, ""), "a")],
)
def test_server_and_source_of_one_commit(build: ServerBuild, commit: str) -> None:
    assert require_same("b10488", build, commit) == ""


def test_server_and_source_of_two_commits() -> None:
    for build, commit in ((RELEASE, "def"), (ServerBuild(10434, ""), "")):
        with pytest.raises(UnsupportedUpstream, match="the installed llama-server is"):
            require_same("b10488", build, commit)


def test_where_nobody_can_tell_it_is_said() -> None:
    for build, commit in ((NAMELESS, "abc"), (RELEASE, ""), (NAMELESS, "")):
        assert "cannot be told" in require_same("b10488", build, commit)


def test_the_data_names_the_pins_that_are_tested() -> None:
    data = pins.load()
    assert set(data.tested) <= set(data.of_version.values())
    assert data.of_version["v0.32.15"] == "b10488"
    assert all(version.startswith("v0.3") for version in data.of_version)
