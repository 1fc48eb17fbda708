"""A sidecar with something to see: models, conversations, requests, partings and days; and the
server of the page, in a process of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from ollama_tiering.launch.address import free_address
from ollama_tiering.sidecar.ledger import Ledger
from tests.sidecar import SidecarProcess
from tests.unit.models.marked_text import TOKENS, encode
from tests.unit.models.vocabularies import NORMAL, vocabulary_file
from tests.unit.sidecar.ollama_models import name_model
from tests.unit.sidecar.wires import GoWire
from tests.unit.why.clients import CASES, chatml

MODELS = ("qwen3:8b", "llama3.1:8b")
START_SECONDS = 30.0
DANGEROUS = "<img src=x onerror=alert(1)>"  # as words of a prompt
_WORDS = ("fix the parser", "write a test", "explain this trace", "rename the flag", "why so slow")


class RuledSidecar(SidecarProcess):
    """`rules` follow its settings in the file."""

    rules = ""

    def environment(self) -> dict[str, str]:
        found = super().environment()
        file = self.root / "config" / "ollama-tiering" / "config.toml"
        file.write_text(f"{file.read_text()}\n{self.rules}")
        return found


class Stage:
    """`days` are in the ledger, today's too; `rules` as in config.toml. A context manager."""

    def __init__(self, root: Path, *, days: int = 0, rules: str = "") -> None:
        self.root = root
        self.models = root / "models"
        self.files = {name: self._model(name) for name in MODELS}
        env = {"OLLAMA_MODELS": str(self.models), "HOME": str(root)}
        if days:
            self._days(days)
        self.sidecar = RuledSidecar(root, env=env, ram_gb=0.5, local_gb=0.5)
        self.sidecar.rules = rules
        self._wires: list[GoWire] = []

    def __enter__(self) -> Stage:
        self.sidecar.start()
        self._wires = [GoWire(self.sidecar, file) for file in self.files.values()]
        return self

    def __exit__(self, *_: object) -> None:
        for wire in self._wires:
            wire.close()
        self.sidecar.kill()  # writing down what nobody wants any more takes long

    def environment(self) -> dict[str, str]:
        """Of a command that looks at it."""
        return self.sidecar.environment() | {"OLLAMA_KV_TIER_SOCKET": str(self.sidecar.socket)}

    def converse(self, count: int, *, long: int = 40) -> None:
        """Stores conversations; the first one's words are DANGEROUS."""
        for number in range(count):
            words = DANGEROUS if not number else f"{_WORDS[number % len(_WORDS)]}, part {number}"
            said = f"{words}: " + "x" * (long * (1 + number % 7))
            self._wires[number % len(self._wires)].store(encode(chatml(("user", said))))

    def ask(self, text: str, *, store: bool = True, memory: int = 0) -> None:
        """A request that ends."""
        tokens = encode(text)
        self._wires[0].ask(tokens, memory=memory)
        if store:
            self._wires[0].store(tokens)

    def part(self, cases: Sequence[int] = (0, 1)) -> None:
        """Prompts that were stored are asked again with something else in them."""
        for number in cases:
            self.ask(CASES[number].stored)
            self.ask(CASES[number].asked)

    def _model(self, name: str) -> Path:
        file = vocabulary_file(self.models / "blobs" / "new", [*TOKENS, (name, NORMAL)])
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        file = file.rename(file.with_name(f"sha256-{digest}"))
        name_model(self.models, name, file.name)
        return file

    def _days(self, count: int) -> None:
        """As the sidecar's own file has them: see `Days.document`."""
        today = datetime.date.today()
        days = {}
        for ago in range(count):
            models = {}
            for number, file in enumerate(self.files.values()):
                busy = 1 + (7 * ago + 3 * number) % 11
                prompt, restored, memory = 90_000 * busy, 55_000 * busy, 15_000 * busy
                computed = prompt - restored - memory
                sums = [12 * busy, prompt, memory, restored, computed, 2.5 * busy, 400.0 * busy]
                models[file.name] = sums
            days[str(today - datetime.timedelta(ago))] = models
        state = self.root / "state" / "ollama-tiering"
        state.mkdir(parents=True, mode=0o700)
        document = Ledger().document() | {"days": days}
        (state / "ledger.json").write_text(json.dumps(document))


@contextlib.contextmanager
def page(environment: Mapping[str, str], *options: str) -> Iterator[str]:
    """Its address, while `tiering web` runs."""
    address = free_address()
    paths = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-m", "ollama_tiering", "web", "--listen", str(address), *options],
        env={**environment, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("page: "), said
        _wait(address.url)
        yield address.url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(START_SECONDS)
        assert process.stdout is not None
        process.stdout.close()
    assert process.returncode == 0


def _wait(url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(httpx.HTTPError):
            assert httpx.get(f"{url}/", trust_env=False).status_code == 200
            return
        assert time.monotonic() < end, "the page is served"
        time.sleep(0.05)
