"""Administration of a store: list, remove, pin, verify, collect.

The sidecar's calls use it and, if no sidecar runs, the command line does. Thread-safe as the store
is. Dry runs, `listing`, and `verify` without repair change nothing.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from ollama_tiering.errors import TieringError
from ollama_tiering.store.block.description import Fields
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books import chain_walk, copies, pinning, reading
from ollama_tiering.store.books.state import Level
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.serving.sequence_end import REMOVE_WAIT_SECONDS
from ollama_tiering.store.serving.session import CommitResult, WriteSession
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import OpenBlock, TierKind
from ollama_tiering.store.tiers.description_file import read_description
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.walk import What, remove_file, vacant, walk
from ollama_tiering.store.tools.archive import ArchiveManifest
from ollama_tiering.store.tools.chain_to_export import ChainToExport, chain_to_export
from ollama_tiering.store.tools.importing import BlockSink, CheckedChain, Present, what_is_present
from ollama_tiering.store.tools.listing import Lister
from ollama_tiering.store.tools.parting import MAX_CHAINS, telling_tokens
from ollama_tiering.store.tools.remains import remove_remains
from ollama_tiering.store.tools.verify import is_leftover, verify
from ollama_tiering.store.upkeep import removal, unlinking, unusable
from ollama_tiering.store.values import (
    ChainLine,
    Listing,
    PinResult,
    Removal,
    Selection,
    VerifyStep,
    Waste,
)

EVERYTHING: Final = Selection()


class Administration:
    """`alone`: nobody else writes into the store's own directories while this is used. Without
    `all_seen`, some tier that may hold blocks could not be looked at.
    """

    def __init__(self, store: TieredStore, *, alone: bool, all_seen: bool = True) -> None:
        self._store = store
        self._state = store.state
        self._alone = alone
        self._all_seen = all_seen

    def listing(
        self, selection: Selection = EVERYTHING, *, blocks: bool = False, words: bool = False
    ) -> Listing:
        """Chains, or single blocks. With `words`, the chains that were used last come with the
        tokens that distinguish them from others. UnknownId, AmbiguousId or UsageError for an id.
        """
        lister = self._lister()
        chains = [] if blocks else list(lister.chains(selection))
        single = list(lister.blocks(selection)) if blocks else []
        if not (blocks and selection.ids):  # blocks of given chains stay in their order
            single.sort(key=lambda line: line.last_use)
        chains.sort(key=lambda line: line.last_use)
        if words:
            chains[-MAX_CHAINS:] = map(self._with_words, chains[-MAX_CHAINS:])
        names = {line.namespace for line in chains} | {line.namespace for line in single}
        tree = self._state.tree
        ends = (record for line in chains if (record := tree.get(line.key)))
        stored = lister.everything()
        if selection == EVERYTHING:
            selected = dataclasses.replace(stored, chains=0) if blocks else stored
        else:
            selected = lister.totals_of_blocks(single) if blocks else lister.totals(ends)
        return Listing(
            chains=chains,
            blocks=single,
            descriptions={name: lister.description(name) for name in names},
            selected=selected,
            stored=stored,
            id_digits=lister.id_digits,
        )

    def remove(self, selection: Selection, *, dry_run: bool) -> Removal:
        """Removes the selected chains. What another chain needs, is pinned or is in use stays. Of
        what is removed, no token stays in this host's tiers, nor in index or quarantine.
        TieringError if one of them is left out, for a copy there would come back with it.
        """
        if not dry_run:
            self._require_own_tiers()
        lister = self._lister()
        ends = self._records(lister, selection)
        everything = selection == EVERYTHING
        unseen = self._store.graveyard.unseen() if everything else {}
        done = removal.remove_chains(
            self._state,
            ends,
            self._store.graveyard,
            dry_run=dry_run,
            wait_seconds=REMOVE_WAIT_SECONDS,
            unseen=unseen,
            clean=lambda keys: remove_remains(
                self._state, None if everything else keys, alone=self._alone
            ),
        )
        if not dry_run:
            self._store.graveyard.forget_unseen(unseen)
            self._store.scrub_index()
            unlinking.sync_removals(self._state)
        return done

    def pin(self, chain_id: str, *, follow: bool = False, dry_run: bool = False) -> PinResult:
        """UnknownId, AmbiguousId, PinsFull; OSError if the pin cannot be recorded."""
        lister = self._lister()
        record = lister.resolve(chain_id)
        known = pinning.pin_of(self._state, record.key)
        key = known.key if known else record.key  # it may have moved on
        pin, more = self._store.pins.pin(key, follows=follow, dry_run=dry_run)
        changed = known is None or known.set_on != pin.set_on
        done = self._pin_result(lister.chain(record), more, changed)
        return dataclasses.replace(done, follows=pin.set_on is not None)

    def unpin(self, chain_id: str, *, dry_run: bool = False) -> PinResult:
        lister = self._lister()
        record = lister.resolve(chain_id)
        before = self._store.pins.pinned_bytes()
        changed = self._store.pins.unpin(record.key, dry_run=dry_run)
        less = before - self._store.pins.pinned_bytes()
        return self._pin_result(lister.chain(record), less, changed)

    def verify(self, *, repair: bool) -> Iterator[VerifyStep]:
        """See verify.py. With repair, the index is written anew after the last step."""
        yield from verify(self._state, repair=repair, alone=self._alone)
        if repair:
            self._store.rebuild_index()

    def collect(
        self,
        *,
        older_than_seconds: float,
        models: frozenset[str] | None,
        dry_run: bool,
        builds: frozenset[str] | None = None,
    ) -> list[Waste]:
        """Removes what nobody can use. The result has each kind once, even if nothing of it was
        found.

        `models` are the file names of the models that exist, `builds` the builds of the engine on
        this host; None means that these are not looked at. What other builds stored on the remote
        tier stays.
        """
        lister = self._lister()
        ends = {record.key: record for record in self._records(lister, EVERYTHING)}
        expired = (
            self._records(lister, Selection(older_than_seconds=older_than_seconds))
            if older_than_seconds > 0
            else []
        )
        orphans = [
            record
            for record in ends.values()
            if models is not None and lister.gone_model(record.namespace, models)
        ]
        others = [
            record
            for record in ends.values()
            if builds is not None and lister.other_build(record.namespace, builds)
        ]
        broken = []  # empty as long as a beginning may exist where nobody has looked yet
        seen = self._all_seen and not self._store.left_out
        if seen and all(level.known for level in self._state.levels):
            broken = [record for record in ends.values() if not lister.chain(record).complete]
        forbidden = [r for r in ends.values() if self._state.terms.of(r.namespace).remove]
        result = []
        for kind, chosen in (
            ("expired", expired),
            ("forbidden", forbidden),
            ("model gone", orphans),
            ("other build", others),
            ("unreachable", broken),
        ):
            left = [record for record in chosen if ends.pop(record.key, None) is not None]
            done = removal.remove_chains(
                self._state,
                left,
                self._store.graveyard,
                dry_run=dry_run,
                own_only=kind == "other build",  # there it may be another host's
            )
            done.kept.pop(chain_walk.NEEDED, None)
            result.append(Waste(kind, done.blocks, done.stored_bytes, done.kept))
        # After what is removed above, which leaves directories vacant.
        files = [self._quarantined(dry_run), self._temporary(dry_run)]
        result += [*files, self._vacant(dry_run)]
        unlinking.sync_removals(self._state)
        if not dry_run and any(waste.files for waste in result):
            self._store.scrub_index()
        return result

    def chain(self, chain_id: str) -> ChainToExport:
        """What an export of this chain consists of. StoreDamaged if its beginning is missing."""
        listing = self.listing(Selection(ids=(chain_id,)), blocks=True)
        return chain_to_export(listing)

    def opened(self, chain: ChainToExport) -> Iterator[AbstractContextManager[OpenBlock]]:
        """The chain's files, to be read one after the other. Only for a store that nobody else
        uses.
        """
        for key, _ in chain.files:
            leased = self._store.lease(chain.namespace, [key])
            self._store.release(leased.lease_id)
            if not leased.blocks:
                raise FileNotFoundError(errno.ENOENT, "block is gone", key.hex())
            yield self._level(leased.blocks[0].tier).tier.open(chain.namespace, key)

    def present(self, checked: CheckedChain) -> Present:
        """What is stored of the chain already."""
        manifest = checked.manifest
        found = self._store.match(
            manifest.namespace, checked.whole_keys, checked.tokens, manifest.block_tokens
        )
        return what_is_present(
            checked, [(b.key, b.rows, b.block_rows, [w.key for w in b.attached]) for b in found]
        )

    @contextmanager
    def sink(self, manifest: ArchiveManifest) -> Iterator[BlockSink]:
        """Takes the blocks of an import."""
        session = self._store.open_session(
            manifest.namespace, manifest.description, manifest.block_tokens
        )
        try:
            yield _SessionSink(session)
        finally:
            self._store.close_session(session)

    def _require_own_tiers(self) -> None:
        for one in self._store.left_out:
            if not one.is_shared:
                raise TieringError(
                    f"nothing was removed: the {one.kind.label} tier is left out, and a copy there "
                    f"would come back with it: {one.why}",
                    hint=f"{one.cure}; or do without that tier for good: remove what is at "
                    f"{one.directory}, set sidecar.{one.kind.label}_budget = 0, and restart",
                )

    def _with_words(self, line: ChainLine) -> ChainLine:
        end = self._state.tree.get(line.key)
        if end is None:  # removed just now
            return line
        if not self._state.terms.of(line.namespace).text:  # a rule of the settings
            return line
        words, before = telling_tokens(self._state.tree, end)
        return dataclasses.replace(line, words=words, words_before=before)

    def _level(self, kind: TierKind) -> Level:
        return next(level for level in self._state.levels if level.tier.kind is kind)

    def _quarantined(self, dry_run: bool) -> Waste:
        files = stored_bytes = 0
        for level in self._state.levels:
            directory = level.tier.directory
            if directory is None or level.tier.is_shared:
                continue
            bad = [found for found in walk(directory) if found.what is What.QUARANTINED]
            files, stored_bytes = files + len(bad), stored_bytes + sum(f.stored_bytes for f in bad)
            if not dry_run:
                unusable.purge_quarantine(self._state, level, keep_blocks=0)
                for found in bad:  # those the tier did not know of
                    remove_file(directory, found)
        return Waste("quarantined", files, stored_bytes, {})

    def _temporary(self, dry_run: bool) -> Waste:
        files = stored_bytes = 0
        for level in self._state.levels:
            directory = level.tier.directory
            if directory is None:
                continue
            for found in walk(directory):
                if found.what is not What.TEMPORARY:
                    continue
                if is_leftover(self._state, level, found, alone=self._alone):
                    files, stored_bytes = files + 1, stored_bytes + found.stored_bytes
                    if not dry_run:
                        remove_file(directory, found)
        return Waste("temporary", files, stored_bytes, {})

    def _vacant(self, dry_run: bool) -> Waste:
        """Counts models. Directories on a shared tier may be waiting for the blocks of another
        sidecar.
        """
        records = reading.records(self._state)
        in_use = {record.namespace for record in records} | self._store.open_namespaces()
        found: set[NamespaceId] = set()
        stored_bytes = 0
        for level in self._state.levels:
            if not isinstance(level.tier, FsTier) or level.tier.is_shared:
                continue
            for namespace, one_bytes in vacant(level.tier.directory, in_use):
                found.add(namespace)
                stored_bytes += one_bytes
                if not dry_run:
                    level.tier.remove_vacant(namespace)
            copies.recount(self._state, level)
        return Waste("vacant", len(found), stored_bytes, {})

    def _records(self, lister: Lister, selection: Selection) -> list[BlockRecord]:
        """The last blocks of the selected chains."""
        if selection == EVERYTHING:
            return lister.ends(selection)
        lines = lister.chains(selection)
        return [record for line in lines if (record := self._state.tree.get(line.key))]

    def _pin_result(self, chain: ChainLine, changed_bytes: int, changed: bool) -> PinResult:
        book = self._store.pins
        return PinResult(
            chain.key,
            chain.blocks,
            changed_bytes,
            book.pinned_bytes(),
            book.limit_bytes,
            changed,
        )

    def _lister(self) -> Lister:
        return Lister(self._state, self.describe)

    def describe(self, namespace: NamespaceId) -> Fields:
        """What a namespace is the digest of, read from a tier of this host, because a remote one
        may hang.
        """
        for level in self._state.levels:
            directory = level.tier.directory
            if directory is not None and not level.tier.is_shared:
                fields = read_description(directory, namespace)
                if fields:
                    return fields
        return ()


class _SessionSink:
    def __init__(self, session: WriteSession) -> None:
        self._session = session

    def put(self, key: BlockKey, parts: Iterator[tuple[bytes, bool]]) -> CommitResult:
        for part, last in parts:
            result = self._session.put_inline(key, part, last=last)
            if result is not None:
                return result
        return CommitResult(False, "the block has no end")
