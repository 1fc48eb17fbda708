from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SegmentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEGMENT_KIND_UNSPECIFIED: _ClassVar[SegmentKind]
    SEGMENT_KIND_K: _ClassVar[SegmentKind]
    SEGMENT_KIND_V: _ClassVar[SegmentKind]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_RAW: _ClassVar[Encoding]
    ENCODING_ZSTD: _ClassVar[Encoding]
    ENCODING_Q8_0: _ClassVar[Encoding]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_RAM: _ClassVar[Tier]
    TIER_LOCAL: _ClassVar[Tier]
    TIER_REMOTE: _ClassVar[Tier]

class Shortfall(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHORTFALL_UNSPECIFIED: _ClassVar[Shortfall]
    SHORTFALL_NOTHING_STORED: _ClassVar[Shortfall]
    SHORTFALL_ENDS: _ClassVar[Shortfall]
    SHORTFALL_DIFFERS: _ClassVar[Shortfall]
    SHORTFALL_TOO_SHORT: _ClassVar[Shortfall]
    SHORTFALL_GATE: _ClassVar[Shortfall]
    SHORTFALL_RECOMPUTE: _ClassVar[Shortfall]
    SHORTFALL_SIDECAR_AWAY: _ClassVar[Shortfall]
    SHORTFALL_SIDECAR_LATE: _ClassVar[Shortfall]
    SHORTFALL_SIDECAR_ERROR: _ClassVar[Shortfall]
    SHORTFALL_NO_MEMORY: _ClassVar[Shortfall]
    SHORTFALL_DAMAGED: _ClassVar[Shortfall]
    SHORTFALL_UNREADABLE: _ClassVar[Shortfall]
    SHORTFALL_BLOCKS_GONE: _ClassVar[Shortfall]
    SHORTFALL_FILES_LATE: _ClassVar[Shortfall]
    SHORTFALL_HANGING: _ClassVar[Shortfall]
    SHORTFALL_NO_CELLS: _ClassVar[Shortfall]
    SHORTFALL_SHIFTED: _ClassVar[Shortfall]
    SHORTFALL_MEMORY_GONE: _ClassVar[Shortfall]
    SHORTFALL_NOT_LOOKED_UP: _ClassVar[Shortfall]
    SHORTFALL_NOT_TEXT: _ClassVar[Shortfall]
    SHORTFALL_FAILED: _ClassVar[Shortfall]
    SHORTFALL_WINDOW_MISSING: _ClassVar[Shortfall]
    SHORTFALL_STATE_MISSING: _ClassVar[Shortfall]
    SHORTFALL_UNCHECKED: _ClassVar[Shortfall]
SEGMENT_KIND_UNSPECIFIED: SegmentKind
SEGMENT_KIND_K: SegmentKind
SEGMENT_KIND_V: SegmentKind
ENCODING_UNSPECIFIED: Encoding
ENCODING_RAW: Encoding
ENCODING_ZSTD: Encoding
ENCODING_Q8_0: Encoding
TIER_UNSPECIFIED: Tier
TIER_RAM: Tier
TIER_LOCAL: Tier
TIER_REMOTE: Tier
SHORTFALL_UNSPECIFIED: Shortfall
SHORTFALL_NOTHING_STORED: Shortfall
SHORTFALL_ENDS: Shortfall
SHORTFALL_DIFFERS: Shortfall
SHORTFALL_TOO_SHORT: Shortfall
SHORTFALL_GATE: Shortfall
SHORTFALL_RECOMPUTE: Shortfall
SHORTFALL_SIDECAR_AWAY: Shortfall
SHORTFALL_SIDECAR_LATE: Shortfall
SHORTFALL_SIDECAR_ERROR: Shortfall
SHORTFALL_NO_MEMORY: Shortfall
SHORTFALL_DAMAGED: Shortfall
SHORTFALL_UNREADABLE: Shortfall
SHORTFALL_BLOCKS_GONE: Shortfall
SHORTFALL_FILES_LATE: Shortfall
SHORTFALL_HANGING: Shortfall
SHORTFALL_NO_CELLS: Shortfall
SHORTFALL_SHIFTED: Shortfall
SHORTFALL_MEMORY_GONE: Shortfall
SHORTFALL_NOT_LOOKED_UP: Shortfall
SHORTFALL_NOT_TEXT: Shortfall
SHORTFALL_FAILED: Shortfall
SHORTFALL_WINDOW_MISSING: Shortfall
SHORTFALL_STATE_MISSING: Shortfall
SHORTFALL_UNCHECKED: Shortfall

class Segment(_message.Message):
    __slots__ = ("child", "layer", "kind", "encoding", "dtype", "row_bytes", "offset", "stored_bytes", "crc32c", "raw_crc32c", "plane_bytes")
    child: int
    layer: int
    kind: SegmentKind
    encoding: Encoding
    dtype: str
    row_bytes: int
    offset: int
    stored_bytes: int
    crc32c: int
    raw_crc32c: int
    plane_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, child: _Optional[int] = ..., layer: _Optional[int] = ..., kind: _Optional[_Union[SegmentKind, str]] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., dtype: _Optional[str] = ..., row_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., crc32c: _Optional[int] = ..., raw_crc32c: _Optional[int] = ..., plane_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockHeader(_message.Message):
    __slots__ = ("namespace", "key", "parent", "first_position", "tokens", "extras", "segments", "created_unix_seconds", "raw_payload_offset", "cells", "window", "fingerprint")
    namespace: bytes
    key: bytes
    parent: bytes
    first_position: int
    tokens: bytes
    extras: _containers.RepeatedCompositeFieldContainer[Extra]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    created_unix_seconds: int
    raw_payload_offset: int
    cells: _containers.RepeatedScalarFieldContainer[int]
    window: _containers.RepeatedScalarFieldContainer[bytes]
    fingerprint: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., first_position: _Optional[int] = ..., tokens: _Optional[bytes] = ..., extras: _Optional[_Iterable[_Union[Extra, _Mapping[str, object]]]] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping[str, object]]]] = ..., created_unix_seconds: _Optional[int] = ..., raw_payload_offset: _Optional[int] = ..., cells: _Optional[_Iterable[int]] = ..., window: _Optional[_Iterable[bytes]] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class Extra(_message.Message):
    __slots__ = ("row", "digest")
    row: int
    digest: bytes
    def __init__(self, row: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("fields",)
    fields: _containers.RepeatedCompositeFieldContainer[NamespaceField]
    def __init__(self, fields: _Optional[_Iterable[_Union[NamespaceField, _Mapping[str, object]]]] = ...) -> None: ...

class NamespaceField(_message.Message):
    __slots__ = ("name", "value")
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class HasRequest(_message.Message):
    __slots__ = ("namespace", "keys", "tokens", "block_tokens", "by_rows", "fingerprints", "extras", "least_tokens")
    namespace: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    tokens: bytes
    block_tokens: int
    by_rows: bool
    fingerprints: _containers.RepeatedScalarFieldContainer[bytes]
    extras: _containers.RepeatedCompositeFieldContainer[Extra]
    least_tokens: int
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., tokens: _Optional[bytes] = ..., block_tokens: _Optional[int] = ..., by_rows: _Optional[bool] = ..., fingerprints: _Optional[_Iterable[bytes]] = ..., extras: _Optional[_Iterable[_Union[Extra, _Mapping[str, object]]]] = ..., least_tokens: _Optional[int] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("key", "rows", "block_rows", "tier", "stored_bytes", "expected_seconds", "raw_bytes", "fingerprint", "attached")
    key: bytes
    rows: int
    block_rows: int
    tier: Tier
    stored_bytes: int
    expected_seconds: float
    raw_bytes: int
    fingerprint: bytes
    attached: _containers.RepeatedCompositeFieldContainer[AttachedBlock]
    def __init__(self, key: _Optional[bytes] = ..., rows: _Optional[int] = ..., block_rows: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., stored_bytes: _Optional[int] = ..., expected_seconds: _Optional[float] = ..., raw_bytes: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., attached: _Optional[_Iterable[_Union[AttachedBlock, _Mapping[str, object]]]] = ...) -> None: ...

class AttachedBlock(_message.Message):
    __slots__ = ("key", "stored_bytes", "expected_seconds", "raw_bytes")
    key: bytes
    stored_bytes: int
    expected_seconds: float
    raw_bytes: int
    def __init__(self, key: _Optional[bytes] = ..., stored_bytes: _Optional[int] = ..., expected_seconds: _Optional[float] = ..., raw_bytes: _Optional[int] = ...) -> None: ...

class HasResponse(_message.Message):
    __slots__ = ("blocks", "matched_tokens")
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    matched_tokens: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping[str, object]]]] = ..., matched_tokens: _Optional[int] = ...) -> None: ...

