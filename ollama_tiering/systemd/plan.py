"""Every path, user and file of an installation, worked out from what was asked for. Reads, writes
nothing.

Python is not copied: the units name the interpreter and the package that run this. What of the
server is ours is copied, because it comes from a cache.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import ollama_tiering
from ollama_tiering import config
from ollama_tiering.config.environment import ENV_CACHE
from ollama_tiering.errors import UsageError
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.service_unit import DROP_IN
from ollama_tiering.patchset.llama_server import installation, links
from ollama_tiering.sidecar.engine import listener
from ollama_tiering.systemd import access, in_place, server_files, stock, stock_unit
from ollama_tiering.systemd.drop_in import drop_in
from ollama_tiering.systemd.manifest import Installed, NewFile
from ollama_tiering.systemd.patch_units import maker_unit, path_unit
from ollama_tiering.systemd.tree_start import TREE
from ollama_tiering.systemd.units import (
    DIRECTORY,
    MAKER_UNIT,
    PATH_UNIT,
    SERVER_UNIT,
    SIDECAR_UNIT,
    WANTED,
    WEB_UNIT,
    Service,
    TreeService,
    server_unit,
    sidecar_unit,
    variable_in,
)
from ollama_tiering.systemd.web_unit import web_unit

DEFAULT_USER: Final = "ollama"  # whom upstream's own installer makes
_SYSTEM_UNITS: Final = Path("/etc/systemd/system")
_SYSTEM_PREFIX: Final = Path("/opt/ollama-tiering")
_SYSTEM_CACHE: Final = Path("/var/cache")
_SYSTEM_CONFIG: Final = Path("/etc") / config.APP_NAME / "config.toml"


@dataclass(frozen=True, slots=True)
class InstallRequest:
    """`root`: that directory is treated as `/`, for images and tests."""

    user_mode: bool = False
    root: Path | None = None
    prefix: Path | None = None
    run_as: str | None = None
    binary: Path | None = None  # None: no server, the sidecar only
    models: Path | None = None
    address: Address | None = None
    replaces: bool = False  # the server of `ollama.service`, whose unit stays
    page: Address | None = None  # of `tiering web`; None: as before
    without_page: bool = False

    @property
    def unit_directory(self) -> Path:
        if not self.user_mode:
            return _SYSTEM_UNITS
        home = os.environ.get("XDG_CONFIG_HOME")
        return (Path(home) if home else config.home() / ".config") / "systemd" / "user"

    @property
    def place(self) -> Path:
        own = config.home() / ".local/lib/ollama-tiering"
        return self.prefix or (own if self.user_mode else _SYSTEM_PREFIX)

    @property
    def cache(self) -> Path:
        """Where the services' user makes trees after an update, as the installed unit says."""
        if self.user_mode:
            return _user_cache()
        unit = Installed(self.place, self.root).at(self.unit_directory / MAKER_UNIT)
        text = unit.read_text(encoding="utf-8", errors="replace") if unit.is_file() else ""
        return Path(variable_in(text, ENV_CACHE) or _SYSTEM_CACHE / DIRECTORY)

    @property
    def config_file(self) -> Path:
        return config.config_file() if self.user_mode else _SYSTEM_CONFIG


@dataclass(frozen=True, slots=True)
class InstallPlan:
    service: Service
    files: tuple[NewFile, ...]
    units: tuple[str, ...]  # that are enabled
    wanted: tuple[str, ...]  # by the server's, which starts them
    stock: dict[str, str]
    changeable: str = ""  # who could change what the services import, and the cure
    replaced: dict[str, str] = field(default_factory=dict)  # program -> SHA-256


def make_plan(request: InstallRequest) -> InstallPlan:
    """UsageError if the installation could not work."""
    stock_digests = stock.digests(request.root, request.unit_directory)
    theirs = in_place.unit_of(request) if request.replaces else None
    if theirs:
        request = in_place.adopted(request, theirs)
    account = _account(request)
    service = _service(request, account, stock_digests)
    files = [_unit(request, SIDECAR_UNIT, sidecar_unit(service))]
    if service.page:
        files.append(_unit(request, WEB_UNIT, web_unit(service, service.page)))
    units = [SIDECAR_UNIT]
    replaced: dict[str, str] = {}
    if theirs and request.binary is not None:
        service = replace(service, shares_models=False)
        service, engine = _with_server(request, request.binary, account, service)
        service, replaced = in_place.fitted(request, service, theirs, account)
        text = drop_in(service, theirs, *replaced.values())
        files += [*engine, _unit(request, str(DROP_IN), text)]  # the last: it needs the others
    elif request.binary is not None:
        service, engine = _with_server(request, request.binary, account, service)
        files += [_unit(request, SERVER_UNIT, server_unit(service)), *engine]
        units.append(SERVER_UNIT)
    changeable = _changeable(account) if account and not request.root else ""
    wanted = (*(WANTED if service.tree else ()), *((WEB_UNIT,) if service.page else ()))
    given = (service, tuple(files), tuple(units), wanted, stock_digests)
    return InstallPlan(*given, changeable, replaced)


def _changeable(account: pwd.struct_passwd) -> str:
    """Python looks for modules in the package's folder first, then in its own."""
    package = Path(ollama_tiering.__file__).parent
    return access.why_changeable(account, package, Path(sys.executable), Path(sys.prefix))


