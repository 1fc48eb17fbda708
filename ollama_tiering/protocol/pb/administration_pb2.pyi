from ollama_tiering.store import block_store_pb2 as _block_store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TierStat(_message.Message):
    tier: _block_store_pb2.Tier
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
    def __init__(self, tier: _Optional[_Union[_block_store_pb2.Tier, str]] = ..., directory: _Optional[bytes] = ..., budget_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., demoted_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., read_bytes_per_second: _Optional[float] = ..., write_bytes_per_second: _Optional[float] = ..., written_today_bytes: _Optional[int] = ..., daily_write_bytes: _Optional[int] = ..., disk_full: _Optional[bool] = ..., surveyed: _Optional[bool] = ..., expired_blocks: _Optional[int] = ..., state: _Optional[str] = ..., resting_seconds: _Optional[float] = ..., sidecars: _Optional[int] = ..., failures: _Optional[_Mapping[str, int]] = ..., encoding: _Optional[str] = ..., encoding_ratio: _Optional[float] = ..., decode_bytes_per_second: _Optional[float] = ...) -> None: ...

class ModelTerms(_message.Message):
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
    shortfalls: _containers.RepeatedCompositeFieldContainer[_block_store_pb2.ShortfallCount]
    def __init__(self, namespace: _Optional[bytes] = ..., model: _Optional[str] = ..., name: _Optional[str] = ..., engine: _Optional[str] = ..., loaded: _Optional[bool] = ..., since_unix_seconds: _Optional[float] = ..., last_used_unix_seconds: _Optional[float] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., memory_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., prefill_seconds: _Optional[float] = ..., restore_seconds: _Optional[float] = ..., shortfalls: _Optional[_Iterable[_Union[_block_store_pb2.ShortfallCount, _Mapping[str, object]]]] = ...) -> None: ...

class StatResponse(_message.Message):
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
    runners: _containers.RepeatedCompositeFieldContainer[_block_store_pb2.RunnerReport]
    queued_bytes: int
    not_written: _containers.ScalarMap[str, int]
    q8_0_namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    model_terms: _containers.RepeatedCompositeFieldContainer[ModelTerms]
    model_uses: _containers.RepeatedCompositeFieldContainer[ModelUse]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceUse]
    by_rows: bool
    look_up: bool
    put_text: bool
    partings: PartingsSum
    rechecked: _containers.RepeatedCompositeFieldContainer[Rechecked]
    builds: _containers.RepeatedCompositeFieldContainer[BuildPair]
    wear: DiskWear
    def __init__(self, version: _Optional[str] = ..., started_unix_seconds: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStat, _Mapping[str, object]]]] = ..., has_calls: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., asked_tokens: _Optional[int] = ..., put_blocks: _Optional[int] = ..., put_bytes: _Optional[int] = ..., get_blocks: _Optional[int] = ..., get_bytes: _Optional[int] = ..., misses: _Optional[_Mapping[str, int]] = ..., open_leases: _Optional[int] = ..., queued_demotions: _Optional[int] = ..., runners: _Optional[_Iterable[_Union[_block_store_pb2.RunnerReport, _Mapping[str, object]]]] = ..., queued_bytes: _Optional[int] = ..., not_written: _Optional[_Mapping[str, int]] = ..., q8_0_namespaces: _Optional[_Iterable[bytes]] = ..., model_terms: _Optional[_Iterable[_Union[ModelTerms, _Mapping[str, object]]]] = ..., model_uses: _Optional[_Iterable[_Union[ModelUse, _Mapping[str, object]]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceUse, _Mapping[str, object]]]] = ..., by_rows: _Optional[bool] = ..., look_up: _Optional[bool] = ..., put_text: _Optional[bool] = ..., partings: _Optional[_Union[PartingsSum, _Mapping[str, object]]] = ..., rechecked: _Optional[_Iterable[_Union[Rechecked, _Mapping[str, object]]]] = ..., builds: _Optional[_Iterable[_Union[BuildPair, _Mapping[str, object]]]] = ..., wear: _Optional[_Union[DiskWear, _Mapping[str, object]]] = ...) -> None: ...

class DiskWear(_message.Message):
    days: int
    written_bytes: int
    requests: int
    def __init__(self, days: _Optional[int] = ..., written_bytes: _Optional[int] = ..., requests: _Optional[int] = ...) -> None: ...

class Rechecked(_message.Message):
    model: str
    name: str
    blocks: int
    different: int
    last_unix_seconds: float
    def __init__(self, model: _Optional[str] = ..., name: _Optional[str] = ..., blocks: _Optional[int] = ..., different: _Optional[int] = ..., last_unix_seconds: _Optional[float] = ...) -> None: ...

