"""The program `llama-server` of a tree: a few lines of shell that start the tree's copy of it, or
the installed one.

Ollama starts llama-server for each model, perhaps weeks after somebody looked whether the tree
fits. Had Ollama been updated in between, our library would get libraries that it was not compiled
for. So each start looks again. This takes some milliseconds and needs nothing of ours.
"""

from __future__ import annotations

import shlex
from typing import Final

from ollama_tiering.config.environment import ENV_ENGINE_SOCKET
from ollama_tiering.patchset.llama_server.installation import SERVER, FileState, InstalledOllama

COPY: Final = "llama-server-installed"  # beside it; of the installed program

# {files} and {state}: what `stat` is asked, and must say. Variables that name folders of the tree
# are led back to the installed ones, because Ollama names those beside the program that it starts.
SCRIPT: Final = """\
#!/bin/sh
# Written by `tiering patch`.
here=${{0%/*}}
installed={lib}
state=$(LC_ALL=C stat -L -c '%s %.9Y %n' -- \\
{files} 2>&1)
if [ "$state" = {state} ]; then
    exec "$here/{copy}" "$@"
fi
echo 'tiering: Ollama was updated or changed since it was patched as {version}, so this model is' \\
    'served as stock; run `tiering patch`, then start Ollama again' >&2
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


def text(installation: InstalledOllama, state: FileState, version: str) -> str:
    """The script. `state` is that of the files for which our library was compiled."""
    said = [f"{size} {_seconds(int(time_ns))} {path}" for path, size, time_ns in state]
    return SCRIPT.format(
        lib=shlex.quote(str(installation.lib)),
        files=" \\\n".join(f"    {shlex.quote(str(path))}" for path, _, _ in state),
        state=shlex.quote("\n".join(said)),
        copy=COPY,
        version=version,
        socket=ENV_ENGINE_SOCKET,
        server=SERVER,
    )


def _seconds(time_ns: int) -> str:
    """As `stat` writes a time with nine places."""
    return f"{time_ns // 10**9}.{time_ns % 10**9:09d}"
