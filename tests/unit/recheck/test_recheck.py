"""Which conversations are computed again, and what a person is told."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering import cli
from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.recheck.chosen import gives_one_answer, latest, text_of
from tests.contract.fake_engine import EXACT, FakeEngine, hello, prompt
from tests.sidecar import SidecarProcess

OLD, RESTORED, NEW = prompt(1000, 64 * 3 + 5), prompt(2000, 64 * 2), prompt(3000, 64 * 4)


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SidecarProcess]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    with SidecarProcess(tmp_path) as running:
        yield running


def test_what_was_restored_comes_first_then_what_was_used_last(daemon: SidecarProcess) -> None:
    with FakeEngine(daemon.socket, hello(fields=EXACT)) as engine:
        for tokens in (OLD, RESTORED, NEW):
            engine.store(tokens)
        engine.restore([*RESTORED, 1])
        engine.store([*NEW, *prompt(5000, 64)])
    with SidecarAdministration(daemon.socket) as admin:
        listing = admin.listing()
        (namespace,) = {one.namespace for one in listing.chains}
        assert gives_one_answer(listing, namespace)
        chosen = latest(listing, namespace, 2)
        assert [one.tokens for one in chosen] == [len(RESTORED), len(NEW) + 64]
        assert latest(listing, b"another", 2) == []
        text = text_of(admin, chosen[0], 64, 8192)
        assert text is not None
        assert list(text.tokens) == RESTORED
        most = text_of(admin, chosen[1], 64, 130)
        assert most is not None
        assert (list(most.tokens), most.blocks) == (NEW[:128], 2)
        oldest = latest(listing, namespace, 3)[2]
        whole = text_of(admin, oldest, 64, 8192)  # without its tail
        assert whole is not None
        assert list(whole.tokens) == OLD[: 64 * 3]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"engine": "another/1+x"}, "only llama-server"),
        ({**EXACT, "one_answer": ""}, "more than tokens"),
        (EXACT, "nothing of it is stored"),
    ],
)
def test_what_cannot_be_checked_is_said_with_the_reason(
    daemon: SidecarProcess,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, str],
    reason: str,
) -> None:
    with FakeEngine(daemon.socket, hello(fields=fields)) as engine:
        if fields != EXACT:
            engine.store(OLD)
        with pytest.raises(SystemExit) as caught:
            cli.main(["recheck", "--now", "--json", "--socket", str(daemon.socket)])
        assert caught.value.code == 9
        (left,) = json.loads(capsys.readouterr().out)["left_out"]
        assert reason in left["reason"]


def test_without_a_loaded_model_it_says_so(
    daemon: SidecarProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["recheck", "--now", "--socket", str(daemon.socket)])
    assert caught.value.code == 9
    assert "none is loaded" in capsys.readouterr().err
    assert os.nice(0) < 19
