"""Which commit of llama.cpp an Ollama is built from, and whether that one is tested here.

What is tested is data (pins.toml), and so are the commits of versions that are known. The commit of
another version is the one that its llama-server says. llama.cpp names its commits by a count, as
`b10488`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering.errors import UnsupportedUpstream
from ollama_tiering.patchset.llama_server.installation import ServerBuild

DATA = Path(__file__).with_name("pins.toml")
OR_GO = "or build a version with the Go engine: tiering patch --tag TAG"


@dataclass(frozen=True, slots=True)
class Pins:
    of_version: dict[str, str]  # v0.32.15 -> b10488
    tested: tuple[str, ...]  # the pins


@dataclass(frozen=True, slots=True)
class LlamaPin:
    """`name` is a tag of llama.cpp, or a commit that has none. One that is not `is_tested` has to
    pass all checks of the self-test.
    """

    name: str
    is_tested: bool


def load(path: Path = DATA) -> Pins:
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    return Pins(dict(document["pins"]), tuple(document["tested"]))


def pin_of(pins: Pins, version: str, build: ServerBuild, tag_of: Callable[[str], str]) -> LlamaPin:
    """`tag_of` returns the tag of a commit that is given by its first digits, or "". It is asked
    for a version that is not known, whose llama-server was built of a shallow clone, as Ollama's
    is: its count says nothing, its commit is right. UnsupportedUpstream where nothing says it.
    """
    name = pins.of_version.get(version)
    if name is None and build.number > 1:
        name = f"b{build.number}"
    if name is None:
        if not build.commit:
            raise UnsupportedUpstream(
                f"which llama.cpp is in Ollama {version} is not known here, and its llama-server "
                "does not say it",
                hint=f"install a release of Ollama; {OR_GO}",
            )
        name = tag_of(build.commit) or build.commit
    return LlamaPin(name, name in pins.tested)


def require_same(pin: str, build: ServerBuild, commit: str) -> str:
    """Why it is not sure that llama-server and the source are of one commit; empty where it is.
    `commit`: of the source, empty where it does not say. UnsupportedUpstream where they are surely
    of two.
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
    return f"whether the source and the installed llama-server are both of {pin} cannot be told"
