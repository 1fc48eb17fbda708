"""`python -m measure.peers` as a person runs it, on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from measure.peers import environment
from ollama_tiering.patchset import build
from ollama_tiering.patchset.binary import ENV_BINARY, named_binary

REPOSITORY = Path(__file__).parents[2]
ENV_PEERS = "OLLAMA_TIERING_TEST_PEERS"  # a virtual environment with both


@pytest.mark.slow
@pytest.mark.engine
def test_ours_and_both_peers_run_the_same_model(tmp_path: Path) -> None:
    binary = named_binary() or next(iter(build.built_binaries()), None)
    if binary is None:
        pytest.skip(f"no patched Ollama is built: run `tiering patch`, or set {ENV_BINARY}")
    peers = Path(os.environ.get(ENV_PEERS) or environment.own_folder())
    if not (peers / "bin/python").is_file():
        pytest.skip(f"no peers are installed: run `python -m measure.peers`, or set {ENV_PEERS}")
    own = {n: v for n, v in os.environ.items() if not n.startswith("OLLAMA_")}
    paths = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY), ENV_BINARY: str(binary)}
    options = ["--shape", "qwen3-tiny", "--tokens", "48", "--repeat", "1", "--threads", "1"]
    options += ["--only", "llama.cpp", "--only", "ik_llama.cpp", "--peers", str(peers), "--json"]
    command = [sys.executable, "-m", "measure.peers", *options]
    done = subprocess.run(
        command, env=own | paths, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    ours, *others = results
    assert (ours["program"], ours["prompt_tokens"]) == ("ours", 48)
    flash = {True: "with flash attention", False: "without flash attention"}
    found = {(one.get("program"), one.get("setting")) for one in others}
    wanted = {(peer.name, words) for peer in environment.PEERS for words in flash.values()}
    assert found == wanted, results
    for one in results:
        assert one["first_median_seconds"] > 0
        assert one["decode_median_rate"] > 0
    assert all(one["built_for"] != "not told" for one in others)
    assert list(tmp_path.iterdir()) == []
