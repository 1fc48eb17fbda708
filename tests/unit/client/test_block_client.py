"""BlockClient against a real sidecar: round trips bit for bit, and a miss whenever in doubt."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from ollama_tiering.client import BlockClient, BlockExtra, Blocks, Match, Namespace, restored
from ollama_tiering.errors import ServiceError
from ollama_tiering.store.block.key import LayerSpec
from tests.places import short_directory
from tests.sidecar import SidecarProcess

LAYERS, HEADS, DIM, BLOCK = 3, 2, 8, 16
Cache = dict[tuple[int, str], NDArray[Any]]


def namespace(name: str) -> Namespace:
    return Namespace.of(
        model=name,
        engine="test/1",
        cache_dtype="f16",
        layers=[LayerSpec(0, layer, HEADS, DIM, DIM) for layer in range(LAYERS)],
        block_tokens=BLOCK,
    )


@pytest.fixture(scope="module")
def daemon() -> Iterator[SidecarProcess]:
    with short_directory() as directory, SidecarProcess(directory) as running:
        yield running


@pytest.fixture(params=["files", "inline"])
def client(request: pytest.FixtureRequest, daemon: SidecarProcess) -> Iterator[BlockClient]:
    inline = request.param == "inline"
    with BlockClient(daemon.socket, inline=inline, fail_open=False) as opened:
        yield opened


@pytest.fixture
def ns(request: pytest.FixtureRequest) -> Namespace:
    return namespace(request.node.name)


def cache_of(tokens: list[int], seed: int = 0) -> Cache:
    """Rows as an engine would have them: each depends on all tokens up to it."""
    cache: Cache = {}
    for layer in range(LAYERS):
        for kind in "kv":
            rows = []
            for position in range(len(tokens)):
                text = f"{seed}/{layer}/{kind}/{tokens[: position + 1]}".encode()
                state = hashlib.shake_128(text).digest(HEADS * DIM * 2)
                rows.append(np.frombuffer(state, np.float16))
            cache[layer, kind] = np.stack(rows)
    return cache


def put(client: BlockClient, ns: Namespace, tokens: list[int], cache: Cache) -> list[int]:
    """Stores a cache; which blocks the client asked for."""
    asked = []

    def segments_of(index: int) -> Cache:
        asked.append(index)
        return {place: rows[index * BLOCK : (index + 1) * BLOCK] for place, rows in cache.items()}

    result = client.put(ns, tokens, segments_of)
    assert result.rows == len(tokens), result
    return asked


def assert_same(blocks: Blocks, cache: Cache, rows: int) -> None:
    assert blocks.rows == rows
    at = 0
    for block in blocks:
        assert block.first_position == at
        for (layer, kind), expected in cache.items():
            array = block.array(layer, kind)
            assert array.dtype == np.float16
            assert array.shape == (block.block_rows, HEADS * DIM)
            wanted = expected[at : at + block.rows]
            assert array[: block.rows].tobytes() == wanted.tobytes()
            assert bytes(block.segment(layer, kind)) == array.tobytes()
        at += block.rows


def test_what_was_put_comes_back_bit_for_bit(client: BlockClient, ns: Namespace) -> None:
    tokens = list(range(50))
    cache = cache_of(tokens)
    assert put(client, ns, tokens, cache) == [0, 1, 2, 3]
    match = client.match(ns, tokens)
    assert match.rows == 50
    assert match.expected_seconds > 0
    with client.get(ns, match) as blocks:
        assert_same(blocks, cache, 50)
        assert [token for block in blocks for token in block.tokens] == tokens


@pytest.mark.parametrize("same", [0, 1, 15, 16, 17, 31, 33, 49])
def test_a_match_ends_at_the_first_different_token(
    client: BlockClient, ns: Namespace, same: int
) -> None:
    tokens = list(range(50))
    cache = cache_of(tokens)
    put(client, ns, tokens, cache)
    prompt = tokens[:same] + [999] * 40
    match = client.match(ns, prompt)
    assert match.rows == same
    with client.get(ns, match) as blocks:
        assert_same(blocks, cache_of(prompt), same)


def test_only_missing_blocks_are_asked_for(client: BlockClient, ns: Namespace) -> None:
    tokens = list(range(50))
    put(client, ns, tokens, cache_of(tokens))
    assert put(client, ns, tokens, cache_of(tokens)) == []
    longer = list(range(70))
    assert put(client, ns, longer, cache_of(longer)) == [3, 4]
    assert client.match(ns, longer).rows == 70


def test_another_namespace_sees_nothing(client: BlockClient, ns: Namespace) -> None:
    tokens = list(range(20))
    put(client, ns, tokens, cache_of(tokens))
    assert client.match(namespace("another model"), tokens).rows == 0


def test_arrays_stay_valid_after_the_lease(client: BlockClient, ns: Namespace) -> None:
    tokens = list(range(16))
    cache = cache_of(tokens)
    put(client, ns, tokens, cache)
    with client.get(ns, client.match(ns, tokens)) as blocks:
        array = blocks[0].array(1, "v")
    assert client.remove_seq(ns, tokens) == 1
    del blocks
    assert array.tobytes() == cache[1, "v"].tobytes()
    assert client.match(ns, tokens).rows == 0


def test_arrays_cannot_be_written_to(client: BlockClient, ns: Namespace) -> None:
    tokens = [1, 2, 3]
    put(client, ns, tokens, cache_of(tokens))
    with client.get(ns, client.match(ns, tokens)) as blocks:
        array = blocks[0].array(0, "k")
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_rows_of_an_image_are_not_matched_by_tokens_alone(
    client: BlockClient, ns: Namespace
) -> None:
    tokens = list(range(30))
    image, other = (BlockExtra(20, bytes([i]) * 32) for i in (1, 2))
    cache = cache_of(tokens)
    segments = {place: rows for place, rows in cache.items()}

    def segments_of(index: int) -> Cache:
        return {p: rows[index * BLOCK : (index + 1) * BLOCK] for p, rows in segments.items()}

    client.put(ns, tokens, segments_of, extras=[image])
    assert client.match(ns, tokens).rows == 20
    assert client.match(ns, tokens, extras=[other]).rows == 20
    assert client.match(ns, tokens[:18], extras=[]).rows == 18
    early = [BlockExtra(17, bytes(32))]
    assert client.match(ns, tokens, extras=early).rows == 17


def test_a_lease_is_given_back(client: BlockClient, ns: Namespace, daemon: SidecarProcess) -> None:
    tokens = [1, 2, 3]
    put(client, ns, tokens, cache_of(tokens))
    with client.get(ns, client.match(ns, tokens)):
        assert daemon.stat().open_leases >= 1
    daemon.wait(lambda stat: stat.open_leases == 0, "the lease is given back")


def test_a_damaged_block_ends_the_run_and_is_reported(
    client: BlockClient, ns: Namespace, daemon: SidecarProcess
) -> None:
    tokens = list(range(50))
    cache = cache_of(tokens)
    put(client, ns, tokens, cache)
    daemon.wait_written()
    match = client.match(ns, tokens)
    for file in daemon.root.rglob(f"{match.blocks[2].key.hex()}.kvb"):
        content = bytearray(file.read_bytes())
        content[-4096] ^= 128
        file.chmod(0o600)
        file.write_bytes(content)
    with client.get(ns, match) as blocks:
        assert_same(blocks, cache, 32)
    assert client.failures["corrupt"] == 1
    assert client.match(ns, tokens).rows == 32


def files_of(daemon: SidecarProcess, match: Match) -> list[Path]:
    names = [f"{ref.key.hex()}.kvb" for ref in match.blocks]
    return [path for name in names for path in (daemon.root / "ram").rglob(name)]


def test_what_was_checked_is_what_is_used_whatever_becomes_of_the_file(
    daemon: SidecarProcess, ns: Namespace
) -> None:
    """A vandal of the same user writes into the blocks' files in RAM after the check."""
    tokens = list(range(50))
    cache = cache_of(tokens)
    with BlockClient(daemon.socket, fail_open=False) as client:
        put(client, ns, tokens, cache)
        match = client.match(ns, tokens)
        assert {ref.tier for ref in match.blocks} == {"ram"}
        with client.get(ns, match) as blocks:
            files = files_of(daemon, match)
            assert len(files) == len(blocks)
            for file in files:
                file.chmod(0o600)
                with file.open("r+b") as opened:
                    opened.write(b"\xff" * file.stat().st_size)
            assert_same(blocks, cache, 50)
    assert client.failures == {}


