"""What is made from the code is up to date, and what is written by hand beside it is true."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ollama_tiering import config
from ollama_tiering.cli import cli
from ollama_tiering.config import GIB, SETTINGS, words
from ollama_tiering.config.settings import Setting
from ollama_tiering.errors import ConfigError, UsageError
from ollama_tiering.launch.address import parse_address
from ollama_tiering.patchset.binary import ENV_BINARY, named_binary
from scripts import gen_docs
from tests.unit.docs.pages import PAGES, ROOT

CONFIGURATION = ROOT / "docs/configuration.md"
VARIABLE = re.compile(
    r"\bOLLAMA_(?:KV_TIER(?:ING|_[A-Z_]*[A-Z])|TIERING_[A-Z_]*[A-Z]|CPU_[A-Z]+)\b"
)
COMMANDS = [(path, command) for command, path, _ in gen_docs.walk(cli, "tiering")]


@pytest.fixture
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(("OLLAMA_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("path", gen_docs.pages(), ids=lambda path: path.name)
def test_what_is_made_from_the_code_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == gen_docs.pages()[path], "run `make docs`"


def test_every_command_and_option_is_in_the_page() -> None:
    page = gen_docs.commands_page()
    for path, command in COMMANDS:
        section = page.partition(f"# {path}\n")[2].partition("\n##")[0]
        assert section, path
        for param in command.params:
            assert f"`{param.opts[0]}`" in section or isinstance(param, click.Argument), path
    assert {path for path, _ in COMMANDS} >= {"tiering up", "tiering patch build", "tiering rm"}


def test_every_option_has_a_help() -> None:
    lacking = [
        f"{path} {param.opts[0]}"
        for path, command in COMMANDS
        for param in command.params
        if isinstance(param, click.Option) and not re.match(r"[^\[\s]", param.help or "")
    ]
    assert not lacking


def test_every_setting_has_a_meaning_and_nothing_else_has() -> None:
    assert set(words.MEANINGS) == {setting.key for setting in SETTINGS}


def test_defaults_in_words_are_those_in_force(own_world: Path) -> None:
    """All but those of a machine or a user, which the next tests look at."""
    settings = config.load()
    by_hand = set(words._DEFAULTS)
    for setting in SETTINGS:
        if setting.key in by_hand:
            continue
        value = getattr(getattr(settings, setting.key.partition(".")[0]), setting.field)
        said = words.default_in_words(setting.key)
        if setting.field.endswith("_bytes"):
            assert config.parse_size(said) == value, setting.key
        else:
            assert said == (f"{value:g}" if isinstance(value, float) else str(value).lower())
    assert by_hand < {setting.key for setting in SETTINGS}


@pytest.mark.parametrize(("has_gib", "budget_gib"), [(4, 1), (16, 4), (32, 8), (512, 8)])
def test_the_ram_budget_is_a_quarter_of_the_memory_and_at_most_8_gib(
    has_gib: int, budget_gib: int, own_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words.default_in_words("sidecar.ram_budget") == "a quarter of the memory, at most 8 GiB"
    loading = sys.modules["ollama_tiering.config.load"]  # config.load is its function
    monkeypatch.setattr(loading, "_total_ram_bytes", lambda: has_gib * GIB)
    assert config.load_sidecar().ram_budget_bytes == budget_gib * GIB


def test_the_page_names_the_places_as_they_are(
    own_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = dict(re.findall(r"^\| (\w+) directory \| (.+) \|$", CONFIGURATION.read_text(), re.M))
    places = {
        "settings": lambda: config.config_file().parent,
        "data": config.data_dir,
        "state": config.state_dir,
        "runtime": config.run_dir,
        "cache": config.cache_dir,
    }
    assert set(rows) == set(places)
    for name, place in places.items():
        *variables, last = [part.strip("` ") for part in rows[name].split(", else ")]
        state = config.state_dir()
        assert place() == (state / "run" if name == "runtime" else Path(last).expanduser())
        for said in reversed(variables):  # the first one counts
            variable, _, below = said.removeprefix("$").partition("/")
            monkeypatch.setenv(variable, str(own_world))  # a runtime directory must be there
            assert place() == own_world / below


def test_paths_by_default_are_where_the_words_say(own_world: Path) -> None:
    settings = config.load_sidecar()
    runtime, data, state = config.run_dir(), config.data_dir(), config.state_dir()
    found = {
        "sidecar.socket": (settings.socket_path, runtime, "runtime"),
        "sidecar.local_dir": (settings.local_dir, data, "data"),
        "sidecar.remote_key_file": (settings.remote_key_file, state, "state"),
    }
    for key, (path, folder, name) in found.items():
        assert path is not None
        assert path.parent == folder
        assert words.default_in_words(key) == f"{path.name} in the {name} directory"
    assert settings.ram_dir is settings.remote_dir is settings.models_dir is None


def test_what_a_bad_value_says_is_what_the_page_shows(
    own_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = re.search(r"```console\n\$ (.+)\n((?:.+\n)+)```", CONFIGURATION.read_text())
    assert block
    assignment, _, *arguments = shlex.split(block[1])
    monkeypatch.setenv(*assignment.split("=", 1))
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(cli, arguments, standalone_mode=False, catch_exceptions=False)
    assert block[2] == f"error: {caught.value.message}\nhint: {caught.value.hint}\n"
    assert caught.value.exit_code == 10


def test_the_variables_whose_bad_value_is_bad_usage(
    own_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = CONFIGURATION.read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)`", page.partition("(2 for ")[2].partition(")")[0])
    assert named == ["OLLAMA_HOST", ENV_BINARY]
    with pytest.raises(UsageError, match="no/such:thing"):
        parse_address("no/such:thing")
    monkeypatch.setenv(ENV_BINARY, "no/such:thing")
    with pytest.raises(UsageError, match=f"{ENV_BINARY}=no/such:thing"):
        named_binary()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_an_error_names_a_flag_that_exists(setting: Setting, own_world: Path) -> None:
    """Those that have one: what overrides settings are flags of `sidecar`, `up` and `patch`."""
    options = {o for _, command in COMMANDS for param in command.params for o in param.opts}
    by_variable = {"sidecar.ram_budget", "sidecar.local_dir", "sidecar.remote_budget"}
    flag = setting.flag or "--" + setting.key.partition(".")[2].replace("_", "-")
    if setting.flag or setting.key in by_variable:
        assert flag in options
    if flag in options:
        with pytest.raises(ConfigError, match=f"flag {flag}: "):
            config.load({setting.key: ""})


def test_the_help_of_a_flag_says_the_default_and_the_variable_of_its_setting() -> None:
    """Of `tiering sidecar` all; of the others where they speak of the variable."""
    by_variable = {setting.env: setting.key for setting in SETTINGS if setting.env}
    flags = {setting.flag or "--" + setting.key.partition(".")[2].replace("_", "-"): setting.key
             for setting in SETTINGS if setting.key.startswith("sidecar.")}  # fmt: skip
    checked = 0
    for path, command in COMMANDS:
        for param in command.params:
            said = getattr(param, "help", None) or ""
            named = re.search(r"\[env (\w+)", said)
            key = flags.get(param.opts[0]) if path == "tiering sidecar" else None
            if named and param.opts != ["--models"]:
                key = key or by_variable.get(named[1])
            if key:
                assert said.endswith(words.flag_note(key)), f"{path} {param.opts[0]}"
                checked += 1
    assert checked >= 14


def test_every_variable_is_documented_and_every_documented_one_is_read() -> None:
    read = {
        name
        for folder, pattern in (
            ("ollama_tiering", "*.py"),
            ("patches", "*.go"),
            ("patches", "*.patch"),
            ("csrc/shim", "*.cpp"),
        )
        for file in (ROOT / folder).rglob(pattern)
        if not file.name.endswith("_test.go")
        for name in VARIABLE.findall(file.read_text(encoding="utf-8"))
        if not name.startswith("OLLAMA_TIERING_TEST")
    }
    page = set(VARIABLE.findall(CONFIGURATION.read_text(encoding="utf-8")))
    assert page == read
    named = {name for one in PAGES for name in VARIABLE.findall(one.read_text(encoding="utf-8"))}
    assert named == read
    assert len(read) > 15


def test_the_patched_server_says_a_bad_value_as_the_page_says() -> None:
    """Each variable it reads is warned of, but for those that the page names as silent."""
    text = (ROOT / "patches/overlay/kvtier/config.go").read_text(encoding="utf-8")
    read = set(re.findall(r'(?:value|socketPath)\("(OLLAMA_\w+)"\)', text))
    warned = set(re.findall(r'"invalid environment variable, using default", "key", "(\w+)"', text))
    anything = {"OLLAMA_KV_TIER_SOCKET", "OLLAMA_KV_TIER_SALT"}  # no value of them is bad
    page = CONFIGURATION.read_text(encoding="utf-8")
    silent = set(
        VARIABLE.findall(page.partition("Two variables have no bad value:")[2].partition("\n\n")[0])
    )
    assert len(silent) == 2
    assert read == warned | anything | silent
    assert not warned & silent
    assert "`invalid environment variable, using default` with `key`, `value` and" in page
