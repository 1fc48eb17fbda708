"""The unit of the page beside the sidecar's, which starts it and stops it. Pure: the plan has
decided everything.

The page is locked in like the sidecar, but sees devices, because it says what `doctor` finds.
"""

from __future__ import annotations

import re
from typing import Final

from ollama_tiering.launch.address import Address
from ollama_tiering.systemd.units import (
    DIRECTORY,
    LOCKED,
    SIDECAR_UNIT,
    Service,
    argument,
    environment,
    hidden_home,
    own_user,
    system_places,
    unit_text,
)

_MEMORY: Final = ("MemoryHigh=512M", "MemoryMax=768M")  # 100 MB, and the texts of prompts
TOKEN: Final = f"/var/lib/{DIRECTORY}/web.token"  # of the system's page


def web_unit(service: Service, address: Address) -> str:
    """Of a page that listens there."""
    lines = [
        "[Unit]",
        "Description=Page of the tiered Ollama in the browser",
        f"After={SIDECAR_UNIT}",
        f"PartOf={SIDECAR_UNIT}",
        "StartLimitIntervalSec=600",
        "StartLimitBurst=5",
        "",
        "[Service]",
        f"ExecStart={argument(service.python)} -P -m ollama_tiering web --listen {address} "
        f"--socket {argument(service.socket)}",
        *environment(PYTHONPATH=str(service.package_parent), PYTHONUNBUFFERED="1"),
        *(environment(OLLAMA_MODELS=str(service.models)) if service.models else ()),
        "# It says its address; for root, with the token, which is not for a journal.",
        "StandardOutput=null",
        "Restart=on-failure",
        "RestartSec=10",
        "# A wrong setting stays wrong, and so does a package that is missing.",
        "RestartPreventExitStatus=2 6 10",
        *_MEMORY,
        "OOMScoreAdjust=500",
        "LimitCORE=0",
        "UMask=0077",
        "",
        *LOCKED,
    ]
    if service.system:
        lines += [
            "",
            *own_user(service),
            *system_places(),
            "ProtectSystem=strict",
            hidden_home(service),
            "PrivateTmp=yes",
            "ProtectControlGroups=yes",
            "ProtectKernelModules=yes",
            "ProtectKernelTunables=yes",
            "CapabilityBoundingSet=",
            "AmbientCapabilities=",
        ]
        if address.is_loopback:
            lines += ["IPAddressDeny=any", "IPAddressAllow=localhost"]
    return unit_text(lines)


def address_in(unit: str) -> str:
    """Where the page of such a unit listens; empty if it does not say."""
    found = re.search(r"^ExecStart=.* web --listen (\S+) ", unit, re.MULTILINE)
    return found[1] if found else ""
