"""The environment of every call of Go: what decides the target is ours, however it was set.

A person's `go env -w` counts only where it says how modules are fetched. Variables that decide the
code (flags, GOAMD64) count where they are in the environment: there the build's name knows them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ollama_tiering import config
from ollama_tiering.config import memory_limit
from ollama_tiering.errors import ConfigError
from ollama_tiering.patchset import compilers

_FETCHING: Final = (
    *("GOPROXY", "GOSUMDB", "GOPRIVATE", "GONOPROXY", "GONOSUMDB", "GOINSECURE", "GOVCS", "GOAUTH"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
# None: not set; Go then takes what this machine is
_TARGET: Final[dict[str, str | None]] = {
    **dict.fromkeys(("GOOS", "GOARCH", "GOEXPERIMENT", "GOFIPS140", "GOROOT")),
    **{"GO111MODULE": "on", "GOTOOLCHAIN": "local", "GOWORK": "off", "CGO_ENABLED": "1"},
    "GOENV": "off",
}
_ROOMY_BYTES: Final = 2 << 30  # for each compiler, a C++ compiler's needs included
_OTHER_SOURCES: Final = ("mod=", "modfile=", "overlay=")  # of GOFLAGS, after one dash or two


def go_environment(goarch: str | None = None) -> dict[str, str | None]:
    """To be added to our own; None removes a variable. Go's caches lie below ours unless the person
    has set them. The module cache can be removed. `goarch`: not for this machine.
    """
    own = config.cache_dir() / "go"
    wanted = {"GOCACHE": str(own / "build"), "GOMODCACHE": str(own / "mod")} | _written_down()
    made: dict[str, str | None] = {n: value for n, value in wanted.items() if not os.environ.get(n)}
    given = os.environ.get("GOFLAGS", "").split()
    flags = [flag for flag in given if not flag.lstrip("-").startswith(_OTHER_SOURCES)]
    if "-modcacherw" not in flags:
        flags.append("-modcacherw")
    made |= {"GOFLAGS": " ".join(flags)} | _TARGET | compilers.compiler_names()
    return made | ({"GOARCH": goarch} if goarch else {})


def collector(jobs: int) -> dict[str, str]:
    """GOGC for Go's compiler: a fifth faster if memory need not be freed at once. A process takes
    up to 640 MB then instead of 420; `jobs` run at a time. Go's cache does not go by it.
    """
    roomy = memory_limit().limit_bytes >= jobs * _ROOMY_BYTES
    return {"GOGC": "400"} if roomy and not os.environ.get("GOGC") else {}


def _written_down() -> dict[str, str]:
    """What `go env -w` has kept of the variables by which modules are fetched."""
    named = os.environ.get("GOENV")
    if named == "off":
        return {}
    try:
        home = os.environ.get("XDG_CONFIG_HOME") or str(config.expanded("~/.config"))
    except ConfigError:  # there is no home, so nothing was written there
        return {}
    try:
        text = Path(named or f"{home}/go/env").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs if name in _FETCHING and value.strip()}
