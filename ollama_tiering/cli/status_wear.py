"""What `tiering status` says of how much is written to the disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ollama_tiering.config import count, format_size

if TYPE_CHECKING:
    from ollama_tiering.protocol.pb import administration_pb2 as adm

_YEAR_DAYS: Final = 365
_TB: Final = 10**12  # as makers of disks count


def lines(answer: adm.StatResponse) -> Iterator[str]:
    """One line, once a day on which something was written is over."""
    wear = answer.wear
    if not wear.days:
        return
    a_request = ""
    if wear.requests:
        a_request = f", {format_size(wear.written_bytes // wear.requests)} a request"
    yield (
        f"  written to disk {format_size(wear.written_bytes // wear.days)} a day"
        f"{a_request} (the last {count(wear.days, 'whole day')}); at this rate "
        f"{terabytes_a_year(wear):.1f} TB a year (compare with the TBW in the disk's data sheet)"
    )


def document(answer: adm.StatResponse) -> dict[str, Any]:
    """Of whole days; figures of a day, a request and a year are null where there is none."""
    wear = answer.wear
    return {
        "days": wear.days,
        "written_bytes": wear.written_bytes,
        "requests": wear.requests,
        "bytes_a_day": wear.written_bytes // wear.days if wear.days else None,
        "bytes_a_request": wear.written_bytes // wear.requests if wear.requests else None,
        "terabytes_a_year": round(terabytes_a_year(wear), 3) if wear.days else None,
    }


def terabytes_a_year(wear: adm.DiskWear) -> float:
    """`wear` has at least a day."""
    return wear.written_bytes / wear.days * _YEAR_DAYS / _TB
