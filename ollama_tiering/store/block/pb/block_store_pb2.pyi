from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SegmentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    SEGMENT_KIND_UNSPECIFIED: _ClassVar[SegmentKind]
    SEGMENT_KIND_K: _ClassVar[SegmentKind]
    SEGMENT_KIND_V: _ClassVar[SegmentKind]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_RAW: _ClassVar[Encoding]
    ENCODING_ZSTD: _ClassVar[Encoding]
    ENCODING_Q8_0: _ClassVar[Encoding]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_RAM: _ClassVar[Tier]
    TIER_LOCAL: _ClassVar[Tier]
    TIER_REMOTE: _ClassVar[Tier]

class Shortfall(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
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
    row: int
    digest: bytes
    def __init__(self, row: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Namespace(_message.Message):
    fields: _containers.RepeatedCompositeFieldContainer[NamespaceField]
    def __init__(self, fields: _Optional[_Iterable[_Union[NamespaceField, _Mapping[str, object]]]] = ...) -> None: ...

class NamespaceField(_message.Message):
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class LookUpRequest(_message.Message):
    namespace: bytes
    tokens: bytes
    extras: _containers.RepeatedCompositeFieldContainer[Extra]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    block_tokens: int
    most_rows: int
    memory_rows: int
    min_tokens: int
    by_rows: bool
    fingerprints: _containers.RepeatedScalarFieldContainer[bytes]
    windows: _containers.RepeatedCompositeFieldContainer[WindowSought]
    prefill_tokens_per_second: float
    copy_bytes_per_second: float
    def __init__(self, namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., extras: _Optional[_Iterable[_Union[Extra, _Mapping[str, object]]]] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping[str, object]]]] = ..., block_tokens: _Optional[int] = ..., most_rows: _Optional[int] = ..., memory_rows: _Optional[int] = ..., min_tokens: _Optional[int] = ..., by_rows: _Optional[bool] = ..., fingerprints: _Optional[_Iterable[bytes]] = ..., windows: _Optional[_Iterable[_Union[WindowSought, _Mapping[str, object]]]] = ..., prefill_tokens_per_second: _Optional[float] = ..., copy_bytes_per_second: _Optional[float] = ...) -> None: ...

class Span(_message.Message):
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class WindowSought(_message.Message):
    child: int
    size: int
    row_bytes: int
    at_checkpoints: bool
    def __init__(self, child: _Optional[int] = ..., size: _Optional[int] = ..., row_bytes: _Optional[int] = ..., at_checkpoints: _Optional[bool] = ...) -> None: ...

class LookUpResponse(_message.Message):
    plan: LookUpPlan
    files: _containers.RepeatedCompositeFieldContainer[NamedFile]
    lease_id: int
    def __init__(self, plan: _Optional[_Union[LookUpPlan, _Mapping[str, object]]] = ..., files: _Optional[_Iterable[_Union[NamedFile, _Mapping[str, object]]]] = ..., lease_id: _Optional[int] = ...) -> None: ...

class LookUpPlan(_message.Message):
    start_row: int
    end_row: int
    files: int
    reason: Shortfall
    at_row: int
    expected_seconds: float
    own_bytes: int
    def __init__(self, start_row: _Optional[int] = ..., end_row: _Optional[int] = ..., files: _Optional[int] = ..., reason: _Optional[_Union[Shortfall, str]] = ..., at_row: _Optional[int] = ..., expected_seconds: _Optional[float] = ..., own_bytes: _Optional[int] = ...) -> None: ...

class NamedFile(_message.Message):
    key: bytes
    tier: Tier
    path: bytes
    file_bytes: int
    fingerprint: bytes
    def __init__(self, key: _Optional[bytes] = ..., tier: _Optional[_Union[Tier, str]] = ..., path: _Optional[bytes] = ..., file_bytes: _Optional[int] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class HasRequest(_message.Message):
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
    key: bytes
    stored_bytes: int
    expected_seconds: float
    raw_bytes: int
    def __init__(self, key: _Optional[bytes] = ..., stored_bytes: _Optional[int] = ..., expected_seconds: _Optional[float] = ..., raw_bytes: _Optional[int] = ...) -> None: ...

class HasResponse(_message.Message):
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    matched_tokens: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping[str, object]]]] = ..., matched_tokens: _Optional[int] = ...) -> None: ...

