"""The text of the two unit files. Pure: the plan has decided everything.

The sidecar is restricted as far as possible: it needs its own directories, a Unix socket, loopback
for the metrics, and nothing else. The server is restricted less: options that imply
NoNewPrivileges, or that close devices, would keep CUDA from loading its modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ollama_tiering.config import ENV_CPU_ATTENTION, ENV_ENABLE, ENV_SOCKET, MIB
from ollama_tiering.config.environment import ENV_ENGINE_SOCKET
from ollama_tiering.config.memory_limit import UNIT_HEADROOM_BYTES
from ollama_tiering.errors import UsageError
from ollama_tiering.launch.address import Address
from ollama_tiering.systemd.stock import PROGRAMS
from ollama_tiering.systemd.tree_start import MAKER, OWN, SAID_WHY, SHARED

SIDECAR_UNIT: Final = "ollama-tiering.service"
SERVER_UNIT: Final = "ollama-tiered.service"
WEB_UNIT: Final = "ollama-tiering-web.service"  # wanted by the sidecar's
PATH_UNIT: Final = f"{MAKER}.path"
MAKER_UNIT: Final = f"{MAKER}.service"
WANTED: Final = (PATH_UNIT, MAKER_UNIT)  # by a server's unit with a tree, at each start
DIRECTORY: Final = "ollama-tiering"  # below /run, /var/lib and /var/cache

LOCKED: Final = (  # what every service manager can apply
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "MemoryDenyWriteExecute=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallErrorNumber=EPERM",
)

_WATCHDOG_SECONDS: Final = 300  # a disk that stalls for a minute is weather
_START_SECONDS: Final = 90  # opening the index of a large tier; the server waits for no longer
_STOP_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class TreeService:
    """`stock` is how the installed `ollama` is started, of that version; its tree lies in the
    prefix `place`.
    """

    version: str
    stock: Path
    place: Path
    engine_socket: Path
    program: Path  # `stock` without links
    lib: Path
    cache: Path  # of trees that are made after an update
    proxies: Mapping[str, str] = field(default_factory=dict)  # variables, for the source


@dataclass(frozen=True, slots=True)
class Service:
    """What the units say. Paths are those of the machine on which they will run."""

    python: Path
    package_parent: Path  # the directory that `import ollama_tiering` needs on its path
    socket: Path
    ram_budget_bytes: int
    run_as: str | None  # None: units of a user's own manager
    group: str | None
    writable: tuple[Path, ...]  # tier directories in other places than the default
    home_is_needed: bool  # Python, the package or the models lie in somebody's home
    binary: Path | None  # the server; None: the sidecar only
    address: str
    models: Path | None
    keys: Path | None  # where the server keeps its key and, unless told otherwise, its models
    cpu_attention: str  # exact | stock
    shares_models: bool = False  # with an `ollama.service` beside it
    page: Address | None = None  # where a page of `tiering web` listens
    tree: TreeService | None = None  # the server is an installed Ollama with a tree of links

    @property
    def system(self) -> bool:
        return self.run_as is not None


def sidecar_unit(service: Service) -> str:
    # Blocks in RAM are files on tmpfs, which count as the sidecar's memory. Beyond them: its own
    # 300 MB at most and a page cache to write through.
    high = service.ram_budget_bytes + UNIT_HEADROOM_BYTES
    command = f"{argument(service.python)} -m ollama_tiering"
    lines = [
        "[Unit]",
        "Description=KV block store of the tiered Ollama",
        *((f"Wants={WEB_UNIT}",) if service.page else ()),
        "StartLimitIntervalSec=600",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={command} sidecar --socket {argument(service.socket)}",
        "# Unlike a signal it fails where the settings cannot be read, and says why.",
        f"ExecReload={command} reload --socket {argument(service.socket)}",
        *environment(
            PYTHONPATH=str(service.package_parent),
            PYTHONUNBUFFERED="1",
            PYTHONFAULTHANDLER="1",  # what every thread did when the watchdog struck
        ),
        # For the names of models, which rules in config.toml go by.
        *(environment(OLLAMA_MODELS=str(service.models)) if service.models else ()),
        f"WatchdogSec={_WATCHDOG_SECONDS}",
        f"TimeoutStartSec={_START_SECONDS}",
        f"TimeoutStopSec={_STOP_SECONDS}",
        "Restart=on-failure",
        "RestartSec=2",
        "# A wrong setting stays wrong.",
        "RestartPreventExitStatus=2 10",
        "",
        f"# The RAM tier's budget ({service.ram_budget_bytes // MIB} MiB, files on tmpfs count as "
        "memory) and what the process needs.",
        f"MemoryHigh={high // MIB}M",
        f"MemoryMax={(high + UNIT_HEADROOM_BYTES) // MIB}M",
        "# The cache goes before the server does.",
        "OOMScoreAdjust=200",
        "LimitNOFILE=16384",
        "# A core dump would hold prompts.",
        "LimitCORE=0",
        "UMask=0077",
        "",
        *LOCKED,
    ]
    if service.system:
        lines += _locked_in(service)
    return unit_text([*lines, "", *_install(service)])


def _locked_in(service: Service) -> list[str]:
    """Options that only the system's manager can apply without a user namespace."""
    return [
        "",
        *own_user(service),
        *system_places(),
        f"RuntimeDirectory={DIRECTORY}",
        "RuntimeDirectoryMode=0700",
        "RuntimeDirectoryPreserve=restart",
        "# /dev/shm, where the RAM tier lies, stays writable and is the host's.",
        "ProtectSystem=strict",
        *(f"ReadWritePaths=-{quote(path)}" for path in service.writable),
        hidden_home(service),
        "PrivateTmp=yes",
        "PrivateDevices=yes",
        "ProtectClock=yes",
        "ProtectControlGroups=yes",
        "ProtectHostname=yes",
        "ProtectKernelLogs=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelTunables=yes",
        "ProtectProc=invisible",
        "KeyringMode=private",
        "CapabilityBoundingSet=",
        "AmbientCapabilities=",
        "# Metrics, when switched on, are for this host.",
        "IPAddressDeny=any",
        "IPAddressAllow=localhost",
    ]


