"""What operations.md says of cached tokens is bounded to where they are told."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
FIELDS = re.compile(r"prompt_eval_cached_count|PromptEvalCachedCount|cache_read_input_tokens")


def section() -> str:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    return page.partition("\n## What clients are told\n")[2].partition("\n## ")[0]


def test_only_the_go_engine_gets_fields_of_ours() -> None:
    """What the page says of an installed Ollama rests on this: nothing of ours adds them there."""
    ours = [f for f in (ROOT / "patches/overlay").rglob("*.go") if FIELDS.search(f.read_text())]
    assert ours
    for file in (ROOT / "llama_server").rglob("*"):
        if file.suffix in (".cpp", ".h", ".patch", ".toml"):
            assert not FIELDS.search(file.read_text(encoding="utf-8")), file


def test_the_page_says_where_no_client_sees_them_and_names_the_clients() -> None:
    text = section()
    assert "each answer says" not in text.partition("- **A version with the Go engine**")[0]
    installed = text.partition("- **An installed Ollama from v0.30 on**")[2].partition("\n\n")[0]
    assert "up to v0.33.2 it tells no client" in " ".join(installed.split())
    assert "From v0.33.3 on Ollama itself" in " ".join(installed.split())
    rows = [line for line in text.splitlines() if line.startswith("|") and line.count("|") == 4]
    clients = "\n".join(row.split("|")[1] for row in rows)
    for name in ("curl", "npm", "of Python", "langchain-ollama", "litellm", "openai", "anthropic"):
        assert name in clients
