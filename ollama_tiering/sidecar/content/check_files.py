"""CheckFiles: an engine asks whether the files that it has loaded are what they are called.

The answer takes no time: what is not known yet is being read, and the engine asks again.
"""

from __future__ import annotations

import os
from typing import Final

from ollama_tiering.protocol.loaded_file import FileIdentity, LoadedFile
from ollama_tiering.sidecar.content.contents import Contents
from ollama_tiering.sidecar.content.verdict import FilesVerdict, verdict
from ollama_tiering.store import block_store_pb2 as pb

MAX_FILES: Final = 64
MAX_PATH_BYTES: Final = 4096  # PATH_MAX of Linux


class CheckFiles:
    """To be used on the event loop only, as it logs what it answers only once."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def answer(self, request: pb.CheckFilesRequest) -> pb.CheckFilesResponse:
        """ValueError if the request makes no sense."""
        files = [_loaded(file) for file in request.files]
        check_files(files)
        asked = [self._contents.ask(file, fresh=True) for file in files]
        return _message(verdict(files, asked))


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
