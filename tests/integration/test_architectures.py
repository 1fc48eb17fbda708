"""docs/models.md decides about every architecture that a supported Ollama registers."""

from __future__ import annotations

import re

import pytest

from ollama_tiering.patchset import manifest
from ollama_tiering.patchset.manifest import version_key
from ollama_tiering.patchset.upstream import SourceCache
from scripts import models_page

CACHE = SourceCache()
CACHED = [tag for tag in manifest.load().pins if CACHE.has(tag)]
WHY = f"no supported version in the source cache {CACHE.root}; `tiering fetch --all-tags` fills it"
REGISTER = re.compile(r'\bmodel\.Register\("([^"]+)"')
NAMES = re.compile(r"LLM_ARCH_NAMES = \{(.*?)\n\};", re.S)
NAME = re.compile(r'\{\s*LLM_ARCH_(\w+),\s*"([^"]+)"')

pytestmark = [pytest.mark.upstream, pytest.mark.skipif(not CACHED, reason=WHY)]


def decided(engine: str, tag: str) -> set[str]:
    return {
        name
        for one in models_page.load()
        if one.engine == engine and version_key(one.since) <= version_key(tag)
        for name in one.names
    }


def text(tag: str, path: str) -> str:
    content = CACHE.read(tag, path)
    assert content is not None, f"{tag} has no {path}"
    return content.decode()


@pytest.mark.parametrize("tag", CACHED)
def test_the_go_engine_registers_what_the_page_decides_about(tag: str) -> None:
    sources = [
        path
        for path in CACHE.files(tag)
        if path.startswith("model/models/") and path.endswith(".go") and "_test" not in path
    ]
    registered = {name for path in sources for name in REGISTER.findall(text(tag, path))}
    assert len(registered) >= 30
    assert registered == decided("go", tag)


@pytest.mark.parametrize("tag", CACHED)
def test_llama_cpp_knows_what_the_page_decides_about(tag: str) -> None:
    table = NAMES.search(text(tag, "llama/llama.cpp/src/llama-arch.cpp"))
    assert table
    known = {name for constant, name in NAME.findall(table[1]) if constant != "UNKNOWN"}
    assert len(known) >= 100
    assert known == decided("llama.cpp", tag)
