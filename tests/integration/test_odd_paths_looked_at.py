"""`doctor`, `logs` and `model` with paths that mean something to somebody on the way, or at which
nothing can be: an exit code that is documented, and one clear line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ollama_tiering.config.environment import ENV_CACHE
from tests.odd_paths import NAMES, WRONG, Said, Tiering, nothing_there, run_command

pytestmark = pytest.mark.slow

TINY = ("--layers", "1", "--embd", "32", "--ffn", "32")
HOMES = ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME")
PLACES = (*HOMES, "XDG_RUNTIME_DIR", ENV_CACHE, "OLLAMA_TIERING_CONFIG", "OLLAMA_MODELS")
TIERS = ("OLLAMA_KV_TIER_LOCAL", "OLLAMA_KV_TIER_RAM", "OLLAMA_KV_TIER_REMOTE")
FOR_DOCTOR = (*PLACES, *TIERS, "OLLAMA_KV_TIER_SOCKET", "OLLAMA_TIERING_BINARY", "PATH")


@pytest.fixture(autouse=True)
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OLLAMA_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiering(capfdbinary: pytest.CaptureFixture[bytes]) -> Tiering:
    """Runs the command; exit code, stdout, stderr. It says at most one error, in one line."""

    def run(*args: str) -> Said:
        code, out, err = run_command(capfdbinary, *args)
        if err and args[0] != "logs":
            first, *more = err.splitlines()
            assert first.startswith(b"error: ")
            assert all(line.startswith(b"hint: ") for line in more[:1])
            assert len(more) < 2
        return code, out, err

    return run


@pytest.fixture(params=NAMES)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    directory = tmp_path / NAMES[request.param]
    directory.mkdir(mode=0o700)
    return directory


def require_lines(text: bytes) -> None:
    """Of the doctor: each begins as one does, and has nothing that a terminal obeys."""
    *lines, summary = text.decode().splitlines()
    assert summary.endswith(" fail")
    for line in lines:
        assert line.startswith(("ok    ", "warn  ", "fail  ", "      -> ")), line
        assert line.isprintable(), line


def test_doctor_in_homes_of_that_name(
    odd: Path, tiering: Tiering, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*PLACES, *TIERS, "OLLAMA_KV_TIER_SOCKET"):
        monkeypatch.setenv(name, str(odd / ("c.toml" if name.endswith("CONFIG") else name)))
    (odd / "c.toml").write_text("")
    for name in HOMES:
        (odd / name).mkdir()
    code, out, _ = tiering("doctor")
    assert code in (0, 1)
    require_lines(out)
    found = json.loads(tiering("doctor", "--json")[1])
    local = next(check for check in found if check["name"] == "local tier directory")
    assert str(odd / "OLLAMA_KV_TIER_LOCAL") in local["finding"]


@pytest.mark.parametrize("name", FOR_DOCTOR)
@pytest.mark.parametrize("wrong", [*WRONG, "empty", "relative", "above"])
def test_doctor_where_nothing_can_be(
    name: str, wrong: str, tiering: Tiering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {**nothing_there(tmp_path), "empty": "", "relative": "a/../b", "above": ".."}
    monkeypatch.setenv(name, paths[wrong])
    code, out, _ = tiering("doctor")
    assert code in (0, 1)
    require_lines(out)
    tiering("doctor", "--json")


@pytest.mark.parametrize("key", ["local_dir", "remote_dir", "ram_dir", "socket"])
def test_doctor_with_settings_that_name_odd_paths(
    key: str, tiering: Tiering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    monkeypatch.setenv("OLLAMA_TIERING_CONFIG", str(file))
    texts = [name for name in NAMES.values() if os.fsencode(name).isascii()]
    for text in (*texts, *nothing_there(tmp_path).values(), "", "a\0b", "..", "\udcff"):
        quoted = json.dumps(text).replace("\\udcff", "?")
        file.write_text(f"[sidecar]\n{key} = {quoted}\n")
        code, out, _ = tiering("doctor")
        assert code in (0, 1), text
        require_lines(out)


def test_logs_in_a_state_directory_of_that_name(
    odd: Path, tiering: Tiering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(odd))
    assert tiering("logs")[0] == 9
    folder = odd / "ollama-tiering/logs"
    folder.mkdir(parents=True)
    for name in ("ollama", "sidecar"):
        (folder / f"{name}-11434.log").write_bytes(b"one\xff\ntwo\n")
    code, out, err = tiering("logs", "-n", "1")
    assert (code, out) == (0, b"two\ntwo\n")
    assert [line[:4] for line in err.splitlines()] == [b"==> ", b"==> "]
    assert err.replace(b"\n", b"").decode().isprintable()
    code, out, _ = tiering("logs", "server", "--paths")
    assert out == os.fsencode(folder / "ollama-11434.log") + b"\n"


@pytest.mark.parametrize("wrong", WRONG)
def test_logs_where_nothing_can_be(
    wrong: str, tiering: Tiering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nothing_there(tmp_path)[wrong]
    monkeypatch.setenv("XDG_STATE_HOME", path)
    assert tiering("logs")[0] in (2, 9, 10)
    (tmp_path / "logs-of-folders/ollama-tiering/logs/ollama-1.log").mkdir(parents=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "logs-of-folders"))
    assert tiering("logs")[0] == 2  # a directory where a file should be


def test_a_model_of_that_name(odd: Path, tiering: Tiering) -> None:
    """Named from / on, and from where one is."""
    for file in (odd / odd.name, Path(f"m{odd.name}"[:255])):
        make = ("model", "make", *TINY, "qwen3-tiny", "--", str(file))
        assert tiering(*make[:2], "--dry-run", *make[2:])[0] == 0
        code, out, _ = tiering(*make)
        assert (code, out.count(b"\n")) == (0, 1)
        assert file.read_bytes()[:4] == b"GGUF"
        assert out.removesuffix(b"\n").decode().isprintable()
        code, _, err = tiering(*make)
        assert code == 2
        assert b"--force replaces it" in err
        assert tiering(*make[:-1], str(file / "below"))[0] == 2
    for wrong in (odd, odd / "no" / odd.name):
        assert tiering("model", "make", *TINY, "qwen3-tiny", "--", str(wrong))[0] == 2
    assert tiering("model", "make", "--", odd.name, str(odd / "x"))[0] == 2
    assert tiering("model", odd.name)[0] == 2


@pytest.mark.parametrize(
    "wrong",
    [*(wrong for wrong in WRONG if wrong != "nothing"), "", ".", "..", "/"],
)
def test_no_model_can_be_there(wrong: str, tiering: Tiering, tmp_path: Path) -> None:
    path = nothing_there(tmp_path).get(wrong, wrong)
    before = sorted(tmp_path.rglob("*"))
    make = ("model", "make", *TINY, "qwen3-tiny", "--", path)
    assert tiering(*make)[0] == 2
    assert tiering(*make[:2], "--dry-run", *make[2:])[0] == 2
    assert sorted(tmp_path.rglob("*")) == before
    replaces = wrong in ("a file", "a file with a slash", "a link to itself", "a link to nothing")
    assert tiering(*make[:2], "--force", *make[2:])[0] == (0 if replaces else 2)
