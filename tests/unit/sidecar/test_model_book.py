"""What was done for each model, by its name: in Stat's answer and in the metrics."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from ollama_tiering.protocol.shortfalls import NAMES
from ollama_tiering.sidecar import model_book
from ollama_tiering.sidecar.ledger import Ledger
from ollama_tiering.sidecar.model_book import ModelBook
from ollama_tiering.sidecar.model_metrics import ModelCollector
from ollama_tiering.sidecar.runners import RunnerTable
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.unit.sidecar.ollama_models import blob, name_model
from tests.unit.sidecar.reports import NAMESPACE, OTHER, report
from tests.unit.sidecar.scrape import Scrape, of_registry


def made(models: Path, *reports: pb.RunnerReport) -> ModelBook:
    book = ModelBook(Ledger(), models)
    for one in reports:
        if book.book(one):
            book.refresh()
    return book


def scrape(book: ModelBook, runners: RunnerTable | None = None) -> Scrape:
    registry = CollectorRegistry()
    registry.register(ModelCollector(book, runners))
    return of_registry(registry)


def test_a_model_is_called_as_people_know_it_and_the_file_name_stays(tmp_path: Path) -> None:
    name_model(tmp_path, "qwen3:0.6b", blob(1))
    book = made(tmp_path, report(2), report(1, pid=8, namespace=OTHER, model=blob(2)))
    named, unnamed = book.messages({OTHER})
    assert (named.name, named.model, named.loaded) == ("qwen3:0.6b", blob(1), False)
    assert (unnamed.name, unnamed.model, unnamed.loaded) == ("", blob(2), True)
    assert [name for name, _ in book.shown()] == ["qwen3:0.6b", "000000000000"]
    assert named.prompt_tokens == 300
    assert named.memory_tokens + named.restored_tokens + named.recomputed_tokens == 300


def test_names_are_looked_for_when_a_model_is_heard_of_and_not_with_every_report(
    tmp_path: Path,
) -> None:
    now = [0.0]
    book = ModelBook(Ledger(), tmp_path, clock=lambda: now[0])
    assert book.book(report(1))  # never looked
    book.refresh()
    assert not book.book(report(2))  # looked just now: it has no name
    now[0] = 10
    assert book.book(report(3))
    name_model(tmp_path, "qwen3:0.6b", blob(1))
    book.refresh()
    now[0] = 20
    assert not book.book(report(4))  # known
    assert not book.book(report(1, pid=8, model="made.gguf"))  # no blob: that is its name


def test_a_reader_that_hangs_holds_up_nobody_else(tmp_path: Path) -> None:
    book = made(tmp_path, report(1))
    with book._reading:
        begun = time.monotonic()
        book.refresh()
        assert time.monotonic() - begun < 5
    assert book.shown()


def test_names_are_looked_for_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_book, "_REFRESH_SECONDS", 0.01)
    book = made(tmp_path, report(1))
    assert book.name(blob(1)) == ""
    name_model(tmp_path, "qwen3:0.6b", blob(1))

    async def until_named() -> None:
        with ThreadPoolExecutor() as pool:
            chore = asyncio.create_task(book.keep_up(pool))
            while not book.name(blob(1)):
                await asyncio.sleep(0.01)
            chore.cancel()

    asyncio.run(asyncio.wait_for(until_named(), 10))
    assert book.name(blob(1)) == "qwen3:0.6b"


def test_a_name_that_is_no_text_is_sent_all_the_same(tmp_path: Path) -> None:
    name_model(tmp_path, "bad\udcff:x", blob(1))
    book = made(tmp_path, report(1))
    (message,) = book.messages(())
    assert message.name == r"bad\xff:x"
    assert r"bad\\xff:x" in scrape(book).text


def test_metrics_are_by_name_and_add_up(tmp_path: Path) -> None:
    name_model(tmp_path, "qwen3:0.6b", blob(1))
    measured = {"prefill_tokens": 1000, "prefill_seconds": 10.0, "restore_seconds": 0.5}
    book = made(
        tmp_path,
        report(2, restored=640, **measured),
        report(1, pid=8, namespace=OTHER, restored=60, **measured),  # other settings of it
        report(1, pid=9, namespace=bytes(32), model=blob(3), restored=64),
    )
    found = scrape(book)
    model = {"model": "qwen3:0.6b"}
    assert found("tiering_model_requests_total", **model) == 3
    sources = ("memory", "restored", "recomputed")
    parts = [found("tiering_model_prompt_tokens_total", source=s, **model) for s in sources]
    assert parts == [300, 700, 150]
    assert found("tiering_model_restore_seconds_total", **model) == 1
    assert found("tiering_model_prefill_tokens_per_second", **model) == 100
    assert found("tiering_model_saved_seconds", **model) == 7 - 1
    # Of the other model nothing was measured: nothing is said of it.
    assert found.labels("tiering_model_saved_seconds") == {"model": {"qwen3:0.6b"}}
    assert found.labels("tiering_model_prefill_tokens_per_second") == {"model": {"qwen3:0.6b"}}
    assert found("tiering_model_requests_total", model="000000000000") == 1
    assert blob(1) not in found.text
    assert NAMESPACE.hex() not in found.text
    for family in found.families:
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge")


def test_a_saving_below_zero_is_shown_as_it_is(tmp_path: Path) -> None:
    slow = {"prefill_tokens": 1000, "prefill_seconds": 1.0, "restore_seconds": 3.0}
    found = scrape(made(tmp_path, report(1, restored=1000, **slow)))
    assert found("tiering_model_saved_seconds", model="000000000000") == pytest.approx(-2)


def test_reasons_are_shown_for_each_model_from_zero_on(tmp_path: Path) -> None:
    name_model(tmp_path, "qwen3:0.6b", blob(1))
    ends = pb.ShortfallCount(reason=pb.SHORTFALL_ENDS, requests=2, tokens=60)
    newer = pb.ShortfallCount(reason=47, requests=1, tokens=5)  # type: ignore[arg-type]
    book = made(
        tmp_path,
        report(3, shortfalls=[ends, newer]),
        report(2, pid=8, namespace=OTHER, shortfalls=[ends]),  # of the same model
        report(1, pid=9, namespace=bytes(32), model=blob(3)),
    )
    assert [list(use.shortfalls) for use in book.messages(())] == [[ends, newer], [ends], []]
    found = scrape(book)

    def shown(reason: str, model: str = "qwen3:0.6b") -> tuple[float, float]:
        labels = {"reason": reason, "model": model}
        return (
            found("tiering_model_short_requests_total", **labels),
            found("tiering_model_short_tokens_total", **labels),
        )

    assert shown("ends") == (4, 120)
    assert shown("other") == (1, 5)
    assert shown("nothing_stored") == (0, 0)
    assert shown("ends", "000000000000") == (0, 0)
    assert found.labels("tiering_model_short_tokens_total")["reason"] == set(NAMES)


def test_what_is_to_be_stored_is_shown_of_runners_that_are_alive(tmp_path: Path) -> None:
    name_model(tmp_path, "qwen3:0.6b", blob(1))
    runners = RunnerTable()
    book = made(tmp_path, mine := report(1, pid=os.getpid(), to_store=3))
    for one in (mine, report(1, pid=os.getppid(), to_store=2), report(1, pid=1 << 30, to_store=9)):
        runners.put(one)
    found = scrape(book, runners)
    assert found("tiering_model_to_store", model="qwen3:0.6b") == 5
    assert found.labels("tiering_model_to_store") == {"model": {"qwen3:0.6b"}}
    assert found.total("tiering_model_requests_total") == 1
