"""The secret of the MACs: made once, private, and refused when others had it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from ollama_tiering.config import SidecarConfig, load_sidecar
from ollama_tiering.errors import ConfigError
from ollama_tiering.sidecar.rule_book import RuleBook
from ollama_tiering.store.assemble import open_store
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.remote_key import read_key, remote_authenticity


def opened(settings: SidecarConfig) -> TieredStore:
    return open_store(settings, RuleBook(settings).decide)


def key_id(path: Path, **options: bool) -> bytes:
    return remote_authenticity(path, **{"mac": True, "make": True, **options}).key_id


def test_it_is_made_once_private_and_copied_it_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "state" / "remote.key"
    first = key_id(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert len(path.read_text().strip()) == 64
    assert key_id(path) == first
    copied = tmp_path / "elsewhere.key"
    copied.write_text(path.read_text().strip())  # an editor may drop the last line's end
    copied.chmod(0o400)
    assert key_id(copied) == first
    assert list(path.parent.iterdir()) == [path]
    assert key_id(tmp_path / "another.key") != first


def test_of_many_that_make_it_at_once_all_get_the_same(tmp_path: Path) -> None:
    found: list[bytes] = []
    make = lambda: found.append(key_id(tmp_path / "key"))  # noqa: E731
    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_directory_that_a_group_may_write_to_is_no_reason(tmp_path: Path) -> None:
    """As the state directory of a user with umask 002 may be."""
    tmp_path.chmod(0o775)
    assert len(key_id(tmp_path / "key")) == len(key_id(tmp_path / "new" / "key"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_is_an_error_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot be used"):
        key_id(tmp_path / "link" / "key")


def test_it_is_made_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "key"
    assert key_id(path) == key_id(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def no_links(*_: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_half_a_key_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def fsync(fd: int) -> None:
        calls.append(fd)
        if len(calls) > 1:  # of the file itself, after the temporary one
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ConfigError, match="No space left"):
        key_id(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []


def test_who_only_looks_makes_none_and_believes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert key_id(path, make=False) != key_id(path, make=False)
    assert not path.exists()


def test_without_macs_no_key_is_asked_for(tmp_path: Path) -> None:
    assert not remote_authenticity(tmp_path / "key", mac=False, make=True).required
    assert not (tmp_path / "key").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_had_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    key_id(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="others may read or write it") as caught:
        read_key(path)
    assert "chmod 600" in (caught.value.hint or "")
    assert "remote_mac = false" in (caught.value.hint or "")


def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: a file of another user, for making one needs root")
    path = tmp_path / "key"
    key_id(path)
    os.chown(path, 65534, -1)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        read_key(path)


@pytest.mark.parametrize("content", ["", "ab", "zz" * 32, "ab" * 33, "ab" * 31, "ab" * 32 + "\n\n"])
def test_what_is_no_key_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="64 hex digits"):
        read_key(path)


def test_a_link_or_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "key")
    key_id(tmp_path / "key")
    for name in ("link", "."):
        with pytest.raises(ConfigError, match="cannot be used"):
            read_key(tmp_path / name)


def test_the_settings_reach_the_tier(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir(mode=0o700)
    flags = {
        "sidecar.ram_budget": "0",
        "sidecar.local_dir": tmp_path / "local",
        "sidecar.remote_dir": tmp_path / "remote",
        "sidecar.remote_key_file": tmp_path / "named.key",
    }
    opened(load_sidecar(flags)).close()
    assert read_key(tmp_path / "named.key") is not None
    (tmp_path / "named.key").unlink()
    opened(load_sidecar({**flags, "sidecar.remote_mac": False})).close()
    assert not (tmp_path / "named.key").exists()


def test_a_switch_is_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not true or false"):
        load_sidecar({"sidecar.remote_mac": "no"})
