"""Requests of every method, by the protocol's own description: a new field is covered by itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ollama_tiering.protocol.calls import METHODS
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.fuzz.mutations import NAMESPACE, NS, ROWS, SAMPLES, mutate, scalar

UNARY = [method for method in METHODS.values() if not method.client_streaming]
Path = tuple[FieldDescriptor, ...]

RAW = [one for one in SAMPLES if one.data == one.raw and one.namespace == NAMESPACE]
MANY = 70_000  # more than any list may have
LONG_BYTES = (1 << 20, (1 << 24) - 4096, 1 << 24)  # a message may have 16 MiB


def fields_of(descriptor: Descriptor, above: Path = ()) -> Iterator[Path]:
    """Every field of a message and of the messages in it, as the way to it."""
    for field in descriptor.fields:
        way = (*above, field)
        yield way
        if field.message_type is not None and field.message_type not in _types(above):
            yield from fields_of(field.message_type, way)


def _types(way: Path) -> list[Descriptor]:
    return [field.message_type for field in way if field.message_type is not None]


TARGETS: list[tuple[MethodDescriptor, Path]] = [
    (method, way) for method in UNARY for way in fields_of(method.input_type)
] + [(method, ()) for method in UNARY if not method.input_type.fields]


def request_for(method: MethodDescriptor) -> Any:
    return GetMessageClass(method.input_type)()


def plausible(rng: random.Random, message: Message, depth: int = 0) -> None:
    """Fields as a client would fill them; now and then one is left out."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.15 or depth > 3:
            continue
        if field.message_type is not None:
            times = rng.choice((1, 1, 2, 5)) if field.is_repeated else 1
            for _ in range(times):
                inner = getattr(message, field.name)
                plausible(rng, inner.add() if field.is_repeated else inner, depth + 1)
        elif field.is_repeated:
            times = rng.choice((1, 2, 3))
            getattr(message, field.name).extend(likely(rng, field) for _ in range(times))
        else:
            setattr(message, field.name, likely(rng, field))


def likely(rng: random.Random, field: FieldDescriptor) -> Any:
    """A value of the store's own, by the field's name; else one at a boundary of its type."""
    one = rng.choice(RAW)
    known: dict[str, Any] = {
        "namespace": NAMESPACE,
        "key": one.key,
        "keys": one.key,
        "parent": NAMESPACE,
        "tokens": one.tokens,
        "block_tokens": ROWS,
        "id": one.key.hex()[: rng.choice((4, 16, 64))],
        "ids": one.key.hex()[: rng.choice((4, 16, 64))],
        "file_bytes": len(one.data),
        "lease_id": rng.randrange(1, 1000),
        "reservation_ids": rng.randrange(1, 1000),
        "tier": rng.randrange(4),
        "model": "fuzz",
        "models": "fuzz",
        "part": one.data,
        "pid": rng.choice((1, rng.randrange(1, 1 << 22))),
        "older_than_seconds": rng.choice((0.0, 1e9)),
        "dry_run": rng.random() < 0.9,
        "repair": rng.random() < 0.5,
    }
    value = known.get(field.name)
    fits = type(value) is type(field.default_value) or field.is_repeated
    return value if value is not None and fits and rng.random() < 0.9 else scalar(rng, field)


def aimed(rng: random.Random, number: int) -> tuple[MethodDescriptor, Message]:
    """A plausible request with one field, chosen by the number, as it should not be."""
    method, way = TARGETS[number % len(TARGETS)]
    message = request_for(method)
    plausible(rng, message)
    if way:
        spoil(rng, message, way)
    return method, message


