"""What a tree must do before it is kept: name the devices that the installed llama-server names,
and answer after a kill, from the store, with the bits of the installed one's own cache in memory:
on the CPU, and with each of GGML's libraries for GPUs that has a device here.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ollama_tiering import extras
from ollama_tiering.config import GIB, SOCKET_PATH_MAX_BYTES, count
from ollama_tiering.config.environment import ENV_ENGINE_SOCKET
from ollama_tiering.errors import MissingTool, ResultDiffers, ServiceError
from ollama_tiering.launch import block_service, llama_devices
from ollama_tiering.launch.block_service import BlockService
from ollama_tiering.launch.llama_server import Completed, LlamaServer, serving
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.report import Report

SHAPE: Final = "llama-tiny"
PROMPT_TOKENS: Final = 300
ANSWER_TOKENS: Final = 8
BLOCK_TOKENS: Final = 64
STORE_SECONDS: Final = 60.0
ALL_LAYERS, NO_LAYERS = "99", "0"  # how many are on a GPU
_TEXT: Final = range(1, 90)  # tokens of that model that are text
_OPTIONS: Final = ("-c", "1024", "-np", "1", "-t", "1")
_NO_OWN_CACHE: Final = {"LLAMA_ARG_CACHE_RAM": "0"}
_RESTORE: Final = {"OLLAMA_KV_TIER_GATE": "restore"}  # computing so little may be faster
_SETTINGS: Final = "[sidecar]\ntail_seconds = 0\nmin_tokens = 1\nmin_free_percent = 0\n"
_NOT_KEPT: Final = "the tree is not kept; Ollama goes on as before"
_FOLDER: Final = "kvt-"
_PART: Final = re.compile(r"cpu|\d+")  # what lies in it
_LEFT_SECONDS: Final = 6 * 3600.0
_DEEPEST: Final = len("/kvt-12345678/10/run/s.engine")  # a socket, below the folder of all


def self_test(installed: InstalledOllama, tree: InstalledOllama, report: Report) -> None:
    """ResultDiffers says what is not as it must be; ServiceError, why it could not be tested."""
    with report.stage("self-test: devices"):
        with_gpu = require_same_devices(installed, tree)
    place = _short_place()
    _sweep(place)
    with tempfile.TemporaryDirectory(prefix=_FOLDER, dir=place) as folder:
        with report.stage("self-test: save, kill, restore"):
            require_same_bits(installed, tree, Path(folder, "cpu"))
        require_same_bits_on_gpus(installed, tree, Path(folder), with_gpu, report)


def _short_place() -> Path:
    """Where a socket can lie: TMPDIR may have too long a name."""
    for place in map(Path, (tempfile.gettempdir(), "/tmp", "/dev/shm")):
        short = len(os.fsencode(place)) + _DEEPEST <= SOCKET_PATH_MAX_BYTES
        if short and os.access(place, os.W_OK | os.X_OK):
            return place
    raise ServiceError(
        f"self-test: {tempfile.gettempdir()} is too long a name for a folder with a socket",
        hint="set TMPDIR to a shorter one",
    )


def _sweep(place: Path) -> None:
    """What a self-test of this user left there that was killed, and is long over."""
    for left in place.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            info = left.lstat()
            is_ours = info.st_uid == os.geteuid()
            parts = {path.name for path in left.iterdir()} if is_ours else set()
            is_old = time.time() - info.st_mtime > _LEFT_SECONDS
            if is_ours and is_old and parts and all(_PART.fullmatch(part) for part in parts):
                shutil.rmtree(left, ignore_errors=True)


def require_same_devices(installed: InstalledOllama, tree: InstalledOllama) -> list[Path | None]:
    """With GGML's library for each kind of device in turn, as `ollama` does it. Returns those with
    which there is a GPU; None stands for the libraries beside llama-server.
    """
    found: list[Path | None] = []
    for backend in (None, *llama_devices.backends(installed.lib)):
        one, other = (llama_devices.listed(side.server, backend) for side in (installed, tree))
        if one != other:
            raise ResultDiffers(
                f"self-test: the installed llama-server names the devices {list(one.lines)}, ours "
                f"{list(other.lines)}" + (f" (with {backend})" if backend else ""),
                hint=_NOT_KEPT,
            )
        if one.has_gpu:
            found.append(backend)
    return found


def require_same_bits_on_gpus(
    installed: InstalledOllama,
    tree: InstalledOllama,
    folder: Path,
    backends: Sequence[Path | None],
    report: Report,
) -> None:
    """The installed llama-server need not work with each of them: a GPU may be too old for a later
    CUDA, and `ollama` takes another library then. With one it must, or nothing was tested.
    """
    untested: list[str] = []
    for number, backend in enumerate(backends):
        with report.stage(f"self-test: save, kill, restore with {backend or 'the GPU'}"):
            try:
                why = require_same_bits(
                    installed, tree, folder / str(number), backend, layers=ALL_LAYERS
                )
            except StockFails as error:
                untested.append(f"with {backend or 'the GPU'} {error.message}")
                continue
        if why:
            report.warn(f"models are not tiered with {backend or 'the GPU'}: {why}")
    if backends and len(untested) == len(backends):
        raise ServiceError(
            f"self-test: there is a GPU, and it cannot be tested: {untested[0]}",
            hint="where another program has the GPU's memory, end that and try again",
        )
    for why in untested:
        report.warn(f"not tested: {why}")


class StockFails(ServiceError):
    """The installed llama-server itself does not serve."""


def require_same_bits(
    installed: InstalledOllama,
    tree: InstalledOllama,
    folder: Path,
    backend: Path | None = None,
    *,
    layers: str = NO_LAYERS,
) -> str:
    """`folder` gets a model, a store of its own, and logs. Returns why a model with such
    layers on a GPU is not tiered, if the tree says so: nothing is restored there. On the CPU it
    must be tiered.
    """
    make_model, make_shape = _makers()

    rng = random.Random(30)
    first, other = ([rng.choice(_TEXT) for _ in range(PROMPT_TOKENS)] for _ in range(2))
    one, two = [*first, 3, *other[:20]], [*first, 4, *other[20:40]]
    folder.mkdir(exist_ok=True)
    model, options = folder / "model.gguf", (*_OPTIONS, "-ngl", layers)
    place = "" if layers == NO_LAYERS else f" with {backend or 'the GPU'}"
    make_model(make_shape(SHAPE), model)
    stock_env = {**_NO_OWN_CACHE, **llama_devices.environment(installed.lib, backend)}
    try:
        with serving(installed.server, model, folder / "0.log", stock_env, *options) as stock:
            cold, hit = (stock.complete(prompt, ANSWER_TOKENS) for prompt in (one, two))
    except ServiceError as error:
        cause, _, told = error.message.partition("\n")
        raise StockFails(f"the installed {cause}", hint=_NOT_KEPT, told=told) from None
    socket = folder / "run" / "s"
    service = _service(folder, socket)
    try:
        service.ensure()
        env = {**_NO_OWN_CACHE, **_RESTORE, **llama_devices.environment(tree.lib, backend)}
        env[ENV_ENGINE_SOCKET] = f"{socket}.engine"
        with serving(tree.server, model, folder / "1.log", env, *options) as tiered:
            computed = tiered.complete(one, ANSWER_TOKENS)
            why = _wait_stored(socket, -(-PROMPT_TOKENS // BLOCK_TOKENS), tiered)
            tiered.kill()
        _require_equal(f"computed{place}", cold, computed)
        if why and layers != NO_LAYERS:
            return why
        if why:
            raise ServiceError(f"self-test: the model is not tiered: {why}", hint=_NOT_KEPT)
        with serving(tree.server, model, folder / "2.log", env, *options) as again:
            restored = again.complete(two, ANSWER_TOKENS)
    finally:
        service.stop()
    if not hit.cached_tokens >= PROMPT_TOKENS:
        raise ResultDiffers(
            f"self-test: stock had {count(hit.cached_tokens, 'token')} in memory",
            hint="end other programs, and try again",
        )
    _require_equal(f"restored after a kill{place}", hit, restored)
    return ""


def _makers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """They need an extra, and `up` imports this. MissingTool where a package of it is broken."""
    try:
        from ollama_tiering.models.make import make_model
        from ollama_tiering.models.shapes import make_shape
    except ImportError as error:
        hint = extras.lacking("models").hint
        raise MissingTool(f"self-test: a test model cannot be made: {error}", hint=hint) from None
    return make_model, make_shape


def _service(folder: Path, socket: Path) -> BlockService:
    settings = folder / "settings.toml"
    settings.write_text(_SETTINGS, encoding="utf-8")
    gib = str((64 << 20) / GIB)
    places = ("--ram-dir", folder / "ram", "--local", folder / "local")
    budgets = ("--ram-gb", gib, "--local-gb", gib)
    inherited = dict.fromkeys((name for name in os.environ if name.startswith("OLLAMA_KV_")), None)
    options = ("--config", settings, *places, *budgets)
    return BlockService(socket, folder / "sidecar.log", options, inherited, leashed=True)


def _wait_stored(socket: Path, blocks: int, server: LlamaServer) -> str:
    """Until so much is in the store. Returns why nothing ever will be, if llama-server says so."""
    deadline = time.monotonic() + STORE_SECONDS
    while True:
        answer = block_service.ask(socket)
        if answer and sum(one.blocks for one in answer.namespaces) >= blocks:
            return ""
        if why := [one.reason for one in answer.runners if one.reason] if answer else []:
            return why[0]
        if time.monotonic() > deadline:
            knows = answer and any(one.tiered for one in answer.runners)
            said = "it knows the sidecar" if knows else "it never spoke to the sidecar"
            raise ServiceError(
                f"self-test: llama-server stored nothing within {STORE_SECONDS:.0f} s, and {said}; "
                "last lines of its log:",
                hint=_NOT_KEPT,
                told=server.tail(),
            )
        time.sleep(0.05)


def _require_equal(what: str, wanted: Completed, found: Completed) -> None:
    if wanted.cached_tokens != found.cached_tokens:
        raise ResultDiffers(
            f"self-test: {what}: {found.cached_tokens} tokens of the prompt were not computed, and "
            f"{wanted.cached_tokens} in the installed llama-server",
            hint=_NOT_KEPT,
        )
    if wanted != found:
        raise ResultDiffers(
            f"self-test: {what}: the answer is not the installed llama-server's",
            hint=_NOT_KEPT,
        )
