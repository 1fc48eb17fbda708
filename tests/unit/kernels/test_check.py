"""`tiering kernel check`: what is wrong ends in exit code 1, what is not served is said."""

from __future__ import annotations

import json

import pytest

from ollama_tiering.cli import main
from ollama_tiering.kernels import check

pytestmark = pytest.mark.usefixtures("numpy_kernels")


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: check.PROBLEMS[name] for name in ("one key", "d 80", "d 112")}
    monkeypatch.setattr(check, "PROBLEMS", few)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["kernel", "check", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_every_instruction_set_of_this_machine_is_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [device.name for device in check.cpu_devices(2)] == ["CPU, avx512", "CPU, scalar"]
    assert run("--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["rows"]) == 6
    assert all(row["ok"] for row in document["rows"])
    assert document["no_gpu"]


def test_a_shape_that_is_not_served_is_named_and_no_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run() == 0
    text = capsys.readouterr().out
    assert "not served: head size 80" in text
    assert "No GPU: " in text


@pytest.mark.parametrize("skew", [1e-3, float("nan")])
def test_an_error_above_its_bound_is_exit_code_1(
    skew: float,
    numpy_kernels: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(numpy_kernels, "skew", skew)
    assert run() == 1
    printed = capsys.readouterr()
    assert "TOO LARGE" in printed.out
    assert "one key on CPU, avx512" in printed.err