class BlockOffer(_message.Message):
    key: bytes
    parent: bytes
    file_bytes: int
    tail: bool
    def __init__(self, key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., file_bytes: _Optional[int] = ..., tail: _Optional[bool] = ...) -> None: ...

class PutRequest(_message.Message):
    open: PutOpen
    reserve: PutReserve
    commit: PutCommit
    inline: PutInline
    def __init__(self, open: _Optional[_Union[PutOpen, _Mapping[str, object]]] = ..., reserve: _Optional[_Union[PutReserve, _Mapping[str, object]]] = ..., commit: _Optional[_Union[PutCommit, _Mapping[str, object]]] = ..., inline: _Optional[_Union[PutInline, _Mapping[str, object]]] = ...) -> None: ...

class PutOpen(_message.Message):
    namespace: bytes
    description: Namespace
    block_tokens: int
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    window_children: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, namespace: _Optional[bytes] = ..., description: _Optional[_Union[Namespace, _Mapping[str, object]]] = ..., block_tokens: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping[str, object]]]] = ..., window_children: _Optional[_Iterable[int]] = ...) -> None: ...

class PutReserve(_message.Message):
    offers: _containers.RepeatedCompositeFieldContainer[BlockOffer]
    text: PutText
    def __init__(self, offers: _Optional[_Iterable[_Union[BlockOffer, _Mapping[str, object]]]] = ..., text: _Optional[_Union[PutText, _Mapping[str, object]]] = ...) -> None: ...

class PutText(_message.Message):
    tokens: bytes
    extras: _containers.RepeatedCompositeFieldContainer[Extra]
    fingerprints: _containers.RepeatedScalarFieldContainer[bytes]
    blocks: _containers.RepeatedCompositeFieldContainer[TextBlock]
    def __init__(self, tokens: _Optional[bytes] = ..., extras: _Optional[_Iterable[_Union[Extra, _Mapping[str, object]]]] = ..., fingerprints: _Optional[_Iterable[bytes]] = ..., blocks: _Optional[_Iterable[_Union[TextBlock, _Mapping[str, object]]]] = ...) -> None: ...

class TextBlock(_message.Message):
    first_row: int
    rows: int
    child: int
    cells: _containers.RepeatedScalarFieldContainer[int]
    ends_window: bool
    def __init__(self, first_row: _Optional[int] = ..., rows: _Optional[int] = ..., child: _Optional[int] = ..., cells: _Optional[_Iterable[int]] = ..., ends_window: _Optional[bool] = ...) -> None: ...

