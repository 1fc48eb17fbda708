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
    refusals = (terms.refusal for terms in answer.model_terms if namespace in terms.namespaces)
    return next(refusals, "")


def _by_file(model: str) -> str:
    """The first digits of a digest. A file of another name has its whole name."""
    digest = model.removeprefix(_DIGEST)
    return model if digest == model else digest[:_DIGEST_DIGITS]


def lines(answer: adm.StatResponse) -> Iterator[str]:
    for terms in answer.model_terms:
        name = terms.name or _by_file(terms.model)
        stored_bytes = terms.local_bytes + terms.remote_bytes
        if terms.refusal:
            left = f", {format_size(stored_bytes)} still on disk" if stored_bytes else ""
            yield f"model {name}: not stored: {terms.refusal}{left}"
        else:
            yield f"model {name}: {', '.join(_parts(terms))}"


def documents(answer: adm.StatResponse) -> list[dict[str, Any]]:
    return [
        {
            "model": terms.model,
            "name": terms.name,
            "namespaces": [namespace.hex() for namespace in terms.namespaces],
            "refusal": terms.refusal,
            "ttl_seconds": terms.ttl_seconds,
            "budget_bytes": terms.budget_bytes,
            "local_bytes": terms.local_bytes,
            "remote_bytes": terms.remote_bytes,
        }
        for terms in answer.model_terms
    ]


def _parts(terms: adm.ModelTerms) -> Iterator[str]:
    of = f" of {format_size(terms.budget_bytes)}" if terms.budget_bytes else ""
    yield f"local {format_size(terms.local_bytes)}{of}"
    if terms.remote_bytes:
        yield f"remote {format_size(terms.remote_bytes)}{of}"
    if terms.ttl_seconds:
        yield f"dropped when unused for {terms.ttl_seconds / _DAY_SECONDS:g} days"
    else:
        yield "never dropped for its age"
