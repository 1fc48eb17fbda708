"""Runs the checks: on the CPU, two at a time, and with each of GGML's libraries for GPUs that has a
device here.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ollama_tiering.errors import MissingTool, ServiceError, TieringError
from ollama_tiering.launch.self_test import checks as every
from ollama_tiering.launch.self_test import exact
from ollama_tiering.launch.self_test.checks import ROWS, SelfCheck
from ollama_tiering.launch.self_test.devices import require_same_devices
from ollama_tiering.launch.self_test.pair import ServerPair, StockFails, TooFew
from ollama_tiering.launch.self_test.place import own_folder
from ollama_tiering.launch.self_test.result import CheckResult, write
from ollama_tiering.launch.self_test.store import NOT_KEPT, NotTiered, TrialStore
from ollama_tiering.patchset.llama_server import links
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.llama_server.outcome import SelfTestOutcome
from ollama_tiering.patchset.report import Report

_AT_ONCE: Final = 2
_TRIES: Final = 3  # of a check that a busy machine may fail
_ONE_THREAD: Final = ("-t", "1")
_NO_LAYER: Final = ("-ngl", "0")
_ALL_LAYERS: Final = ("-ngl", "99")


def self_test(
    installed: InstalledOllama, tree: InstalledOllama, is_whole: bool, report: Report
) -> SelfTestOutcome:
    """All checks if `is_whole`, else those of a llama.cpp that is on the list. ResultDiffers says
    what is not as it must be, and where a report lies that can be sent; ServiceError, why it could
    not be tested. A kind of models or settings that fails is refused by its name.
    """
    with report.stage("self-test: devices"):
        with_gpu = require_same_devices(installed, tree)
    wanted: tuple[SelfCheck, ...] = every.ALL if is_whole else every.SHORT
    if (tree.lib / links.EXACT).is_file():
        wanted = (*wanted, *exact.ALL)
    with own_folder() as folder, TrialStore(folder / "store") as store:
        bench = _Bench(installed, tree, folder, store, _models(folder / "models", wanted))
        begun = time.monotonic()
        with report.stage(f"self-test: {', '.join(dict.fromkeys(one.kind for one in wanted))}"):
            results = _run(wanted, bench)
        outcome = _decided(results, installed, time.monotonic() - begun)
        _require_same_bits_on_gpus(bench, wanted[0], with_gpu, report)
    for kind, why in outcome.refused.items():
        report.warn(f"served as stock with this llama.cpp: {kind}: {why}")
    return outcome


_Made = tuple[str, str]  # a model's shape, or an encoder's name, and dtype


@dataclass(frozen=True)
class _Bench:
    """What all checks of a run share."""

    installed: InstalledOllama
    tree: InstalledOllama
    folder: Path
    store: TrialStore
    models: dict[_Made, Path]

    def on_cpu(self, check: SelfCheck) -> ServerPair:
        return self._pair(check, "cpu", _NO_LAYER, None, "")

    def on_gpu(self, check: SelfCheck, backend: Path | None) -> ServerPair:
        where = str(backend or "the GPU")
        return self._pair(check, where, _ALL_LAYERS, backend, f" with {where}")

    def _pair(
        self, check: SelfCheck, where: str, layers: Sequence[str], backend: Path | None, place: str
    ) -> ServerPair:
        encoder = ("--mmproj", str(self.models[_encoder(check)])) if check.encoder else ()
        options = (*_ONE_THREAD, "-c", str(check.context), *layers, *check.options, *encoder)
        own = Path(tempfile.mkdtemp(dir=self.folder))
        model = self.models[check.shape, check.dtype]
        servers = (self.installed, self.tree, model, options, own, self.store)
        return ServerPair(f"{check.name}, {where}, {own.name}", *servers, backend, place)


def _run(wanted: Sequence[SelfCheck], bench: _Bench) -> list[CheckResult]:
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda check: _result(check, bench), wanted))


def _result(check: SelfCheck, bench: _Bench) -> CheckResult:
    begun = time.monotonic()
    for left in reversed(range(_TRIES)):
        error: TieringError | None = None
        not_tiered = ""
        pair = bench.on_cpu(check)
        try:
            check.run(pair)
        except TooFew as failed:
            error = failed
            if left:
                continue
        except NotTiered as refused:
            not_tiered = str(refused)
        except TieringError as failed:
            error = failed
        break
    seconds = time.monotonic() - begun
    logs = sorted(pair.folder.glob("*.log")) if error else []
    tails = [f"{path.name}\n{_tail(path)}" for path in logs]
    return CheckResult(check.name, check.kind, seconds, error, not_tiered, "\n".join(tails))


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-4000:]


def _decided(
    results: Iterable[CheckResult], installed: InstalledOllama, seconds: float
) -> SelfTestOutcome:
    """Which kinds are refused. Raises the error of a check without which nothing is served."""
    results = list(results)
    needed = (ROWS, exact.KIND)
    failed = [one for one in results if one.error or (one.not_tiered and one.kind in needed)]
    where = write(results, installed, seconds) if failed else ""
    for one in failed:
        if one.kind != ROWS:
            continue
        if one.error is None:
            raise ServiceError(
                f"self-test: the model is not tiered: {one.not_tiered}", hint=NOT_KEPT
            )
        if not isinstance(one.error, StockFails):
            one.error.hint = f"{one.error.hint}; a report that can be sent: {where}"
        raise one.error
    refused = {
        one.kind: f"{one.name}: {one.error.message.partition(chr(10))[0]}"
        for one in failed
        if one.error
    }
    not_exact = refused.pop(exact.KIND, "")
    if unknown := [one for one in failed if one.kind == exact.KIND and one.error is None]:
        not_exact = f"{unknown[0].name}: {unknown[0].not_tiered}"
    return SelfTestOutcome(sum(one.passed for one in results), refused, not_exact)


def _require_same_bits_on_gpus(
    bench: _Bench, check: SelfCheck, backends: Sequence[Path | None], report: Report
) -> None:
    """The installed llama-server need not work with each of them: a GPU may be too old for a later
    CUDA, and `ollama` takes another library then. With one it must, or nothing was tested.
    """
    untested: list[str] = []
    for backend in backends:
        with report.stage(f"self-test: save, kill, restore with {backend or 'the GPU'}"):
            try:
                check.run(bench.on_gpu(check, backend))
            except StockFails as error:
                untested.append(f"with {backend or 'the GPU'} {error.message}")
            except NotTiered as refused:
                report.warn(f"models are not tiered with {backend or 'the GPU'}: {refused}")
    if backends and len(untested) == len(backends):
        raise ServiceError(
            f"self-test: there is a GPU, and it cannot be tested: {untested[0]}",
            hint="where another program has the GPU's memory, end that and try again",
        )
    for why in untested:
        report.warn(f"not tested: {why}")


def _models(folder: Path, wanted: Iterable[SelfCheck]) -> dict[_Made, Path]:
    """By shape and type of the weights; of encoders of images, too."""
    make_model, make_shape, make_projector = _makers()
    folder.mkdir()
    made: dict[_Made, Path] = {}
    for check in wanted:
        key = check.shape, check.dtype
        if key not in made:
            made[key] = folder / f"{check.shape}-{check.dtype}.gguf"
            make_model(make_shape(check.shape, dtype=check.dtype), made[key])
        if check.encoder:
            projector = made[_encoder(check)] = folder / f"{_encoder(check)[0]}.gguf"
            make_projector(projector, check.encoder, make_shape(check.shape).embd)
    return made


def _encoder(check: SelfCheck) -> _Made:
    return f"{check.encoder}-{check.shape}", "f16"


def _makers() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """They bring packages that `up` has no use for. MissingTool where one of these is broken."""
    try:
        from ollama_tiering.models.make import make_model
        from ollama_tiering.models.projector import make_projector
        from ollama_tiering.models.shapes import make_shape
    except ImportError as error:
        hint = "install tiering again, with its packages"
        raise MissingTool(f"self-test: a test model cannot be made: {error}", hint=hint) from None
    return make_model, make_shape, make_projector
