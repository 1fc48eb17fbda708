"""All of `tiering up`, from an address to a server that is watched until its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ollama_tiering import __version__, config
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import block_service, engine_socket, ollama
from ollama_tiering.launch.address import Address, Found, Occupant, beside, who_listens
from ollama_tiering.launch.block_service import BlockService
from ollama_tiering.launch.build_watch import BuildWatch
from ollama_tiering.launch.idle_recheck import IdleRecheck
from ollama_tiering.launch.news import RunnerNews
from ollama_tiering.launch.process import rotate
from ollama_tiering.launch.running_up import RunningUp, UpLock, records
from ollama_tiering.launch.servers import Servers
from ollama_tiering.launch.service_unit import (
    SYSTEM_UNITS,
    has_system_unit,
    stop_command,
    unit_name,
    way_in,
)
from ollama_tiering.launch.supervise import Interrupts, Pair
from ollama_tiering.launch.unharmed import unharmed
from ollama_tiering.patchset.llama_server import link_tree
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.protocol.pb import administration_pb2 as adm

_RETIRE_SECONDS = 30.0


class Teller(Protocol):
    """`ollama_tiering.patchset.report.Report` is one."""

    def say(self, text: str) -> None: ...

    def say_lines(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def stage(self, text: str) -> contextlib.AbstractContextManager[Callable[[str], None]]: ...


@dataclass(frozen=True, slots=True)
class UpRequest:
    address: Address
    socket: Path
    models: Path | None = None
    cpu_attention: str | None = "exact"  # None: as the binary itself
    why_stock: str = ""  # a reason not even to try the sidecar
    llama_server: bool = False  # the server is an Ollama that runs llama-server
    engine_socket: Path | None = None  # the sidecar's, for that one
    recheck_seconds: float = 0.0  # how often a conversation is computed again; 0: never
    idle_seconds: float = 120.0  # ... once nobody has asked for so long
    installed: InstalledOllama | None = None  # that Ollama, whose files may change meanwhile

    @property
    def models_dir(self) -> Path:
        """Where the server looks for models, as in v0.16.3 envconfig/config.go `Models`."""
        named = os.environ.get(config.ENV_MODELS, "").strip().strip("\"'")
        return (self.models or config.expanded(named or "~/.ollama/models")).absolute()

    def environment(self, *, tiered: bool) -> dict[str, str | None]:
        """What the server gets in addition to our own variables."""
        if self.llama_server:
            socket = self.engine_socket if tiered else None
            return ollama.llama_server_environment(
                self.address, socket, self.models, self.cpu_attention
            )
        socket = self.socket if tiered else None
        return ollama.server_environment(self.address, socket, self.models, self.cpu_attention)

    @property
    def server_log(self) -> Path:
        return config.state_dir() / "logs" / f"ollama-{self.address.port}.log"

    @property
    def patch_log(self) -> Path:
        return config.state_dir() / "logs" / f"patch-{self.address.port}.log"

    @property
    def sidecar_log(self) -> Path:
        return config.state_dir() / "logs" / f"sidecar-{self.address.port}.log"


def require_free(address: Address) -> None:
    """ServiceError that says who has the port, and what to do about it."""
    found = who_listens(address)
    if found.occupant is Occupant.NOBODY:
        return
    other = f"run beside it: tiering up --host {beside(address)}"
    unit = f", {name}" if found.pid and (name := unit_name(found.pid)) else ""
    by = f" (process {found.pid}{unit})" if found.pid else ""
    if found.occupant is Occupant.OLLAMA:
        instead = f"; or {way}" if (way := way_in(found.pid)) else ""
        raise ServiceError(
            f"another Ollama {found.detail} listens on {address} already{by}",
            hint=f"stop it ({_how_to_stop(found)}), or {other}{instead}",
        )
    name = f", {found.detail}" if found.detail else ""
    raise ServiceError(
        f"a process that is not Ollama listens on {address}{by}{name}",
        hint=f"stop that process, or {other}",
    )


def _how_to_stop(found: Found) -> str:
    """By its unit, if it runs in one. This user may not be allowed to see whose process it is."""
    if found.pid and (command := stop_command(found.pid)):
        return command
    if not found.pid and ((SYSTEM_UNITS / "ollama.service").exists() or has_system_unit()):
        return "sudo systemctl stop ollama"
    return f"kill {found.pid}" if found.pid else "quit the app, or end `ollama serve`"


def run(
    request: UpRequest,
    binary: Path,
    held: UpLock,
    report: Teller,
    ready: Callable[[RunningUp], None],
) -> None:
    """Starts sidecar and server, watches and stops them. Returns after an orderly end that was
    asked for. `ready` is called once the server answers. If the sidecar does not start, or would
    not hear llama-server, the server runs as stock.
    """
    interrupts = Interrupts()
    # The same models directory as the server's: rules are for models by name.
    place = {config.ENV_MODELS: str(request.models)} if request.models else None
    if held.lacks:
        report.warn(held.lacks)
    log = rotate(request.sidecar_log, report.warn)
    service = BlockService(request.socket, log, env=place)
    record = replace(first_record(request), binary=str(binary), server_log=str(request.server_log))

    pair: Pair | None = None

    def note() -> None:
        if pair is not None:
            record.binary, record.server_pid = str(servers.binary), pair.server.pid
        record.sidecar_pid = service.child.pid if service.child else 0
        shared = before and not service.child
        record.sidecar_log = _log_of_shared(request.socket) if shared else str(service.log)
        held.write(record)

    servers = Servers(request, binary, report, interrupts.asked)
    with interrupts.listening():
        before = _start_sidecar(request, service, held.left, interrupts, report)
        try:
            if before and service.child is None:
                _say_shared(request.socket, before.version, report)
            note()
            if request.cpu_attention == "exact" and _has_exact(request, binary):
                report.say(
                    "models on the CPU use our exact attention (off with --cpu-attention stock, or "
                    f"server.cpu_attention in {config.config_file()})"
                )
            server = servers.first(tiered=before is not None)
        except BaseException:
            service.stop(interrupts.insisted)
            raise
        record.ready = True
        watch = BuildWatch(lambda: servers.binary, report.warn)
        news: Callable[[], None] = _nothing
        again = IdleRecheck(request.socket, request.recheck_seconds, request.idle_seconds)
        if before:
            serving = request.socket, report.say, lambda: record.server_pid
            news = RunnerNews(*serving, request.models_dir)

        def look() -> None:
            watch()
            news()
            if before:
                again()

        pair = Pair(service if before else None, server, interrupts, report.say_lines, note, look)
        pair.successor = lambda: servers.successor(pair)
        note()
        with contextlib.closing(servers), _stopping(pair, before), contextlib.closing(again):
            with unharmed(report.warn, "Ollama serves, but not all is said of it"):
                ready(record)
            pair.watch()
            stored = "stores what its models hold " if before else ""
            report.say(f"stopping: Ollama {stored}(Ctrl-C again: at once)")


def _has_exact(request: UpRequest, binary: Path) -> bool:
    """Also true of the Go engine, which has it wherever it runs."""
    if not request.llama_server:
        return True
    tree = link_tree.of_binary(binary)
    return tree is not None and tree.runs_exact


def first_record(request: UpRequest) -> RunningUp:
    """What is known before anything was started."""
    return RunningUp(
        pid=os.getpid(),
        url=request.address.url,
        socket=str(request.socket),
        models=str(request.models_dir),
        started=time.time(),
    )


def _log_of_shared(socket: Path) -> str:
    """The log of a sidecar that another `tiering up` started; empty if none did."""
    owner = block_service.owner(socket)
    logs = [r.sidecar_log for r in records() if owner and r.sidecar_pid == owner]
    return logs[0] if logs else ""


def _nothing() -> None:
    pass


def _start_sidecar(
    request: UpRequest,
    service: BlockService,
    left: RunningUp | None,
    interrupts: Interrupts,
    report: Teller,
) -> adm.StatResponse | None:
    """What the sidecar says of itself; or None, and cause and cure in one line, if it does not
    start.
    """
    why, cause = request.why_stock, "" if request.installed else "no sidecar, so "
    why = why or config.memory_limit().why_no_sidecar()
    if not why:
        try:
            _retire_orphan(request.socket, left, report)
            with report.stage("starting the sidecar"):
                answer = service.ensure(interrupts.asked)
            if request.llama_server:
                why = engine_socket.why_unheard(request.engine_socket, request.socket)
            if not why:
                return answer
            cause = ""
            service.give_up()
        except Exception as error:  # whatever it is, Ollama must start
            why, cause = f"{service.why_not(error)}; log: {request.sidecar_log}", "no sidecar, so "
            service.give_up()
        except BaseException:
            service.give_up()
            raise
    report.warn(f"{cause}Ollama serves as stock, without its cache: {why}")
    return None


@contextlib.contextmanager
def _stopping(pair: Pair, before: adm.StatResponse | None) -> Iterator[None]:
    """Stops both processes, however the body ends, and says what was stored meanwhile."""
    try:
        yield
    finally:
        pair.stop_server()
        if before and pair.service and (after := block_service.ask(pair.service.socket)):
            # the counters of a sidecar that was started again begin at 0
            again = after.put_blocks < before.put_blocks
            new = after.put_blocks - (0 if again else before.put_blocks)
            size = config.format_size(after.put_bytes - (0 if again else before.put_bytes))
            were = config.agreeing(new, "was")
            pair.say(f"Ollama stopped; {config.count(new, 'block')} ({size}) {were} stored")
        else:
            pair.say("Ollama stopped")
        pair.stop_sidecar()


def _say_shared(socket: Path, version: str, report: Teller) -> None:
    pid = block_service.owner(socket)
    report.say(
        f"using the sidecar that already runs on {socket} (process {pid}); it is not stopped"
    )
    if version != __version__:
        report.warn(
            f"that sidecar has version {version}, this is {__version__}: stop it when you can"
        )


def _retire_orphan(socket: Path, left: RunningUp | None, report: Teller) -> None:
    """A `tiering up` that was killed leaves its sidecar behind, and nobody else
    would ever stop it.
    """
    if not left or not left.sidecar_pid or left.sidecar_pid != block_service.owner(socket):
        return
    if left.socket != str(socket) or not block_service.ask(socket):
        return
    report.say(f"stopping the sidecar that a killed `tiering up` left (process {left.sidecar_pid})")
    with contextlib.suppress(ProcessLookupError):
        os.kill(left.sidecar_pid, signal.SIGTERM)
    deadline = time.monotonic() + _RETIRE_SECONDS
    while socket.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
