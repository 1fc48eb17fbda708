"""What `tiering status` says of requests that computed more than the last token of their prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.cli import status
from ollama_tiering.cli.status_shortfalls import WORDS
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.protocol.shortfalls import name
from ollama_tiering.store.block.pb import block_store_pb2 as pb

OPERATIONS = Path(__file__).parents[3] / "docs/operations.md"


def told(**more: Any) -> tuple[list[str], dict[str, Any]]:
    """The lines of one runner, and its part of the document."""
    runner = pb.RunnerReport(pid=5, model="m", tiered=True, engine="ollama-go/0.16.3+12", **more)
    answer = adm.StatResponse(version="1", runners=[runner])
    lines = list(status.lines(Path("s"), answer))
    document = status.document(Path("s"), answer)
    json.dumps(document, allow_nan=False)
    return lines[lines.index("runner 5 m: tiered, ollama-go/0.16.3") :], document["runners"][0]


def last(shortfall: int, at_token: int = 0, **more: Any) -> dict[str, Any]:
    tokens = {"prompt_tokens": 1200, "memory_tokens": 0, "restored_tokens": 212} | more
    request = pb.LastRequest(shortfall=shortfall, at_token=at_token, **tokens)  # type: ignore[arg-type]
    return {"last_request": request}


def why(**more: Any) -> str:
    lines, document = told(**more)
    at = next(i for i, line in enumerate(lines) if line.startswith("  last request: "))
    assert lines[at + 1] == f"    {document['last_request']['why']}"
    return lines[at + 1].strip()


def test_a_loaded_model_has_engine_caches_last_request_reasons_and_what_is_to_be_stored() -> None:
    lines, document = told(
        caches="plain f16",
        min_tokens=64,
        to_store=2,
        shortfalls=[
            pb.ShortfallCount(reason=pb.SHORTFALL_TOO_SHORT, requests=1, tokens=40),
            pb.ShortfallCount(reason=pb.SHORTFALL_NOTHING_STORED, requests=12, tokens=14400),
        ],
        **last(pb.SHORTFALL_DIFFERS, 212),
    )
    assert lines == [
        "runner 5 m: tiered, ollama-go/0.16.3",
        "  caches: plain f16",
        "  0 requests, 0 prompt tokens = 0 in memory + 0 restored + 0 recomputed",
        "  recomputed, by reason:",
        "    14,400 tokens of 12 requests: nothing stored begins like this prompt",
        "    40 tokens of 1 request: shorter than min_tokens (64)",
        "  last request: 1,200 prompt tokens = 0 in memory + 212 restored + 988 recomputed",
        "    prompt differs from the stored one at token 212",
        "  2 conversations are still to be stored",
    ]
    assert (document["caches"], document["min_tokens"], document["to_store"]) == (
        "plain f16",
        64,
        2,
    )
    assert document["shortfalls"] == [
        {"reason": "too_short", "requests": 1, "tokens": 40},
        {"reason": "nothing_stored", "requests": 12, "tokens": 14400},
    ]
    assert document["last_request"] == {
        "prompt_tokens": 1200,
        "memory_tokens": 0,
        "restored_tokens": 212,
        "recomputed_tokens": 988,
        "reason": "differs",
        "at_token": 212,
        "why": "prompt differs from the stored one at token 212",
    }


def test_a_request_of_which_all_but_the_last_token_came_back_has_no_reason() -> None:
    lines, document = told(**last(0, memory_tokens=987), to_store=1)
    assert lines[-2:] == [
        "  last request: 1,200 prompt tokens = 987 in memory + 212 restored + 1 recomputed",
        "  1 conversation is still to be stored",
    ]
    found = document["last_request"]
    assert (found["reason"], found["at_token"], found["why"]) == (None, None, None)
    assert document["shortfalls"] == []


def test_a_runner_of_an_older_version_says_nothing_of_it() -> None:
    lines, document = told()
    assert lines[1:] == ["  0 requests, 0 prompt tokens = 0 in memory + 0 restored + 0 recomputed"]
    assert document["last_request"] is None
    assert document["to_store"] == 0


def test_a_runner_of_a_newer_version_has_another_reason() -> None:
    said = "another reason, which this version does not know"
    assert why(**last(47)) == said
    lines, document = told(shortfalls=[pb.ShortfallCount(reason=47, requests=1, tokens=9)])  # type: ignore[arg-type]
    assert lines[-1] == f"    9 tokens of 1 request: {said}"
    assert document["shortfalls"] == [{"reason": "other", "requests": 1, "tokens": 9}]


def test_positions_are_said_where_they_say_something() -> None:
    assert (
        why(**last(pb.SHORTFALL_ENDS, 1128)) == "what is stored of the prompt ends at token 1,128"
    )
    assert why(**last(pb.SHORTFALL_GATE)) == "gate: recomputing is faster"
    assert why(**last(pb.SHORTFALL_TOO_SHORT), min_tokens=8) == "shorter than min_tokens (8)"
    assert why(**last(pb.SHORTFALL_TOO_SHORT)) == "shorter than min_tokens"


def test_the_next_turn_of_a_chat_does_not_read_as_a_fault() -> None:
    memory = {"memory_tokens": 1163, "restored_tokens": 0}
    said = "next turn: 37 new tokens, shorter than min_tokens (64)"
    assert why(**last(pb.SHORTFALL_TOO_SHORT, **memory), min_tokens=64) == said


def test_a_model_that_is_not_tiered_has_its_reason_and_its_engine() -> None:
    runner = pb.RunnerReport(pid=5, model="m", reason="sliding window", engine="ollama-go/0.16.3")
    answer = adm.StatResponse(version="1", runners=[runner])
    assert list(status.lines(Path("s"), answer))[-2:] == [
        "runner 5 m: not tiered: sliding window",
        "  engine: ollama-go/0.16.3",
    ]


@pytest.mark.parametrize("reason", pb.Shortfall.values())
def test_every_reason_has_words_of_its_own_and_a_line_of_what_to_do(reason: int) -> None:
    words = WORDS[reason]
    assert list(WORDS.values()).count(words) == 1
    rows = [
        line
        for line in OPERATIONS.read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| {words}") and f" | `{name(reason)}` | " in line
    ]
    assert len(rows) == 1, words
    assert rows[0].rsplit("|", 2)[1].strip(), "nothing to do"
