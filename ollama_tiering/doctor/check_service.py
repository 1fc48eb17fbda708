"""Services of systemd in the usual places: whether the next start of one with a tree of links takes
the tree, and whether another service would take its port.
"""

from __future__ import annotations

from collections.abc import Iterator

from ollama_tiering.doctor.check import Check, ok, warn
from ollama_tiering.launch.service_unit import UNIT_NAME
from ollama_tiering.systemd import replaced, service
from ollama_tiering.systemd.plan import InstallRequest
from ollama_tiering.systemd.units import SERVER_UNIT


def checks() -> Iterator[Check]:
    for user_mode in (False, True):
        request = InstallRequest(user_mode=user_mode)
        if replaces := replaced.found(request):
            if replaces["why_stock"]:
                finding = f"its next start is not tiered: {replaces['why_stock']}"
                yield warn(UNIT_NAME, finding, replaces["cure"])
            else:
                yield ok(UNIT_NAME, f"starts the patched server, by {replaces['drop_in']}")
        elif tree := service.tree_of(request):
            name = f"service in {request.place}"
            if tree["why_stock"]:
                finding = f"its next start is as stock: {tree['why_stock']}"
                yield warn(name, finding, tree["cure"])
            else:
                yield ok(name, "its tree is made for the Ollama that is installed")
        if rival := service.rival_of(request):
            finding, _, cure = rival.partition(": ")
            yield warn(f"port of {SERVER_UNIT}", finding, cure)
