"""llama-server without Ollama: a sidecar beside it, its own arguments, and its own end.

It writes to the terminal by itself. It is in a session of its own, so that Ctrl-C reaches only us,
and we end it before the sidecar, which writes down what it still sends.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.config.environment import ENV_ENGINE_SOCKET, ENV_LLAMA_SERVER
from ollama_tiering.errors import MissingTool, ServiceError, TieringError, UsageError
from ollama_tiering.launch import leash, llama_devices, router_models
from ollama_tiering.launch.block_service import BlockService, ask
from ollama_tiering.launch.ollama import STOP_SECONDS
from ollama_tiering.launch.process import Child, environment, rotate
from ollama_tiering.launch.supervise import Interrupts, Pair
from ollama_tiering.launch.up import Teller
from ollama_tiering.patchset.llama_server import built, installation
from ollama_tiering.patchset.llama_server.link_tree import RECORD, LinkTree
from ollama_tiering.system.files import without_links

PROGRAM = "llama-server"
_BUILT = (
    f"build/bin/{PROGRAM}"  # below <cache>/llama-server/NAME, where scripts/llama_server.py ran
)
_PARTS = (PROGRAM, "libllama-server-impl.so")  # one of them has our lines


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """`engine_socket` is where the sidecar on `socket` listens for engines; None: nowhere.
    `cpu_attention`: as the setting says.
    """

    program: Path
    arguments: tuple[str, ...]
    socket: Path
    engine_socket: Path | None
    cpu_attention: str = "stock"

    @property
    def sidecar_log(self) -> Path:
        return config.state_dir() / "logs" / "sidecar-llama-server.log"


def find_program(named: Path | None) -> Path:
    """The named one, or the latest in the cache: of a tree of links, or built there. MissingTool if
    there is none, UsageError if it has no tiering, or is of a tree for other files than are
    installed.
    """
    named = named or _latest()
    if named is None:
        raise MissingTool(
            f"no {PROGRAM} with the tiering in {config.cache_dir() / PROGRAM}",
            hint=f"name one: --program, or {ENV_LLAMA_SERVER}; docs/llama-server.md says how to "
            "build it; `tiering patch` makes one of an installed Ollama",
        )
    if not named.is_file() or not os.access(named, os.X_OK):
        raise MissingTool(f"{named}: no such program", hint=f"--program names a {PROGRAM}")
    if not _has_tiering(named):
        raise UsageError(
            f"{named} has no tiering: it would never look at the sidecar",
            hint="docs/llama-server.md says how to build one that has",
        )
    if (tree := _tree_of(named)) and not _fits(tree):
        raise UsageError(
            f"{named} was made for other files than {tree.program} has now",
            hint="make it again: tiering patch",
        )
    return named.absolute()


def _latest() -> Path | None:
    """One of a tree by the time at which that was made: the program's own is the release's."""
    made = [(path.lstat().st_mtime, path) for path in built.folder().glob(f"*/{_BUILT}")]
    made += [
        ((tree.folder / RECORD).stat().st_mtime, tree.lib / PROGRAM)
        for tree in built.trees()
        if _fits(tree)
    ]
    return max(made)[1] if made else None


def _tree_of(program: Path) -> LinkTree | None:
    real = without_links(program)
    return next((one for one in built.trees() if without_links(one.lib / PROGRAM) == real), None)


def _fits(tree: LinkTree) -> bool:
    found = installation.at(Path(tree.program))
    return found is not None and tree.fits(found)


def _has_tiering(program: Path) -> bool:
    """Whether it, or its library, reads the variable that names the engine socket."""
    for folder in dict.fromkeys((program.parent, without_links(program).parent)):
        for part in _PARTS:
            path = program if part == PROGRAM else folder / part
            if path.is_file() and ENV_ENGINE_SOCKET.encode() in path.read_bytes():
                return True
    return False


def library_environment(program: Path, report: Teller) -> dict[str, str | None]:
    """As `ollama` starts the one of a tree: beside llama-server GGML finds no library for GPUs. Of
    several that have a device the best is taken, unless the person has named one.
    """
    tree = _tree_of(program)
    if tree is None:
        return {}
    if named := os.environ.get(llama_devices.ENV_BACKEND):
        return llama_devices.environment(tree.lib, Path(named).absolute())
    found = list(_with_gpu(tree, report))
    if not found:
        return llama_devices.environment(tree.lib, None)
    other = f" (or set {llama_devices.ENV_BACKEND}={tree.lib / found[1]})" if found[1:] else ""
    report.say(f"GPUs are used with {tree.lib / found[0]}{other}")
    return llama_devices.environment(tree.lib, found[0])


def _with_gpu(tree: LinkTree, report: Teller) -> Iterator[Path]:
    for backend in sorted(llama_devices.backends(tree.lib), key=_preference):
        try:
            if llama_devices.listed(tree.lib / PROGRAM, backend).has_gpu:
                yield backend
        except TieringError as error:
            report.warn(f"{backend} is left out: {error.message}")


def _preference(backend: Path) -> tuple[bool, list[int]]:
    """As Ollama's: a vendor's own before Vulkan, a later version before an earlier one."""
    numbers = [-int(number) for number in re.findall(r"\d+", str(backend.parent))]
    return "vulkan" in backend.name, numbers


def run(request: PlainRequest, report: Teller) -> int:
    """Until llama-server ends, or a signal asks for an end. Returns its exit code, as a shell gives
    it. If the sidecar does not start, it serves as stock.
    """
    interrupts = Interrupts()
    service = BlockService(request.socket, rotate(request.sidecar_log, report.warn))
    with interrupts.listening():
        shared = ask(request.socket) is not None
        why = _start_sidecar(service, request, interrupts)
        if why:
            report.warn(f"no sidecar, so {PROGRAM} serves as stock, without its cache: {why}")
        elif shared:
            report.say(f"using the sidecar that already runs on {request.socket}")
        try:
            server = _start(request, None if why else request.engine_socket, report)
        except BaseException:
            service.stop(interrupts.insisted)
            raise
        pair = Pair(None if why else service, server, interrupts, report.say_lines)
        try:
            pair.watch()
        except ServiceError:
            if server.running:
                raise
        finally:
            if server.running:  # else its number may be another process's by now
                router_models.ask_to_end(server.pid)
            server.stop(seconds=STOP_SECONDS, hurry=interrupts.insisted)
            pair.stop_sidecar()
    code = server.exit_code or 0
    return 128 - code if code < 0 else code


def _start_sidecar(service: BlockService, request: PlainRequest, interrupts: Interrupts) -> str:
    """Why there is none; empty if there is."""
    if why := config.memory_limit().why_no_sidecar():
        return why
    try:
        service.ensure(interrupts.asked)
        if request.engine_socket is None or not request.engine_socket.is_socket():
            raise ServiceError(
                f"the sidecar on {request.socket} has no engine socket",
                hint="start it anew with a shorter path: sidecar.engine_socket",
            )
    except Exception as error:  # whatever it is, llama-server must start
        why = service.why_not(error)
        service.give_up()
        return why
    except BaseException:
        service.give_up()
        raise
    return ""


def _start(request: PlainRequest, engine_socket: Path | None, report: Teller) -> Child:
    libraries = library_environment(request.program, report)
    socket = str(engine_socket) if engine_socket else None
    process = subprocess.Popen(
        [sys.executable, "-IS", leash.__file__, str(request.program), *request.arguments],
        env=environment(
            {
                ENV_ENGINE_SOCKET: socket,
                config.ENV_CPU_ATTENTION: request.cpu_attention,
                **libraries,
            }
        ),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    return Child(PROGRAM, process, request.sidecar_log)
