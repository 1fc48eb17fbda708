"""The patched Ollama as benchmarks need it: reboots, a memcpy beside a restore, a twin without
tiering.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.engines.drivers import Scratch
from ollama_tiering.engines.ollama_driver import OllamaDriver
from ollama_tiering.errors import ServiceError
from ollama_tiering.store import block_store_pb2 as pb

_MEASURE = "OLLAMA_KV_TIER_MEASURE"
_GATE = "OLLAMA_KV_TIER_GATE"
_FLASH = "OLLAMA_FLASH_ATTENTION"
# The runner's load request; if that leaves the choice to llama.cpp, what llama.cpp then logs.
_FLASH_IN_LOG = re.compile(
    rb"FlashAttention:(Enabled|Disabled)\b|Flash Attention was auto, set to (enabled|disabled)\b"
)
_BUILT_FOR = {"native": "this machine", "variants": "several kinds, the best is chosen"}
_ENGINES = {"ollama-go": "Go engine", "llama.cpp": "llama.cpp engine"}  # as a report names them


class BenchDriver(OllamaDriver):
    """Always restores what can be restored, whatever the gate would say. `attention` is `exact` or
    `stock`, as for `tiering up`. `flash` None means as Ollama chooses.
    """

    def __init__(
        self,
        binary: Path,
        scratch: Scratch,
        *,
        ctx: int,
        attention: str,
        flash: bool | None = None,
        threads: int | None = None,
        tiered: bool = True,
    ) -> None:
        env: dict[str, str | None] = {_GATE: "restore", "OLLAMA_NOPRUNE": "1"}
        env |= {config.ENV_CPU_ATTENTION: attention}
        env |= {_FLASH: str(int(flash))} if flash is not None else {}
        super().__init__(binary, scratch, ctx=ctx, threads=threads, env=env, tiered=tiered)
        self._asked_for, self._flash = attention, flash
        self._log_before = 0  # bytes that servers before this one have written

    def _start(self) -> None:
        self._log_before = self._log.stat().st_size if self._log.exists() else 0
        super()._start()

    @property
    def flash(self) -> bool | None:
        """Whether the runner was loaded with flash attention, by the server's log; else what it was
        told to use.
        """
        with self._log.open("rb") as log:
            log.seek(self._log_before)
            found = _FLASH_IN_LOG.findall(log.read())
        return b"".join(found[-1]).lower() == b"enabled" if found else self._flash

    @property
    def engine(self) -> str:
        """Version and engine in words, as a record names them; the engine once it has reported."""
        version = self.name.partition(" (")[0]  # a path says nothing to a reader
        told = self.last_report.engine.partition("/")[0] if self.last_report else ""
        return f"{version}, {_ENGINES.get(told, told)}" if told else version

    @property
    def built_for(self) -> str:
        """The processors it was compiled for, by the name of the build's folder (choose.py)."""
        kinds = set(self._binary.parent.parent.name.split("-"))
        return next((words for kind, words in _BUILT_FOR.items() if kind in kinds), "not told")

    @property
    def attention(self) -> str:
        """Names it: what the runner reports, else what it was told to use."""
        told = self.last_report.cpu_attention if self.last_report else self._asked_for
        if told != "stock":
            return told or "of the GPU"
        ways = {None: "stock", True: "stock with flash attention"}
        return ways.get(self.flash, "stock without flash attention")

    def again(self, *, reboot: bool, measure: bool) -> None:
        """Restarts both; `reboot` empties the RAM tier and the page cache of the local tier."""
        self.stop()
        self._env[_MEASURE] = "1" if measure else None
        if reboot:
            _empty(self._scratch.ram)
            _drop_from_page_cache(self._scratch.blocks)
        self.resume()

    def last_restore(self) -> pb.RestoreReport:
        if self.last_report is None or not self.last_report.HasField("last_restore"):
            raise ServiceError("the runner reported no restore")
        return self.last_report.last_restore


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _drop_from_page_cache(directory: Path) -> None:
    """Drops them: only clean pages can be, so what is not on the disk yet is written first."""
    os.sync()
    for path in directory.rglob("*.kvb"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


class GateDriver(BenchDriver):
    """Restores or recomputes as it is told, or as the gate decides. With `ram` off, blocks are only
    on the disk, and every restore reads past the page cache.
    """

    def __init__(
        self, binary: Path, scratch: Scratch, *, ctx: int, attention: str, ram: bool
    ) -> None:
        super().__init__(binary, scratch, ctx=ctx, attention=attention)
        if not ram:
            self._sidecar = scratch.sidecar(ram_gb=0)

    def with_gate(self, gate: str) -> None:
        self.stop()
        self._env[_GATE] = gate
        self._env["OLLAMA_KV_TIER_MIN_TOKENS"] = "32"  # the gate decides, not the least length
        self.resume()


class Untiered(BenchDriver):
    """A binary with tiering off, or a stock one. It has no sidecar, and nothing to wait for."""

    def __init__(
        self,
        binary: Path,
        scratch: Scratch,
        *,
        ctx: int,
        attention: str,
        flash: bool | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(
            binary,
            scratch,
            ctx=ctx,
            attention=attention,
            flash=flash,
            threads=threads,
            tiered=False,
        )

    def settle(self) -> pb.RunnerReport:
        return pb.RunnerReport()
