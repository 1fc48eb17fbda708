"""The text of the two unit files. Pure: everything is decided in the plan.

The sidecar is locked in as far as it goes: it needs its own directories, a Unix socket, loopback
for the metrics and nothing else. The server is held back less: whatever switches on
NoNewPrivileges, or closes devices, would keep CUDA from loading its modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.config import MIB
from ollama_tiering.errors import UsageError

SIDECAR_UNIT: Final = "ollama-tiering.service"
SERVER_UNIT: Final = "ollama-tiered.service"
DIRECTORY: Final = "ollama-tiering"  # below /run and /var/lib

# Blocks in RAM are files on tmpfs, which count as the sidecar's memory. Beyond them: its own 300 MB
# at most and a page cache to write through.
_HEADROOM_BYTES: Final = 1 << 30
_WATCHDOG_SECONDS: Final = 300  # a disk that stalls for a minute is weather
_START_SECONDS: Final = 90  # opening the index of a large tier; the server waits for no longer
_STOP_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class Service:
    """What the units say. Paths are those of the machine they will run on."""

    python: Path
    package_parent: Path  # the directory that `import ollama_tiering` needs on its path
    socket: Path
    ram_budget_bytes: int
    run_as: str | None  # None: units of a user's own manager
    group: str | None
    writable: tuple[Path, ...]  # tier directories in other places than the default
    home_is_needed: bool  # Python, the package or the models lie in somebody's home
    binary: Path | None
    address: str
    models: Path | None
    keys: Path | None  # where the server keeps its key and, unless told otherwise, its models
    cpu_attention: str  # exact | stock

    @property
    def system(self) -> bool:
        return self.run_as is not None


def sidecar_unit(service: Service) -> str:
    high = service.ram_budget_bytes + _HEADROOM_BYTES
    lines = [
        "[Unit]",
        "Description=KV block store of the tiered Ollama",
        "StartLimitIntervalSec=600",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={quote(service.python)} -m ollama_tiering sidecar "
        f"--socket {quote(service.socket)}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        *_environment(
            PYTHONPATH=str(service.package_parent),
            PYTHONUNBUFFERED="1",
            PYTHONFAULTHANDLER="1",  # what every thread did when the watchdog struck
        ),
        # For the names of models, which rules in config.toml go by.
        *(_environment(OLLAMA_MODELS=str(service.models)) if service.models else ()),
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
        f"MemoryMax={(high + _HEADROOM_BYTES) // MIB}M",
        "# The cache goes before the server does.",
        "OOMScoreAdjust=200",
        "LimitNOFILE=16384",
        "# A core dump would hold prompts.",
        "LimitCORE=0",
        "UMask=0077",
        "",
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
    ]
    if service.system:
        lines += _locked_in(service)
    return _text([*lines, "", *_install(service)])


def _locked_in(service: Service) -> list[str]:
    """What only the system's manager can do without a user namespace."""
    return [
        "",
        *_user(service),
        *_environment(XDG_CONFIG_HOME="/etc", XDG_DATA_HOME="%S", XDG_STATE_HOME="%S"),
        *_environment(XDG_RUNTIME_DIR="%t"),
        f"RuntimeDirectory={DIRECTORY}",
        "RuntimeDirectoryMode=0700",
        "RuntimeDirectoryPreserve=restart",
        f"StateDirectory={DIRECTORY}",
        "StateDirectoryMode=0700",
        "# /dev/shm, where the RAM tier lies, stays writable and is the host's.",
        "ProtectSystem=strict",
        *(f"ReadWritePaths=-{quote(path)}" for path in service.writable),
        f"ProtectHome={'read-only' if service.home_is_needed else 'yes'}",
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
        "StartLimitIntervalSec=600",
        "StartLimitBurst=5",
        "",
        "[Service]",
        f"ExecStart={quote(service.binary)} serve",
        *_environment(
            OLLAMA_HOST=service.address,
            OLLAMA_KV_TIERING="1",
            OLLAMA_KV_TIER_SOCKET=str(service.socket),
            OLLAMA_CPU_ATTENTION=service.cpu_attention,
            # A stock Ollama may be fetching into the same models directory.
            OLLAMA_NOPRUNE="1",
        ),
        *(_environment(OLLAMA_MODELS=str(service.models)) if service.models else ()),
        "# Only the server is told to stop: it has its runners store their K/V, then ends them.",
        "KillMode=mixed",
        f"TimeoutStopSec={_STOP_SECONDS}",
        "Restart=on-failure",
        "RestartSec=3",
        "LimitCORE=0",
    ]
    if service.system:
        lines += _held_back(service)
    return _text([*lines, "", *_install(service)])


def _held_back(service: Service) -> list[str]:
    return [
        "",
        *_user(service),
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


def _user(service: Service) -> Iterable[str]:
    yield f"User={service.run_as}"
    if service.group:
        yield f"Group={service.group}"


def _install(service: Service) -> list[str]:
    return ["[Install]", f"WantedBy={'multi-user' if service.system else 'default'}.target"]


def _environment(**values: str) -> list[str]:
    return [
        f'Environment="{name}={_escaped(value, keep="%" if value[:1] == "%" else "")}"'
        for name, value in values.items()
    ]


def quote(path: Path) -> str:
    """One word of a unit file; a specifier at its start (`%t/…`) stays one."""
    text = str(path)
    escaped = _escaped(text, keep="%" if text[:1] == "%" else "").replace("$", "$$")
    return f'"{escaped}"' if escaped != text or set(text) & set(" ;'\t") else text


def _escaped(text: str, keep: str) -> str:
    if not text.isprintable():
        raise UsageError(f"{text!r} cannot be written into a unit file", hint="name another path")
    head, rest = (text[:2], text[2:]) if keep else ("", text)
    for old, new in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%")):
        rest = rest.replace(old, new)
    return head + rest


def _text(lines: Sequence[str]) -> str:
    return "\n".join(
        ["# Written by `tiering systemd install`; change it with a drop-in.", *lines, ""]
    )