def spoil(rng: random.Random, message: Message, way: Path) -> None:
    field, *rest = way
    if rest:
        inner = getattr(message, field.name)
        if field.is_repeated:
            inner = inner.add() if not inner else rng.choice(inner)
        spoil(rng, inner, tuple(rest))
        return
    kind = rng.random()
    if kind < 0.1:
        message.ClearField(field.name)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        if field.is_repeated:
            for _ in range(rng.choice((1, 3, MANY) if kind < 0.12 else (1, 3))):
                inner.add()
        else:
            inner.SetInParent()
    elif field.is_repeated:
        values = getattr(message, field.name)
        times = rng.choice((1, 3, 100))
        values.extend(scalar(rng, field) for _ in range(times))
        if kind < 0.12:
            values.extend([values[-1]] * MANY)
    elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES) and kind < 0.13:
        long = b"x" * rng.choice(LONG_BYTES)
        setattr(message, field.name, long if field.type == field.TYPE_BYTES else long.decode())
    else:
        setattr(message, field.name, scalar(rng, field))


def garbled(rng: random.Random, message: Message) -> bytes:
    """The wire format, damaged; mostly still a message."""
    data = bytearray(message.SerializeToString()[:4096])
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        if rng.random() < 0.5 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 8))
    return bytes(data)


# --- the stream of a writer -----------------------------------------------------------------------


def opening() -> pb.PutRequest:
    fields = [pb.NamespaceField(name=name, value=value) for name, value in NS.fields()]
    description = pb.Namespace(fields=fields)
    return pb.PutRequest(
        open=pb.PutOpen(namespace=NAMESPACE, description=description, block_tokens=ROWS)
    )


PUT_TARGETS = list(fields_of(pb.PutRequest.DESCRIPTOR))


def put_stream(rng: random.Random, number: int) -> list[pb.PutRequest]:
    """Mostly in order, mostly right; the field chosen by the number is not."""
    requests = [opening()] if rng.random() < 0.9 else []
    for _ in range(rng.choice((0, 1, 2, 4))):
        requests += rng.choice((_inline, _reserve, _commit, _anything))(rng)
    way = PUT_TARGETS[number % len(PUT_TARGETS)]
    spoilt = pb.PutRequest()
    plausible(rng, getattr(spoilt, way[0].name))
    spoil(rng, spoilt, way)
    requests.insert(rng.randrange(len(requests) + 1), spoilt)
    if rng.random() < 0.2:
        rng.shuffle(requests)
    if rng.random() < 0.2:
        requests.insert(rng.randrange(len(requests) + 1), rng.choice(requests))
    return requests


def _inline(rng: random.Random) -> list[pb.PutRequest]:
    """A block in parts, whole or damaged."""
    one = rng.choice(RAW)
    data = one.data if rng.random() < 0.3 else mutate(rng, one).data
    step = rng.choice((7000, 1 << 20, max(1, len(data) // 3), 64))
    starts = range(0, min(len(data), 40 * step), step)
    parts = [data[start : start + step] for start in starts] or [b""]
    return [
        pb.PutRequest(inline=pb.PutInline(key=one.key, part=part, last=index + 1 == len(parts)))
        for index, part in enumerate(parts)
    ]


def _reserve(rng: random.Random) -> list[pb.PutRequest]:
    reserve = pb.PutReserve()
    for _ in range(rng.choice((0, 1, 3, 50))):
        size = rng.choice((8192, 20480, 1 << 20, 1 << 30, 1 << 40, 4096 * rng.randrange(1, 300)))
        key = rng.choice((rng.choice(RAW).key, rng.randbytes(32)))
        reserve.offers.add(key=key, parent=NAMESPACE, file_bytes=size, tail=rng.random() < 0.3)
    return [pb.PutRequest(reserve=reserve)]


def _commit(rng: random.Random) -> list[pb.PutRequest]:
    ids = [rng.randrange(1, 1 << rng.randrange(1, 64)) for _ in range(rng.choice((0, 1, 5)))]
    return [pb.PutRequest(commit=pb.PutCommit(reservation_ids=ids))]


def _anything(rng: random.Random) -> list[pb.PutRequest]:
    request = pb.PutRequest()
    plausible(rng, getattr(request, rng.choice(request.DESCRIPTOR.fields).name))
    return [request]
