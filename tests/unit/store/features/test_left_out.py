"""A tier that cannot be opened at the start: the others serve, and say which one is missing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering.config import MIB, MemoryLimit, SidecarConfig, default_local_dir, state_dir
from ollama_tiering.errors import ServiceError, TieringError
from ollama_tiering.sidecar.rule_book import RuleBook
from ollama_tiering.store import own_tiers
from ollama_tiering.store.assemble import open_store
from ollama_tiering.store.books.report import AbsentTier
from ollama_tiering.store.own_tiers import can_be_opened, open_tier
from ollama_tiering.store.tiers import memory_group, stores_seen
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.names import (
    INDEX_NAME,
    LOCK_NAME,
    PINS_NAME,
    TOMBSTONES_NAME,
    VERSION_DIRECTORY,
)
from ollama_tiering.store.tools.admin import EVERYTHING, Administration
from ollama_tiering.store.tools.offline import Purpose, offline
from ollama_tiering.store.upkeep.index import BlockIndex
from ollama_tiering.system import directories
from tests.unit.store.from_settings import config, opened

NS = samples.namespace()


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def failing_below(
    root: Path, error: int, monkeypatch: pytest.MonkeyPatch, *names: str
) -> Callable[[], None]:
    """Calls of os that change something there fail until the answer is called."""
    broken = [True]
    for name in names:
        real = getattr(os, name)

        def call(
            place: Any, *args: Any, _name: str = name, _real: Any = real, **options: Any
        ) -> Any:
            path = place
            if (at := options.get("dir_fd")) is not None:
                path = Path(f"/proc/self/fd/{at}").readlink() / os.fspath(place)
            writes = _name != "open" or (args and args[0] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
            if broken[0] and writes and Path(os.fspath(path)).is_relative_to(root):
                raise OSError(error, os.strerror(error), os.fspath(path))
            return _real(place, *args, **options)

        monkeypatch.setattr(os, name, call)
    return lambda: broken.__setitem__(0, False)


def full_or_read_only(error: int) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def harm(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        failing_below(place, error, monkeypatch, "open", "mkdir")

    return harm


def of_another_user(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir(mode=0o700)
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        info = real(fd)
        if Path(f"/proc/self/fd/{fd}").readlink() != place:
            return info
        fields = list(info)
        fields[4] = os.geteuid() + 1
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", fstat)


def not_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had a store, and its disk is not mounted."""
    place.mkdir(mode=0o700)
    with monkeypatch.context() as mounted:
        mounted.setattr(stores_seen, "mount_point", lambda path: place)
        stores_seen.remember(place)
    place.rmdir()


HARMS = {
    "full": full_or_read_only(errno.ENOSPC),
    "read-only": full_or_read_only(errno.EROFS),
    "broken": full_or_read_only(errno.EIO),
    "no permission": full_or_read_only(errno.EACCES),
    "of another user": of_another_user,
    "not there": not_there,
}


