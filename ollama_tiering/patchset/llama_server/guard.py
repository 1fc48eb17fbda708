"""The program `llama-server` of a tree: a few lines of shell that start the tree's copy of it, or
the installed one.

Ollama starts llama-server for each model, perhaps weeks after somebody looked whether the tree
fits. Had Ollama been updated in between, our library would get libraries that it was not compiled
for. So each start looks again. This takes some milliseconds and needs nothing of ours.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.config.environment import ENV_ENGINE_SOCKET, ENV_REFUSED_KINDS
from ollama_tiering.errors import MissingTool, UnsupportedUpstream
from ollama_tiering.patchset.llama_server.installation import (
    IMPLEMENTATION,
    SERVER,
    FileState,
    InstalledOllama,
)
from ollama_tiering.patchset.run import run

_ASKED: Final = "%s %.9Y %n"  # of `stat`
_LINE: Final = re.compile(r"(\d+) (\d+(?:\.\d+)?) (.+)")
_ROUNDED_SECONDS: Final = 1.0

COPY: Final = "llama-server-installed"  # beside it; of the installed program

# {asked}, {files} and {state}: what `stat` is asked, of what, and what it must say. Variables that
# name folders of the tree are led back to the installed ones, because Ollama names those beside the
# program that it starts.
SCRIPT: Final = """\
#!/bin/sh
# Written by `tiering patch`.
here=${{0%/*}}
installed={lib}
again='this model is served as stock; run `tiering patch`, then start Ollama again'
state=$(LC_ALL=C stat -L -c '{asked}' -- \\
{files} 2>&1)
if ! [ -x "$here/{copy}" ] || ! [ -f "$here/{ours}" ]; then
    echo "tiering: the tree of links is not whole any more, so $again" >&2
elif [ "$state" = {state} ]; then
    export {refused_name}={refused}
    exec "$here/{copy}" "$@"
elif ! stat -L -c '{asked}' -- / > /dev/null 2>&1; then
    echo 'tiering: there is no `stat` that says size and time of a file, so this model is served' \\
        'as stock; install GNU coreutils' >&2
else
    echo "tiering: Ollama was updated or changed since it was patched as {version}, so $again" >&2
fi
unset {socket}
set -f
IFS=:
led_back() {{
    all=
    for one in $1; do
        case $one in "$here" | "$here"/*) one=$installed${{one#"$here"}} ;; esac
        all=$all${{all:+:}}$one
    done
}}
for name in LD_LIBRARY_PATH GGML_BACKEND_PATH; do
    eval "value=\\${{$name-}}"
    if [ -n "$value" ]; then
        led_back "$value"
        export "$name=$all"
    fi
done
exec "$installed/{server}" "$@"
"""


def text(
    installation: InstalledOllama, state: FileState, version: str, refused: Collection[str] = ()
) -> str:
    """The script. `state` is that of the files for which our library was compiled, `refused` the
    kinds that failed the self-test. MissingTool where no `stat` here can say that state.
    """
    return SCRIPT.format(
        asked=_ASKED,
        lib=shlex.quote(str(installation.lib)),
        files=" \\\n".join(f"    {shlex.quote(str(path))}" for path, _, _ in state),
        state=shlex.quote(_said_of(state)),
        copy=COPY,
        ours=IMPLEMENTATION,
        version=_plain(version),
        socket=ENV_ENGINE_SOCKET,
        refused_name=ENV_REFUSED_KINDS,
        refused=shlex.quote(",".join(sorted(refused))),
        server=SERVER,
    )


def _plain(version: str) -> str:
    """The script has it as it is, so it must not be shell."""
    if not re.fullmatch(r"[\w.+-]+", version, re.ASCII):
        raise UnsupportedUpstream(
            f"{version!r} is no version of Ollama", hint="make the tree again: tiering patch"
        )
    return version


def _said_of(state: FileState) -> str:
    """What `stat` says of files in that state. Not each writes a time to the last place (that of
    uutils rounds it), so the one here is asked, and what it says is taken if it means that state.
    """
    names = [str(path) for path, _, _ in state]
    exact = "\n".join(f"{size} {_seconds(int(time_ns))} {path}" for path, size, time_ns in state)
    done = run("stat", "-L", "-c", _ASKED, "--", *names, env={"LC_ALL": "C"}, paths=True)
    said = done.stdout.rstrip("\n")
    if said == exact or _means(said.splitlines(), state):
        return said
    if _state_of(names) == state:
        raise MissingTool(
            "`stat` does not say size and time of a file, by which each start of llama-server sees "
            "whether Ollama was updated",
            hint="install GNU coreutils",
        )
    return exact  # the files are others by now, and so the guard will find


def _means(lines: Sequence[str], state: FileState) -> bool:
    return len(lines) == len(state) and all(
        (found := _LINE.fullmatch(line))
        and [found[3], int(found[1])] == [path, size]
        and abs(float(found[2]) - int(time_ns) / 10**9) <= _ROUNDED_SECONDS
        for line, (path, size, time_ns) in zip(lines, state, strict=True)
    )


def _state_of(paths: Sequence[str]) -> FileState:
    found: FileState = []
    for path in paths:
        with contextlib.suppress(OSError):
            info = Path(path).stat()
            found.append([path, info.st_size, info.st_mtime_ns])
    return found


def _seconds(time_ns: int) -> str:
    """As `stat` of GNU writes a time with nine places."""
    return f"{time_ns // 10**9}.{time_ns % 10**9:09d}"
