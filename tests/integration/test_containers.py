"""The image serves as root and as any user, from a read-only root, and finds what it stored again.

`scripts/containers` builds and unpacks it, and names it: OLLAMA_TIERING_TEST_IMAGE. It needs root.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ollama_tiering.config import GIB, MIB, parse_size
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.ollama import Api, Generated
from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from tests.engine.harness import text
from tests.engine_ollama_llama_server.servers import add_model
from tests.integration.box import Box, Image, owners
from tests.memory_group import memory_group

REPO = Path(__file__).parents[2]
FOLDER = os.environ.get("OLLAMA_TIERING_TEST_IMAGE")
pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="no image: `make containers` builds and tries one"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
MODEL, PROMPT_TOKENS, ANSWER_TOKENS = "tiny", 900, 24
PROMPT = text(PROMPT_TOKENS, "a container")
OPTIONS = {"num_ctx": 2048, "num_predict": ANSWER_TOKENS, "num_thread": 2}


@pytest.fixture(scope="module")
def image() -> Image:
    assert FOLDER is not None
    return Image(Path(FOLDER))


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    make_model(make_shape("qwen3-tiny"), path)
    return path


class Boxes:
    """Makes boxes with the volumes of one container."""

    def __init__(self, image: Image, root: Path) -> None:
        self._image, self._root = image, root
        self._made: list[Box] = []

    def __call__(
        self, *, user: int = 0, shm_mib: int = 64, mode: int = 0o1777, group: int = 0
    ) -> Box:
        volumes = {path: self._root / path.strip("/") for path in ("/data/.ollama", "/data/.local")}
        for folder in volumes.values():
            folder.mkdir(parents=True, exist_ok=True)
            os.chown(folder, 0, group)
            folder.chmod(mode)
        log = self._root / "log"
        self._made.append(Box(self._image, log, volumes, user=user, shm_mib=shm_mib))
        return self._made[-1]

    def close(self) -> None:
        for one in self._made:
            one.end()


@pytest.fixture
def box(image: Image, tmp_path: Path) -> Iterator[Boxes]:
    boxes = Boxes(image, tmp_path)
    with closing(boxes):
        yield boxes


def grace_seconds() -> float:
    """What the compose file gives it to end."""
    compose = yaml.safe_load((REPO / "packaging/docker/compose.yaml").read_text())
    return float(compose["services"]["tiering"]["stop_grace_period"].removesuffix("s"))


def create(one: Box, model_file: Path) -> None:
    """In the volume, as its user would: a server from v0.30 on makes none without its tools."""
    models = one.volumes["/data/.ollama"] / "models"
    add_model(models, MODEL, model_file)
    for path in models.rglob("*"):
        os.chown(path, one.user, one.user)


def ask(one: Box) -> Generated:
    return one.inside(lambda: Api(Address(), timeout=120).generate(MODEL, PROMPT, **OPTIONS))


def status(one: Box) -> dict[str, Any]:
    done = one.execute("tiering", "status", "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def restored_rows(one: Box) -> int:
    """Of all requests of this container; the runner reports them a moment after its answer."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if rows := sum(int(use["restored_tokens"]) for use in status(one)["model_uses"]):
            return rows
        time.sleep(0.2)
    return 0


def said_of_tiers(lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith("  keeps ")]
    return line


def same(first: Generated, second: Generated) -> bool:
    return (first.tokens, first.logprobs) == (second.tokens, second.logprobs)


def comes_back(make: Boxes, model_file: Path, **how: Any) -> list[str]:
    """Computes, ends, starts again and restores; returns what the first start said. Stock's
    attention has other last bits for one batch than for another, so what is restored is compared
    with what lay in memory.
    """
    one = make(**how)
    lines = one.start()
    create(one, model_file)
    computed, remembered = ask(one), ask(one)
    assert len(computed.tokens) == ANSWER_TOKENS
    before = sum(int(use["restored_tokens"]) for use in status(one)["model_uses"])
    assert before == 0
    assert one.stop(grace_seconds()) == 0
    assert not any("killed" in line for line in one.said())
    again = make(**how)
    again.start()
    restored = ask(again)
    assert restored_rows(again) >= PROMPT_TOKENS // 2
    assert restored.tokens == computed.tokens
    assert same(restored, remembered)
    assert again.stop(grace_seconds()) == 0
    return lines


@pytest.mark.parametrize("user", [0, 12345])
def test_what_was_computed_comes_back_in_the_next_container(
    box: Boxes, model_file: Path, tmp_path: Path, user: int
) -> None:
    """Shared memory is another one then: all that is found lies in the volume."""
    lines = comes_back(box, model_file, user=user, shm_mib=1024)
    assert re.search(r"RAM \S+ [GM]iB in /dev/shm/ollama-tiering-", said_of_tiers(lines))
    kept = tmp_path / "data/.local"
    assert owners(kept) == {user}
    for folder in ("share/ollama-tiering/blocks", "state/ollama-tiering"):
        assert stat.S_IMODE((kept / folder).stat().st_mode) == 0o700


