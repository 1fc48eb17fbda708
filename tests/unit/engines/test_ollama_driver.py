"""When the driver goes on: after everything that was computed has been stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.engines import ollama_driver
from ollama_tiering.engines.ollama_driver import OllamaDriver
from ollama_tiering.errors import ServiceError
from ollama_tiering.sidecar.content.contents import BEING_READ
from ollama_tiering.store.block.pb import block_store_pb2 as pb


def driver(monkeypatch: pytest.MonkeyPatch, *reports: pb.RunnerReport) -> OllamaDriver:
    """One that has asked once. Its runner reports these one after the other, the last for ever."""

    def each() -> Iterator[list[pb.RunnerReport]]:
        for report in reports:
            yield [report]
        while True:
            yield [reports[-1]]

    coming = each()
    made = object.__new__(OllamaDriver)
    monkeypatch.setattr(OllamaDriver, "_runners", lambda self: next(coming))
    monkeypatch.setattr(made, "_asked", 1, raising=False)
    monkeypatch.setattr(made, "_log", Path("ollama.log"), raising=False)
    monkeypatch.setattr(ollama_driver, "_REPORT_SECONDS", 0.05)
    return made


def report(requests: int, to_store: int = 0) -> pb.RunnerReport:
    return pb.RunnerReport(tiered=True, requests=requests, to_store=to_store)


def test_it_goes_on_when_nothing_is_left_to_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = (report(0), report(1, to_store=2), report(1, to_store=1), report(1))
    one = driver(monkeypatch, *reports)
    assert one.settle() == one.last_report == reports[-1]


def test_a_model_whose_file_is_being_checked_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = pb.RunnerReport(tiered=False, reason=BEING_READ)
    one = driver(monkeypatch, *[checked] * 10, report(1))
    monkeypatch.setattr(ollama_driver, "_REPORT_SECONDS", 0.02)
    monkeypatch.setattr(ollama_driver, "_POLL_SECONDS", 0.01)  # ten of them take longer
    assert one.settle() == report(1)
    monkeypatch.setattr(ollama_driver, "_CHECK_SECONDS", 0.05)
    with pytest.raises(ServiceError, match=BEING_READ):
        driver(monkeypatch, checked).settle()


@pytest.mark.parametrize(
    ("last", "words"),
    [(report(1, to_store=1), "still storing"), (report(0), "reported nothing")],
)
def test_a_runner_that_does_not_get_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, last: pb.RunnerReport, words: str
) -> None:
    with pytest.raises(ServiceError, match=words):
        driver(monkeypatch, last).settle()
