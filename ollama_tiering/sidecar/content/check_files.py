"""CheckFiles: an engine asks whether the files that it has loaded are what they are called.

The answer takes a moment, in which a file that is known is looked at and a small one is read. Of
what is not known by then it says so, and the engine asks again.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from ollama_tiering.protocol.loaded_file import FileIdentity, LoadedFile
from ollama_tiering.sidecar.content.contents import Contents
from ollama_tiering.sidecar.content.verdict import FilesVerdict, verdict
from ollama_tiering.store import block_store_pb2 as pb

MAX_FILES: Final = 64
PATIENCE_SECONDS: Final = 0.2
_PAUSE_SECONDS: Final = 0.005
MAX_PATH_BYTES: Final = 4096  # PATH_MAX of Linux


class CheckFiles:
    """To be used on the event loop."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    async def answer(self, request: pb.CheckFilesRequest) -> pb.CheckFilesResponse:
        """ValueError if the request makes no sense."""
        files = [_loaded(file) for file in request.files]
        check_files(files)
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_SECONDS
        while True:
            found = verdict(files, [self._contents.ask(file, fresh=True) for file in files])
            if not found.pending or loop.time() >= until:
                return _message(found)
            await asyncio.sleep(_PAUSE_SECONDS)


def check_files(files: list[LoadedFile] | tuple[LoadedFile, ...]) -> None:
    """ValueError for files that no engine has loaded."""
    if not 1 <= len(files) <= MAX_FILES:
        raise ValueError(f"{len(files)} files are none, or more than {MAX_FILES}")
    for file in files:
        if not 1 < len(os.fsencode(file.path)) <= MAX_PATH_BYTES or not file.path.startswith("/"):
            raise ValueError("the path of a loaded file is not absolute, or too long")
        if "\0" in file.path:
            raise ValueError("the path of a loaded file has a zero byte in it")


def _loaded(file: pb.LoadedFile) -> LoadedFile:
    numbers = file.device, file.inode, file.size_bytes, file.mtime_ns, file.ctime_ns
    return LoadedFile(os.fsdecode(file.path), FileIdentity(*numbers))


def _message(found: FilesVerdict) -> pb.CheckFilesResponse:
    response = pb.CheckFilesResponse(reason=found.refusal or found.pending)
    if found.refusal:
        response.state = pb.CheckFilesResponse.STATE_REFUSED
    elif found.pending:
        response.state = pb.CheckFilesResponse.STATE_PENDING
    else:
        response.state = pb.CheckFilesResponse.STATE_SOUND
        response.sha256.extend(map(bytes.fromhex, found.digests))
    return response