class BuildPair(_message.Message):
    model: str
    engine: str
    other_engine: str
    blocks: int
    deepest_tokens: int
    unix_seconds: float
    verdict: str
    name: str
    def __init__(self, model: _Optional[str] = ..., engine: _Optional[str] = ..., other_engine: _Optional[str] = ..., blocks: _Optional[int] = ..., deepest_tokens: _Optional[int] = ..., unix_seconds: _Optional[float] = ..., verdict: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class PartingsSum(_message.Message):
    requests: int
    lost_tokens: int
    lost_seconds: float
    def __init__(self, requests: _Optional[int] = ..., lost_tokens: _Optional[int] = ..., lost_seconds: _Optional[float] = ...) -> None: ...

class NamespaceUse(_message.Message):
    namespace: bytes
    blocks: int
    model: str
    engine: str
    def __init__(self, namespace: _Optional[bytes] = ..., blocks: _Optional[int] = ..., model: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class Selection(_message.Message):
    ids: _containers.RepeatedScalarFieldContainer[str]
    model: str
    older_than_seconds: float
    min_tokens: int
    min_bytes: int
    tier: _block_store_pb2.Tier
    pinned: bool
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., older_than_seconds: _Optional[float] = ..., min_tokens: _Optional[int] = ..., min_bytes: _Optional[int] = ..., tier: _Optional[_Union[_block_store_pb2.Tier, str]] = ..., pinned: _Optional[bool] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...

class ListRequest(_message.Message):
    selection: Selection
    blocks: bool
    words: bool
    def __init__(self, selection: _Optional[_Union[Selection, _Mapping[str, object]]] = ..., blocks: _Optional[bool] = ..., words: _Optional[bool] = ...) -> None: ...

class TierUse(_message.Message):
    tier: _block_store_pb2.Tier
    blocks: int
    stored_bytes: int
    def __init__(self, tier: _Optional[_Union[_block_store_pb2.Tier, str]] = ..., blocks: _Optional[int] = ..., stored_bytes: _Optional[int] = ...) -> None: ...

class Totals(_message.Message):
    chains: int
    blocks: int
    file_bytes: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierUse]
    def __init__(self, chains: _Optional[int] = ..., blocks: _Optional[int] = ..., file_bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierUse, _Mapping[str, object]]]] = ...) -> None: ...

class ChainLine(_message.Message):
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
    namespace: bytes
    description: _block_store_pb2.Namespace
    def __init__(self, namespace: _Optional[bytes] = ..., description: _Optional[_Union[_block_store_pb2.Namespace, _Mapping[str, object]]] = ...) -> None: ...

class ListHead(_message.Message):
    lines: int
    selected: Totals
    stored: Totals
    id_digits: int
    namespaces: _containers.RepeatedCompositeFieldContainer[DescribedNamespace]
    def __init__(self, lines: _Optional[int] = ..., selected: _Optional[_Union[Totals, _Mapping[str, object]]] = ..., stored: _Optional[_Union[Totals, _Mapping[str, object]]] = ..., id_digits: _Optional[int] = ..., namespaces: _Optional[_Iterable[_Union[DescribedNamespace, _Mapping[str, object]]]] = ...) -> None: ...

class ListResponse(_message.Message):
    head: ListHead
    chains: _containers.RepeatedCompositeFieldContainer[ChainLine]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockLine]
    def __init__(self, head: _Optional[_Union[ListHead, _Mapping[str, object]]] = ..., chains: _Optional[_Iterable[_Union[ChainLine, _Mapping[str, object]]]] = ..., blocks: _Optional[_Iterable[_Union[BlockLine, _Mapping[str, object]]]] = ...) -> None: ...

class PinRequest(_message.Message):
    id: str
    unpin: bool
    dry_run: bool
    follow: bool
    def __init__(self, id: _Optional[str] = ..., unpin: _Optional[bool] = ..., dry_run: _Optional[bool] = ..., follow: _Optional[bool] = ...) -> None: ...

class PinResponse(_message.Message):
    key: bytes
    blocks: int
    changed_bytes: int
    pinned_bytes: int
    limit_bytes: int
    changed: bool
    follows: bool
    def __init__(self, key: _Optional[bytes] = ..., blocks: _Optional[int] = ..., changed_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., changed: _Optional[bool] = ..., follows: _Optional[bool] = ...) -> None: ...

class VerifyRequest(_message.Message):
    repair: bool
    def __init__(self, repair: _Optional[bool] = ...) -> None: ...

class Finding(_message.Message):
    tier: _block_store_pb2.Tier
    what: str
    path: str
    detail: str
    repaired: bool
    def __init__(self, tier: _Optional[_Union[_block_store_pb2.Tier, str]] = ..., what: _Optional[str] = ..., path: _Optional[str] = ..., detail: _Optional[str] = ..., repaired: _Optional[bool] = ...) -> None: ...

class VerifyResponse(_message.Message):
    done_blocks: int
    total_blocks: int
    done_bytes: int
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    def __init__(self, done_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., done_bytes: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping[str, object]]]] = ...) -> None: ...

