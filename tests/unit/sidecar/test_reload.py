"""SIGHUP: what may change does at once, the rest is named, a bad file changes nothing."""

from __future__ import annotations

import json
import logging
import os
import pty
import signal
from dataclasses import fields, replace
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering import cli
from ollama_tiering.config import ModelRule, SidecarConfig, load_sidecar
from ollama_tiering.config.settings import SETTINGS
from ollama_tiering.errors import ConfigError, TieringError
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.sidecar import logs, reload
from ollama_tiering.sidecar.reload import Reloaded, Reloader
from ollama_tiering.store.tiers.contract import TierKind
from tests.sidecar import PutStream, SidecarProcess
from tests.unit.sidecar.manager import Manager
from tests.unit.store.support import FILE_BYTES, NS, Bench


class Reading:
    """A reloader over a store of 8 and 16 blocks whose settings a test writes."""

    def __init__(self, root: Path) -> None:
        self.bench = Bench(ram=8, local=16)
        self.config = replace(
            load_sidecar({"sidecar.socket": root / "s"}, path=self.empty(root)),
            ram_dir=root / "ram",
            local_dir=root / "local",
            ram_budget_bytes=8 * FILE_BYTES,
            local_budget_bytes=16 * FILE_BYTES,
        )
        self.wanted = self.config
        self.limits: dict[TierKind, int] = {}
        self.reloader = Reloader(
            self.bench.store, self.config, self.reread, self.limit, lambda _: None
        )

    @staticmethod
    def empty(root: Path) -> Path:
        (root / "empty.toml").write_text("")
        return root / "empty.toml"

    def reread(self) -> SidecarConfig:
        return self.wanted

    def limit(self, directory: Path, budget_bytes: int, kind: TierKind) -> int:
        return min(budget_bytes, self.limits.get(kind, budget_bytes))

    def budgets(self) -> list[int]:
        return [tier.budget_bytes // FILE_BYTES for tier in self.bench.store.report().tiers]

    def apply(self, **changes: object) -> Reloaded:
        self.wanted = replace(self.wanted, **changes)  # type: ignore[arg-type]
        return self.reloader.apply()


@pytest.fixture
def reading(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Reading:
    caplog.set_level(logging.DEBUG, "ollama_tiering")
    return Reading(tmp_path)


def test_budgets_change_at_once(reading: Reading, caplog: pytest.LogCaptureFixture) -> None:
    reading.bench.put(range(4 * 6))
    reading.bench.store.run_pending()
    reading.apply(ram_budget_bytes=2 * FILE_BYTES, local_budget_bytes=3 * FILE_BYTES)
    assert reading.budgets() == [2, 3]
    assert len(reading.bench.in_tier(0)) <= 2
    assert len(reading.bench.in_tier(1)) == 3
    assert "changed=ram_budget_bytes,local_budget_bytes needs_restart=none" in caplog.text


def test_watermarks_and_log_level_change_at_once(reading: Reading) -> None:
    before = logging.getLogger(logs.ROOT).level
    try:
        reading.apply(high_watermark=0.5, low_watermark=0.25, log_level="error")
        assert logging.getLogger(logs.ROOT).level == logging.ERROR
    finally:
        logging.getLogger(logs.ROOT).setLevel(before)
    reading.bench.put(range(4 * 5))
    reading.bench.store.run_pending()
    assert len(reading.bench.in_tier(0)) == 2


def test_times_and_rules_change_at_once(reading: Reading, caplog: pytest.LogCaptureFixture) -> None:
    terms = reading.bench.state.terms
    reading.apply(ttl_days=2.0)
    assert terms.of(NS.digest()).ttl_seconds == 2 * 86400
    reading.apply(model_rules=(ModelRule("sample", ttl_days=1.0),))
    assert terms.of(NS.digest()).ttl_seconds == 86400
    assert terms.unknown.ttl_seconds == 2 * 86400
    reading.apply(model_rules=())
    assert terms.of(NS.digest()).ttl_seconds == 2 * 86400
    assert "needs_restart=none" in caplog.text


def test_what_needs_a_restart_is_named_each_time(
    reading: Reading, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    reading.apply(socket_path=tmp_path / "other", metrics_port=9999)
    assert "changed=none needs_restart=socket_path,metrics_port" in caplog.text
    caplog.clear()
    reading.apply()
    assert "needs_restart=socket_path,metrics_port" in caplog.text


def test_a_tier_is_not_removed_and_a_budget_of_another_directory_waits(
    reading: Reading, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    reading.apply(ram_budget_bytes=0)
    assert "needs_restart=ram_budget_bytes" in caplog.text
    reading.apply(local_dir=tmp_path / "elsewhere", local_budget_bytes=FILE_BYTES)
    assert reading.budgets() == [8, 16]


def test_a_budget_is_cut_to_the_file_system(reading: Reading) -> None:
    reading.limits[TierKind.LOCAL] = 5 * FILE_BYTES
    reading.apply(local_budget_bytes=100 * FILE_BYTES)
    assert reading.budgets() == [8, 5]


def test_settings_that_cannot_be_read_change_nothing(
    reading: Reading, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> SidecarConfig:
        raise ConfigError("config.toml:3: low_watermark: 2 is not", hint="correct that line")

    monkeypatch.setattr(reading.reloader, "_reread", refuse)
    with pytest.raises(ConfigError, match=r"config\.toml:3"):
        reading.apply(ram_budget_bytes=FILE_BYTES)
    assert reading.budgets() == [8, 16]
    assert "reason=config.toml:3: low_watermark: 2 is not hint=correct that line" in caplog.text


def test_a_failure_that_nobody_foresaw_changes_nothing_and_is_told(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    said: list[str] = []
    monkeypatch.setattr(reading.reloader, "_say", said.append)
    monkeypatch.setattr(reading.reloader, "_reread", fail)
    with pytest.raises(TieringError, match="a bug"):
        reading.apply()
    assert said[-1] == "READY=1"  # else a service manager waits


def test_whoever_asks_gets_the_names_that_the_file_has(reading: Reading, tmp_path: Path) -> None:
    rules = (ModelRule("sample", ttl_days=1.0),)
    done = reading.apply(ttl_days=2.0, model_rules=rules, metrics_port=9999, local_dir=tmp_path)
    assert set(done.changed) == {"sidecar.ttl_days", "models"}
    assert set(done.needs_restart) == {"sidecar.metrics_port", "sidecar.local_dir"}
    known = {setting.key for setting in SETTINGS} | {"models", "OLLAMA_MODELS"}
    assert {reload._key_of(field.name) for field in fields(SidecarConfig)} <= known


def test_nothing_new_says_so(reading: Reading, caplog: pytest.LogCaptureFixture) -> None:
    reading.apply()
    assert "reloaded: changed=none needs_restart=none" in caplog.text


class FileSidecar(SidecarProcess):
    """Its budgets come from a file, not from flags."""

    @property
    def file(self) -> Path:
        return self.root / "config.toml"

    def write(self, text: str) -> None:
        self.root.mkdir(exist_ok=True)
        self.file.write_text(f'[sidecar]\nlocal_dir = "{self.local_dir}"\n{text}')

    def command(self) -> list[str]:
        flags = super().command()
        cut = flags.index("--local")
        return [*flags[:cut], "--config", str(self.file)]

    def hang_up(self) -> None:
        self.send_signal(signal.SIGHUP)


def test_a_running_sidecar_rereads_its_file_and_tells_the_manager(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        daemon = FileSidecar(tmp_path / "d", env=manager.environment(60))
        daemon.write('ram_budget = "8MB"\nlocal_budget = "8MB"\n')
        with daemon:
            manager.wait(lambda said: said == "READY=1")
            blocks = samples.sequence(NS, range(4 * 20))
            with daemon.channel() as channel:
                stream = PutStream(rpc.BlockStoreStub(channel), NS)
                assert all(result.stored for result in stream.put(blocks))
                stream.close()
            daemon.wait_written()
            size = len(blocks[0].data)
            limit = 12 * size  # directories count as well
            daemon.write(f"ram_budget = {8 * size}\nlocal_budget = {limit}\n")
            daemon.hang_up()
            said = manager.wait(lambda said: said.startswith("RELOADING=1\nMONOTONIC_USEC="))
            assert int(said.rpartition("=")[2]) > 0
            manager.wait(lambda said: said == "READY=1")
            local = daemon.stat().tiers[1]
            assert local.budget_bytes == limit
            assert local.used_bytes <= limit
            files = daemon.local_dir.rglob
            daemon.wait(
                lambda _: len(list(files("*.kvb"))) == local.blocks, "what is evicted is unlinked"
            )
            assert 0 < local.blocks < 12
            daemon.write("ram_budget = oops\n")
            daemon.hang_up()
            manager.wait(lambda said: said == "READY=1")
            assert daemon.stat().tiers[0].budget_bytes == 8 * size
            assert daemon.stop() == 0
    assert daemon.said(f"{daemon.file}:3")
    assert daemon.said("old settings stay")


def test_a_terminal_that_hangs_up_ends_the_sidecar_in_order(tmp_path: Path) -> None:
    daemon = SidecarProcess(tmp_path)
    ours, theirs = pty.openpty()
    try:
        with daemon.launch(stderr=theirs) as process:
            assert process.stdout is not None
            assert "sidecar ready" in process.stdout.readline()
            process.send_signal(signal.SIGHUP)
            assert process.wait(30) == 0
            assert "sidecar stopped" in process.stdout.read()
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_command_says_what_changed_and_what_needs_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OLLAMA_TIERING_CONFIG", str(tmp_path / "none.toml"))
    daemon = FileSidecar(tmp_path / "d")
    daemon.write('ram_budget = "8MB"\nlocal_budget = "8MB"\n')

    def command(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["reload", "--socket", str(daemon.socket), *words])
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    with daemon:
        assert command() == (0, "nothing has changed\n", "")
        daemon.write('ram_budget = "4MB"\nlocal_budget = "8MB"\nmetrics_port = 9999\n')
        said = "sidecar.ram_budget changed\nsidecar.metrics_port needs a restart\n"
        assert command() == (0, said, "")
        assert daemon.stat().tiers[0].budget_bytes == 4_000_000
        assert json.loads(command("--json")[1]) == {
            "changed": [],
            "needs_restart": ["sidecar.metrics_port"],
        }
        daemon.write('ram_budget = "2MB"\nlocal_budget = oops\n')
        code, out, err = command()
        assert (code, out) == (10, "")
        assert err.startswith(f"error: {daemon.file}:4")
        assert "hint: " in err
        assert daemon.stat().tiers[0].budget_bytes == 4_000_000
    code, _, err = command()
    assert (code, "no sidecar runs" in err) == (9, True)
