"""The administration's values as messages of the protocol and back. Both ends use this module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.protocol.plain_text import printable
from ollama_tiering.store import BlockKey, Fields, NamespaceId, TierKind, as_namespace
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.values import (
    BlockLine,
    ChainLine,
    Finding,
    Listing,
    PinResult,
    Removal,
    Selection,
    TierUse,
    Totals,
    VerifyStep,
    Waste,
)

LINES_PER_MESSAGE: Final = 500
MAX_IDS: Final = 10_000
_NAMES: Final[dict[type[Any], list[str]]] = {
    kind: [field.name for field in fields(kind)] for kind in (ChainLine, BlockLine)
}


def selection_message(selection: Selection) -> adm.Selection:
    return adm.Selection(
        ids=map(printable, selection.ids),
        model=printable(selection.model),
        models=map(printable, selection.models),
        older_than_seconds=selection.older_than_seconds,
        min_tokens=selection.min_tokens,
        min_bytes=selection.min_bytes,
        tier=selection.tier.value if selection.tier else pb.TIER_UNSPECIFIED,  # type: ignore[arg-type]
        pinned=selection.pinned,
    )


def selection_of(message: adm.Selection) -> Selection:
    """ValueError for a selection that makes no sense."""
    for what, named in (("ids", message.ids), ("models", message.models)):
        if len(named) > MAX_IDS:
            raise ValueError(f"{len(named)} {what} are more than {MAX_IDS}")
    return Selection(
        ids=tuple(message.ids),
        model=message.model,
        models=tuple(message.models),
        older_than_seconds=seconds_of(message.older_than_seconds),
        min_tokens=message.min_tokens,
        min_bytes=message.min_bytes,
        tier=TierKind(message.tier) if message.tier else None,
        pinned=message.pinned,
    )


def seconds_of(value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{value} seconds make no sense")
    return value


def listing_messages(listing: Listing) -> Iterable[adm.ListResponse]:
    yield adm.ListResponse(
        head=adm.ListHead(
            lines=len(listing.chains) + len(listing.blocks),
            selected=_totals_message(listing.selected),
            stored=_totals_message(listing.stored),
            id_digits=listing.id_digits,
            namespaces=[
                adm.DescribedNamespace(namespace=namespace, description=_description(pairs))
                for namespace, pairs in listing.descriptions.items()
            ],
        )
    )
    for start in range(0, len(listing.chains), LINES_PER_MESSAGE):
        chains = listing.chains[start : start + LINES_PER_MESSAGE]
        yield adm.ListResponse(chains=[adm.ChainLine(**_line(line)) for line in chains])
    for start in range(0, len(listing.blocks), LINES_PER_MESSAGE):
        blocks = listing.blocks[start : start + LINES_PER_MESSAGE]
        yield adm.ListResponse(blocks=[adm.BlockLine(**_line(line)) for line in blocks])


def listing_of(messages: Iterable[adm.ListResponse]) -> Listing:
    head = adm.ListHead()
    chains: list[ChainLine] = []
    blocks: list[BlockLine] = []
    for message in messages:
        if message.HasField("head"):
            head = message.head
        chains += [ChainLine(**_values(line, ChainLine)) for line in message.chains]
        blocks += [BlockLine(**_values(line, BlockLine)) for line in message.blocks]
    return Listing(
        chains=chains,
        blocks=blocks,
        descriptions={
            as_namespace(entry.namespace): tuple(
                (field.name, field.value) for field in entry.description.fields
            )
            for entry in head.namespaces
        },
        selected=_totals_of(head.selected),
        stored=_totals_of(head.stored),
        id_digits=head.id_digits,
    )


def pin_message(result: PinResult) -> adm.PinResponse:
    return adm.PinResponse(**{f.name: getattr(result, f.name) for f in fields(result)})


def pin_of(message: adm.PinResponse) -> PinResult:
    return PinResult(
        key=BlockKey(message.key),
        blocks=message.blocks,
        changed_bytes=message.changed_bytes,
        pinned_bytes=message.pinned_bytes,
        follows=message.follows,
        limit_bytes=message.limit_bytes,
        changed=message.changed,
    )


def step_message(step: VerifyStep) -> adm.VerifyResponse:
    return adm.VerifyResponse(
        done_blocks=step.done_blocks,
        total_blocks=step.total_blocks,
        done_bytes=step.done_bytes,
        findings=[
            adm.Finding(
                tier=found.tier.value,  # type: ignore[arg-type]
                what=found.what,
                path=printable(found.path),
                detail=printable(found.detail),
                repaired=found.repaired,
            )
            for found in step.findings
        ],
    )


def step_of(message: adm.VerifyResponse) -> VerifyStep:
    findings = [
        Finding(TierKind(f.tier), f.what, f.path, f.detail, f.repaired) for f in message.findings
    ]
    return VerifyStep(
        message.done_blocks, message.total_blocks, message.done_bytes, tuple(findings)
    )


def removal_message(removal: Removal) -> adm.RemoveResponse:
    return adm.RemoveResponse(
        chains=removal.chains,
        blocks=removal.blocks,
        stored_bytes=removal.stored_bytes,
        kept=removal.kept,
        waiting_blocks=removal.waiting_blocks,
        waiting_for=removal.waiting_for,
    )


def removal_of(message: adm.RemoveResponse) -> Removal:
    return Removal(
        message.chains,
        message.blocks,
        message.stored_bytes,
        dict(message.kept),
        message.waiting_blocks,
        message.waiting_for,
    )


def waste_message(waste: Sequence[Waste]) -> adm.CollectResponse:
    return adm.CollectResponse(
        waste=[
            adm.Waste(kind=w.kind, files=w.files, stored_bytes=w.stored_bytes, kept=w.kept)
            for w in waste
        ]
    )


def waste_of(message: adm.CollectResponse) -> list[Waste]:
    return [Waste(w.kind, w.files, w.stored_bytes, dict(w.kept)) for w in message.waste]


def _line(line: ChainLine | BlockLine) -> dict[str, Any]:
    values = {name: getattr(line, name) for name in _NAMES[type(line)]}
    return values | {"tiers": _uses_message(line.tiers)}


def _values(message: adm.ChainLine | adm.BlockLine, kind: type[Any]) -> dict[str, Any]:
    values = {name: getattr(message, name) for name in _NAMES[kind]}
    return values | {
        "key": BlockKey(message.key),
        "namespace": NamespaceId(message.namespace),
        "tiers": _uses_of(message.tiers),
    }


def _description(pairs: Fields) -> pb.Namespace:
    return pb.Namespace(fields=[pb.NamespaceField(name=name, value=value) for name, value in pairs])


def _uses_message(uses: Iterable[TierUse]) -> list[adm.TierUse]:
    return [
        adm.TierUse(tier=u.tier.value, blocks=u.blocks, stored_bytes=u.stored_bytes)  # type: ignore[arg-type]
        for u in uses
    ]


def _uses_of(uses: Iterable[adm.TierUse]) -> tuple[TierUse, ...]:
    return tuple(TierUse(TierKind(use.tier), use.blocks, use.stored_bytes) for use in uses)


def _totals_message(totals: Totals) -> adm.Totals:
    return adm.Totals(
        chains=totals.chains,
        blocks=totals.blocks,
        file_bytes=totals.file_bytes,
        tiers=_uses_message(totals.tiers),
    )


def _totals_of(message: adm.Totals) -> Totals:
    return Totals(message.chains, message.blocks, message.file_bytes, _uses_of(message.tiers))