class BlockOffer(_message.Message):
    __slots__ = ("key", "parent", "file_bytes", "tail")
    key: bytes
    parent: bytes
    file_bytes: int
    tail: bool
    def __init__(self, key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., file_bytes: _Optional[int] = ..., tail: _Optional[bool] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("open", "reserve", "commit", "inline")
    open: PutOpen
    reserve: PutReserve
    commit: PutCommit
    inline: PutInline
    def __init__(self, open: _Optional[_Union[PutOpen, _Mapping[str, object]]] = ..., reserve: _Optional[_Union[PutReserve, _Mapping[str, object]]] = ..., commit: _Optional[_Union[PutCommit, _Mapping[str, object]]] = ..., inline: _Optional[_Union[PutInline, _Mapping[str, object]]] = ...) -> None: ...

class PutOpen(_message.Message):
    __slots__ = ("namespace", "description", "block_tokens")
    namespace: bytes
    description: Namespace
    block_tokens: int
    def __init__(self, namespace: _Optional[bytes] = ..., description: _Optional[_Union[Namespace, _Mapping[str, object]]] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class PutReserve(_message.Message):
    __slots__ = ("offers",)
    offers: _containers.RepeatedCompositeFieldContainer[BlockOffer]
    def __init__(self, offers: _Optional[_Iterable[_Union[BlockOffer, _Mapping[str, object]]]] = ...) -> None: ...

class PutCommit(_message.Message):
    __slots__ = ("reservation_ids",)
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reservation_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PutInline(_message.Message):
    __slots__ = ("key", "part", "last")
    key: bytes
    part: bytes
    last: bool
    def __init__(self, key: _Optional[bytes] = ..., part: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("reserved", "committed")
    reserved: PutReserved
    committed: PutCommitted
    def __init__(self, reserved: _Optional[_Union[PutReserved, _Mapping[str, object]]] = ..., committed: _Optional[_Union[PutCommitted, _Mapping[str, object]]] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("outcome", "id", "path", "reason")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[Reservation.Outcome]
        OUTCOME_RESERVED: _ClassVar[Reservation.Outcome]
        OUTCOME_PRESENT: _ClassVar[Reservation.Outcome]
        OUTCOME_NO_ROOM: _ClassVar[Reservation.Outcome]
        OUTCOME_REFUSED: _ClassVar[Reservation.Outcome]
    OUTCOME_UNSPECIFIED: Reservation.Outcome
    OUTCOME_RESERVED: Reservation.Outcome
    OUTCOME_PRESENT: Reservation.Outcome
    OUTCOME_NO_ROOM: Reservation.Outcome
    OUTCOME_REFUSED: Reservation.Outcome
    outcome: Reservation.Outcome
    id: int
    path: bytes
    reason: str
    def __init__(self, outcome: _Optional[_Union[Reservation.Outcome, str]] = ..., id: _Optional[int] = ..., path: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class PutReserved(_message.Message):
    __slots__ = ("reservations",)
    reservations: _containers.RepeatedCompositeFieldContainer[Reservation]
    def __init__(self, reservations: _Optional[_Iterable[_Union[Reservation, _Mapping[str, object]]]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("stored", "reason")
    stored: bool
    reason: str
    def __init__(self, stored: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class PutCommitted(_message.Message):
    __slots__ = ("results",)
    results: _containers.RepeatedCompositeFieldContainer[Committed]
    def __init__(self, results: _Optional[_Iterable[_Union[Committed, _Mapping[str, object]]]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("namespace", "keys", "inline", "batch")
    namespace: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    inline: bool
    batch: bool
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., inline: _Optional[bool] = ..., batch: _Optional[bool] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("key", "lease_id", "found", "tier", "path", "file_bytes", "part", "more")
    key: bytes
    lease_id: int
    found: bool
    tier: Tier
    path: bytes
    file_bytes: int
    part: bytes
    more: _containers.RepeatedCompositeFieldContainer[GetResponse]
    def __init__(self, key: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., found: _Optional[bool] = ..., tier: _Optional[_Union[Tier, str]] = ..., path: _Optional[bytes] = ..., file_bytes: _Optional[int] = ..., part: _Optional[bytes] = ..., more: _Optional[_Iterable[_Union[GetResponse, _Mapping[str, object]]]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveSeqRequest(_message.Message):
    __slots__ = ("namespace", "keys")
    namespace: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RemoveSeqResponse(_message.Message):
    __slots__ = ("removed_blocks", "removed_bytes")
    removed_blocks: int
    removed_bytes: int
    def __init__(self, removed_blocks: _Optional[int] = ..., removed_bytes: _Optional[int] = ...) -> None: ...

class ReportCorruptRequest(_message.Message):
    __slots__ = ("namespace", "key", "detail")
    namespace: bytes
    key: bytes
    detail: str
    def __init__(self, namespace: _Optional[bytes] = ..., key: _Optional[bytes] = ..., detail: _Optional[str] = ...) -> None: ...

class ReportCorruptResponse(_message.Message):
    __slots__ = ("quarantined",)
    quarantined: bool
    def __init__(self, quarantined: _Optional[bool] = ...) -> None: ...

class ShortfallCount(_message.Message):
    __slots__ = ("reason", "requests", "tokens")
    reason: Shortfall
    requests: int
    tokens: int
    def __init__(self, reason: _Optional[_Union[Shortfall, str]] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class LastRequest(_message.Message):
    __slots__ = ("prompt_tokens", "memory_tokens", "restored_tokens", "shortfall", "at_token")
    prompt_tokens: int
    memory_tokens: int
    restored_tokens: int
    shortfall: Shortfall
    at_token: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., memory_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., shortfall: _Optional[_Union[Shortfall, str]] = ..., at_token: _Optional[int] = ...) -> None: ...

class RunnerReport(_message.Message):
    __slots__ = ("pid", "engine", "model", "tiered", "reason", "namespace", "requests", "prompt_tokens", "memory_tokens", "restored_tokens", "recomputed_tokens", "prefill_tokens_per_second", "snapshot_blocks", "skipped_by_gate", "failures", "last_restore", "cpu_attention", "memory_short_tokens", "started_unix_seconds", "prefill_tokens", "prefill_seconds", "restore_seconds", "caches", "to_store", "shortfalls", "last_request", "min_tokens", "cache_memory")
    pid: int
    engine: str
    model: str
    tiered: bool
    reason: str
    namespace: bytes
    requests: int
    prompt_tokens: int
    memory_tokens: int
    restored_tokens: int
    recomputed_tokens: int
    prefill_tokens_per_second: float
    snapshot_blocks: int
    skipped_by_gate: int
    failures: int
    last_restore: RestoreReport
    cpu_attention: str
    memory_short_tokens: int
    started_unix_seconds: float
    prefill_tokens: int
    prefill_seconds: float
    restore_seconds: float
    caches: str
    to_store: int
    shortfalls: _containers.RepeatedCompositeFieldContainer[ShortfallCount]
    last_request: LastRequest
    min_tokens: int
    cache_memory: CacheMemory
    def __init__(self, pid: _Optional[int] = ..., engine: _Optional[str] = ..., model: _Optional[str] = ..., tiered: _Optional[bool] = ..., reason: _Optional[str] = ..., namespace: _Optional[bytes] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., memory_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., snapshot_blocks: _Optional[int] = ..., skipped_by_gate: _Optional[int] = ..., failures: _Optional[int] = ..., last_restore: _Optional[_Union[RestoreReport, _Mapping[str, object]]] = ..., cpu_attention: _Optional[str] = ..., memory_short_tokens: _Optional[int] = ..., started_unix_seconds: _Optional[float] = ..., prefill_tokens: _Optional[int] = ..., prefill_seconds: _Optional[float] = ..., restore_seconds: _Optional[float] = ..., caches: _Optional[str] = ..., to_store: _Optional[int] = ..., shortfalls: _Optional[_Iterable[_Union[ShortfallCount, _Mapping[str, object]]]] = ..., last_request: _Optional[_Union[LastRequest, _Mapping[str, object]]] = ..., min_tokens: _Optional[int] = ..., cache_memory: _Optional[_Union[CacheMemory, _Mapping[str, object]]] = ...) -> None: ...

class CacheMemory(_message.Message):
    __slots__ = ("device_layers", "device_bytes", "pinned_layers", "pinned_bytes", "host_layers", "host_bytes", "paging_asked", "in_turn", "mirrored_bytes")
    device_layers: int
    device_bytes: int
    pinned_layers: int
    pinned_bytes: int
    host_layers: int
    host_bytes: int
    paging_asked: bool
    in_turn: bool
    mirrored_bytes: int
    def __init__(self, device_layers: _Optional[int] = ..., device_bytes: _Optional[int] = ..., pinned_layers: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., host_layers: _Optional[int] = ..., host_bytes: _Optional[int] = ..., paging_asked: _Optional[bool] = ..., in_turn: _Optional[bool] = ..., mirrored_bytes: _Optional[int] = ...) -> None: ...

class RestoreReport(_message.Message):
    __slots__ = ("tokens", "bytes", "lookup_seconds", "fetch_seconds", "verify_seconds", "copy_seconds", "memcpy_seconds", "memcpy_all_seconds")
    tokens: int
    bytes: int
    lookup_seconds: float
    fetch_seconds: float
    verify_seconds: float
    copy_seconds: float
    memcpy_seconds: float
    memcpy_all_seconds: float
    def __init__(self, tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., lookup_seconds: _Optional[float] = ..., fetch_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., copy_seconds: _Optional[float] = ..., memcpy_seconds: _Optional[float] = ..., memcpy_all_seconds: _Optional[float] = ...) -> None: ...

class ReportRunnerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadedFile(_message.Message):
    __slots__ = ("path", "device", "inode", "size_bytes", "mtime_ns", "ctime_ns")
    path: bytes
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    def __init__(self, path: _Optional[bytes] = ..., device: _Optional[int] = ..., inode: _Optional[int] = ..., size_bytes: _Optional[int] = ..., mtime_ns: _Optional[int] = ..., ctime_ns: _Optional[int] = ...) -> None: ...

class CheckFilesRequest(_message.Message):
    __slots__ = ("files",)
    files: _containers.RepeatedCompositeFieldContainer[LoadedFile]
    def __init__(self, files: _Optional[_Iterable[_Union[LoadedFile, _Mapping[str, object]]]] = ...) -> None: ...

class CheckFilesResponse(_message.Message):
    __slots__ = ("state", "reason", "sha256")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[CheckFilesResponse.State]
        STATE_PENDING: _ClassVar[CheckFilesResponse.State]
        STATE_SOUND: _ClassVar[CheckFilesResponse.State]
        STATE_REFUSED: _ClassVar[CheckFilesResponse.State]
    STATE_UNSPECIFIED: CheckFilesResponse.State
    STATE_PENDING: CheckFilesResponse.State
    STATE_SOUND: CheckFilesResponse.State
    STATE_REFUSED: CheckFilesResponse.State
    state: CheckFilesResponse.State
    reason: str
    sha256: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, state: _Optional[_Union[CheckFilesResponse.State, str]] = ..., reason: _Optional[str] = ..., sha256: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStat(_message.Message):
    __slots__ = ("tier", "directory", "budget_bytes", "used_bytes", "reserved_bytes", "blocks", "evicted_blocks", "demoted_blocks", "quarantined_blocks", "read_bytes_per_second", "write_bytes_per_second", "written_today_bytes", "daily_write_bytes", "disk_full", "surveyed", "expired_blocks", "state", "resting_seconds", "sidecars", "failures", "encoding", "encoding_ratio", "decode_bytes_per_second")
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    tier: Tier
    directory: bytes
    budget_bytes: int
    used_bytes: int
    reserved_bytes: int
    blocks: int
    evicted_blocks: int
    demoted_blocks: int
    quarantined_blocks: int
    read_bytes_per_second: float
    write_bytes_per_second: float
    written_today_bytes: int
    daily_write_bytes: int
    disk_full: bool
    surveyed: bool
    expired_blocks: int
    state: str
    resting_seconds: float
    sidecars: int
    failures: _containers.ScalarMap[str, int]
    encoding: str
    encoding_ratio: float
    decode_bytes_per_second: float
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., directory: _Optional[bytes] = ..., budget_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., demoted_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., read_bytes_per_second: _Optional[float] = ..., write_bytes_per_second: _Optional[float] = ..., written_today_bytes: _Optional[int] = ..., daily_write_bytes: _Optional[int] = ..., disk_full: _Optional[bool] = ..., surveyed: _Optional[bool] = ..., expired_blocks: _Optional[int] = ..., state: _Optional[str] = ..., resting_seconds: _Optional[float] = ..., sidecars: _Optional[int] = ..., failures: _Optional[_Mapping[str, int]] = ..., encoding: _Optional[str] = ..., encoding_ratio: _Optional[float] = ..., decode_bytes_per_second: _Optional[float] = ...) -> None: ...

class ModelTerms(_message.Message):
    __slots__ = ("model", "name", "namespaces", "refusal", "ttl_seconds", "budget_bytes", "local_bytes", "remote_bytes")
    model: str
    name: str
    namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    refusal: str
    ttl_seconds: float
    budget_bytes: int
    local_bytes: int
    remote_bytes: int
    def __init__(self, model: _Optional[str] = ..., name: _Optional[str] = ..., namespaces: _Optional[_Iterable[bytes]] = ..., refusal: _Optional[str] = ..., ttl_seconds: _Optional[float] = ..., budget_bytes: _Optional[int] = ..., local_bytes: _Optional[int] = ..., remote_bytes: _Optional[int] = ...) -> None: ...

class ModelUse(_message.Message):
    __slots__ = ("namespace", "model", "name", "engine", "loaded", "since_unix_seconds", "last_used_unix_seconds", "requests", "prompt_tokens", "memory_tokens", "restored_tokens", "recomputed_tokens", "prefill_tokens", "prefill_seconds", "restore_seconds", "shortfalls")
    namespace: bytes
    model: str
    name: str
    engine: str
    loaded: bool
    since_unix_seconds: float
    last_used_unix_seconds: float
    requests: int
    prompt_tokens: int
    memory_tokens: int
    restored_tokens: int
    recomputed_tokens: int
    prefill_tokens: int
    prefill_seconds: float
    restore_seconds: float
    shortfalls: _containers.RepeatedCompositeFieldContainer[ShortfallCount]
    def __init__(self, namespace: _Optional[bytes] = ..., model: _Optional[str] = ..., name: _Optional[str] = ..., engine: _Optional[str] = ..., loaded: _Optional[bool] = ..., since_unix_seconds: _Optional[float] = ..., last_used_unix_seconds: _Optional[float] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., memory_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., prefill_seconds: _Optional[float] = ..., restore_seconds: _Optional[float] = ..., shortfalls: _Optional[_Iterable[_Union[ShortfallCount, _Mapping[str, object]]]] = ...) -> None: ...

class StatResponse(_message.Message):
    __slots__ = ("version", "started_unix_seconds", "tiers", "has_calls", "matched_tokens", "asked_tokens", "put_blocks", "put_bytes", "get_blocks", "get_bytes", "misses", "open_leases", "queued_demotions", "runners", "queued_bytes", "not_written", "q8_0_namespaces", "model_terms", "model_uses", "namespaces", "by_rows")
    class MissesEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NotWrittenEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    version: str
    started_unix_seconds: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStat]
    has_calls: int
    matched_tokens: int
    asked_tokens: int
    put_blocks: int
    put_bytes: int
    get_blocks: int
    get_bytes: int
    misses: _containers.ScalarMap[str, int]
    open_leases: int
    queued_demotions: int
    runners: _containers.RepeatedCompositeFieldContainer[RunnerReport]
    queued_bytes: int
    not_written: _containers.ScalarMap[str, int]
    q8_0_namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    model_terms: _containers.RepeatedCompositeFieldContainer[ModelTerms]
    model_uses: _containers.RepeatedCompositeFieldContainer[ModelUse]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceUse]
    by_rows: bool
    def __init__(self, version: _Optional[str] = ..., started_unix_seconds: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStat, _Mapping[str, object]]]] = ..., has_calls: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., asked_tokens: _Optional[int] = ..., put_blocks: _Optional[int] = ..., put_bytes: _Optional[int] = ..., get_blocks: _Optional[int] = ..., get_bytes: _Optional[int] = ..., misses: _Optional[_Mapping[str, int]] = ..., open_leases: _Optional[int] = ..., queued_demotions: _Optional[int] = ..., runners: _Optional[_Iterable[_Union[RunnerReport, _Mapping[str, object]]]] = ..., queued_bytes: _Optional[int] = ..., not_written: _Optional[_Mapping[str, int]] = ..., q8_0_namespaces: _Optional[_Iterable[bytes]] = ..., model_terms: _Optional[_Iterable[_Union[ModelTerms, _Mapping[str, object]]]] = ..., model_uses: _Optional[_Iterable[_Union[ModelUse, _Mapping[str, object]]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceUse, _Mapping[str, object]]]] = ..., by_rows: _Optional[bool] = ...) -> None: ...

class NamespaceUse(_message.Message):
    __slots__ = ("namespace", "blocks", "model", "engine")
    namespace: bytes
    blocks: int
    model: str
    engine: str
    def __init__(self, namespace: _Optional[bytes] = ..., blocks: _Optional[int] = ..., model: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class Selection(_message.Message):
    __slots__ = ("ids", "model", "older_than_seconds", "min_tokens", "min_bytes", "tier", "pinned", "models")
    ids: _containers.RepeatedScalarFieldContainer[str]
    model: str
    older_than_seconds: float
    min_tokens: int
    min_bytes: int
    tier: Tier
    pinned: bool
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., older_than_seconds: _Optional[float] = ..., min_tokens: _Optional[int] = ..., min_bytes: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., pinned: _Optional[bool] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("selection", "blocks", "words")
    selection: Selection
    blocks: bool
    words: bool
    def __init__(self, selection: _Optional[_Union[Selection, _Mapping[str, object]]] = ..., blocks: _Optional[bool] = ..., words: _Optional[bool] = ...) -> None: ...

class TierUse(_message.Message):
    __slots__ = ("tier", "blocks", "stored_bytes")
    tier: Tier
    blocks: int
    stored_bytes: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., blocks: _Optional[int] = ..., stored_bytes: _Optional[int] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("chains", "blocks", "file_bytes", "tiers")
    chains: int
    blocks: int
    file_bytes: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierUse]
    def __init__(self, chains: _Optional[int] = ..., blocks: _Optional[int] = ..., file_bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierUse, _Mapping[str, object]]]] = ...) -> None: ...

class ChainLine(_message.Message):
    __slots__ = ("key", "namespace", "tokens", "blocks", "file_bytes", "own_blocks", "own_bytes", "tiers", "created", "last_use", "hits", "pinned", "leased", "complete", "words", "words_before")
    key: bytes
    namespace: bytes
    tokens: int
    blocks: int
    file_bytes: int
    own_blocks: int
    own_bytes: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierUse]
    created: float
    last_use: float
    hits: int
    pinned: bool
    leased: bool
    complete: bool
    words: bytes
    words_before: int
    def __init__(self, key: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., file_bytes: _Optional[int] = ..., own_blocks: _Optional[int] = ..., own_bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierUse, _Mapping[str, object]]]] = ..., created: _Optional[float] = ..., last_use: _Optional[float] = ..., hits: _Optional[int] = ..., pinned: _Optional[bool] = ..., leased: _Optional[bool] = ..., complete: _Optional[bool] = ..., words: _Optional[bytes] = ..., words_before: _Optional[int] = ...) -> None: ...

