"""A sidecar with its local tier in zstd: answers stay the same bit for bit; `status` says so."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ollama_tiering.cli import cli
from ollama_tiering.client import BlockClient
from ollama_tiering.config import SidecarConfig, load_sidecar
from ollama_tiering.engines.reference_engine import ReferenceEngine
from ollama_tiering.errors import ConfigError
from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from ollama_tiering.sidecar.rule_book import RuleBook
from ollama_tiering.store.assemble import open_store
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import TierKind
from tests.contract.daemon import Daemon

PROMPT = "".join(chr(32 + (i * i + 7 * i) % 95) for i in range(200))


def opened(settings: SidecarConfig) -> TieredStore:
    return open_store(settings, RuleBook(settings).decide)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory() as directory:
        yield Daemon(Path(directory), env={"OLLAMA_KV_TIER_COMPRESS": "zstd"})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = make_shape("qwen3-tiny", layers=2, heads=8, kv_heads=8, embd=64, ffn=64)
    make_model(shape, tmp_path / "m.gguf", seed=3)
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("inline", [False, True])
def test_after_a_reboot_the_answer_is_the_one_of_an_in_memory_hit(
    daemon: Daemon, model: Path, inline: bool
) -> None:
    with daemon, BlockClient(daemon.socket) as client:
        engine = ReferenceEngine(model, client)
        engine.generate(PROMPT, 4)
        in_memory = engine.generate(PROMPT, 8)
        assert in_memory.tokens_in_memory == len(PROMPT) - 1
        daemon.wait_written()
    shutil.rmtree(daemon.ram_dir)
    with daemon, BlockClient(daemon.socket, fail_open=False, inline=inline) as client:
        restored = ReferenceEngine(model, client).generate(PROMPT, 8)
        assert restored.tokens_restored == len(PROMPT) - 1
        assert (restored.tokens, restored.logprobs) == (in_memory.tokens, in_memory.logprobs)
        assert not client.failures
        local = daemon.stat().tiers[1]
        assert local.encoding == "zstd"
        assert local.encoding_ratio > 1.05
        assert local.decode_bytes_per_second > 0
        runner = CliRunner()
        told = runner.invoke(cli, ["status", "--socket", str(daemon.socket)])
        assert f"zstd {local.encoding_ratio:.2f}:1, decodes " in told.output
        document = json.loads(
            runner.invoke(cli, ["status", "--socket", str(daemon.socket), "--json"]).output
        )
        assert document["tiers"][1]["encoding"] == "zstd"
        assert document["tiers"][1]["encoding_ratio"] == local.encoding_ratio
        assert document["tiers"][0]["encoding"] == "none"


def test_the_lookup_tells_what_is_read_and_what_it_decodes_to(daemon: Daemon, model: Path) -> None:
    with daemon, BlockClient(daemon.socket) as client:
        engine = ReferenceEngine(model, client)
        engine.generate(PROMPT, 1)
        daemon.wait_written()
    shutil.rmtree(daemon.ram_dir)
    with daemon, BlockClient(daemon.socket) as client:
        found = client.match(engine.namespace, list(PROMPT.encode()))
        assert {block.tier for block in found.blocks} == {"local"}
        whole = found.blocks[0]
        with client.get(engine.namespace, found) as blocks:
            assert whole.stored_bytes < 0.95 * blocks[0].meta.file_bytes
        again = client.match(engine.namespace, list(PROMPT.encode()))
        assert {block.tier for block in again.blocks} == {"ram"}


def test_without_a_ram_tier_an_encoded_local_tier_is_refused(tmp_path: Path) -> None:
    config = load_sidecar(
        {
            "sidecar.ram_budget": "0",
            "sidecar.local_dir": tmp_path / "local",
            "sidecar.local_encoding": "zstd",
        }
    )
    with pytest.raises(ConfigError, match="needs a RAM tier"):
        opened(config)


def test_the_setting_reaches_the_store(tmp_path: Path) -> None:
    config = load_sidecar(
        {
            "sidecar.ram_dir": tmp_path / "ram",
            "sidecar.ram_budget": "1MiB",
            "sidecar.local_dir": tmp_path / "local",
            "sidecar.local_encoding": "zstd",
            "sidecar.zstd_level": 3,
        }
    )
    store = opened(config)
    encodings = {tier.kind: tier.encoding for tier in store.report().tiers}
    store.close()
    assert encodings == {TierKind.RAM: "none", TierKind.LOCAL: "zstd"}


def test_the_setting_of_the_remote_tier_reaches_the_store(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    config = load_sidecar(
        {
            "sidecar.ram_budget": "0",
            "sidecar.local_dir": tmp_path / "local",
            "sidecar.remote_dir": tmp_path / "remote",
            "sidecar.remote_encoding": "zstd",
        }
    )
    store = opened(config)
    encodings = {tier.kind: tier.encoding for tier in store.report().tiers}
    store.close()
    assert encodings == {TierKind.LOCAL: "none", TierKind.REMOTE: "zstd"}


def test_an_encoding_of_a_tier_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = load_sidecar(
        {"sidecar.local_dir": tmp_path / "local", "sidecar.remote_encoding": "zstd"}
    )
    with pytest.raises(ConfigError, match=r"remote_encoding = zstd needs a remote tier"):
        opened(config)
