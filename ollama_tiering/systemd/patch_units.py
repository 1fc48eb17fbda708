"""The units that make a tree of links after an update of the installed Ollama: a path unit that
sees the update, and a service that makes the tree. Pure: the plan has decided everything.

The service runs as the user of the server and writes to a cache of its own, which neither the
server's unit nor the sidecar's may write to. It restarts nothing: the next start of the server
looks into that cache (tree_start.py).
"""

from __future__ import annotations

from typing import Final

from ollama_tiering.config.environment import ENV_CACHE
from ollama_tiering.systemd.tree_start import DUE
from ollama_tiering.systemd.units import (
    Service,
    TreeService,
    argument,
    environment,
    own_user,
    tree_words,
    unit_text,
)

_LOOK_SECONDS: Final = 600  # whether one is due; every other process comes first


def path_unit(tree: TreeService) -> str:
    """It need not see all: files in folders of the libraries are looked at when the server starts,
    too.
    """
    watched = dict.fromkeys((tree.stock, tree.program, tree.lib))
    lines = ["[Unit]", "Description=Watches the installed Ollama for an update", "", "[Path]"]
    for path in watched:
        argument(path)  # UsageError for what no unit file can say
        lines.append("PathChanged=" + str(path).replace("%", "%%"))
    return unit_text(lines)


def maker_unit(service: Service, tree: TreeService) -> str:
    """What it uses of the processor, the disk and memory comes after everything else."""
    python = f"{argument(service.python)} -P -m"
    words = " ".join(argument(word) for word in (*tree_words(service, tree), DUE))
    prefix = tree.stock.parent.parent if tree.stock.parent.name == "bin" else tree.stock.parent
    lines = [
        "[Unit]",
        "Description=Patches the installed Ollama after an update",
        "# Not wanted: stock's server, whose start has this one started, waits for no network.",
        "After=network-online.target",
        "# Every start of the server counts: one that ends again and again has no tree made for it",
        "# again and again.",
        "StartLimitIntervalSec=1h",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "# Its job ends once it has begun: nobody who waits for jobs waits for a compiler.",
        "Type=exec",
        f"ExecCondition={python} ollama_tiering.systemd.tree_start {words}",
        f"ExecStart={python} ollama_tiering patch --wait -q -j 1 --ollama {argument(prefix)}",
        *environment(PYTHONPATH=str(service.package_parent), PYTHONUNBUFFERED="1"),
        *environment(**{ENV_CACHE: str(tree.cache)}),
        *environment(**tree.proxies),
        f"CacheDirectory={tree.cache.name}",
        "CacheDirectoryMode=0700",
        f"TimeoutStartSec={_LOOK_SECONDS}",
        "SyslogIdentifier=tiering",
        "Nice=19",
        "CPUSchedulingPolicy=idle",
        "CPUWeight=1",
        "IOSchedulingClass=idle",
        "OOMScoreAdjust=500",
        "LimitCORE=0",
        "UMask=0077",
    ]
    if service.system:
        lines += [
            "",
            *own_user(service),
            *environment(XDG_CONFIG_HOME="/etc", XDG_STATE_HOME="%C"),
            "# The self-test runs the new llama-server, also on a GPU: see the server's unit.",
            "ProtectSystem=strict",
            "ProtectHome=read-only",
            "PrivateTmp=yes",
            "ProtectControlGroups=yes",
        ]
    return unit_text(lines)