@pytest.mark.parametrize("kind", [TierKind.RAM, TierKind.LOCAL])
@pytest.mark.parametrize("harm", HARMS)
def test_the_others_serve_and_it_is_said_which_is_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: str,
    kind: TierKind,
) -> None:
    place = tmp_path / kind.label
    HARMS[harm](place, monkeypatch)
    store = opened(config(tmp_path))
    try:
        (level,) = store.state.levels
        assert level.tier.kind is not kind
        (missing,) = store.left_out
        assert (missing.kind, missing.directory) == (kind, place)
        reports = {tier.kind: tier for tier in store.report().tiers}
        assert list(reports) == [TierKind.RAM, TierKind.LOCAL]
        assert reports[kind].suspended
        assert reports[kind].state == f"left out: {missing}"
        (said,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
        for one in (said, reports[kind].state):
            assert str(place) in one
            assert missing.why in one
            assert missing.cure in one
            assert "\n" not in one
        session = store.open_session(NS.digest(), NS.fields(), int(NS.block_tokens))
        (block,) = samples.sequence(NS, [1, 2])
        (reserved,) = session.reserve([block.offer])
        assert reserved.path is not None
        reserved.path.write_bytes(block.data)
        assert session.commit([reserved.reservation_id])[0].stored
        assert len(store.lease(NS.digest(), [block.key]).blocks) == 1
    finally:
        store.close()


def test_where_no_tier_can_be_had_each_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_below(tmp_path, errno.EROFS, monkeypatch, "open", "mkdir")
    with pytest.raises(ServiceError, match="no tier can be opened") as failed:
        opened(config(tmp_path))
    for name in ("ram", "local"):
        assert str(tmp_path / name) in failed.value.message
    assert os.strerror(errno.EROFS) in failed.value.message
    assert failed.value.hint


def test_a_tool_that_stores_wants_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_below(tmp_path / "local", errno.EROFS, monkeypatch, "open", "mkdir")
    settings = config(tmp_path)
    with pytest.raises(ServiceError, match="not every tier can be opened"):
        open_store(settings, RuleBook(settings).decide, background=False, whole=True)


@pytest.mark.parametrize("name", [PINS_NAME, TOMBSTONES_NAME])
def test_lists_that_cannot_be_read_leave_their_tier_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    remote = {"remote_dir": tmp_path / "remote", "remote_budget_bytes": MIB, "remote_mac": False}
    settings = config(tmp_path, **remote)
    opened(settings).close()
    (tmp_path / "local" / name).write_text("{}")
    real = os.open

    def broken(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(name) and str(path).startswith(str(tmp_path / "local")):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", broken)
    store = opened(settings)
    try:
        assert [level.tier.kind for level in store.state.levels] == [TierKind.RAM]
        assert [one.kind for one in store.left_out] == [TierKind.LOCAL, TierKind.REMOTE]
        assert str(tmp_path / "local" / name) in store.left_out[0].why
    finally:
        store.close()


@pytest.mark.parametrize("name", [PINS_NAME, TOMBSTONES_NAME])
def test_with_such_lists_it_is_not_worth_to_open_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    opened(config(tmp_path)).close()
    (tmp_path / "local" / name).write_text("{}")
    real = os.open
    broken = [True]

    def call(path: Any, *args: Any, **options: Any) -> int:
        if broken[0] and str(path).endswith(name) and "local" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", call)
    closed: list[Path] = []
    close = BlockIndex.close

    def noted(index: BlockIndex) -> None:
        closed.append(index.path)
        close(index)

    monkeypatch.setattr(BlockIndex, "close", noted)
    store = opened(config(tmp_path))
    assert closed == [tmp_path / "local" / INDEX_NAME]  # of the store that was not to be had
    (missing,) = store.left_out
    store.close()
    assert not can_be_opened(missing)
    broken[0] = False
    assert can_be_opened(missing)
    left = open_tier(TierKind.LOCAL, tmp_path / "local", MIB)
    assert not isinstance(left, AbsentTier)  # nothing holds its lock
    left.close()


@pytest.mark.parametrize("kind", [TierKind.RAM, TierKind.LOCAL])
def test_a_tier_whose_size_cannot_be_asked_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: TierKind
) -> None:
    place = tmp_path / kind.label
    real = own_tiers.filesystem_bytes

    def broken_since_it_was_opened(path: Path) -> int:
        if path == place:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(place))
        return real(path)

    with monkeypatch.context() as broken:
        broken.setattr(own_tiers, "filesystem_bytes", broken_since_it_was_opened)
        (missing,) = left_out(config(tmp_path))
        assert (missing.kind, missing.directory) == (kind, place)
        assert not can_be_opened(missing)
    assert can_be_opened(missing)  # nothing holds its lock
    assert left_out(config(tmp_path)) == []


def test_a_memory_group_that_holds_the_model_only_has_no_ram_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = MemoryLimit(220 * MIB, Path("/sys/fs/cgroup/memory.max"))
    monkeypatch.setattr(memory_group, "memory_limit", lambda: limit)
    monkeypatch.setattr(memory_group, "in_memory", lambda path: True)
    store = opened(config(tmp_path))
    try:
        assert [level.tier.kind for level in store.state.levels] == [TierKind.LOCAL]
        assert store.left_out == ()
    finally:
        store.close()
    other = open_tier(TierKind.RAM, tmp_path / "ram", MIB)
    assert not isinstance(other, AbsentTier)  # nothing holds its lock
    other.close()


