"""The block store, and its face: the names that the rest of the product may use.

Other packages import from here, from `errors` (what goes wrong), from `values` (what people and
tools see) or from `tools` (what a person asks of a store), and from nowhere deeper. A name is
loaded when it is first used, so that a program which needs only keys does not load SQLite.

    tools     what a person asks: lists, removals, archives, also without a sidecar
    assemble  from the settings to a TieredStore, with what own_tiers could open
    tiered    the store itself, with the threads of background, over
    serving   what a client's call does
    upkeep    what the store does by itself
    books     what lies where and what may go, under one lock, without a disk
    values    what people and tools see
    tiers     where bytes lie
    block     what a block is, pure

Each of them knows only those below it. None of them knows gRPC or Click.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ollama_tiering.store.assemble import open_store as open_store
    from ollama_tiering.store.block.blockfile import MAX_ROWS as MAX_ROWS
    from ollama_tiering.store.block.blockfile import BlockMeta as BlockMeta
    from ollama_tiering.store.block.blockfile import BlockPlan as BlockPlan
    from ollama_tiering.store.block.blockfile import buffer_reader as buffer_reader
    from ollama_tiering.store.block.blockfile import check_header as check_header
    from ollama_tiering.store.block.blockfile import damaged as damaged
    from ollama_tiering.store.block.blockfile import encode_block as encode_block
    from ollama_tiering.store.block.blockfile import plan_block as plan_block
    from ollama_tiering.store.block.blockfile import read_header as read_header
    from ollama_tiering.store.block.blockfile import read_meta as read_meta
    from ollama_tiering.store.block.blockfile import verify_buffer as verify_buffer
    from ollama_tiering.store.block.checksum import crc32c as crc32c
    from ollama_tiering.store.block.description import Fields as Fields
    from ollama_tiering.store.block.key import DEFAULT_BLOCK_TOKENS as DEFAULT_BLOCK_TOKENS
    from ollama_tiering.store.block.key import DIGEST_BYTES as DIGEST_BYTES
    from ollama_tiering.store.block.key import TOKEN_BYTES as TOKEN_BYTES
    from ollama_tiering.store.block.key import BlockExtra as BlockExtra
    from ollama_tiering.store.block.key import BlockKey as BlockKey
    from ollama_tiering.store.block.key import LayerSpec as LayerSpec
    from ollama_tiering.store.block.key import Namespace as Namespace
    from ollama_tiering.store.block.key import NamespaceId as NamespaceId
    from ollama_tiering.store.block.key import as_key as as_key
    from ollama_tiering.store.block.key import as_namespace as as_namespace
    from ollama_tiering.store.block.key import block_key as block_key
    from ollama_tiering.store.block.key import digest_from_hex as digest_from_hex
    from ollama_tiering.store.block.key import extras_of as extras_of
    from ollama_tiering.store.block.key import prefix_chain as prefix_chain
    from ollama_tiering.store.block.key import rows_fingerprint as rows_fingerprint
    from ollama_tiering.store.block.key import tokens_to_bytes as tokens_to_bytes
    from ollama_tiering.store.block.key import window_end_extra as window_end_extra
    from ollama_tiering.store.block.key import window_extra as window_extra
    from ollama_tiering.store.block.layout import KnownLayouts as KnownLayouts
    from ollama_tiering.store.block.pb import block_store_pb2 as block_store_pb2
    from ollama_tiering.store.block.segments import SegmentShape as SegmentShape
    from ollama_tiering.store.block.segments import align as align
    from ollama_tiering.store.books.matching import MAX_ATTACHED as MAX_ATTACHED
    from ollama_tiering.store.books.report import AttachedBlock as AttachedBlock
    from ollama_tiering.store.books.report import LeasedBlock as LeasedBlock
    from ollama_tiering.store.books.report import LeftOver as LeftOver
    from ollama_tiering.store.books.report import MatchedBlock as MatchedBlock
    from ollama_tiering.store.books.report import ModelReport as ModelReport
    from ollama_tiering.store.books.report import StoreReport as StoreReport
    from ollama_tiering.store.books.report import TierReport as TierReport
    from ollama_tiering.store.books.terms import Decide as Decide
    from ollama_tiering.store.books.terms import Terms as Terms
    from ollama_tiering.store.books.tree import BlockRecord as BlockRecord
    from ollama_tiering.store.own_tiers import can_be_opened as can_be_opened
    from ollama_tiering.store.own_tiers import cut_budget as cut_budget
    from ollama_tiering.store.serving.leasing import Awaited as Awaited
    from ollama_tiering.store.serving.leasing import Leasing as Leasing
    from ollama_tiering.store.serving.lookup import PIECE_BLOCKS as PIECE_BLOCKS
    from ollama_tiering.store.serving.session import BlockOffer as BlockOffer
    from ollama_tiering.store.serving.session import CommitResult as CommitResult
    from ollama_tiering.store.serving.session import Outcome as Outcome
    from ollama_tiering.store.serving.session import Reserved as Reserved
    from ollama_tiering.store.serving.session import WriteSession as WriteSession
    from ollama_tiering.store.tiered import TieredStore as TieredStore
    from ollama_tiering.store.tiers import ram_place as ram_place
    from ollama_tiering.store.tiers import stores_seen as stores_seen
    from ollama_tiering.store.tiers.contract import OpenBlock as OpenBlock
    from ollama_tiering.store.tiers.contract import Tier as Tier
    from ollama_tiering.store.tiers.contract import TierKind as TierKind
    from ollama_tiering.store.tiers.directory import FsTier as FsTier
    from ollama_tiering.store.tiers.memory import MemoryTier as MemoryTier
    from ollama_tiering.store.tiers.names import VERSION_DIRECTORY as VERSION_DIRECTORY
    from ollama_tiering.store.tiers.remote import RemoteTier as RemoteTier
    from ollama_tiering.store.tiers.shared_directory import SharedFsTier as SharedFsTier
else:
    # The same names by the module they are in; a module of that name is meant as a whole.
    _FACE: Final = {
        "assemble": "open_store",
        "block.blockfile": (
            "BlockMeta BlockPlan MAX_ROWS buffer_reader check_header damaged encode_block "
            "plan_block read_header read_meta verify_buffer"
        ),
        "block.checksum": "crc32c",
        "block.description": "Fields",
        "block.key": (
            "BlockExtra BlockKey DEFAULT_BLOCK_TOKENS DIGEST_BYTES LayerSpec Namespace "
            "NamespaceId TOKEN_BYTES as_key as_namespace block_key digest_from_hex extras_of "
            "prefix_chain rows_fingerprint tokens_to_bytes window_end_extra window_extra"
        ),
        "block.layout": "KnownLayouts",
        "block.pb.block_store_pb2": "block_store_pb2",
        "block.segments": "SegmentShape align",
        "books.matching": "MAX_ATTACHED",
        "books.report": (
            "AttachedBlock LeasedBlock LeftOver MatchedBlock ModelReport StoreReport TierReport"
        ),
        "books.terms": "Decide Terms",
        "books.tree": "BlockRecord",
        "serving.leasing": "Awaited Leasing",
        "serving.lookup": "PIECE_BLOCKS",
        "serving.session": "BlockOffer CommitResult Outcome Reserved WriteSession",
        "own_tiers": "can_be_opened cut_budget",
        "tiered": "TieredStore",
        "tiers.contract": "OpenBlock Tier TierKind",
        "tiers.directory": "FsTier",
        "tiers.memory": "MemoryTier",
        "tiers.names": "VERSION_DIRECTORY",
        "tiers.ram_place": "ram_place",
        "tiers.remote": "RemoteTier",
        "tiers.shared_directory": "SharedFsTier",
        "tiers.stores_seen": "stores_seen",
    }
    _MODULE_OF: Final = {name: module for module, names in _FACE.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
        value = module if _MODULE_OF[name].endswith(f".{name}") else getattr(module, name)
        globals()[name] = value
        return value
