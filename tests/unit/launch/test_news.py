"""A person learns once of each runner whether its model is tiered."""

import os
from pathlib import Path

import pytest

from ollama_tiering.launch import news
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.unit.sidecar.ollama_models import blob, name_model

SERVER = 7

TIERED = pb.RunnerReport(pid=1, model="sha256-" + "0123456789abcdef" * 4, tiered=True)
NOT = pb.RunnerReport(pid=2, model="sha256-" + "fedcba9876543210" * 4, reason="embedding model")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[adm.StatResponse | None]:
    given: list[adm.StatResponse | None] = []
    monkeypatch.setattr(news, "ask", lambda _socket: given.pop(0))
    monkeypatch.setattr(news.psutil, "Process", Runner)
    monkeypatch.setattr(news, "models_dirs", lambda first: [first] if first else [])
    return given


class Runner:
    """Stands for a process of the server's."""

    def __init__(self, pid: int) -> None:
        self.parent = SERVER if pid < 100 else 8

    def ppid(self) -> int:
        return self.parent


def test_each_runner_is_told_of_once(answers) -> None:
    said: list[str] = []
    look = news.RunnerNews(Path("s"), said.append, lambda: SERVER)
    both = adm.StatResponse(runners=[TIERED, NOT])
    answers += [adm.StatResponse(runners=[TIERED]), both, both]
    for _ in range(3):
        look()
    assert said == [
        "model 0123456789ab loaded, is tiered",
        "model fedcba987654 loaded, is not tiered: embedding model",
    ]


def test_exact_attention_is_part_of_the_news(answers) -> None:
    said: list[str] = []
    report = pb.RunnerReport(pid=1, model="m", tiered=True, cpu_attention="exact (avx512)")
    answers.append(adm.StatResponse(runners=[report]))
    news.RunnerNews(Path("s"), said.append, lambda: SERVER)()
    assert said == ["model m loaded, is tiered, attention exact (avx512)"]


def test_a_model_that_a_rule_keeps_out_is_news(answers) -> None:
    said: list[str] = []
    report = pb.RunnerReport(pid=1, model="m", tiered=True, namespace=b"n")
    other = pb.RunnerReport(pid=2, model="o", tiered=True, namespace=b"o")
    terms = [
        adm.ModelTerms(namespaces=[b"n"], refusal="a rule"),
        adm.ModelTerms(namespaces=[b"o"]),
    ]
    answers.append(adm.StatResponse(runners=[report, other], model_terms=terms))
    news.RunnerNews(Path("s"), said.append, lambda: SERVER)()
    assert said == ["model m loaded, is not stored: a rule", "model o loaded, is tiered"]


def test_a_sidecar_that_does_not_answer_is_no_news(answers) -> None:
    said: list[str] = []
    look = news.RunnerNews(Path("s"), said.append, lambda: SERVER)
    answers += [
        adm.StatResponse(runners=[TIERED]),
        None,
        adm.StatResponse(runners=[TIERED]),
    ]
    for _ in range(3):
        look()
    assert len(said) == 1


def test_a_model_loaded_again_is_told_again(answers) -> None:
    said: list[str] = []
    look = news.RunnerNews(Path("s"), said.append, lambda: SERVER)
    again = pb.RunnerReport(pid=3, model=TIERED.model, tiered=True)
    answers += [adm.StatResponse(runners=[TIERED]), adm.StatResponse(runners=[again])]
    look()
    look()
    assert len(said) == 2


def test_the_model_has_its_name_from_the_servers_models_directory(answers, tmp_path: Path) -> None:
    said: list[str] = []
    name_model(tmp_path, "qwen3:0.6b", blob(1))
    reports = [pb.RunnerReport(pid=n, model=blob(n), tiered=True) for n in (1, 2)]
    answers.append(adm.StatResponse(runners=reports))
    news.RunnerNews(Path("s"), said.append, lambda: SERVER, tmp_path)()
    assert said == ["model qwen3:0.6b loaded, is tiered", "model 000000000000 loaded, is tiered"]


def test_of_another_servers_models_nothing_is_said(answers) -> None:
    said: list[str] = []
    theirs = pb.RunnerReport(pid=100, model="m", tiered=True)
    answers.append(adm.StatResponse(runners=[theirs, TIERED]))
    news.RunnerNews(Path("s"), said.append, lambda: SERVER)()
    assert said == ["model 0123456789ab loaded, is tiered"]


def test_whose_a_runner_is_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    mine = adm.StatResponse(runners=[pb.RunnerReport(pid=os.getpid(), model="m", tiered=True)])
    gone = adm.StatResponse(runners=[pb.RunnerReport(pid=1 << 30, model="m", tiered=True)])
    for answer, server in ((mine, os.getppid()), (mine, os.getpid()), (gone, os.getppid())):
        monkeypatch.setattr(news, "ask", lambda _socket, answer=answer: answer)
        news.RunnerNews(Path("s"), said.append, lambda server=server: server)()
    assert said == ["model m loaded, is tiered"]
