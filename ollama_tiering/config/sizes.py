"""Byte sizes as people write and read them. No I/O."""

from __future__ import annotations

import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {
    f"{unit}b": factor for unit, factor in list(_UNITS.items()) if len(unit) == 1 and unit != "b"
}
_UNITS |= {"kib": KIB, "mib": MIB, "gib": GIB, "tib": GIB << 10}
_UNITS |= {"ki": KIB, "mi": MIB, "gi": GIB, "ti": GIB << 10}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)


MAX_SIZE_BYTES = 1 << 62  # what fits into every signed 64-bit number it is kept in


def parse_size(value: str | int) -> int:
    """The bytes of `8GiB`, `500MB`, `1.5g` or a plain number. ValueError says what is wrong."""
    size_bytes = _parse(value)
    if size_bytes > MAX_SIZE_BYTES:
        raise ValueError(f"{value!r} is more than any size")
    return size_bytes


def _parse(value: str | int) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size")
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a size cannot be negative")
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{value!r} is not a size; write it like 8GiB, 500MB or 1048576")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_size(size_bytes: int) -> str:
    """A size for people: `1.5 GiB`. One that was written in decimal units, `50GB`, is shown so."""
    if size_bytes and size_bytes % 10**6 == 0:
        for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
            if size_bytes >= factor and size_bytes * 10 % factor == 0:
                return f"{size_bytes / factor:.1f} {unit}"
    for unit, factor in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} B"