def test_the_remote_tier_waits_for_the_list_of_what_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remote").mkdir(mode=0o700)
    failing_below(tmp_path / "local", errno.EROFS, monkeypatch, "open", "mkdir")
    remote = {"remote_dir": tmp_path / "remote", "remote_budget_bytes": MIB, "remote_mac": False}
    settings = config(tmp_path, **remote)
    store = opened(settings)
    try:
        assert [level.tier.kind for level in store.state.levels] == [TierKind.RAM]
        states = {tier.kind: tier.state for tier in store.report().tiers}
        assert "the local tier's directory says what was removed" in states[TierKind.REMOTE]
    finally:
        store.close()


def test_a_disk_that_is_full_and_has_a_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(config(tmp_path)).close()
    assert (tmp_path / "local" / LOCK_NAME).exists()
    real = os.pwrite

    def full(fd: int, *args: Any) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(tmp_path / "local"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, *args)

    monkeypatch.setattr(os, "pwrite", full)
    opened_store = open_tier(TierKind.LOCAL, tmp_path / "local", MIB)
    assert not isinstance(opened_store, AbsentTier)
    opened_store.close()


def test_it_can_be_opened_once_the_cause_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "local"
    mended = failing_below(place, errno.EROFS, monkeypatch, "open", "mkdir")
    absent = open_tier(TierKind.LOCAL, place, MIB)
    assert isinstance(absent, AbsentTier)
    assert not can_be_opened(absent)
    mended()
    assert can_be_opened(absent)
    other = open_tier(TierKind.LOCAL, place, MIB)
    assert not isinstance(other, AbsentTier)
    assert not can_be_opened(absent)  # another process has it
    other.close()


def test_nothing_is_removed_that_would_come_back_with_a_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(config(tmp_path))
    session = first.open_session(NS.digest(), NS.fields(), int(NS.block_tokens))
    blocks = samples.sequence(NS, range(8))
    for block in blocks:
        assert session.put_inline(block.key, block.data, last=True)
    first.close()
    (tmp_path / "ram" / VERSION_DIRECTORY).joinpath(
        NS.digest().hex(), blocks[0].key.hex()[:2], f"{blocks[0].key.hex()}.kvb"
    ).unlink()  # evicted there
    mended = failing_below(tmp_path / "local", errno.EROFS, monkeypatch, "open", "mkdir")
    store = opened(config(tmp_path))
    try:
        admin = Administration(store, alone=False)
        planned = admin.remove(EVERYTHING, dry_run=True)
        assert planned.blocks
        with pytest.raises(TieringError, match="the local tier is left out") as refused:
            admin.remove(EVERYTHING, dry_run=False)
        assert refused.value.hint
        assert admin.remove(EVERYTHING, dry_run=True) == planned
        # Its beginning lies on the tier that is left out.
        waste = admin.collect(older_than_seconds=0, models=None, dry_run=False)
        assert sum(one.files for one in waste) == 0
    finally:
        store.close()
    mended()
    store = opened(config(tmp_path))
    try:
        Administration(store, alone=False).remove(EVERYTHING, dry_run=False)
    finally:
        store.close()
    assert list(tmp_path.rglob("*.kvb")) == []


@pytest.mark.usefixtures("on_a_disk")
def test_without_a_sidecar_too_nothing_is_removed_while_a_disk_is_away(tmp_path: Path) -> None:
    settings, decide = config(tmp_path), RuleBook(config(tmp_path)).decide
    opened(settings).close()
    (tmp_path / "local").rename(tmp_path / "unmounted")
    with (
        offline(settings, decide, Purpose.CHANGE) as admin,
        pytest.raises(TieringError, match="the local tier is left out"),
    ):
        admin.remove(EVERYTHING, dry_run=False)
    (tmp_path / "unmounted").rename(tmp_path / "local")
    (tmp_path / "ram").rename(tmp_path / "gone")  # as after a reboot
    with offline(settings, decide, Purpose.CHANGE) as admin:
        admin.remove(EVERYTHING, dry_run=False)


# --- which directory is made -------------------------------------------------------------------


