"""Which commit of llama.cpp an Ollama is built from, and whether that one is tested here.

The pins are data (pins.toml). llama.cpp names its commits by a count, as `b10488`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering.errors import UnsupportedUpstream
from ollama_tiering.patchset.llama_server.installation import ServerBuild

DATA = Path(__file__).with_name("pins.toml")
UNTESTED = "try it all the same: tiering patch --allow-untested"
OR_GO = "or build a version with the Go engine: tiering patch --tag TAG"


@dataclass(frozen=True, slots=True)
class Pins:
    of_version: dict[str, str]  # v0.32.15 -> b10488
    tested: tuple[str, ...]  # the pins


def load(path: Path = DATA) -> Pins:
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    return Pins(dict(document["pins"]), tuple(document["tested"]))


def pin_of(pins: Pins, version: str, build: ServerBuild, *, allow_untested: bool) -> str:
    """UnsupportedUpstream for a version that is not known or not tested. One that is not known has
    the pin that llama-server's own count names, if it is one.
    """
    pin = pins.of_version.get(version)
    if pin is None:
        known = ", ".join(v for v, p in pins.of_version.items() if p in pins.tested)
        if not allow_untested or build.number < 2:
            trying = f"; {UNTESTED}" if build.number > 1 else ""
            hint = f"known and tested: {known}{trying}; {OR_GO}"
            raise UnsupportedUpstream(
                f"which llama.cpp is in Ollama {version} is not known here", hint=hint
            )
        return f"b{build.number}"
    if pin not in pins.tested and not allow_untested:
        raise UnsupportedUpstream(
            f"Ollama {version} has llama.cpp {pin}, which is not tested",
            hint=f"{UNTESTED}; {OR_GO}",
        )
    return pin


def require_same(pin: str, build: ServerBuild, commit: str, *, allow_untested: bool) -> str:
    """A warning, empty where llama-server and the source are surely of one commit. `commit`: of the
    source, empty where it does not say. UnsupportedUpstream where they are surely of two, or nobody
    can tell and `allow_untested` is not given.
    """
    if build.commit and commit:
        if commit.startswith(build.commit) or build.commit.startswith(commit):
            return ""
        raise UnsupportedUpstream(
            f"the installed llama-server is of llama.cpp {build.commit}, and {pin} is "
            f"{commit[:12]}",
            hint="where --llama-source named a source, leave it out or name llama.cpp's own; "
            "else this Ollama is no release, or was changed: install it again",
        )
    if build.number > 1 and f"b{build.number}" != pin:
        raise UnsupportedUpstream(
            f"the installed llama-server is build b{build.number}, and the source is {pin}",
            hint="install Ollama again, or name the source of its build with --llama-source",
        )
    if f"b{build.number}" == pin:
        return ""
    doubt = f"whether the source and the installed llama-server are both of {pin} cannot be told"
    if not allow_untested:
        raise UnsupportedUpstream(
            doubt, hint=f"give a git clone with the tag {pin} as --llama-source; or {UNTESTED}"
        )
    return f"{doubt}; the self-test has to show it"
