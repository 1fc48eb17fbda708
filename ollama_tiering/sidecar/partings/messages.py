"""Partings as messages of the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ollama_tiering.config import count
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.sidecar.partings.partings import Partings
from ollama_tiering.sidecar.partings.record import KeptParting
from ollama_tiering.store import Fields, NamespaceId
from ollama_tiering.store import block_store_pb2 as pb

Describe = Callable[[NamespaceId], Fields]
_MOST_MODELS: Final = 10_000


def wanted(request: adm.PartingsRequest, partings: Partings) -> Callable[[KeptParting], bool]:
    """ValueError for a request that makes no sense."""
    if len(request.models) > _MOST_MODELS:
        raise ValueError(f"{count(len(request.models), 'model')} named, {_MOST_MODELS:,} at most")
    models, part = set(request.models), request.model.lower()

    def is_wanted(one: KeptParting) -> bool:
        model = partings.model(one)
        named = bool(model) and (model in models or part in model.lower())
        return not part or named or one.parting.namespace.hex().startswith(part)

    return is_wanted


def parting_message(
    one: KeptParting, partings: Partings, describe: Describe, name: Callable[[str], str]
) -> adm.Parting:
    parting, forbidden = partings.shown(one)
    namespace, model = parting.namespace, partings.model(one)
    computed = one.computed_tokens
    message = adm.Parting(
        kind=int(parting.kind),  # type: ignore[arg-type]
        unix_seconds=parting.unix_seconds,
        namespace=_described(namespace, describe),
        model=model,
        name=name(model),
        prompt_tokens=parting.prompt_tokens,
        at_token=parting.at_token,
        computed_tokens=parting.prompt_tokens - parting.at_token if computed is None else computed,
        lost_tokens=one.lost_tokens,
        tokens_per_second=partings.rate(bytes(namespace)),
        before=parting.before,
        asked=parting.asked,
        stored=parting.stored,
        skipped_asked=parting.skipped_asked,
        skipped_stored=parting.skipped_stored,
        evicted_unix_seconds=parting.evicted_unix_seconds,
        num_ctx=one.num_ctx,
        text_forbidden=forbidden,
    )
    if parting.elsewhere is not None:
        message.elsewhere.CopyFrom(_described(parting.elsewhere, describe))
    return message


def sum_message(partings: Partings) -> adm.PartingsSum:
    lost = partings.lost_in_a_day()
    return adm.PartingsSum(
        requests=lost.requests, lost_tokens=lost.tokens, lost_seconds=lost.seconds
    )


def _described(namespace: NamespaceId, describe: Describe) -> adm.DescribedNamespace:
    fields = [pb.NamespaceField(name=name, value=value) for name, value in describe(namespace)]
    return adm.DescribedNamespace(
        namespace=namespace, description=pb.Namespace(fields=fields) if fields else None
    )