def system_places() -> Iterable[str]:
    """Lines that lead to the settings and the state directory of the system's services."""
    yield from environment(XDG_CONFIG_HOME="/etc", XDG_DATA_HOME="%S", XDG_STATE_HOME="%S")
    yield from environment(XDG_RUNTIME_DIR="%t")
    yield f"StateDirectory={DIRECTORY}"
    yield "StateDirectoryMode=0700"


def hidden_home(service: Service) -> str:
    """The line that hides homes as far as it can be."""
    return f"ProtectHome={'read-only' if service.home_is_needed else 'yes'}"


def server_unit(service: Service) -> str:
    assert service.binary is not None
    lines = [
        "[Unit]",
        "Description=Ollama with a KV cache that outlives restarts",
        "After=network-online.target",
        "Wants=network-online.target",
        "# Stopped before the sidecar, which writes down what it stored; started without it too.",
        f"After={SIDECAR_UNIT}",
        f"Wants={SIDECAR_UNIT}",
        *wants(service),
        *_start_limit(service),
        "",
        "[Service]",
        *_start(service),
        *environment(OLLAMA_HOST=service.address),
        *(environment(OLLAMA_MODELS=str(service.models)) if service.models else ()),
        "# Only the server is told to stop: it ends its runners, after they stored their K/V.",
        "KillMode=mixed",
        f"TimeoutStopSec={_STOP_SECONDS}",
        f"Restart={'always' if service.tree else 'on-failure'}",
        "RestartSec=3",
        "LimitCORE=0",
    ]
    if service.system:
        lines += _held_back(service)
    return unit_text([*lines, "", *_install(service)])


def wants(service: Service) -> Iterable[str]:
    """What makes a tree after an update. Each start of the server sees, too, what was updated while
    nobody watched.
    """
    return (f"Wants={name}" for name in WANTED if service.tree)


def _start(service: Service) -> Iterable[str]:
    if service.tree:
        return [*tree_start(service, service.tree, SERVER_UNIT), "SyslogIdentifier=ollama"]
    return _go_start(service)


def _start_limit(service: Service) -> Iterable[str]:
    """It takes the place of an installed one, whose own unit never gives up: an update takes
    minutes in which no start succeeds.
    """
    if service.tree:
        return ["StartLimitIntervalSec=0"]
    return ["StartLimitIntervalSec=600", "StartLimitBurst=5"]


# Of a script: what it asks is found whatever PATH a unit sets.
ALL_PROGRAMS: Final = 'PATH="$PATH:/usr/bin:/bin"'

# Without it a server removes, when it starts, what another one is just fetching into the same
# models directory. With it the weights before an update of a model stay for ever.
_NO_PRUNE: Final = "OLLAMA_NOPRUNE"


def _go_start(service: Service) -> Iterable[str]:
    assert service.binary is not None
    if service.shares_models:
        yield from environment(**{_NO_PRUNE: "1"})
    yield f"ExecStart={argument(service.binary)} serve"
    yield from environment(**go_variables(service))


def go_variables(service: Service) -> dict[str, str]:
    """What makes a server with the Go engine a tiered one."""
    return {
        ENV_ENABLE: "1",
        ENV_SOCKET: str(service.socket),
        ENV_CPU_ATTENTION: service.cpu_attention,
    }


