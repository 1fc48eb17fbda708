"""From what was asked for to every path, user and file of an installation. Reads, writes nothing.

The Python side is not copied: the units name the interpreter and the package that run this. The
patched binary and its libraries are, since the build tree they come from is a cache.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ollama_tiering
from ollama_tiering import config
from ollama_tiering.errors import UsageError
from ollama_tiering.launch.address import Address
from ollama_tiering.systemd import stock
from ollama_tiering.systemd.manifest import NewFile
from ollama_tiering.systemd.units import (
    DIRECTORY,
    SERVER_UNIT,
    SIDECAR_UNIT,
    Service,
    server_unit,
    sidecar_unit,
)

DEFAULT_USER: Final = "ollama"  # whom upstream's own installer makes
_SYSTEM_UNITS: Final = Path("/etc/systemd/system")
_SYSTEM_PREFIX: Final = Path("/opt/ollama-tiering")
_SYSTEM_CONFIG: Final = Path("/etc") / config.APP_NAME / "config.toml"
_HOMES: Final = (Path("/home"), Path("/root"), Path("/run/user"))


@dataclass(frozen=True, slots=True)
class Request:
    """`root`: as if that directory were `/`, for images and tests."""

    user_mode: bool = False
    root: Path | None = None
    prefix: Path | None = None
    run_as: str | None = None
    binary: Path | None = None  # None: no server, the sidecar only
    models: Path | None = None
    address: Address | None = None

    @property
    def unit_directory(self) -> Path:
        if not self.user_mode:
            return _SYSTEM_UNITS
        home = os.environ.get("XDG_CONFIG_HOME")
        return (Path(home) if home else Path.home() / ".config") / "systemd" / "user"

    @property
    def place(self) -> Path:
        own = Path.home() / ".local/lib/ollama-tiering"
        return self.prefix or (own if self.user_mode else _SYSTEM_PREFIX)

    @property
    def config_file(self) -> Path:
        return config.config_file() if self.user_mode else _SYSTEM_CONFIG


@dataclass(frozen=True, slots=True)
class Plan:
    service: Service
    files: tuple[NewFile, ...]
    units: tuple[str, ...]
    stock: dict[str, str]


def make_plan(request: Request) -> Plan:
    """UsageError where the installation could not work."""
    found = stock.digests(request.root, request.unit_directory)
    service = _service(request, found)
    files = [_unit(request, SIDECAR_UNIT, sidecar_unit(service))]
    units = [SIDECAR_UNIT]
    if request.binary is not None:
        files += [_unit(request, SERVER_UNIT, server_unit(service)), *_engine(request)]
        units.append(SERVER_UNIT)
    return Plan(service, tuple(files), tuple(units), found)


def _service(request: Request, found: dict[str, str]) -> Service:
    settings, socket, writable = _settings(request)
    account = _account(request)
    python, package = Path(sys.executable), Path(ollama_tiering.__file__).parents[1]
    if account and not request.root:
        _require_reachable(account, python, python.resolve(), package / "ollama_tiering")
    beside = Address(port=Address().port + 1) if stock.has_unit(found) else Address()
    needed = (python, python.resolve(), package, *([request.models] if request.models else []))
    name = None if request.user_mode else request.run_as or DEFAULT_USER
    return Service(
        python=python,
        package_parent=package,
        socket=socket,
        ram_budget_bytes=settings.sidecar.ram_budget_bytes,
        run_as=name,
        group=None,
        writable=writable,
        home_is_needed=any(path.is_relative_to(home) for path in needed for home in _HOMES),
        binary=request.place / "bin" / "ollama" if request.binary else None,
        address=str(request.address or beside),
        models=request.models,
        keys=_keys(request, Path(account.pw_dir)) if account else None,
        cpu_attention=settings.server.cpu_attention,
    )


def _settings(request: Request) -> tuple[config.Config, Path, tuple[Path, ...]]:
    """Settings as the service will see them, its socket, and tiers in places of a person's choice.

    Not with the variables of whoever installs: the service will not have them.
    """
    file = request.config_file
    here = request.root / file.relative_to("/") if request.root else file
    with without_variables():
        settings = config.load(path=here if here.is_file() else Path(os.devnull))
        sidecar = settings.sidecar
        own_socket = sidecar.socket_path != config.default_socket_path()
        chosen = {sidecar.local_dir} - {config.default_local_dir()}
        if sidecar.ram_dir is not None:
            chosen.add(sidecar.ram_dir)
    run = Path("%t") if request.user_mode else Path("/run")
    socket = sidecar.socket_path if own_socket else run / DIRECTORY / "sidecar.sock"
    outside = [path for path in sorted(chosen) if not path.is_relative_to("/dev/shm")]
    return settings, socket, tuple(outside)


@contextlib.contextmanager
def without_variables() -> Iterator[None]:
    names = [name for name in os.environ if name.startswith("OLLAMA_KV_")]
    kept = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(kept)


def _account(request: Request) -> pwd.struct_passwd | None:
    if request.user_mode:
        if request.run_as:
            raise UsageError("--run-as is for the system's manager", hint="leave out one of both")
        return None
    name = request.run_as or DEFAULT_USER
    for account in _accounts(request.root):
        if account.pw_name == name:
            return account
    try:
        if not request.root:
            return pwd.getpwnam(name)  # may be known to a directory service only
    except KeyError:
        pass
    raise UsageError(
        f"there is no user {name} to run the services as",
        hint="name one with --run-as, make one (useradd --system --create-home "
        "--home-dir /var/lib/ollama ollama), or install for yourself with --user",
    )


def _accounts(root: Path | None) -> Iterator[pwd.struct_passwd]:
    """Of the passwd file of another root."""
    if root is None:
        return
    with contextlib.suppress(FileNotFoundError):
        for line in (root / "etc/passwd").read_text(encoding="utf-8").splitlines():
            fields = line.split(":")
            if len(fields) == 7 and fields[2].isdigit() and fields[3].isdigit():
                numbers = int(fields[2]), int(fields[3])
                yield pwd.struct_passwd((*fields[:2], *numbers, *fields[4:]))


def _keys(request: Request, home: Path) -> Path:
    """The server's own directory; until it has made that, the home it makes it in."""
    keys = home / ".ollama"
    here = request.root / keys.relative_to("/") if request.root else keys
    return keys if here.is_dir() else home