class BlockLine(_message.Message):
    __slots__ = ("key", "namespace", "parent", "rows", "tokens", "file_bytes", "tiers", "created", "last_use", "hits", "children", "pinned", "leased", "complete")
    key: bytes
    namespace: bytes
    parent: bytes
    rows: int
    tokens: int
    file_bytes: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierUse]
    created: float
    last_use: float
    hits: int
    children: int
    pinned: bool
    leased: bool
    complete: bool
    def __init__(self, key: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., rows: _Optional[int] = ..., tokens: _Optional[int] = ..., file_bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierUse, _Mapping[str, object]]]] = ..., created: _Optional[float] = ..., last_use: _Optional[float] = ..., hits: _Optional[int] = ..., children: _Optional[int] = ..., pinned: _Optional[bool] = ..., leased: _Optional[bool] = ..., complete: _Optional[bool] = ...) -> None: ...

class DescribedNamespace(_message.Message):
    __slots__ = ("namespace", "description")
    namespace: bytes
    description: Namespace
    def __init__(self, namespace: _Optional[bytes] = ..., description: _Optional[_Union[Namespace, _Mapping[str, object]]] = ...) -> None: ...

class ListHead(_message.Message):
    __slots__ = ("lines", "selected", "stored", "id_digits", "namespaces")
    lines: int
    selected: Totals
    stored: Totals
    id_digits: int
    namespaces: _containers.RepeatedCompositeFieldContainer[DescribedNamespace]
    def __init__(self, lines: _Optional[int] = ..., selected: _Optional[_Union[Totals, _Mapping[str, object]]] = ..., stored: _Optional[_Union[Totals, _Mapping[str, object]]] = ..., id_digits: _Optional[int] = ..., namespaces: _Optional[_Iterable[_Union[DescribedNamespace, _Mapping[str, object]]]] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("head", "chains", "blocks")
    head: ListHead
    chains: _containers.RepeatedCompositeFieldContainer[ChainLine]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockLine]
    def __init__(self, head: _Optional[_Union[ListHead, _Mapping[str, object]]] = ..., chains: _Optional[_Iterable[_Union[ChainLine, _Mapping[str, object]]]] = ..., blocks: _Optional[_Iterable[_Union[BlockLine, _Mapping[str, object]]]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("id", "unpin", "dry_run")
    id: str
    unpin: bool
    dry_run: bool
    def __init__(self, id: _Optional[str] = ..., unpin: _Optional[bool] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("key", "blocks", "changed_bytes", "pinned_bytes", "limit_bytes", "changed")
    key: bytes
    blocks: int
    changed_bytes: int
    pinned_bytes: int
    limit_bytes: int
    changed: bool
    def __init__(self, key: _Optional[bytes] = ..., blocks: _Optional[int] = ..., changed_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., changed: _Optional[bool] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("repair",)
    repair: bool
    def __init__(self, repair: _Optional[bool] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("tier", "what", "path", "detail", "repaired")
    tier: Tier
    what: str
    path: str
    detail: str
    repaired: bool
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., what: _Optional[str] = ..., path: _Optional[str] = ..., detail: _Optional[str] = ..., repaired: _Optional[bool] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("done_blocks", "total_blocks", "done_bytes", "findings")
    done_blocks: int
    total_blocks: int
    done_bytes: int
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    def __init__(self, done_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., done_bytes: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping[str, object]]]] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("selection", "dry_run")
    selection: Selection
    dry_run: bool
    def __init__(self, selection: _Optional[_Union[Selection, _Mapping[str, object]]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ("chains", "blocks", "stored_bytes", "kept", "waiting_blocks", "waiting_for")
    class KeptEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    chains: int
    blocks: int
    stored_bytes: int
    kept: _containers.ScalarMap[str, int]
    waiting_blocks: int
    waiting_for: str
    def __init__(self, chains: _Optional[int] = ..., blocks: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., kept: _Optional[_Mapping[str, int]] = ..., waiting_blocks: _Optional[int] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ("older_than_seconds", "ask_models", "models", "dry_run", "ask_builds", "builds")
    older_than_seconds: float
    ask_models: bool
    models: _containers.RepeatedScalarFieldContainer[str]
    dry_run: bool
    ask_builds: bool
    builds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, older_than_seconds: _Optional[float] = ..., ask_models: _Optional[bool] = ..., models: _Optional[_Iterable[str]] = ..., dry_run: _Optional[bool] = ..., ask_builds: _Optional[bool] = ..., builds: _Optional[_Iterable[str]] = ...) -> None: ...

class Waste(_message.Message):
    __slots__ = ("kind", "files", "stored_bytes", "kept")
    class KeptEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    kind: str
    files: int
    stored_bytes: int
    kept: _containers.ScalarMap[str, int]
    def __init__(self, kind: _Optional[str] = ..., files: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., kept: _Optional[_Mapping[str, int]] = ...) -> None: ...

class CollectResponse(_message.Message):
    __slots__ = ("waste",)
    waste: _containers.RepeatedCompositeFieldContainer[Waste]
    def __init__(self, waste: _Optional[_Iterable[_Union[Waste, _Mapping[str, object]]]] = ...) -> None: ...
