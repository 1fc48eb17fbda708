"""A person learns once of each runner whether its model is tiered."""

from pathlib import Path

import pytest

from ollama_tiering.launch import news
from ollama_tiering.store.pb import block_store_pb2 as pb

TIERED = pb.RunnerReport(pid=1, model="sha256-0123456789abcdef", tiered=True)
NOT = pb.RunnerReport(pid=2, model="sha256-fedcba98765432", reason="embedding model")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[pb.StatResponse | None]:
    given: list[pb.StatResponse | None] = []
    monkeypatch.setattr(news, "ask", lambda _socket: given.pop(0))
    return given


def test_each_runner_is_told_of_once(answers) -> None:
    said: list[str] = []
    look = news.RunnerNews(Path("s"), said.append)
    both = pb.StatResponse(runners=[TIERED, NOT])
    answers += [pb.StatResponse(runners=[TIERED]), both, both]
    for _ in range(3):
        look()
    assert said == [
        "model 0123456789ab loaded, is tiered",
        "model fedcba987654 loaded, is not tiered: embedding model",
    ]


def test_exact_attention_is_part_of_the_news(answers) -> None:
    said: list[str] = []
    report = pb.RunnerReport(pid=1, model="m", tiered=True, cpu_attention="exact (avx512)")
    answers.append(pb.StatResponse(runners=[report]))
    news.RunnerNews(Path("s"), said.append)()
    assert said == ["model m loaded, is tiered, attention exact (avx512)"]


def test_a_model_that_a_rule_keeps_out_is_news(answers) -> None:
    said: list[str] = []
    report = pb.RunnerReport(pid=1, model="m", tiered=True, namespace=b"n")
    other = pb.RunnerReport(pid=2, model="o", tiered=True, namespace=b"o")
    terms = [pb.ModelTerms(namespaces=[b"n"], refusal="a rule"), pb.ModelTerms(namespaces=[b"o"])]
    answers.append(pb.StatResponse(runners=[report, other], model_terms=terms))
    news.RunnerNews(Path("s"), said.append)()
    assert said == ["model m loaded, is not stored: a rule", "model o loaded, is tiered"]


def test_a_sidecar_that_does_not_answer_is_no_news(answers) -> None:
    said: list[str] = []
    look = news.RunnerNews(Path("s"), said.append)
    answers += [pb.StatResponse(runners=[TIERED]), None, pb.StatResponse(runners=[TIERED])]
    for _ in range(3):
        look()
    assert len(said) == 1


def test_a_model_loaded_again_is_told_again(answers) -> None:
    said: list[str] = []
    look = news.RunnerNews(Path("s"), said.append)
    again = pb.RunnerReport(pid=3, model=TIERED.model, tiered=True)
    answers += [pb.StatResponse(runners=[TIERED]), pb.StatResponse(runners=[again])]
    look()
    look()
    assert len(said) == 2
