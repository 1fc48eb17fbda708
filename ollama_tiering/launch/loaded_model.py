"""Which file a running llama-server has loaded, by its command line, for whoever needs its
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import psutil

_OPTIONS = ("-m", "--model")


def model_files(pids: Iterable[int]) -> dict[str, Path]:
    """File name -> path, of those processes that can be looked at."""
    found: dict[str, Path] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for option, value in pairwise(process.cmdline()):
                if option in _OPTIONS:
                    path = Path(process.cwd(), value)
                    found[path.name] = path
        except (psutil.Error, OSError, ValueError):
            continue
    return found
