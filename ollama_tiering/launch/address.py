"""The address of Ollama, and which process has it already."""

from __future__ import annotations

import enum
import ipaddress
import os
import socket
from dataclasses import dataclass, replace

import httpx
import psutil

from ollama_tiering.errors import UsageError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 11434
PAGE_PORT = 8434  # of `tiering web`
_PROBE_SECONDS = 2.0
_PORTS_TRIED = 100
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port. A server on `0.0.0.0` listens everywhere and is asked at
    the loopback address.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        host = _ANY_ADDRESS.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach a server there."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> Address:
    """Accepts what v0.16.3 envconfig/config.go `Host` does, without paths and TLS: `host`, `:port`,
    `host:port`, `http://host:port`.
    """
    value = text.strip().strip("\"'").rstrip("/")
    scheme, separator, rest = value.rpartition("://")
    if separator and scheme != "http":
        raise UsageError(
            f"{text!r}: a server listens on plain http",
            hint=f"write it like 127.0.0.1:{default_port}",
        )
    if rest.startswith("["):
        host, _, port = rest[1:].partition("]")
        port = port.removeprefix(":")
    elif rest.count(":") > 1:
        host, port = rest, ""
    else:
        host, _, port = rest.partition(":")
    default = 80 if separator else default_port
    number = int(port) if port.isascii() and port.isdigit() else -1 if port else default
    if "/" in rest or not 0 < number < 65536:
        raise UsageError(
            f"{text!r} is not an address", hint=f"write it like 127.0.0.1:{default_port}"
        )
    return Address(host or DEFAULT_HOST, number)


def address_of(named: str | None = None) -> Address:
    """The given address, else that of OLLAMA_HOST."""
    return parse_address(named or os.environ.get("OLLAMA_HOST") or "")


def free_address() -> Address:
    """A loopback port that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind((DEFAULT_HOST, 0))
        return Address(DEFAULT_HOST, probe.getsockname()[1])


def beside(address: Address) -> Address:
    """The next port that is free, for a second server; any free one if none is near."""
    for port in range(address.port + 1, min(address.port + 1 + _PORTS_TRIED, 65536)):
        other = replace(address, port=port)
        try:
            if _can_bind(other):
                return other
        except UsageError:  # a port that this user may not take
            continue
    return replace(address, port=free_address().port)


class Occupant(enum.Enum):
    NOBODY = "nobody"
    OLLAMA = "ollama"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Found:
    """Who listens. `detail` is Ollama's version, or what is known of the other process."""

    occupant: Occupant
    detail: str = ""
    pid: int | None = None


def who_listens(address: Address) -> Found:
    """Asks whatever listens on the port, then asks the system for its process."""
    if _can_bind(address):
        return Found(Occupant.NOBODY)
    pid, program = _process_at(address.port)
    try:
        with httpx.Client(trust_env=False, timeout=_PROBE_SECONDS) as client:
            answer = client.get(f"{address.url}/api/version")
        if answer.status_code == httpx.codes.OK and (version := _version(answer)):
            return Found(Occupant.OLLAMA, version, pid)
    except httpx.HTTPError:
        pass
    return Found(Occupant.OTHER, program, pid)


def _version(answer: httpx.Response) -> str:
    try:
        content = answer.json()
    except ValueError:
        return ""
    return str(content.get("version", "")) if isinstance(content, dict) else ""


def _can_bind(address: Address) -> bool:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        # as Go's net.Listen: a port in TIME_WAIT is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except socket.gaierror:
            raise UsageError(
                f"{address.host}: no such host here", hint="--host names an address of this machine"
            ) from None
        except OSError as error:
            if error.errno in (98, 48):  # EADDRINUSE on Linux, macOS
                return False
            raise UsageError(
                f"cannot listen on {address}: {error.strerror}",
                hint="--host takes an address of this machine, and a port from 1024 on",
            ) from None
    return True


def _process_at(port: int) -> tuple[int | None, str]:
    """Process id and name of the listener, if this user may see them."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.laddr:
                continue
            if connection.laddr.port == port and connection.pid:
                return connection.pid, psutil.Process(connection.pid).name()
    except (psutil.Error, OSError):
        pass
    return None, ""