class PutCommit(_message.Message):
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    crcs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, reservation_ids: _Optional[_Iterable[int]] = ..., crcs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PutInline(_message.Message):
    key: bytes
    part: bytes
    last: bool
    def __init__(self, key: _Optional[bytes] = ..., part: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class PutResponse(_message.Message):
    reserved: PutReserved
    committed: PutCommitted
    def __init__(self, reserved: _Optional[_Union[PutReserved, _Mapping[str, object]]] = ..., committed: _Optional[_Union[PutCommitted, _Mapping[str, object]]] = ...) -> None: ...

class Reservation(_message.Message):
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
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
    payload_offset: int
    file_bytes: int
    def __init__(self, outcome: _Optional[_Union[Reservation.Outcome, str]] = ..., id: _Optional[int] = ..., path: _Optional[bytes] = ..., reason: _Optional[str] = ..., payload_offset: _Optional[int] = ..., file_bytes: _Optional[int] = ...) -> None: ...

class PutReserved(_message.Message):
    reservations: _containers.RepeatedCompositeFieldContainer[Reservation]
    def __init__(self, reservations: _Optional[_Iterable[_Union[Reservation, _Mapping[str, object]]]] = ...) -> None: ...

class Committed(_message.Message):
    stored: bool
    reason: str
    def __init__(self, stored: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class PutCommitted(_message.Message):
    results: _containers.RepeatedCompositeFieldContainer[Committed]
    def __init__(self, results: _Optional[_Iterable[_Union[Committed, _Mapping[str, object]]]] = ...) -> None: ...

class GetRequest(_message.Message):
    namespace: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    inline: bool
    batch: bool
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., inline: _Optional[bool] = ..., batch: _Optional[bool] = ...) -> None: ...

class GetResponse(_message.Message):
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
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    def __init__(self) -> None: ...

class RemoveSeqRequest(_message.Message):
    namespace: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RemoveSeqResponse(_message.Message):
    removed_blocks: int
    removed_bytes: int
    def __init__(self, removed_blocks: _Optional[int] = ..., removed_bytes: _Optional[int] = ...) -> None: ...

class ReportCorruptRequest(_message.Message):
    namespace: bytes
    key: bytes
    detail: str
    def __init__(self, namespace: _Optional[bytes] = ..., key: _Optional[bytes] = ..., detail: _Optional[str] = ...) -> None: ...

class ReportCorruptResponse(_message.Message):
    quarantined: bool
    def __init__(self, quarantined: _Optional[bool] = ...) -> None: ...

class ShortfallCount(_message.Message):
    reason: Shortfall
    requests: int
    tokens: int
    def __init__(self, reason: _Optional[_Union[Shortfall, str]] = ..., requests: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class LastRequest(_message.Message):
    prompt_tokens: int
    memory_tokens: int
    restored_tokens: int
    shortfall: Shortfall
    at_token: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., memory_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., shortfall: _Optional[_Union[Shortfall, str]] = ..., at_token: _Optional[int] = ...) -> None: ...

class RunnerReport(_message.Message):
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
    settings: RunnerSettings
    def __init__(self, pid: _Optional[int] = ..., engine: _Optional[str] = ..., model: _Optional[str] = ..., tiered: _Optional[bool] = ..., reason: _Optional[str] = ..., namespace: _Optional[bytes] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., memory_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., snapshot_blocks: _Optional[int] = ..., skipped_by_gate: _Optional[int] = ..., failures: _Optional[int] = ..., last_restore: _Optional[_Union[RestoreReport, _Mapping[str, object]]] = ..., cpu_attention: _Optional[str] = ..., memory_short_tokens: _Optional[int] = ..., started_unix_seconds: _Optional[float] = ..., prefill_tokens: _Optional[int] = ..., prefill_seconds: _Optional[float] = ..., restore_seconds: _Optional[float] = ..., caches: _Optional[str] = ..., to_store: _Optional[int] = ..., shortfalls: _Optional[_Iterable[_Union[ShortfallCount, _Mapping[str, object]]]] = ..., last_request: _Optional[_Union[LastRequest, _Mapping[str, object]]] = ..., min_tokens: _Optional[int] = ..., cache_memory: _Optional[_Union[CacheMemory, _Mapping[str, object]]] = ..., settings: _Optional[_Union[RunnerSettings, _Mapping[str, object]]] = ...) -> None: ...

class RunnerSettings(_message.Message):
    context_tokens: int
    slots: int
    batch_tokens: int
    threads: int
    def __init__(self, context_tokens: _Optional[int] = ..., slots: _Optional[int] = ..., batch_tokens: _Optional[int] = ..., threads: _Optional[int] = ...) -> None: ...

class CacheMemory(_message.Message):
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
    def __init__(self) -> None: ...

class LoadedFile(_message.Message):
    path: bytes
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    def __init__(self, path: _Optional[bytes] = ..., device: _Optional[int] = ..., inode: _Optional[int] = ..., size_bytes: _Optional[int] = ..., mtime_ns: _Optional[int] = ..., ctime_ns: _Optional[int] = ...) -> None: ...

class CheckFilesRequest(_message.Message):
    files: _containers.RepeatedCompositeFieldContainer[LoadedFile]
    def __init__(self, files: _Optional[_Iterable[_Union[LoadedFile, _Mapping[str, object]]]] = ...) -> None: ...

class CheckFilesResponse(_message.Message):
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
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
    def __init__(self) -> None: ...

class StatForEngines(_message.Message):
    tiers: _containers.RepeatedCompositeFieldContainer[TierFolder]
    by_rows: bool
    look_up: bool
    put_text: bool
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierFolder, _Mapping[str, object]]]] = ..., by_rows: _Optional[bool] = ..., look_up: _Optional[bool] = ..., put_text: _Optional[bool] = ...) -> None: ...

class TierFolder(_message.Message):
    directory: bytes
    def __init__(self, directory: _Optional[bytes] = ...) -> None: ...
