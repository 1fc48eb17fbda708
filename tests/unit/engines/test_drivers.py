"""The place a run works in: room is asked for first, and nothing large outlives it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ollama_tiering.engines.drivers import Scratch
from ollama_tiering.errors import ServiceError, TieringError


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directories of a Scratch below this test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("ollama_tiering.engines.drivers.SHARED_MEMORY", tmp_path)


def work(*, keep: bool = False, error: BaseException | None = None) -> Scratch:
    """What a run leaves where it works; with `error` it ends by that."""
    with Scratch("test", keep=keep) as scratch:
        scratch.model_file.write_text("weights")
        for name in ("models/blobs/sha256-0", "blocks/0.kvb", "ollama.log"):
            (scratch.root / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch.root / name).write_text("text")
        (scratch.ram / "0.kvb").write_text("rows")
        if error:
            raise error
    return scratch


def test_nothing_is_left(tmp_path: Path) -> None:
    work()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt):
        work(error=KeyboardInterrupt())
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_the_logs_and_nothing_large(tmp_path: Path) -> None:
    with pytest.raises(ServiceError):
        work(error=ServiceError("read the log"))
    (root,) = tmp_path.iterdir()  # that of the RAM tier is gone
    assert sorted(path.name for path in root.iterdir()) == ["config.toml", "home", "ollama.log"]


def test_what_is_to_be_kept_is_kept_whatever_happened(tmp_path: Path) -> None:
    kept = work(keep=True)
    assert kept.model_file.exists()
    assert (kept.ram / "0.kvb").exists()
    with pytest.raises(ServiceError):
        work(keep=True, error=ServiceError("read the log"))
    assert len(list(tmp_path.glob("*/model.gguf"))) == 2


def test_a_disk_with_less_room_is_refused() -> None:
    with Scratch("test") as scratch:
        free_bytes = shutil.disk_usage(scratch.root).free
        scratch.need_bytes(free_bytes // 2)
        with pytest.raises(TieringError, match=r"are needed below .*, and .* are free") as caught:
            scratch.need_bytes(2 * free_bytes)
    assert "TMPDIR" in (caught.value.hint or "")
