"""The RAM tier's own place: in memory, where no other user can be first, and found again."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from ollama_tiering.config import GIB, MIB, SidecarConfig
from ollama_tiering.sidecar import server
from ollama_tiering.sidecar.reload import Reloader
from ollama_tiering.sidecar.rule_book import RuleBook
from ollama_tiering.store import assemble
from ollama_tiering.store.assemble import cut_budget, open_store
from ollama_tiering.store.tiers import ram_place, ram_record
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import LOCK_NAME, FsTier
from ollama_tiering.store.tiers.ram_place import is_ours, kept, placed, recorded
from ollama_tiering.system.locks import lock_file


class Machine:
    """Directories that stand for /dev/shm, $XDG_RUNTIME_DIR and the state directory."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shm, self.runtime, self.state = root / "shm", root / "runtime", root / "state"
        self.config = SidecarConfig(
            socket_path=root / "s",
            ram_dir=None,
            ram_budget_bytes=64 * MIB,
            local_dir=root / "local",
            local_budget_bytes=GIB,
        )
        self.in_memory = {self.shm}
        self.runtime_bytes = 0
        for directory in (self.shm, self.runtime):
            directory.mkdir()
            directory.chmod(0o700)
        monkeypatch.setattr(ram_place, "SHARED_MEMORY", self.shm)
        monkeypatch.setattr(ram_place, "in_memory", lambda path: path in self.in_memory)
        monkeypatch.setenv("XDG_STATE_HOME", str(self.state))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(self.runtime))
        statvfs = os.statvfs

        def sized(path: Path) -> os.statvfs_result:
            info = list(statvfs(path))
            if path == self.runtime:
                info[1:3] = [4096, self.runtime_bytes // 4096]
            return os.statvfs_result(info)

        monkeypatch.setattr(ram_place.os, "statvfs", sized)

    @property
    def record(self) -> Path:
        return self.state / "ollama-tiering" / "ram-dir"

    def start(self) -> Path:
        place = placed(self.config).ram_dir
        assert place is not None
        assert is_ours(place)
        return place


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def taken_by_another(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another user made there: with root's help, or as seen from another uid."""
    if place.is_dir():
        place.rmdir()
    place.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(place, 54321, 54321)
        return
    lstat = Path.lstat

    def foreign(path: Path) -> os.stat_result:
        info = lstat(path)
        if path != place:
            return info
        fields = list(info)
        fields[stat.ST_UID] = 54321
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", foreign)


def test_a_place_is_found_again_where_shared_memory_hands_down_its_group(machine: Machine) -> None:
    """As in a pod with fsGroup, whose emptyDir has the set-group-ID bit."""
    machine.shm.chmod(0o2777)
    first = machine.start()
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert recorded() == first
    assert machine.start() == first


def test_the_name_in_shared_memory_cannot_be_guessed(machine: Machine) -> None:
    first = machine.start()
    assert first.parent == machine.shm
    machine.record.unlink()
    (first / "x").touch()
    second = machine.start()
    assert len(first.name) == len(second.name)
    random = [place.name.rpartition("-")[2] for place in (first, second)]
    assert all(len(part) == 32 for part in random)
    assert random[0] != random[1]


def test_it_is_found_again(machine: Machine) -> None:
    place = machine.start()
    (place / "block").touch()
    assert machine.start() == place
    assert (place / "block").exists()
    assert recorded() == place


def test_the_record_is_private(machine: Machine) -> None:
    before = os.umask(0)
    try:
        machine.start()
    finally:
        os.umask(before)
    info = machine.record.lstat()
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert stat.S_IMODE(machine.record.parent.lstat().st_mode) == 0o700
    assert [path.name for path in machine.record.parent.iterdir()] == ["ram-dir"]


def test_a_directory_that_another_user_made_there_is_not_used(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a reboot the name is known to who saw it, and free."""
    place = machine.start()
    taken_by_another(place, monkeypatch)
    assert recorded() is None
    other = machine.start()
    assert other != place
    assert machine.start() == other
    assert place.is_dir()  # not ours to remove
    assert f"RAM tier moves: path={place} is not ours alone" in caplog.text


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o750, 0o701, 0o777])
def test_a_directory_that_others_may_enter_is_not_used(machine: Machine, mode: int) -> None:
    place = machine.start()
    place.chmod(mode)
    assert machine.start() != place


def test_a_link_is_not_followed(machine: Machine, tmp_path: Path) -> None:
    place = machine.start()
    place.rmdir()
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o700)
    place.symlink_to(target)
    assert machine.start() != place
    assert [*target.iterdir()] == []


def test_what_is_gone_is_made_under_another_name(machine: Machine) -> None:
    """As a reboot leaves it."""
    place = machine.start()
    place.rmdir()
    other = machine.start()
    assert other != place
    assert machine.start() == other


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_record_that_others_may_read_or_write_does_not_count(machine: Machine, mode: int) -> None:
    place = machine.start()
    machine.record.chmod(mode)
    assert recorded() is None
    assert machine.start() != place
    assert stat.S_IMODE(machine.record.lstat().st_mode) == 0o600


def test_a_record_of_another_user_does_not_count(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = machine.start()
    monkeypatch.setattr(ram_record.os, "geteuid", lambda: 54321)
    assert ram_record.read_record(machine.record) is None
    monkeypatch.undo()
    assert ram_record.read_record(machine.record) == place


def test_a_record_that_is_a_link_does_not_count(machine: Machine, tmp_path: Path) -> None:
    place = machine.start()
    elsewhere = tmp_path / "record"
    machine.record.rename(elsewhere)
    machine.record.symlink_to(elsewhere)
    assert recorded() is None
    assert machine.start() != place
    assert elsewhere.read_text() == f"{place}\n"  # not written through


@pytest.mark.parametrize(
    "content",
    ["", "ram", "/etc", "/dev/shm/x", "{shm}/..", "{shm}/ollama-tiering-0", "/\0", "/\n/"],
)
def test_a_record_leads_nowhere_else(machine: Machine, content: str) -> None:
    machine.start()
    machine.record.write_text(content.format(shm=machine.shm))
    assert recorded() is None
    assert machine.start().parent == machine.shm


def test_below_the_runtime_directory_where_that_has_room(machine: Machine) -> None:
    machine.in_memory.add(machine.runtime)
    machine.runtime_bytes = 2 * 128 * MIB
    assert machine.start() == machine.runtime / "ollama-tiering" / "ram"
    assert recorded() == machine.runtime / "ollama-tiering" / "ram"


@pytest.mark.parametrize(
    ("budget_bytes", "runtime_bytes"),
    [(64 * MIB, 2 * 128 * MIB - 4096), (4 * GIB, 8 * GIB - 4096)],
)
def test_not_where_it_would_fill_the_sessions_memory(
    machine: Machine, budget_bytes: int, runtime_bytes: int
) -> None:
    machine.in_memory.add(machine.runtime)
    machine.runtime_bytes = runtime_bytes
    machine.config = replace(machine.config, ram_budget_bytes=budget_bytes)
    assert machine.start().parent == machine.shm


def test_not_in_a_runtime_directory_on_a_disk_or_open_to_others(machine: Machine) -> None:
    machine.runtime_bytes = 64 * GIB
    assert machine.start().parent == machine.shm
    machine.record.unlink()
    machine.in_memory.add(machine.runtime)
    machine.runtime.chmod(0o755)  # as /run, which is the system's
    assert machine.start().parent == machine.shm


def test_the_place_stays_when_the_budget_changes(machine: Machine) -> None:
    machine.in_memory.add(machine.runtime)
    machine.runtime_bytes = GIB
    machine.config = replace(machine.config, ram_budget_bytes=2 * GIB)
    place = machine.start()
    assert place.parent == machine.shm
    now = placed(machine.config)
    machine.config = replace(machine.config, ram_budget_bytes=64 * MIB)
    assert machine.start() == place
    assert kept(now, machine.config).ram_dir == place
    named = replace(machine.config, ram_dir=Path("/named"))
    assert kept(now, named).ram_dir == Path("/named")


def test_the_directory_of_an_earlier_version_goes_if_it_is_ours(machine: Machine) -> None:
    old = machine.shm / f"ollama-tiering-{os.getuid()}"
    FsTier(TierKind.RAM, old).close()
    (old / "v1" / "x").mkdir(parents=True)
    machine.start()
    assert not old.exists()


def test_it_stays_while_a_sidecar_uses_it_or_when_it_is_not_ours(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = machine.shm / f"ollama-tiering-{os.getuid()}"
    old.mkdir(mode=0o700)
    lock = lock_file(old / LOCK_NAME, "test")
    machine.start()
    assert old.is_dir()
    os.close(lock)
    (old / LOCK_NAME).unlink()
    taken_by_another(old, monkeypatch)
    machine.start()
    assert old.is_dir()


def test_an_old_name_that_is_a_link_stays_and_so_does_what_it_leads_to(
    machine: Machine, tmp_path: Path
) -> None:
    target = tmp_path / "mine"
    target.mkdir(mode=0o700)
    (target / "file").touch()
    old = machine.shm / f"ollama-tiering-{os.getuid()}"
    old.symlink_to(target)
    machine.start()
    assert (target / "file").exists()
    assert old.is_symlink()


def test_a_place_whose_record_is_lost_does_not_keep_its_memory(machine: Machine) -> None:
    place = machine.start()
    (place / "block").write_bytes(bytes(4096))
    machine.record.unlink()
    other = machine.start()
    assert [*machine.shm.iterdir()] == [other]


def test_another_installation_of_the_same_user_is_left_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = machine.start()
    monkeypatch.setenv("XDG_STATE_HOME", str(machine.state / "other"))
    other = machine.start()
    assert other != place
    assert place.is_dir()


def test_without_a_memory_file_system_there_is_none(machine: Machine) -> None:
    machine.in_memory.clear()
    assert placed(machine.config).ram_dir is None
    only_ram = replace(machine.config, local_budget_bytes=0)
    assert placed(only_ram).ram_dir == machine.state / "ollama-tiering" / "ram"


def test_a_named_directory_and_a_budget_of_none_are_left_as_they_are(machine: Machine) -> None:
    named = replace(machine.config, ram_dir=Path("/named"))
    assert placed(named) == named
    off = replace(machine.config, ram_budget_bytes=0)
    assert placed(off) == off
    assert [*machine.shm.iterdir()] == []


def test_looking_makes_nothing(machine: Machine) -> None:
    assert recorded() is None
    assert [*machine.shm.iterdir()] == []
    assert not machine.state.exists()


def test_a_state_directory_that_cannot_be_written_costs_the_record_only(machine: Machine) -> None:
    machine.state.touch()
    place = machine.start()
    assert place.parent == machine.shm
    assert recorded() is None


def test_a_reload_of_the_budget_does_not_move_the_place(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = machine.config
    now = placed(asked)
    lower = replace(asked, ram_budget_bytes=32 * MIB)
    reread = server._keeping_place(asked, now, lambda: lower)
    assert reread is not None
    monkeypatch.setattr(assemble, "in_memory", lambda path: True)
    store = open_store(now, RuleBook(now).decide, background=False)
    try:
        reloader = Reloader(store, now, reread, cut_budget)
        reloader.apply()
        assert store.report().tiers[0].budget_bytes == 32 * MIB
        assert store.report().tiers[0].directory == now.ram_dir
    finally:
        store.close()
