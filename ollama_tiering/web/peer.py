"""Which user is at the other end of a connection on loopback: the kernel's table of connections
says so. (For a Unix socket it would be SO_PEERCRED.)
"""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path
from typing import Final

_TABLES: Final = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}
_ESTABLISHED: Final = "01"  # a closed one is listed as user 0's
_LOCAL, _REMOTE, _STATE, _USER = 1, 2, 3, 7  # columns

Place = tuple[str, int]  # host and port


def peer_user(client: Place, server: Place) -> int | None:
    """User id of the process that has connected from `client`; None if that cannot be known, as of
    another machine.
    """
    try:
        names = _kernel_name(client), _kernel_name(server)
        lines = _TABLES[ipaddress.ip_address(client[0]).version].read_text().splitlines()
    except (OSError, ValueError):
        return None
    for line in lines[1:]:
        fields = line.split()
        if (fields[_LOCAL], fields[_REMOTE]) == names and fields[_STATE] == _ESTABLISHED:
            return int(fields[_USER])
    return None


def _kernel_name(place: Place) -> str:
    """`0100007F:20F2`: words of 32 bits in this machine's order."""
    packed = ipaddress.ip_address(place[0]).packed
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    little = sys.byteorder == "little"
    shown = "".join((word[::-1] if little else word).hex() for word in words)
    return f"{shown}:{place[1]:04x}".upper()