@pytest.fixture
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the tests run."""
    monkeypatch.setattr(stores_seen, "in_memory", lambda path: False)


def left_out(settings: SidecarConfig) -> list[AbsentTier]:
    store = opened(settings)
    try:
        return list(store.left_out)
    finally:
        store.close()


@pytest.mark.usefixtures("on_a_disk")
@pytest.mark.parametrize("kind", [TierKind.RAM, TierKind.LOCAL])
def test_only_the_last_part_of_a_named_path_is_made(tmp_path: Path, kind: TierKind) -> None:
    missing = tmp_path / "mnt" / "usb" / "blocks"
    field = f"{kind.label}_dir"
    (absent,) = left_out(config(tmp_path, **{field: missing}))
    assert absent.kind is kind
    assert "is its disk mounted?" in absent.cure
    assert not (tmp_path / "mnt").exists()
    missing.parent.mkdir(parents=True)
    assert left_out(config(tmp_path, **{field: missing})) == []
    assert missing.is_dir()


@pytest.mark.usefixtures("on_a_disk")
def test_the_default_place_is_made_with_all_above_it(tmp_path: Path) -> None:
    assert not default_local_dir().parent.exists()
    assert left_out(config(tmp_path, local_dir=default_local_dir())) == []
    assert default_local_dir().is_dir()
    for path in sorted(default_local_dir().rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    default_local_dir().rmdir()
    assert left_out(config(tmp_path, local_dir=default_local_dir())) == []


def test_in_memory_all_of_a_path_is_made_after_each_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_seen, "in_memory", lambda path: True)
    place = tmp_path / "shm" / "of mine" / "ram"
    for _ in range(2):
        assert left_out(config(tmp_path, ram_dir=place)) == []
        place.rename(tmp_path / "gone")
        (tmp_path / "gone").rename(tmp_path / f"gone {_}")
        place.parent.rmdir()


@pytest.mark.usefixtures("on_a_disk")
def test_a_store_that_is_gone_is_not_begun_anew_in_silence(tmp_path: Path) -> None:
    settings = config(tmp_path)
    assert left_out(settings) == []
    (tmp_path / "local").rename(tmp_path / "unmounted")
    (absent,) = left_out(settings)
    assert "it had a store and is gone" in absent.why
    assert "is its disk mounted?" in absent.cure
    assert f"mkdir -m 700 {tmp_path / 'local'}" in absent.cure
    assert not (tmp_path / "local").exists()
    (tmp_path / "unmounted").rename(tmp_path / "local")
    assert left_out(settings) == []
    (tmp_path / "local").rename(tmp_path / "removed")
    (tmp_path / "local").mkdir(mode=0o700)  # what the cure says
    assert left_out(settings) == []


@pytest.mark.usefixtures("on_a_disk")
def test_a_ram_tier_that_is_gone_is_begun_anew(tmp_path: Path) -> None:
    """As after a reboot."""
    settings = config(tmp_path)
    assert left_out(settings) == []
    (tmp_path / "ram").rename(tmp_path / "gone")
    assert left_out(settings) == []
    assert (tmp_path / "ram").is_dir()


@pytest.mark.usefixtures("on_a_disk")
@pytest.mark.parametrize("kind", [TierKind.RAM, TierKind.LOCAL])
def test_a_mount_point_without_its_disk_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: TierKind
) -> None:
    place = tmp_path / kind.label
    mounted = monkeypatch.context()
    with mounted as patch:
        patch.setattr(os.path, "ismount", lambda path: str(path) in (str(place), "/"))
        assert left_out(config(tmp_path)) == []
    place.rename(tmp_path / "the disk")
    place.mkdir(mode=0o700)
    (absent,) = left_out(config(tmp_path))
    assert f"it had a store on the file system of {place}" in absent.why
    assert not (place / VERSION_DIRECTORY).exists()
    place.rmdir()
    (tmp_path / "the disk").rename(place)  # moved onto this disk on purpose: it is there
    assert left_out(config(tmp_path)) == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 9}', '{"version": 1, "stores": 3}', "\udcff"]
)
def test_a_damaged_record_is_as_none(tmp_path: Path, text: str) -> None:
    state_dir().mkdir(parents=True)
    stores_seen.record_file().write_bytes(text.encode(errors="surrogateescape"))
    assert left_out(config(tmp_path)) == []


def test_a_name_that_is_no_text_is_remembered(tmp_path: Path) -> None:
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    place.mkdir(mode=0o700)
    stores_seen.remember(place)
    stores_seen.require_place(place)


def test_what_somebody_tampered_with_still_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local").chmod(0o777)
    with pytest.raises(directories.UnsafeDirectory, match="writable by others"):
        opened(config(tmp_path))
