"""The token of the page: made once, for nobody else, and refused where others may know it."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from ollama_tiering.errors import ConfigError
from ollama_tiering.web.token import FILE_NAME, page_token


def test_it_is_made_once_for_this_user_only(tmp_path: Path) -> None:
    state = tmp_path / "state"
    before = os.umask(0)
    try:
        token = page_token(state)
    finally:
        os.umask(before)
    assert re.fullmatch(r"[\w-]{43}", token)
    assert stat.S_IMODE((state / FILE_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert page_token(state) == token
    (state / FILE_NAME).unlink()
    assert page_token(state) != token


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_one_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    page_token(tmp_path)
    (tmp_path / FILE_NAME).chmod(mode)
    with pytest.raises(ConfigError, match="others may use it") as caught:
        page_token(tmp_path)
    assert "remove it" in (caught.value.hint or "")


@pytest.mark.parametrize("content", [b"", b"\n", b"short\n", b"x" * 44, b"x" * 9999, b"\xff" * 43])
def test_one_that_is_no_token_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / FILE_NAME
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError):
        page_token(tmp_path)
    assert file.read_bytes() == content


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    page_token(tmp_path / "elsewhere")
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "elsewhere" / FILE_NAME)
    with pytest.raises(ConfigError):
        page_token(tmp_path)


def test_another_users_is_refused(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    page_token(tmp_path)
    os.chown(tmp_path / FILE_NAME, 12345, -1)
    with pytest.raises(ConfigError, match="user 12345"):
        page_token(tmp_path)
