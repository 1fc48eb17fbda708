"""Text of messages from what may hold any bytes, such as a name of a file; and paths, which are
bytes in messages.
"""

from __future__ import annotations

import os


def printable(text: str) -> str:
    """A file name may hold any bytes, but a message holds only text."""
    try:
        return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
    except UnicodeEncodeError:  # half a character that stands for no byte
        return text.encode(errors="backslashreplace").decode()


def path_of(sent: bytes) -> str:
    return os.fsdecode(sent)
