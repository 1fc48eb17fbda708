"""The archive of one commit, as a host of git repositories gives it: for a machine without git."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import Final

from ollama_tiering.errors import FetchError
from ollama_tiering.patchset.report import Report

_HINT: Final = (
    "install git (Debian, Ubuntu: apt-get install git); without network: --llama-source FILE"
)
_SECONDS: Final = 60.0  # for an answer, or the next bytes of it
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")


def archive(url: str, to: Path, report: Report) -> str:
    """Writes it to the file `to`. Returns the commit that `git archive` writes at the beginning.
    FetchError where it cannot be had, or does not say its commit.
    """
    import httpx  # most starts need none

    with report.stage(f"fetching {url} (there is no git)"):
        try:
            answer = httpx.stream("GET", url, follow_redirects=True, timeout=_SECONDS)
            with answer as response, to.open("wb") as sink:
                response.raise_for_status()
                for part in response.iter_raw():
                    sink.write(part)
        except httpx.HTTPError as error:
            raise FetchError(f"{url}: {str(error).partition(chr(10))[0]}", hint=_HINT) from None
    try:
        with tarfile.open(to) as members:
            commit = members.pax_headers.get("comment", "")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise FetchError(f"{url} is no whole archive: {error}", hint=_HINT) from None
    if not _COMMIT.fullmatch(commit):
        raise FetchError(f"{url} does not say its commit", hint=_HINT)
    return commit
