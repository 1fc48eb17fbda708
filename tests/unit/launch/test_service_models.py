"""Whoever stops Ollama's service and starts `tiering up` is told where its models are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ollama_tiering.launch import service_models
from ollama_tiering.launch.service_models import left_behind


def add_model(models: Path) -> None:
    path = models / "manifests/registry.ollama.ai/library/qwen3/0.6b"
    path.parent.mkdir(parents=True)
    path.write_text("{}")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path / "home/.ollama/models"


@pytest.fixture
def service(tmp_path: Path) -> Path:
    return tmp_path / "usr/share/ollama/.ollama/models"


def test_the_models_of_the_service_are_named(own: Path, service: Path) -> None:
    assert left_behind(own, service) == ""  # there is no such service
    service.mkdir(parents=True)
    assert left_behind(own, service) == ""  # it has none either
    add_model(service)
    said = left_behind(own, service)
    assert said == f"{own} has no models; to serve those of Ollama's service: " + (
        f"tiering up --models {service}"
    )


def test_who_has_models_or_named_a_place_is_told_nothing(
    own: Path, service: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(service)
    assert left_behind(service, service) == ""
    with monkeypatch.context() as patched:
        patched.setenv("OLLAMA_MODELS", str(own))
        assert left_behind(own, service) == ""
    add_model(own)
    assert left_behind(own, service) == ""


def test_models_that_may_not_be_read_or_written(
    own: Path, service: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(service)
    monkeypatch.setattr(service_models.os, "access", lambda _path, how: how != os.W_OK)
    assert "must write there" in left_behind(own, service)
    monkeypatch.setattr(service_models.os, "access", lambda *_: False)
    monkeypatch.setattr(service_models.os, "walk", lambda _path: [])
    assert "may not read" in left_behind(own, service)
