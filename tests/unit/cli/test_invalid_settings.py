"""A mistake in the settings is said, and what runs is shown all the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering import cli
from ollama_tiering.config import GIB, config_file, readable
from ollama_tiering.errors import ConfigError
from ollama_tiering.protocol import calls as rpc
from tests.sidecar import PutStream, SidecarProcess

NS = samples.namespace(layers=1)
BLOCKS = samples.sequence(NS, range(3))
MISTAKES = {
    "an unknown key": "[sidecar]\nmetrics_prt = 1\n",
    "a bad value": '[sidecar]\nttl_days = "long"\n',
    "no TOML": "[sidecar\nram_budget = \n",
    "a bad rule": '[models."x y"]\nstore = 3\n',
    "watermarks": "[sidecar]\nlow_watermark = 0.9\nhigh_watermark = 0.5\n",
    "no section": "sidecar = 3\n",
    "not UTF-8": "[sidecar]\n# \udcff\n",
}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SidecarProcess]:
    for name in [name for name in os.environ if name.startswith(("OLLAMA", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with SidecarProcess(tmp_path) as daemon, daemon.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), NS)
        assert all(result.stored for result in stream.put(BLOCKS))
        stream.close()
        monkeypatch.setenv("OLLAMA_KV_TIER_SOCKET", str(daemon.socket))
        yield daemon


def write(text: str) -> Path:
    file = config_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode(errors="surrogateescape"))
    return file


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(args))
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_state_is_shown_then_the_mistake(
    daemon: SidecarProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    for what, text in MISTAKES.items():
        file = write(text)
        for args, shown in (
            (("status",), f"sidecar 0.1.0 on {daemon.socket}"),
            (("ls",), "1 conversation, 1 block, "),
            (("config",), "sidecar.ram_budget"),
        ):
            code, out, err = run(capsys, *args)
            assert shown in out, what
            assert code == ConfigError.exit_code, what
            assert err.startswith("error: "), what
            assert str(file) in err
            assert err.count("error: ") == 1
        assert json.loads(run(capsys, "status", "--json")[1])["running"]
        assert len(json.loads(run(capsys, "ls", "--json")[1])["chains"]) == 1
        assert json.loads(run(capsys, "config", "--json")[1])["settings"]


def test_an_own_mistake_of_the_command_is_not_hidden(
    daemon: SidecarProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    write(MISTAKES["an unknown key"])
    code, _, err = run(capsys, "ls", "0000")
    assert code == 2
    assert "no block" in err


def test_nothing_is_changed_under_settings_that_are_not_valid(
    daemon: SidecarProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    write(MISTAKES["an unknown key"])
    for args in (("rm", "--all", "--yes"), ("gc",), ("pin", BLOCKS[-1].key.hex())):
        code, out, err = run(capsys, *args)
        assert (code, out) == (ConfigError.exit_code, "")
        assert "metrics_prt" in err
    daemon.stop()
    code, out, _ = run(capsys, "ls")
    assert (code, out) == (ConfigError.exit_code, ""), "without a sidecar the files are not known"
    assert run(capsys, "status")[0] == ConfigError.exit_code


def test_what_can_be_read_is_in_force_and_what_cannot_has_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write('[sidecar]\nsocket = "/x/s.sock"\nthis is none\nlocal_budget = "5GiB"\nttl_days = "x"\n')
    settings, broken = readable()
    assert broken is not None
    assert broken.message.startswith(f"{config_file()}:3: ")
    assert str(settings.sidecar.socket_path) == "/x/s.sock"
    assert settings.sidecar.local_budget_bytes == 5 * GIB
    assert settings.sidecar.ttl_days == 30
    code, out, err = run(capsys, "config", "sidecar.ttl_days", "sidecar.local_budget")
    assert code == ConfigError.exit_code
    assert "sidecar.ttl_days      (not valid)  (" in out
    assert "sidecar.local_budget  5.0 GiB  (" in out
    assert err.startswith(f"error: {config_file()}:3: ")
    write("[sidecar]\nttl_days = 3\n")
    assert readable()[1] is None
    assert readable()[0].sidecar.ttl_days == 3
