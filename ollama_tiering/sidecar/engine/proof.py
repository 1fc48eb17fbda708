"""What the files of one connection's engine are: not known yet, what they are called, or not so.

The engine says which files it has loaded; whether their content is right is computed beside
(sidecar/content). Until that is known nothing is matched, planned or committed for it.
"""

from __future__ import annotations

from typing import Final

from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import EngineOutcome, Kind
from ollama_tiering.sidecar.content.check_files import check_files
from ollama_tiering.sidecar.content.contents import Content, Contents
from ollama_tiering.sidecar.content.verdict import FilesVerdict, claimed, damaged, verdict
from ollama_tiering.sidecar.engine.lookups import nothing
from ollama_tiering.store import block_store_pb2 as pb

HELLO_SECONDS: Final = 0.4  # well below what an engine gives a hello; a small file is read by then
_PLAN_SECONDS: Final = 1.0  # ... a plan, which may wait for a look at the file
GATED: Final = (Kind.MATCH, Kind.WAIT, Kind.PLAN, Kind.COMMIT, Kind.FINISHED)
_NAMED: Final = "sha256"  # the model is called by its digest, which was compared


class Proof:
    """Used by one thread at a time. ValueError for files that make no sense, or none."""

    def __init__(self, contents: Contents, hello: m.Hello) -> None:
        check_files(hello.files)
        self._contents = contents
        self._files = hello.files
        self._claimed = claimed(dict(hello.fields).get("model", ""))

    def greet(self) -> FilesVerdict:
        return self._judged(self._contents.wait(self._files, HELLO_SECONDS))

    def look(self, kind: int) -> FilesVerdict:
        """For a request of this kind. What is stored must not come from a file that was written to
        since it was looked at; a look-up has no time to wait.
        """
        if kind == Kind.PLAN:
            return self._judged(self._contents.wait(self._files, _PLAN_SECONDS))
        return self._judged([self._contents.ask(file) for file in self._files])

    def content(self, digests: tuple[str, ...]) -> str:
        """What the namespace says of sound files."""
        return _NAMED if self._claimed and len(digests) == 1 else ",".join(digests)

    def _judged(self, contents: list[Content]) -> FilesVerdict:
        found = verdict(self._files, contents)
        if found.digests and self._claimed not in ("", found.digests[0]):
            return FilesVerdict(refusal=damaged(self._files[0].path, found.digests[0]))
        return found


def unproven(kind: int, body: bytes, found: FilesVerdict) -> tuple[Kind, bytes]:
    """The answer to one of GATED, while nothing is matched or stored. Malformed."""
    reason = found.refusal or found.pending
    if kind == Kind.MATCH:
        m.EngineMatch.unpack(body)
        return Kind.MATCHED, nothing(pb.SHORTFALL_UNCHECKED).pack()
    if kind == Kind.WAIT:
        m.EngineLease.unpack(body)
        return Kind.MATCHED, nothing(pb.SHORTFALL_UNCHECKED).pack()
    if kind == Kind.PLAN:
        m.Plan.unpack(body)
        outcome = EngineOutcome.REFUSED if found.refusal else EngineOutcome.LATER
        return Kind.PLANNED, m.Planned(outcome, reason).pack()
    if kind == Kind.COMMIT:
        count = len(m.Commit.unpack(body).files)
        return Kind.COMMITTED, m.Committed((reason,) * count).pack()
    m.EngineFinished.unpack(body)
    return Kind.DONE, b""