def _with_server(
    request: InstallRequest, binary: Path, account: pwd.struct_passwd | None, service: Service
) -> tuple[Service, Iterator[NewFile]]:
    """The service with its server, and the server's files."""
    here = account if not request.root else None  # what can be looked at on this machine
    theirs = stock_unit.read(request.root, request.unit_directory, user_mode=request.user_mode)
    patched = server_files.tree_with(binary)
    if patched is None:
        if here:
            access.require_own(here, request.place / "bin")
        service = replace(service, binary=request.place / "bin" / "ollama")
        return service, server_files.go_files(binary, request.place)
    tree, ollama = patched
    start = installation.usual_name(ollama.program, on_path=request.user_mode)
    if here:
        cure = "install Ollama where every user may read it (such as /usr/local)"
        access.require_reachable(here, start, ollama.program, ollama.server, cure=cure)
        access.require_own(here, start, ollama.program, ollama.lib, request.place / TREE)
    tree_folder = request.place / TREE
    service = replace(
        service,
        binary=tree_folder / links.PROGRAM,
        tree=TreeService(
            version=tree.version,
            stock=start,
            place=request.place,
            engine_socket=_engine_socket(request, service),
            program=ollama.program,
            lib=ollama.lib,
            cache=_maker_cache(account),
            proxies=theirs.proxies if theirs else {},
        ),
    )
    assert service.tree is not None
    makers = (
        _unit(request, PATH_UNIT, path_unit(service.tree)),
        _unit(request, MAKER_UNIT, maker_unit(service, service.tree)),
    )
    files = server_files.tree_files(tree, ollama, start, tree_folder)
    return service, itertools.chain(makers, files)


def _maker_cache(account: pwd.struct_passwd | None) -> Path:
    """A folder for each user: systemd gives an existing one, and the trees in it, to another."""
    if account is None:
        return Path("%C") / DIRECTORY
    return _SYSTEM_CACHE / f"{DIRECTORY}-{account.pw_uid}"


def _engine_socket(request: InstallRequest, service: Service) -> Path:
    """Says where the sidecar on the service's socket listens for llama-server."""
    settings, _, _ = _settings(request)
    socket = listener.place(replace(settings.sidecar, socket_path=service.socket))
    if socket is None:
        raise UsageError(
            f"the name of a socket beside {service.socket} is too long",
            hint=f"name a shorter sidecar.engine_socket in {request.config_file}",
        )
    return socket


def _service(
    request: InstallRequest, account: pwd.struct_passwd | None, stock_digests: dict[str, str]
) -> Service:
    settings, socket, writable = _settings(request)
    python, package = Path(sys.executable), Path(ollama_tiering.__file__).parents[1]
    if account and not request.root:
        needed = (python, python.resolve(), package / "ollama_tiering")
        access.require_reachable(
            account,
            *needed,
            cure="install the Debian package, or put a checkout where every user may read it "
            "(such as /opt) and run its scripts/tiering systemd install",
        )
    beside = Address(port=Address().port + 1) if stock.has_unit(stock_digests) else Address()
    # The sidecar reads the files of models, too; without a word they lie in the server's home.
    models = request.models or (Path(account.pw_dir) if account else None)
    read = (python, python.resolve(), package, *([models] if models else []))
    name = None if request.user_mode else request.run_as or DEFAULT_USER
    return Service(
        python=python,
        package_parent=package,
        socket=socket,
        ram_budget_bytes=settings.sidecar.ram_budget_bytes,
        run_as=name,
        group=None,
        writable=writable,
        home_is_needed=any(path.is_relative_to(home) for path in read for home in access.HOMES),
        binary=None,
        address=str(request.address or beside),
        models=request.models,
        shares_models=_shares_models(request, stock_digests),
        keys=_keys(request, Path(account.pw_dir)) if account else None,
        cpu_attention=settings.server.cpu_attention,
        page=request.page,
    )


def _shares_models(request: InstallRequest, stock_digests: dict[str, str]) -> bool:
    """Whether an `ollama.service` that runs beside ours has the same models directory: the user is
    the same, or the directory is named. Where ours has stock's port, it has its place.
    """
    in_its_place = request.address is not None and request.address.port == Address().port
    same_user = not request.user_mode and (request.run_as or DEFAULT_USER) == DEFAULT_USER
    beside = stock.has_unit(stock_digests) and not in_its_place
    return beside and (same_user or request.models is not None)


def _settings(request: InstallRequest) -> tuple[config.Config, Path, tuple[Path, ...]]:
    """The settings as the service will see them, its socket, and tiers in directories that a person
    chose. The variables of whoever installs are ignored, because the service will not have them.
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


def _account(request: InstallRequest) -> pwd.struct_passwd | None:
    if request.user_mode:
        if request.run_as:
            raise UsageError(
                "--run-as works only for the system's service manager",
                hint="give --run-as or --user, not both",
            )
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
    """Reads the passwd file of another root."""
    if root is None:
        return
    with contextlib.suppress(FileNotFoundError):
        for line in (root / "etc/passwd").read_text(encoding="utf-8").splitlines():
            fields = line.split(":")
            if len(fields) == 7 and fields[2].isdigit() and fields[3].isdigit():
                numbers = int(fields[2]), int(fields[3])
                yield pwd.struct_passwd((*fields[:2], *numbers, *fields[4:]))


def _keys(request: InstallRequest, home: Path) -> Path:
    """The server's own directory of keys; until it exists, the home in which
    the server makes it.
    """
    keys = home / ".ollama"
    here = request.root / keys.relative_to("/") if request.root else keys
    return keys if here.is_dir() else home


def _user_cache() -> Path:
    """As the user's service manager has it: `%C` in a unit."""
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else config.home() / ".cache") / DIRECTORY


def _unit(request: InstallRequest, name: str, text: str) -> NewFile:
    return NewFile(request.unit_directory / name, content=text.encode())
