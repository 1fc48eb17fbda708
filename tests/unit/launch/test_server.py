"""What `ollama serve` is started with, and how it ends."""

from pathlib import Path

import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import ollama
from ollama_tiering.launch.address import free_address


def test_the_server_gets_every_variable_and_ours(
    fake_ollama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_NUM_PARALLEL", "3")
    monkeypatch.setenv("OLLAMA_KV_TIER_GATE", "restore")
    place = free_address()
    env = ollama.server_environment(place, tmp_path / "s.sock", tmp_path / "models")
    ollama.start_server(fake_ollama.binary, place, log=tmp_path / "log", env=env).stop(seconds=10)
    seen = fake_ollama.environment
    assert seen["OLLAMA_NUM_PARALLEL"] == "3"
    assert seen["OLLAMA_KV_TIER_GATE"] == "restore"
    assert seen["OLLAMA_KV_TIERING"] == "1"
    assert seen["OLLAMA_KV_TIER_SOCKET"] == str(tmp_path / "s.sock")
    assert seen["OLLAMA_MODELS"] == str(tmp_path / "models")
    assert seen["OLLAMA_HOST"] == str(place)


def test_a_server_without_a_socket_is_a_stock_one(
    fake_ollama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_KV_TIERING", "1")
    place = free_address()
    env = ollama.server_environment(place, None)
    ollama.start_server(fake_ollama.binary, place, log=tmp_path / "log", env=env).stop(seconds=10)
    assert "OLLAMA_KV_TIERING" not in fake_ollama.environment


def test_the_attention_is_set_only_where_it_was_chosen(tmp_path: Path) -> None:
    place = free_address()
    assert "OLLAMA_CPU_ATTENTION" not in ollama.server_environment(place, tmp_path)
    chosen = ollama.server_environment(place, tmp_path, cpu_attention="stock")
    assert chosen["OLLAMA_CPU_ATTENTION"] == "stock"


def test_the_server_is_asked_to_end_once_and_ends(fake_ollama, tmp_path: Path) -> None:
    place = free_address()
    env = ollama.server_environment(place, None)
    server = ollama.start_server(fake_ollama.binary, place, log=tmp_path / "log", env=env)
    assert server.stop(seconds=10)
    assert fake_ollama.events == ["serve started", "SIGTERM", "ended"]


def test_a_server_that_dies_at_once_is_reported_with_its_log(fake_ollama, tmp_path: Path) -> None:
    fake_ollama.behave(die=5)
    place = free_address()
    with pytest.raises(ServiceError, match=r"exit code 5(.|\n)*something is wrong with me"):
        ollama.start_server(
            fake_ollama.binary,
            place,
            log=tmp_path / "log",
            env=ollama.server_environment(place, None),
        )


def test_a_streamed_answer_is_put_together() -> None:
    answer = ollama.Generated()
    best = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    part = {"logprobs": [{"token": "a", "logprob": -0.5, "top_logprobs": best}]}
    ollama._add(answer, part, 0.25)
    ollama._add(answer, {"logprobs": [{"token": "c", "logprob": 0}]}, 0.5)
    ollama._add(
        answer,
        {"done": True, "prompt_eval_count": 7, "eval_count": 2, "eval_duration": 10**9},
        0.6,
    )
    assert answer.tokens == ["a", "c"]
    assert answer.logprobs == [[("a", -0.5), ("b", -1.5)], []]
    assert answer.seconds_to_first_token == 0.25
    assert answer.prompt_tokens == 7
    assert answer.decode_tokens_per_second == 2


def test_an_error_inside_a_stream_is_an_error() -> None:
    with pytest.raises(ServiceError, match="model runner has unexpectedly stopped"):
        ollama._add(ollama.Generated(), {"error": "model runner has unexpectedly stopped"}, 0.1)
