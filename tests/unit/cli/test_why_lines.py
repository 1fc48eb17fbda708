"""What `tiering why` prints, whatever an engine, a prompt or a recipe says."""

from __future__ import annotations

from typing import Any

import pytest

from ollama_tiering.cli import why_lines
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.why.explain import Explained, Explainer, causes
from ollama_tiering.why.recipes import all_recipes
from ollama_tiering.why.vocabularies import Vocabularies
from tests.unit.models.marked_text import TOKENS, encode
from tests.unit.models.vocabularies import vocabulary_file
from tests.unit.sidecar.ollama_models import blob

EVIL = "\x1b]0;owned\x07\u202e"


def described(**fields: str) -> adm.DescribedNamespace:
    pairs = [pb.NamespaceField(name=name, value=value) for name, value in fields.items()]
    return adm.DescribedNamespace(namespace=bytes(32), description=pb.Namespace(fields=pairs))


def parting(**more: Any) -> adm.Parting:
    values: dict[str, Any] = {
        "kind": adm.Parting.KIND_DIFFERS,
        "unix_seconds": 1e9,
        "namespace": described(engine="a", extra="threads=2;batch=512"),
        "model": blob(1),
        "name": "qwen3:8b",
        "prompt_tokens": 900,
        "at_token": 5,
        "computed_tokens": 800,
        "lost_tokens": 700,
        "tokens_per_second": 100.0,
    }
    return adm.Parting(**values | more)


@pytest.fixture
def explainer(tmp_path: Any) -> Explainer:
    vocabulary_file(tmp_path / "blobs" / blob(1), TOKENS)
    return Explainer(Vocabularies([tmp_path]), all_recipes(None), {})


def printed(found: list[Explained], capsys: pytest.CaptureFixture[str]) -> str:
    why_lines.show(causes(found), found, 1e9, text=True)
    return capsys.readouterr().out


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_that_is_printed_commands_a_terminal(
    explainer: Explainer,
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
    sides = {
        name: tokens_to_bytes(encode(f"{name}{EVIL}[red]"))
        for name in ("before", "asked", "stored")
    }
    settings = described(engine=f"b{EVIL}", extra=f"threads={EVIL};batch=512")
    found = [
        explainer.explained(parting(**sides, at_token=len(sides["before"]) // 4)),
        explainer.explained(parting(name=f"m{EVIL}", model=EVIL)),
        explainer.explained(
            parting(kind=adm.Parting.KIND_OTHER_SETTINGS, elsewhere=settings, name=f"n{EVIL}")
        ),
    ]
    out = printed(found, capsys)
    assert "owned" in out
    assert "\x1b]" not in out
    assert "\x07" not in out
    assert "\u202e" not in out


def test_the_settings_that_differ_are_named_with_both_values(explainer: Explainer) -> None:
    settings = described(engine="a", extra="threads=1;batch=512;content=x")
    found = explainer.explained(parting(kind=adm.Parting.KIND_OTHER_SETTINGS, elsewhere=settings))
    assert (found.verdict, found.elsewhere) == ("other_settings", {"threads": ("1", "2")})
    other = explainer.explained(
        parting(kind=adm.Parting.KIND_OTHER_SETTINGS, elsewhere=described(engine="b"))
    )
    assert other.verdict == "other_build"
    assert other.elsewhere["engine"] == ("b", "a")


def test_a_kind_of_a_newer_sidecar_and_odd_bytes_are_shown_as_what_is_known(
    explainer: Explainer, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = parting(before=b"abc", asked=b"\xff" * 7, stored=b"12345")
    strange = parting(kind=99)  # type: ignore[arg-type]
    found = [explainer.explained(odd), explainer.explained(strange)]
    assert found[1].verdict == "no_text"
    assert "700 tokens that were stored" in printed(found, capsys)


def test_what_no_speed_was_measured_for_is_told_in_tokens(
    explainer: Explainer, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [explainer.explained(parting(tokens_per_second=0.0))]
    assert found[0].lost_seconds is None
    assert printed(found, capsys).startswith(
        "qwen3:8b: computed again once: 700 tokens that were stored\n"
    )
    assert why_lines.document(found, 1e9, text=True)["partings"][0]["lost_seconds"] is None


def test_nothing_is_said_in_one_line(
    explainer: Explainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed([], capsys).startswith("nothing that was stored had to be computed again since")
    sound = [explainer.explained(parting(lost_tokens=3))]
    assert "; 1 prompt that only began like others, which is no fault" in printed(sound, capsys)
