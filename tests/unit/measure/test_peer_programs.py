"""Peers: what is installed of the lock, and a process that is asked over a socket."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from measure.peers import environment, worker
from measure.peers.driver import PeerDriver, Settings, instructions
from measure.peers.environment import IK_LLAMA_CPP, PEERS
from ollama_tiering.engines.drivers import Scratch
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import Finished

QUIET = Report(quiet=True)

# Speaks as worker.py does: each token of the prompt back, then dies on request.
FAKE = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    lines = connection.makefile("rw")
    settings = json.loads(sys.argv[2])
    assert settings["own_socket"].endswith(".sock") and "GGML_X" not in os.environ
    def send(**message):
        lines.write(json.dumps(message) + "\\n"); lines.flush()
    send(version="fake 1", system="AVX = 1 | AVX2 = 1 | AVX512 = 0 | ")
    while line := lines.readline():
        request = json.loads(line)
        if request["prompt"] == [33]:
            sys.exit("GGML_ASSERT(S > 0) failed")
        for token in request["prompt"][:request["new_tokens"]]:
            send(token=token, top=[[token, -0.5], [10, -1.5]])
        send(prompt_tokens=len(request["prompt"]))
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerDriver]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(worker, "__file__", str(script))
    monkeypatch.setenv("GGML_X", "1")
    with Scratch("test") as scratch:
        made = PeerDriver(Path(sys.executable), scratch, Settings("fake", 256, 512, 1, True))
        yield made
        made.close()


def test_a_peer_is_asked_in_tokens_and_answers_in_text(driver: PeerDriver) -> None:
    driver.start()
    assert (driver.engine, driver.built_for) == ("fake 1", "AVX2")
    answer = driver.generate("hello", 3)
    assert answer.tokens == ["h", "e", "l"]
    assert answer.logprobs[0] == [("h", -0.5), ("\n", -1.5)]
    assert answer.prompt_tokens == 5
    assert 0 < answer.seconds_to_first_token <= answer.seconds_to_last_token
    assert driver.generate("ab", 2).tokens == ["a", "b"], "it goes on"


@pytest.mark.parametrize(
    ("system", "name"),
    [
        ("CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | REPACK = 1 | ", "AVX2"),
        ("AVX = 1 | AVX_VNNI = 0 | AVX2 = 1 | AVX512 = 0 | NEON = 0 | ", "AVX2"),
        ("AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 1 | ", "AVX512_VNNI"),
        ("CPU : NEON = 1 | ARM_FMA = 1 | ", "NEON"),
        ("", "not told"),
    ],
)
def test_a_library_s_own_words_name_its_widest_instructions(system: str, name: str) -> None:
    assert instructions(system) == name


def test_the_best_tokens_of_logits_with_log_probabilities() -> None:
    found = worker.top([0.0, 3.0, 1.0, 2.0, -1.0, 500.0 - 500.0, 2.5])
    assert [token for token, _ in found] == [1, 6, 3, 2, 0]
    total = sum(math.exp(x) for x in (0, 3, 1, 2, -1, 0, 2.5))
    assert found[0][1] == pytest.approx(3 - math.log(total))
    assert worker.top([1000.0, 0, 0, 0, 0])[0] == (0, 0.0), "no overflow"


def test_the_lock_pins_every_package_with_hashes() -> None:
    lock = environment.LOCK.read_text()
    for peer in PEERS:
        lines = environment.requirements(peer.packages, lock)
        assert re.match(rf"{peer.packages[0]}==[\d.]+ \\\n    --hash=sha256:", lines)
        for package in peer.packages:
            assert f"{package}==" in lines
    ik = environment.requirements(IK_LLAMA_CPP.packages, lock)
    assert ik.count("numpy==") == lock.count("\nnumpy=="), "one for each kind of Python"
    assert "xllamacpp" not in ik
    given = environment.LOCK.with_suffix(".in").read_text().split()
    assert all(f"{pin} \\" in lock for pin in given)
    names = [name for peer in PEERS for name in peer.packages]
    assert set(re.findall(r"^([\w-]+)==", lock, re.MULTILINE)) == set(names), "none without a peer"


def test_wheels_only_with_hashes_once_and_below_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    installed: dict[str, str] = {}

    def run(*args: str | Path, stdin: bytes = b"", **_: object) -> Finished:
        """Stands for python and pip."""
        words = [str(arg) for arg in args]
        commands.append(words)
        if "venv" in words:
            (Path(words[-1]) / "bin").mkdir(parents=True)
            (Path(words[-1]) / "bin/python").touch()
        installed.update(re.findall(r"^([\w-]+)==([\w.]+)", stdin.decode(), re.MULTILINE))
        asks = "importlib.metadata" in words[2]
        return Finished(int(asks and words[-1] not in installed), installed.get(words[-1], ""), ())

    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path))
    monkeypatch.setattr(environment, "run", run)
    python, absent = environment.python_with(PEERS, None, QUIET)
    assert python.is_relative_to(tmp_path / "peers")
    assert not absent
    installs = [command for command in commands if "pip" in command]
    assert len(installs) == 2
    for command in installs:
        assert command[0] == str(python), "never into the project's own"
        assert command[command.index("--only-binary") + 1] == ":all:"
        assert "--require-hashes" in command
    count = len(commands)
    environment.python_with(PEERS, None, QUIET)
    assert not [command for command in commands[count:] if "pip" in command or "venv" in command]
