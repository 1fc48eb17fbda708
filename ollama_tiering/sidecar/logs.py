"""The sidecar's log: one line of text, or one JSON object, per record on stderr.

JSON lines have `time` (RFC 3339, UTC), `level`, `logger` and `message` (the whole text). Every
`name=value` of the message is a field of its own. It is taken from the call's arguments and not
from the text, so a path with spaces stays one value, and a number stays a number.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import re
import sys
from collections.abc import Iterator
from typing import IO, Any, Final

TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
ROOT: Final = "ollama_tiering"

# One conversion of a %-format, with the name before it if it is a field.
_CONVERSION: Final = re.compile(
    r"(?:(?<![\w=])([A-Za-z_]\w*)=)?%(?:%|[-#0 +]*\d*(?:\.\d+)?([diouxXeEfFgGcrsa]))"
)
_RESERVED: Final = frozenset({"time", "level", "logger", "message", "exception"})


def configure(log_format: str, level: str, stream: IO[str] | None = None) -> None:
    """`text` or `json`. Libraries log only warnings and worse."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    logging.getLogger(ROOT).setLevel(level.upper())


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields(record):
            line[f"field_{name}" if name in _RESERVED else name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, allow_nan=False)  # ASCII: no line break of Unicode's own


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    if not isinstance(record.msg, str) or not isinstance(record.args, tuple):
        return
    values = iter(record.args)
    for match in _CONVERSION.finditer(record.msg):
        name, conversion = match.groups()
        if conversion is None:  # %%
            continue
        value = next(values, None)
        if name:
            plain = isinstance(value, str | int)
            plain = plain or (isinstance(value, float) and math.isfinite(value))
            yield name, value if plain else str(value)