class RemoveRequest(_message.Message):
    selection: Selection
    dry_run: bool
    def __init__(self, selection: _Optional[_Union[Selection, _Mapping[str, object]]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class RemoveResponse(_message.Message):
    chains: int
    blocks: int
    stored_bytes: int
    kept: _containers.ScalarMap[str, int]
    waiting_blocks: int
    waiting_for: str
    def __init__(self, chains: _Optional[int] = ..., blocks: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., kept: _Optional[_Mapping[str, int]] = ..., waiting_blocks: _Optional[int] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class CollectRequest(_message.Message):
    older_than_seconds: float
    ask_models: bool
    models: _containers.RepeatedScalarFieldContainer[str]
    dry_run: bool
    ask_builds: bool
    builds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, older_than_seconds: _Optional[float] = ..., ask_models: _Optional[bool] = ..., models: _Optional[_Iterable[str]] = ..., dry_run: _Optional[bool] = ..., ask_builds: _Optional[bool] = ..., builds: _Optional[_Iterable[str]] = ...) -> None: ...

class Waste(_message.Message):
    kind: str
    files: int
    stored_bytes: int
    kept: _containers.ScalarMap[str, int]
    def __init__(self, kind: _Optional[str] = ..., files: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., kept: _Optional[_Mapping[str, int]] = ...) -> None: ...

class CollectResponse(_message.Message):
    waste: _containers.RepeatedCompositeFieldContainer[Waste]
    def __init__(self, waste: _Optional[_Iterable[_Union[Waste, _Mapping[str, object]]]] = ...) -> None: ...

class PartingsRequest(_message.Message):
    last: int
    model: str
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, last: _Optional[int] = ..., model: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...

class Parting(_message.Message):
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        KIND_UNSPECIFIED: _ClassVar[Parting.Kind]
        KIND_DIFFERS: _ClassVar[Parting.Kind]
        KIND_EVICTED: _ClassVar[Parting.Kind]
        KIND_DAMAGED: _ClassVar[Parting.Kind]
        KIND_OTHER_SETTINGS: _ClassVar[Parting.Kind]
    KIND_UNSPECIFIED: Parting.Kind
    KIND_DIFFERS: Parting.Kind
    KIND_EVICTED: Parting.Kind
    KIND_DAMAGED: Parting.Kind
    KIND_OTHER_SETTINGS: Parting.Kind
    kind: Parting.Kind
    unix_seconds: float
    namespace: DescribedNamespace
    model: str
    name: str
    prompt_tokens: int
    at_token: int
    computed_tokens: int
    lost_tokens: int
    tokens_per_second: float
    before: bytes
    asked: bytes
    stored: bytes
    skipped_asked: int
    skipped_stored: int
    evicted_unix_seconds: float
    elsewhere: DescribedNamespace
    num_ctx: int
    text_forbidden: bool
    def __init__(self, kind: _Optional[_Union[Parting.Kind, str]] = ..., unix_seconds: _Optional[float] = ..., namespace: _Optional[_Union[DescribedNamespace, _Mapping[str, object]]] = ..., model: _Optional[str] = ..., name: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., at_token: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., lost_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., before: _Optional[bytes] = ..., asked: _Optional[bytes] = ..., stored: _Optional[bytes] = ..., skipped_asked: _Optional[int] = ..., skipped_stored: _Optional[int] = ..., evicted_unix_seconds: _Optional[float] = ..., elsewhere: _Optional[_Union[DescribedNamespace, _Mapping[str, object]]] = ..., num_ctx: _Optional[int] = ..., text_forbidden: _Optional[bool] = ...) -> None: ...

class DaysRequest(_message.Message):
    days: int
    def __init__(self, days: _Optional[int] = ...) -> None: ...

class DayOfModel(_message.Message):
    date: str
    model: str
    name: str
    requests: int
    prompt_tokens: int
    memory_tokens: int
    restored_tokens: int
    recomputed_tokens: int
    restore_seconds: float
    saved_seconds: float
    written_bytes: int
    partings: int
    def __init__(self, date: _Optional[str] = ..., model: _Optional[str] = ..., name: _Optional[str] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., memory_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., restore_seconds: _Optional[float] = ..., saved_seconds: _Optional[float] = ..., written_bytes: _Optional[int] = ..., partings: _Optional[int] = ...) -> None: ...

class DaysResponse(_message.Message):
    days: _containers.RepeatedCompositeFieldContainer[DayOfModel]
    def __init__(self, days: _Optional[_Iterable[_Union[DayOfModel, _Mapping[str, object]]]] = ...) -> None: ...

class RevokeBuildsRequest(_message.Message):
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class RevokeBuildsResponse(_message.Message):
    revoked: _containers.RepeatedCompositeFieldContainer[BuildPair]
    def __init__(self, revoked: _Optional[_Iterable[_Union[BuildPair, _Mapping[str, object]]]] = ...) -> None: ...

class ReloadRequest(_message.Message):
    def __init__(self) -> None: ...

class ReloadResponse(_message.Message):
    changed: _containers.RepeatedScalarFieldContainer[str]
    needs_restart: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, changed: _Optional[_Iterable[str]] = ..., needs_restart: _Optional[_Iterable[str]] = ...) -> None: ...
