"""What an install that does not name a choice takes over from the one before it.

Otherwise an upgrade that names only the new binary would move the server to another port, to
another user, or away from its models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ollama_tiering.launch.address import parse_address
from ollama_tiering.systemd import replaced
from ollama_tiering.systemd.manifest import Installed, InstallManifest
from ollama_tiering.systemd.plan import InstallRequest
from ollama_tiering.systemd.units import SERVER_UNIT, SIDECAR_UNIT, WEB_UNIT, variable_in
from ollama_tiering.systemd.web_unit import address_in


def as_before(request: InstallRequest) -> InstallRequest:
    """The request, with what the installed units say wherever it says nothing. What is in the place
    of `ollama.service` stays there, and that unit says the rest.
    """
    if request.page is None and not request.without_page:
        page = address_in("\n".join(_units(request, WEB_UNIT)))
        request = replace(request, page=parse_address(page) if page else None)
    if request.replaces or replaced.path_in(request, _manifest(request)):
        return replace(request, replaces=True)
    text = "\n".join(_units(request, SIDECAR_UNIT, SERVER_UNIT))
    host, models = variable_in(text, "OLLAMA_HOST"), variable_in(text, "OLLAMA_MODELS")
    user = re.search(r"^User=(\S+)$", text, re.MULTILINE)
    return replace(
        request,
        address=request.address or (parse_address(host) if host else None),
        models=request.models or (Path(models) if models else None),
        run_as=request.run_as or (user[1] if user else None),
    )


def _units(request: InstallRequest, *names: str) -> Iterator[str]:
    """Those that install wrote; it refuses to replace one that was changed since."""
    installed, manifest = Installed(request.place, request.root), _manifest(request)
    for name in names:
        path = str(request.unit_directory / name)
        wanted = manifest.files.get(path, "")
        if wanted and installed.state(path, wanted) == "same":
            yield installed.at(path).read_text(encoding="utf-8")


def _manifest(request: InstallRequest) -> InstallManifest:
    return Installed(request.place, request.root).load() or InstallManifest()
