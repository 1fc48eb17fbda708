"""`config`, `logs` and `completion`: what helps a person find a way around."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ollama_tiering.cli import cli, logs
from ollama_tiering.config import SETTINGS
from ollama_tiering.config.origins import _shown
from ollama_tiering.errors import ServiceError, UsageError


@pytest.fixture(autouse=True)
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(("OLLAMA_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def run(*args: str) -> Result:
    result = CliRunner().invoke(cli, args, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result


def write_settings(home: Path, text: str) -> Path:
    file = home / ".config/ollama-tiering/config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def test_every_setting_is_shown_with_its_origin(
    own_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_settings(own_world, "[sidecar]\n\nram_budget = '3GiB'\nmin_tokens = 9\n")
    monkeypatch.setenv("OLLAMA_KV_TIER_MIN_TOKENS", "77")
    lines = run("config").output.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [setting.key for setting in SETTINGS]
    by_key = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert by_key["sidecar.ram_budget"] == f"3.0 GiB  ({file}:3: ram_budget)"
    assert by_key["sidecar.min_tokens"] == ("77  (environment variable OLLAMA_KV_TIER_MIN_TOKENS)")
    assert by_key["patch.cpu"] == "native  (default)"
    assert by_key["sidecar.remote_dir"] == "none  (default)"
    assert lines[-1] == f"file: {file}"


def test_a_key_a_section_and_what_is_set(own_world: Path) -> None:
    write_settings(own_world, "[patch]\ncpu = 'variants'\n")
    assert run("config", "patch.cpu").output.startswith("patch.cpu  variants")
    section = run("config", "patch").output.splitlines()[:-1]
    assert section
    assert all(line.startswith("patch.") for line in section)
    assert [line.split()[0] for line in run("config", "--set").output.splitlines()[:-1]] == [
        "patch.cpu"
    ]
    with pytest.raises(UsageError, match=r"patch\.cpuu; did you mean 'patch\.cpu'"):
        run("config", "patch.cpuu")


def test_settings_as_json(own_world: Path) -> None:
    document = json.loads(run("config", "--json", "sidecar.ram_budget", "sidecar.socket").output)
    assert document["exists"] is False
    ram = document["settings"]["sidecar.ram_budget"]
    assert isinstance(ram["value"], int)
    assert ram["origin"] == "default"
    assert ram["variable"] == "OLLAMA_KV_TIER_RAM_GB"
    assert document["settings"]["sidecar.socket"]["value"].endswith("sidecar.sock")


@pytest.mark.parametrize("field", ["salt", "key_salt", "shared_secret", "mac_key"])
def test_a_secret_is_not_shown(field: str) -> None:
    assert _shown(field, "hunter2") == "(set, not shown)"
    assert _shown(field, "") == "none"


def make_logs(home: Path) -> Path:
    folder = home / ".local/state/ollama-tiering/logs"
    folder.mkdir(parents=True)
    for name, text, when in (
        ("ollama-1.log", "old server\n", 1),
        ("ollama-2.log", "".join(f"line {n}\n" for n in range(9)), 2),
        ("ollama-2.log.1", "the run before\n", 9),
        ("sidecar-2.log", "sidecar says\n", 2),
    ):
        (folder / name).write_text(text)
        os.utime(folder / name, (when, when))
    return folder


def test_the_newest_logs_end_with_their_last_lines(own_world: Path) -> None:
    make_logs(own_world)
    assert run("logs", "-n", "2").stdout == "line 7\nline 8\nsidecar says\n"
    assert run("logs", "server", "--port", "1").stdout == "old server\n"
    assert run("logs", "sidecar", "-n", "0").stdout == ""


def test_paths_of_the_logs(own_world: Path) -> None:
    folder = make_logs(own_world)
    assert run("logs", "--paths").stdout.split() == [
        str(folder / "ollama-2.log"),
        str(folder / "sidecar-2.log"),
    ]


def test_without_a_log_it_says_who_writes_one(own_world: Path) -> None:
    with pytest.raises(ServiceError, match="no log of port 7 in") as caught:
        run("logs", "--port", "7")
    assert "tiering up" in str(caught.value.hint)


def test_following_shows_what_came_since_also_in_a_file_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text("before\n")
    places = {file: 7}
    said: list[str] = []

    def look() -> list[str]:
        said.clear()
        logs._follow(places, lambda _file, text: said.append(text))
        return said

    assert look() == []
    with file.open("a") as log:
        log.write("more\n")
    assert look() == ["more\n"]
    file.write_text("new\n")  # shorter than what was read
    assert look() == ["new\n"]
    file.unlink()
    assert look() == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_asks_this_command(shell: str) -> None:
    script = run("completion", shell).output
    assert "_TIERING_COMPLETE" in script
    assert f"{shell}_complete" in script


def test_commands_and_options_are_completed() -> None:
    def complete(words: str) -> list[str]:
        environment = os.environ | {
            "_TIERING_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        command = [sys.executable, "-m", "ollama_tiering"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert complete("tiering sta") == ["status"]
    assert "--cpu-attention" in complete("tiering up --cpu")
