"""What makes a file one that is not ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STRANGER = 65534


def foreign_owner(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: a file of another user, for making one needs root")
    os.chown(path, STRANGER, -1)


def group_may_write(path: Path) -> None:
    path.chmod(0o460)


def all_may_write(path: Path) -> None:
    path.chmod(0o666)


SPOILERS = (foreign_owner, group_may_write, all_may_write)