_READ_AFTER_TRUNCATION: Final = """
import os, sys
from pathlib import Path
import ollama_tiering.client.restored as restored
from ollama_tiering.store.block.pb import block_store_pb2 as pb

path = Path(sys.argv[1])
answer = pb.GetResponse(path=os.fsencode(path), file_bytes=path.stat().st_size, tier=pb.TIER_RAM)
data = restored.load(answer)
with path.open("r+b") as file:
    file.truncate(0)
print(sum(memoryview(data)))
"""


def test_a_file_that_is_truncated_while_it_is_used_does_not_kill_the_process(
    tmp_path: Path,
) -> None:
    """In a process of its own: reading past the end of a mapped file is SIGBUS."""
    path = tmp_path / "block"
    path.write_bytes(b"\1" * 16384)
    command = [sys.executable, "-c", _READ_AFTER_TRUNCATION, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "16384\n"), done.stderr


def test_a_file_that_is_truncated_before_it_is_read_is_a_miss(
    daemon: SidecarProcess, ns: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its size and the reading."""
    tokens = list(range(32))
    with BlockClient(daemon.socket) as client:
        put(client, ns, tokens, cache_of(tokens))
        match = client.match(ns, tokens)
        first = files_of(daemon, match)[0]
        fstat = os.fstat

        def then_truncated(fd: int) -> os.stat_result:
            info = fstat(fd)
            first.chmod(0o600)
            os.truncate(first, 4096)
            return info

        monkeypatch.setattr(restored.os, "fstat", then_truncated)
        with client.get(ns, match) as blocks:
            assert len(blocks) == 0
        monkeypatch.undo()
        assert client.failures["get"] + client.failures.get("corrupt", 0) >= 1


def test_tokens_that_are_not_the_prompts_are_refused(client: BlockClient, ns: Namespace) -> None:
    tokens = list(range(16))
    put(client, ns, tokens, cache_of(tokens))
    match = client.match(ns, tokens)
    lying = type(match)(match.tokens[:-4] + bytes(4), match.blocks)
    with client.get(ns, lying) as blocks:
        assert len(blocks) == 0
    assert client.failures["corrupt"] == 1


def test_a_large_put_goes_in_several_batches(daemon: SidecarProcess, monkeypatch: Any) -> None:
    monkeypatch.setattr("ollama_tiering.client.block_client._BATCH_BYTES", 100_000)
    ns = namespace("batches")
    tokens = list(range(200))
    cache = cache_of(tokens)
    with BlockClient(daemon.socket, fail_open=False) as client:
        assert put(client, ns, tokens, cache) == list(range(13))
        with client.get(ns, client.match(ns, tokens)) as blocks:
            assert_same(blocks, cache, 200)


def test_rows_that_are_no_rows_are_refused(client: BlockClient, ns: Namespace) -> None:
    with pytest.raises(ValueError, match="are not 3 rows"):
        client.put(ns, [1, 2, 3], lambda i: {(0, "k"): np.zeros(7, np.uint8)})


def test_without_a_sidecar_everything_is_a_quick_miss(tmp_path: Path) -> None:
    ns = namespace("down")
    with BlockClient(tmp_path / "none") as client:
        start = time.monotonic()
        match = client.match(ns, [1, 2, 3])
        assert match.rows == 0
        assert len(client.get(ns, match)) == 0
        assert client.put(ns, [1, 2, 3], lambda i: {}).rows == 0
        assert client.remove_seq(ns, [1, 2, 3]) == 0
        assert time.monotonic() - start < 2
        assert client.failures == {"match": 1, "put": 1, "remove": 1}
        with pytest.raises(ServiceError):
            client.stat()


def test_not_failing_open_raises(tmp_path: Path) -> None:
    with (
        BlockClient(tmp_path / "none", fail_open=False) as client,
        pytest.raises(ServiceError) as caught,
    ):
        client.match(namespace("down"), [1])
    assert caught.value.hint


def test_a_client_finds_a_restarted_sidecar(tmp_path: Path) -> None:
    ns = namespace("restart")
    tokens = list(range(20))
    cache = cache_of(tokens)
    with SidecarProcess(tmp_path) as daemon, BlockClient(daemon.socket) as client:
        put(client, ns, tokens, cache)
        match = client.match(ns, tokens)
        daemon.kill()
        assert client.match(ns, tokens).rows == 0
        assert len(client.get(ns, match)) == 0
        daemon.start()
        end = time.monotonic() + 10
        while client.match(ns, tokens).rows == 0:
            assert time.monotonic() < end
            time.sleep(0.05)
        with client.get(ns, client.match(ns, tokens)) as blocks:
            assert_same(blocks, cache, 20)


def test_a_full_store_says_why_and_keeps_the_leading_run(tmp_path: Path) -> None:
    ns = namespace("full")
    tokens = list(range(16 * 20))
    cache = cache_of(tokens)
    with (
        SidecarProcess(tmp_path, ram_gb=200_000 / 2**30, local_gb=0) as daemon,
        BlockClient(daemon.socket) as client,
    ):
        result = client.put(
            ns,
            tokens,
            lambda i: {p: rows[i * BLOCK : (i + 1) * BLOCK] for p, rows in cache.items()},
        )
        assert 0 < result.rows < len(tokens)
        assert result.reason == "no_room"
        assert client.match(ns, tokens).rows == result.rows
