"""docs/household.md: its numbers are those of the code, its settings those of the compose file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ollama_tiering.config import GIB, MIB, SidecarConfig, load
from ollama_tiering.models.shapes import SHAPES

REPO = Path(__file__).parents[3]
PAGE = (REPO / "docs/household.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| [\w.-]+ \(`(.+?)`\) \|(.*)\|$", PAGE, re.MULTILINE)
CHAT_TOKENS = 8192


@pytest.mark.parametrize(("name", "cells"), ROWS)
def test_bytes_for_a_token_are_those_of_the_shape(name: str, cells: str) -> None:
    shape = SHAPES[name]
    numbers = [int(cell.replace(",", "")) for cell in re.findall(r"[\d,]*\d", cells)]
    layers, heads, head, for_token, chat_mib = numbers
    assert (layers, heads, head) == (shape.layers, shape.kv_heads, shape.head_dim)
    assert for_token == shape.kv_bytes_per_token == 2 * layers * heads * head * 2
    assert chat_mib * MIB == for_token * CHAT_TOKENS


def test_there_are_such_rows() -> None:
    assert len(ROWS) == 3
    assert f"{CHAT_TOKENS:,} tokens" in PAGE


def test_defaults_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    settings: SidecarConfig = load().sidecar
    assert f"takes {settings.local_budget_bytes // GIB} GiB" in PAGE
    assert f"leaves {settings.min_free_percent:.0f} %" in PAGE
    assert f"for {settings.ttl_days:.0f} days" in PAGE


def test_settings_of_open_webui_are_those_of_the_compose_file() -> None:
    compose = yaml.safe_load((REPO / "packaging/docker/compose.open-webui.yaml").read_text())
    webui = compose["services"]["webui"]["environment"]
    assert set(webui) <= set(re.findall(r"`([A-Z_]+)`", PAGE))
