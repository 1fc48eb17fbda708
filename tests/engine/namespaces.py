"""What a sidecar has stored blocks of: the descriptions of its namespaces (docs/format.md)."""

from __future__ import annotations

import json

from tests.engine.harness import Sidecar

Description = dict[str, str]


def descriptions(sidecar: Sidecar) -> list[Description]:
    files = sidecar.ram_dir.glob("v1/*/namespace.json")
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def parts(description: Description) -> dict[str, str]:
    """Those of `extra`. Two of one name would be two meanings, of which a reader sees one."""
    found: dict[str, str] = {}
    for part in description["extra"].split(";"):
        name, _, value = part.partition("=")
        assert name not in found, f"two parts are named {name!r}: {description['extra']}"
        found[name] = value
    return found


def only_parts(sidecar: Sidecar) -> dict[str, str]:
    """Those of the one namespace that it has."""
    (description,) = descriptions(sidecar)
    return parts(description)