def test_dockers_64_megabytes_are_no_ram_tier_and_it_is_said(
    box: Boxes, model_file: Path, tmp_path: Path
) -> None:
    lines = comes_back(box, model_file, user=12345, shm_mib=64)
    assert said_of_tiers(lines).endswith(
        "in /data/.local/share/ollama-tiering/blocks, "
        "no RAM tier: /dev/shm has 64.0 MiB, one takes 128.0 MiB or more"
    )


def test_volumes_of_a_pod_with_fs_group(box: Boxes, model_file: Path, tmp_path: Path) -> None:
    """They belong to root, and the group may write there and hands itself down."""
    comes_back(box, model_file, user=12345, shm_mib=512, mode=0o2775, group=12345)


def test_a_limit_of_a_gigabyte(
    box: Boxes, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The RAM tier has a quarter of what the processes leave, though shared memory has more."""
    with memory_group(GIB) as group, closing(box):
        monkeypatch.setattr(Box, "entering", lambda _, *words: group.entering(*words))
        lines = comes_back(box, model_file, user=12345, shm_mib=2048)
        found = re.search(r"RAM (\S+ [GM]iB) in /dev/shm/", said_of_tiers(lines))
        assert found is not None
        assert parse_size(found[1]) == (GIB - 256 * MIB) // 4
        assert group.killed == 0


def test_nothing_but_the_volumes_can_be_written(box: Boxes) -> None:
    one = box()
    one.start()
    assert one.first.cmdline()[-1] == "up"
    status_line = (Path("/proc") / str(one.first.pid) / "status").read_text()
    assert re.search(r"^NSpid:\s+\d+\s+1$", status_line, re.MULTILINE)
    for path in ("/x", "/etc/x", "/opt/ollama-tiering/x", "/usr/local/bin/x"):
        refused = one.execute("touch", path)
        assert refused.returncode != 0
        assert "Read-only file system" in refused.stderr
    assert one.execute("touch", "/data/.local/x", "/tmp/x").returncode == 0
    assert one.stop(grace_seconds()) == 0


def test_the_health_check_tells_ollama_and_the_sidecar_apart(box: Boxes) -> None:
    one = box(user=12345)
    one.start()
    end = time.monotonic() + 30
    while (done := one.execute(*one.image.health)).returncode and time.monotonic() < end:
        time.sleep(0.2)
    assert (done.returncode, done.stdout) == (0, "Ollama answers; sidecar: ready\n")
    server = next(child for child in one.first.children(recursive=True) if child.name() == "ollama")
    server.suspend()
    try:
        hung = one.execute(*one.image.health)
    finally:
        server.resume()
    assert hung.returncode == 1
    assert hung.stdout.startswith("Ollama does not answer")
    assert one.stop(grace_seconds()) == 0


def test_the_page_is_for_whoever_has_its_token(box: Boxes) -> None:
    one = box(user=12345)
    (line,) = [line for line in one.start("--web", "0.0.0.0:8434") if line.startswith("  page ")]
    query = line.partition("?")[2]
    assert query.startswith("token=")
    url = "http://127.0.0.1:8434/"
    answers = one.inside(
        lambda: [httpx.get(url).status_code, httpx.get(f"{url}?{query}").status_code]
    )
    assert answers == [401, 200]
    assert one.stop(grace_seconds()) == 0


def test_without_a_place_for_blocks_it_serves_as_stock(
    box: Boxes, model_file: Path, tmp_path: Path
) -> None:
    """The volume of an older container, which belonged to root."""
    one = box(user=12345)
    one.volumes["/data/.local"].chmod(0o755)
    lines = one.start()
    assert [line for line in lines if "Ollama serves as stock" in line]
    create(one, model_file)
    assert len(ask(one).tokens) == ANSWER_TOKENS
    done = one.execute(*one.image.health)
    assert (done.returncode, done.stdout[:27]) == (0, "Ollama answers, as stock: t")
    assert one.stop(grace_seconds()) == 0


def test_the_image_has_no_secret_and_no_history(image: Image) -> None:
    own = image.root / "opt/ollama-tiering"
    assert not (own / ".git").exists()
    assert not list(own.rglob("*.key"))
    assert not [path for path in (image.root / "data").rglob("*") if not path.is_dir()]
    assert owners(own) == {0}
    writable = [p for p in own.rglob("*") if not p.is_symlink() and p.stat().st_mode & 0o022]
    assert writable == []
