from __future__ import annotations

import pytest

from ollama_tiering.system.filesystems import is_memory, is_network


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse", "fuse.sshfs"])
def test_what_others_may_change_is_on_a_network(kind: str) -> None:
    assert is_network(kind)
    assert not is_memory(kind)


@pytest.mark.parametrize("kind", ["ext4", "btrfs", "fuseblk", "", "tmpfs"])
def test_a_disk_of_this_machine_is_not(kind: str) -> None:
    assert not is_network(kind)
    assert is_memory(kind) == (kind == "tmpfs")
