"""Terms of a model by its file name: Ollama's manifests, the rules, and what is in doubt."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ollama_tiering.config import ModelRule, SidecarConfig, load_sidecar
from ollama_tiering.sidecar.manifests import ManifestReader, ModelNames
from ollama_tiering.sidecar.rule_book import RuleBook
from ollama_tiering.store.books.terms import Decide, Terms
from tests.unit.sidecar.ollama_models import blob, name_model

DAY = 86400.0
FORBID = ModelRule("private", store=False)


class Desk:
    def __init__(self, root: Path) -> None:
        self.models = root / "models"
        self.now = 100.0
        (self.models / "manifests").mkdir(parents=True)
        (root / "empty.toml").write_text("")
        self.config = replace(load_sidecar(path=root / "empty.toml"), models_dir=self.models)

    def name(self, name: str, number: int) -> Path:
        return name_model(self.models, name, blob(number))

    def settings(self, *rules: ModelRule) -> SidecarConfig:
        return replace(self.config, model_rules=rules)

    def book(self, *rules: ModelRule) -> RuleBook:
        return RuleBook(self.settings(*rules), clock=lambda: self.now)


@pytest.fixture
def desk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Desk:
    caplog.set_level(logging.INFO, "ollama_tiering")
    return Desk(tmp_path)


def test_without_rules_everything_is_stored_for_as_long_as_the_settings_say(desk: Desk) -> None:
    terms = desk.book().decide(blob(1))
    assert (terms.refusal, terms.remove, terms.ttl_seconds) == ("", False, 30 * DAY)


def test_a_rule_speaks_of_the_model_behind_a_name(desk: Desk) -> None:
    desk.name("private:latest", 1)
    desk.name("me/other:8b", 2)
    book = desk.book(FORBID, ModelRule("me/other", ttl_days=2, budget_bytes=7))
    private, other = book.decide(blob(1)), book.decide(blob(2))
    assert private.refusal == 'rule in config.toml: [models."private"] store = false'
    assert private.remove
    assert private.name == "private:latest"
    assert (other.refusal, other.ttl_seconds, other.budget_bytes) == ("", 2 * DAY, 7)


def test_a_model_with_two_names_is_held_to_the_stricter_rule(desk: Desk) -> None:
    desk.name("private:latest", 1)
    desk.name("public:latest", 1)
    terms = desk.book(FORBID, ModelRule("public", store=True)).decide(blob(1))
    assert terms.remove
    assert terms.name == "private:latest, public:latest"


def test_a_model_without_a_name_is_not_stored_as_long_as_it_could_be_a_forbidden_one(
    desk: Desk,
) -> None:
    desk.name("public:latest", 2)
    book = desk.book(FORBID)
    unknown = book.decide(blob(1))
    assert "its name is not known" in unknown.refusal
    assert "private" in unknown.refusal
    assert not unknown.remove  # on a suspicion nothing is removed
    assert book.decide("").refusal
    assert not book.decide(blob(2)).refusal


def test_a_model_without_a_name_falls_under_the_rule_for_all(desk: Desk) -> None:
    terms = desk.book(ModelRule("*", ttl_days=3), ModelRule("a", ttl_days=1)).decide(blob(1))
    assert (terms.refusal, terms.ttl_seconds) == ("", 3 * DAY)


def test_only_what_is_named_is_stored_where_the_rule_for_all_forbids(desk: Desk) -> None:
    desk.name("chosen:latest", 1)
    book = desk.book(ModelRule("*", store=False), ModelRule("chosen", store=True))
    assert not book.decide(blob(1)).refusal
    assert book.decide(blob(2)).remove
    assert book.decide("").refusal
    assert not book.decide("").remove


def test_a_digest_may_be_named_in_a_rule(desk: Desk) -> None:
    book = desk.book(FORBID, ModelRule(blob(1), store=True), ModelRule(blob(2), store=False))
    assert not book.decide(blob(1)).refusal
    assert book.decide(blob(2)).remove


def test_a_model_that_is_no_blob_goes_by_its_file_name(desk: Desk) -> None:
    book = desk.book(ModelRule("toy", store=False))
    assert book.decide("toy").remove
    assert not book.decide("other").refusal


@pytest.mark.parametrize("how", ["no json", "no directory", "too large"])
def test_while_manifests_cannot_be_read_the_safe_side_is_taken_and_said(
    desk: Desk, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    file = desk.name("private:latest", 1)
    if how == "no json":
        file.write_text("{")
    elif how == "too large":
        file.write_bytes(b" " * ((1 << 20) + 1))
    else:
        (desk.models / "manifests").rename(desk.models / "elsewhere")
    book = desk.book(FORBID)
    terms = book.decide(blob(1))
    assert "its name is not known" in terms.refusal
    assert not terms.remove
    assert "names of models are not all known" in caplog.text
    everything = desk.book(ModelRule("*", store=False)).decide(blob(1))
    assert everything.refusal
    assert not everything.remove


@pytest.mark.parametrize(
    "forbids", [FORBID, ModelRule("*", store=False)], ids=["another name", "all others"]
)
def test_a_model_that_may_have_a_second_name_which_is_forbidden_is_withheld(
    desk: Desk, forbids: ModelRule
) -> None:
    desk.name("public:latest", 1)
    second = desk.name("private:latest", 1)
    whole = second.read_text()
    second.write_text(whole[:20])
    book = desk.book(forbids, ModelRule("public", store=True))
    terms = book.decide(blob(1))
    assert str(second) in terms.refusal
    assert str(forbids) in terms.refusal
    assert terms.name == "public:latest"
    assert not terms.remove  # on a suspicion nothing is removed
    second.write_text(whole)
    book.refresh()
    assert book.decide(blob(1)).remove
    second.unlink()
    book.refresh()
    assert not book.decide(blob(1)).refusal


def test_what_no_rule_forbids_is_stored_whatever_cannot_be_read(desk: Desk) -> None:
    desk.name("public:latest", 1)
    desk.name("private:latest", 1).write_text("{")
    book = desk.book(ModelRule("public", ttl_days=2), ModelRule("private", store=True))
    assert (book.decide(blob(1)).refusal, book.decide(blob(1)).ttl_seconds) == ("", 2 * DAY)
    assert not desk.book(FORBID).decide("mine.gguf").refusal  # a file of nobody's manifest


def test_a_name_given_later_is_seen_and_told(desk: Desk) -> None:
    desk.name("public:latest", 1)
    book = desk.book(FORBID)
    told: list[Decide] = []
    book.keep_up(told.append)
    told.clear()
    book.keep_up(told.append)
    assert not told
    assert not book.decide(blob(1)).refusal
    desk.name("private:v2", 1)
    book.keep_up(told.append)
    assert len(told) == 1
    assert told[0](blob(1)).remove


def test_a_model_pulled_just_now_is_known_at_once_and_the_others_are_told_of_too(
    desk: Desk,
) -> None:
    book = desk.book(FORBID)
    assert book.decide(blob(1)).refusal
    desk.now += 10
    desk.name("public:latest", 1)
    assert not book.decide(blob(1)).refusal
    told: list[Decide] = []
    book.keep_up(told.append)
    assert told


def test_a_changed_manifest_is_read_again_and_an_unchanged_one_is_not(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.name("a:1", 1)
    file = desk.name("b:1", 2)
    reader = ManifestReader(desk.models)
    assert reader.read().of_blob == {blob(1): ("a:1",), blob(2): ("b:1",)}
    opened: list[Path] = []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (opened.append(path), read(path))[1])
    assert len(reader.read().of_blob) == 2
    assert opened == []
    name_model(desk.models, "b:1", blob(3))
    os.utime(file, ns=(1, 1))
    assert reader.read().of_blob == {blob(1): ("a:1",), blob(3): ("b:1",)}
    assert opened == [file]


def test_a_rule_for_a_name_nobody_has_is_said_with_what_it_may_mean(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.name("llama3.2:3b", 1)
    desk.book(ModelRule("lama3.2", store=False), ModelRule("llama3.2", ttl_days=1))
    desk.book(ModelRule("some*.gguf", store=False))  # of a file that llama-server may be given
    assert "gguf" not in caplog.text
    assert 'no model here has a name that fits the rule [models."lama3.2"]' in caplog.text
    assert "did you mean 'llama3.2'" in caplog.text
    assert '[models."llama3.2"]' not in caplog.text


def test_names_for_people_are_the_first_of_several(desk: Desk) -> None:
    desk.name("b:1", 1)
    desk.name("a:1", 1)
    desk.name("hf.co/me/x:q4", 2)
    found = ManifestReader(desk.models).read().of_blob
    assert {of: names[0] for of, names in found.items()} == {
        blob(1): "a:1",
        blob(2): "hf.co/me/x:q4",
    }


def test_rules_that_come_at_runtime_may_be_asked_before_they_are_read(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is opened while SIGHUP brings the first rules."""
    desk.name("private:latest", 1)
    book = desk.book()
    read = ManifestReader.read
    decided: list[Terms] = []
    asking = threading.Thread(target=lambda: decided.append(book.decide(blob(1))))

    def read_slowly(self: ManifestReader) -> ModelNames:
        if not asking.ident:
            asking.start()
            asking.join(0.2)
        return read(self)

    monkeypatch.setattr(ManifestReader, "read", read_slowly)
    book.change(desk.settings(FORBID))
    asking.join(30)
    assert [terms.remove for terms in decided] == [True]


def test_no_text_is_shown_of_what_a_rule_names_nor_of_what_may_be_it(desk: Desk) -> None:
    manifest = desk.name("diary:latest", 1)
    desk.name("open:latest", 2)
    book = desk.book(ModelRule("diary", text=False))
    shown = [book.decide(name).text for name in (blob(1), blob(2), blob(3), "", "other.gguf")]
    assert shown == [False, True, False, False, True]
    assert not book.decide(blob(1)).refusal  # it is stored all the same
    manifest.write_text("{")
    book.refresh()
    assert not book.decide(blob(2)).text  # it may have that name, too
    assert desk.book(FORBID).decide(blob(2)).text
    assert desk.book().decide(blob(1)).text