def _require_reachable(account: pwd.struct_passwd, *paths: Path) -> None:
    groups = set(os.getgrouplist(account.pw_name, account.pw_gid))
    for path in paths:
        for step in (*reversed(path.parents), path):
            if not _may(account.pw_uid, groups, step):
                raise UsageError(
                    f"user {account.pw_name} may not read {step}, which the service needs",
                    hint="put the checkout where every user may read it (such as /opt), and run "
                    "its scripts/tiering systemd install; or use --run-as or --user",
                )


def _may(uid: int, groups: set[int], path: Path) -> bool:
    info = path.stat()
    wanted = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() or os.access(path, os.X_OK) else 0)
    if path.is_dir():
        wanted = stat.S_IXOTH
    shift = 6 if info.st_uid == uid else 3 if info.st_gid in groups else 0
    return uid == 0 or info.st_mode & (wanted << shift) == wanted << shift


def _unit(request: Request, name: str, text: str) -> NewFile:
    return NewFile(request.unit_directory / name, content=text.encode())


def _engine(request: Request) -> Iterator[NewFile]:
    """As upstream's release lays them out: bin/ollama and lib/ollama beside each other."""
    assert request.binary is not None
    binary = request.binary.resolve()
    if not binary.is_file() or not os.access(binary, os.X_OK):
        raise UsageError(f"{request.binary} is not a program", hint="build one: tiering patch")
    yield NewFile(request.place / "bin" / "ollama", 0o755, source=binary)
    for libraries in (binary.parent / "build/lib/ollama", binary.parent.parent / "lib/ollama"):
        if libraries.is_dir():
            yield from _libraries(libraries, request.place / "lib" / "ollama")
            return


def _libraries(source: Path, target: Path) -> Iterator[NewFile]:
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_symlink() and len(path.readlink().parts) == 1:
            yield NewFile(place, link=str(path.readlink()))
        elif path.is_file():
            yield NewFile(place, stat.S_IMODE(path.stat().st_mode) & 0o755, source=path)
