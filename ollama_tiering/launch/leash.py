"""Runs a program that gets SIGTERM when its parent dies: `python leash.py PROGRAM ARG...`.

The program keeps the process id. Only Linux has such a signal; elsewhere the program just runs.
This uses the standard library only, because a fresh interpreter runs the file by its path each
time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replaces this process by the program. Exit code 127 if the program cannot be run."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        print(f"{sys.argv[1]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