def stock_start(word: str) -> str:
    """The part of a script that starts the installed Ollama, whose path is in `word`; where an
    update has put it into another usual place, that one.
    """
    usual = " ".join(PROGRAMS)
    return (
        f'for stock in "{word}" {usual}; do if [ -x "$stock" ]; then exec "$stock" serve; fi; '
        f'done; exec "{word}" serve'
    )


def _tree_script(service: Service) -> str:
    """Python names the program and the shell starts it, so that Ollama starts even where Python
    does not. Only a tree gets the variables; the first is that of launch/ollama.py.
    """
    kept = f'; export {ENV_CPU_ATTENTION}="${{{ENV_CPU_ATTENTION}-{service.cpu_attention}}}"'
    if service.shares_models:
        kept += f'; export {_NO_PRUNE}="${{{_NO_PRUNE}-1}}"'
    return "; ".join(
        (
            f'tree=$({ALL_PROGRAMS}; PYTHONPATH="$2" exec timeout -k 5 60 "$1" -P -m '
            'ollama_tiering.systemd.tree_start "$3" "$4" "$5")',
            "code=$?",
            "if [ $code = 0 ]",
            f'then export {ENV_ENGINE_SOCKET}="$7"{kept}',
            'exec "$tree" serve',
            "fi",
            f"[ $code = {SAID_WHY} ] || echo 'tiering: Ollama starts as stock: its tree could not "
            "be checked; run `tiering doctor`, then `tiering systemd install` again' >&2",
            stock_start("$6"),
        )
    )


def tree_start(service: Service, tree: TreeService, unit: str) -> Iterable[str]:
    """The lines with which `unit` starts a tree of links, or else the installed Ollama as stock."""
    asked = (service.python, service.package_parent, *tree_words(service, tree))
    words = (_tree_script(service), unit, *asked, tree.stock, tree.engine_socket)
    command = " ".join(argument(word) for word in words)
    yield "# The tree, if it is made for what is installed now; else the installed Ollama as stock."
    yield f"ExecStart=/bin/sh -c {command}"


def tree_words(service: Service, tree: TreeService) -> tuple[Path, str, Path]:
    """What tree_start.py is given."""
    return tree.place, SHARED if service.system else OWN, tree.cache


def _held_back(service: Service) -> list[str]:
    return [
        "",
        *own_user(service),
        "# Blocks that find no room in RAM are written where the sidecar says.",
        f"StateDirectory={DIRECTORY}",
        "StateDirectoryMode=0700",
        "# Nothing that implies NoNewPrivileges or closes devices: CUDA may need nvidia-modprobe.",
        "ProtectSystem=strict",
        *(f"ReadWritePaths=-{quote(p)}" for p in (service.keys, service.models) if p),
        *(f"ReadWritePaths=-{quote(path)}" for path in service.writable),
        "ProtectHome=read-only",
        "PrivateTmp=yes",
        "ProtectControlGroups=yes",
    ]


def own_user(service: Service) -> Iterable[str]:
    """Lines that name the services' user."""
    yield f"User={service.run_as}"
    if service.group:
        yield f"Group={service.group}"


def _install(service: Service) -> list[str]:
    return ["[Install]", f"WantedBy={'multi-user' if service.system else 'default'}.target"]


def environment(**values: str) -> list[str]:
    """Lines that set variables."""
    return [
        f'Environment="{name}={_escaped(value, keep="%" if value[:1] == "%" else "")}"'
        for name, value in values.items()
    ]


def variable_in(unit: str, name: str) -> str:
    """What such a line says in the text of a unit; empty if none does."""
    found = re.search(rf'^Environment="{name}=(.*)"$', unit, re.MULTILINE)
    return re.sub(r'%(%)|\\([\\"])', r"\1\2", found[1]) if found else ""


def quote(word: Path | str) -> str:
    """One word of a unit file. A specifier at its start (`%t/…`) stays one."""
    text = str(word)
    escaped = _escaped(text, keep="%" if text[:1] == "%" else "")
    return f'"{escaped}"' if escaped != text or set(text) & set(" ;'\t") else text


def argument(word: Path | str) -> str:
    """One word of a command, the only place where systemd puts variables in."""
    return quote(word).replace("$", "$$")


def _escaped(text: str, keep: str) -> str:
    if not text.isprintable():
        raise UsageError(f"{text!r} cannot be written into a unit file", hint="name another path")
    head, rest = (text[:2], text[2:]) if keep else ("", text)
    for old, new in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%")):
        rest = rest.replace(old, new)
    return head + rest


def unit_text(lines: Sequence[str]) -> str:
    """A unit file of these lines."""
    return "\n".join(
        ["# Written by `tiering systemd install`; change it with a drop-in.", *lines, ""]
    )
