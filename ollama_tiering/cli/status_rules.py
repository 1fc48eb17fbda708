"""What `tiering status` says of models that a rule treats differently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ollama_tiering.config import format_size

if TYPE_CHECKING:
    from ollama_tiering.protocol.pb import administration_pb2 as adm

_DAY_SECONDS: Final = 86400.0
_DIGEST, _DIGEST_DIGITS = "sha256-", 12


def refusal(answer: adm.StatResponse, namespace: bytes) -> str:
    """Why nothing of a runner's model is stored; empty if it is stored."""
    found = (one.refusal for one in answer.model_terms if namespace in one.namespaces)
    return next(found, "")


def _by_file(model: str) -> str:
    """The first digits of a digest. A file of another name has its whole name."""
    digest = model.removeprefix(_DIGEST)
    return model if digest == model else digest[:_DIGEST_DIGITS]


def lines(answer: adm.StatResponse) -> Iterator[str]:
    for one in answer.model_terms:
        name = one.name or _by_file(one.model)
        held = one.local_bytes + one.remote_bytes
        if one.refusal:
            left = f", {format_size(held)} still on disk" if held else ""
            yield f"model {name}: not stored: {one.refusal}{left}"
        else:
            yield f"model {name}: {', '.join(_parts(one))}"


def documents(answer: adm.StatResponse) -> list[dict[str, Any]]:
    return [
        {
            "model": one.model,
            "name": one.name,
            "namespaces": [namespace.hex() for namespace in one.namespaces],
            "refusal": one.refusal,
            "ttl_seconds": one.ttl_seconds,
            "budget_bytes": one.budget_bytes,
            "local_bytes": one.local_bytes,
            "remote_bytes": one.remote_bytes,
        }
        for one in answer.model_terms
    ]


def _parts(one: adm.ModelTerms) -> Iterator[str]:
    of = f" of {format_size(one.budget_bytes)}" if one.budget_bytes else ""
    yield f"local {format_size(one.local_bytes)}{of}"
    if one.remote_bytes:
        yield f"remote {format_size(one.remote_bytes)}{of}"
    if one.ttl_seconds:
        yield f"dropped when unused for {one.ttl_seconds / _DAY_SECONDS:g} days"
    else:
        yield "never dropped for its age"
