"""The archive of one commit, as a host of git repositories gives it: for a machine without git."""

from __future__ import annotations

import re
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Final

from ollama_tiering.errors import FetchError
from ollama_tiering.patchset.report import Report

_HINT: Final = (
    "install git (Debian, Ubuntu: apt-get install git); without network: --llama-source FILE"
)
_SECONDS: Final = 60.0  # for an answer, or the next bytes of it
_MOST_SECONDS: Final = 3600.0  # ... all of it
_MOST_BYTES: Final = 1 << 30  # thirty times what it has
_SECURE: Final = "https:"
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
                if url.startswith(_SECURE) and response.url.scheme != "https":
                    raise FetchError(f"{url} leads to {response.url}, not by https", hint=_HINT)
                _written(response.iter_raw(), sink, url)
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


def _written(parts: Iterable[bytes], sink: IO[bytes], url: str) -> None:
    """FetchError for more than it may take, of bytes or time."""
    end = time.monotonic() + _MOST_SECONDS
    left_bytes = _MOST_BYTES
    for part in parts:
        left_bytes -= len(part)
        if left_bytes < 0 or time.monotonic() > end:
            raise FetchError(f"{url} takes too long, or is too large", hint=_HINT)
        sink.write(part)
