"""`tiering bench`: its engines compute as those of `tiering up`, unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.cli import main
from ollama_tiering.engines import bench_driver
from ollama_tiering.engines.drivers import Scratch
from ollama_tiering.errors import ServiceError
from ollama_tiering.models.shapes import make_shape

BENCHES = ("restore", "gate")


class Started(ServiceError):
    """Far enough."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What every driver that is made was asked for; none of them starts."""
    found: list[dict[str, Any]] = []

    def driver(*_args: object, **options: Any) -> None:
        found.append(options)
        raise Started("a driver was made")

    for name in ("BenchDriver", "GateDriver", "Untiered"):
        monkeypatch.setattr(bench_driver, name, driver)
    monkeypatch.setattr(
        "ollama_tiering.patchset.binary.patched_binary", lambda *_, **__: Path("/no/ollama")
    )
    monkeypatch.setattr("ollama_tiering.models.make.make_model", lambda *_, **__: 0)
    monkeypatch.setenv("OLLAMA_TIERING_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # TMPDIR is read once
    monkeypatch.delenv("OLLAMA_CPU_ATTENTION", raising=False)
    (tmp_path / "config.toml").touch()
    return found


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("name", BENCHES)
def test_the_attention_is_that_of_up_unless_told_otherwise(
    name: str, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench(name, "-q")
    assert asked.pop()["attention"] == "exact"
    bench(name, "-q", "--attention", "stock")
    assert asked.pop()["attention"] == "stock"
    monkeypatch.setenv("OLLAMA_CPU_ATTENTION", "stock")  # `up` obeys it
    bench(name, "-q")
    assert asked.pop()["attention"] == "stock"
    monkeypatch.delenv("OLLAMA_CPU_ATTENTION")
    (tmp_path / "config.toml").write_text('[server]\ncpu_attention = "stock"\n')
    bench(name, "-q")
    assert asked.pop()["attention"] == "stock"


def test_room_for_the_model_and_its_blocks_is_asked_for_before_it_is_made(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed: list[int] = []

    def refuse(_: Scratch, size_bytes: int) -> None:
        needed.append(size_bytes)
        raise ServiceError("no room")

    monkeypatch.setattr(Scratch, "need_bytes", refuse)
    bench("restore", "--shape", "llama-3.2-1b", "--tokens", "2048,8192")
    assert "making a model" not in capsys.readouterr().err
    assert not asked
    shape = make_shape("llama-3.2-1b")
    assert needed == [shape.stored_bytes + (2048 + 8192) * shape.kv_bytes_per_token]


def test_a_prompt_without_tokens_for_the_hits_is_refused_before_anything_starts(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("restore", "--tokens", "64,4", "--repeat", "3") == 2
    assert "4 is too few" in capsys.readouterr().err
    assert not asked
    bench("restore", "-q", "--tokens", "64,5", "--repeat", "3")
    assert asked


def test_an_unknown_baseline_is_refused_before_anything_starts(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("restore", "--baselines", "ours,worst") == 2
    assert "worst" in capsys.readouterr().err
    assert not asked
