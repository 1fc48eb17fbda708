"""scripts/linux_hashes.py: a lock lists the files that can be installed here, and of each release
at least one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.linux_hashes import installable, main

REPO = Path(__file__).resolve().parents[2]
LOCKS = [
    *sorted(REPO.glob("requirements*.lock")),
    REPO / "ollama_tiering/patchset/tools.lock",
    REPO / "measure/peers/requirements-peers.lock",
]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a-1.tar.gz", True),
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("a-1-cp314-cp314t-musllinux_1_2_aarch64.whl", True),
        ("a-1-cp38-abi3-manylinux_2_28_aarch64.whl", True),
        ("a-1-cp310-cp310-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp311-cp311-manylinux_2_17_i686.whl", False),
        ("a-1-cp311-cp311-macosx_11_0_arm64.whl", False),
        ("a-1-cp38-abi3-win_amd64.whl", False),
        ("a-1-pp311-pypy311_pp73-manylinux_2_17_x86_64.whl", False),
    ],
)
def test_what_can_be_installed(name: str, wanted: bool) -> None:
    assert installable(f"https://files/{name}") is wanted


def test_other_hashes_are_left_out_and_nothing_else(tmp_path: Path) -> None:
    lock, pylock = tmp_path / "a.lock", tmp_path / "pylock.toml"
    hashes = "    --hash=sha256:1 \\\n    --hash=sha256:2\n"
    lock.write_text(f"a==1 \\\n{hashes}    # via b\n")
    files = [("1", "a-1-py3-none-any.whl"), ("2", "a-1-py3-none-win32.whl")]
    wheels = [f'{{url = "x/{name}", hashes = {{sha256 = "{sha}"}}}}' for sha, name in files]
    pylock.write_text(f'[[packages]]\nname = "a"\nwheels = [{", ".join(wheels)}]\n')
    main(lock, pylock)
    assert lock.read_text() == "a==1 \\\n    --hash=sha256:1\n    # via b\n"
    lock.write_text("a==1 \\\n    --hash=sha256:2\n")
    with pytest.raises(SystemExit, match="no file of a==1"):
        main(lock, pylock)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_release_in_a_lock_has_a_hash(lock: Path) -> None:
    lines = lock.read_text().splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if "==" in line and not line.startswith(" "):
            assert after.startswith("    --hash=sha256:")
