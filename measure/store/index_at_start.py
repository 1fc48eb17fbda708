"""A start of the store with the index of its local tier and without it: the same files, in turns.

The store runs in a fresh process each time. Without an index the survey reads every header.
"""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ollama_tiering.store
from measure.results import Ratio, Section
from measure.store import local_files
from measure.store.local_files import Conversation, conversations
from measure.store.looking_up import BLOCK_TOKENS, CHAIN
from ollama_tiering.store import BlockKey, FsTier, NamespaceId, TieredStore, TierKind

_FEWER: Final = 5
_ROUNDS: Final = 3
_POLL_SECONDS: Final = 0.005
_COLD, _WARM = "cold", "warm"
_WITHOUT, _WITH = "without", "with"
_MODULES: Final = ("index.py", "index_keeper.py")
_WHAT: Final = {
    "newest": "first hit, newest conversation",
    "oldest": "first hit, oldest conversation",
    "known": "every block known",
    "counted": "files counted, writes may begin",
}


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds since the store was opened, with all modules loaded; most memory of its process."""

    newest: float
    oldest: float
    known: float
    counted: float
    peak_bytes: float


def measure(disk: Path, files: int, say: Callable[[str], None], rounds: int = _ROUNDS) -> Section:
    """A fifth of the files cold and warm, several times; all of them cold and once."""
    root = Path(tempfile.mkdtemp(dir=disk, prefix="tiering-bench-"))
    ratios: list[Ratio] = []
    try:
        made = 0
        few = max(CHAIN, files // _FEWER)
        for count, heats, turns in ((few, (_COLD, _WARM), rounds), (files, (_COLD,), 1)):
            say(f"making {count:,} block files and their index")
            local_files.make_files(root, made, count)
            local_files.make_index(root, count)
            made = count
            runs: dict[tuple[str, str], list[Start]] = {}
            for number, heat, side in itertools.product(range(turns), heats, (_WITHOUT, _WITH)):
                say(f"{count:,} blocks, {heat}, {side} the index, {number + 1} of {turns}")
                _prepare(root, heat)
                runs.setdefault((heat, side), []).append(start(root, count, index=side == _WITH))
            for heat in heats:
                say(f"{count:,} blocks, {heat}, a plain program")
                how = _prepare(root, heat)
                bare = _plain(root, count)
                ratios += _ratios(count, heat, runs[heat, _WITHOUT], runs[heat, _WITH], bare)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    notes = [
        f"Conversations of {CHAIN} blocks of {BLOCK_TOKENS} tokens in {local_files.NAMESPACES} "
        f"namespaces of {local_files.LAYERS} layers. Headers are whole, rows are zeros that take "
        "no room on the disk. Seconds since the store was opened; Python starts before. Without "
        f"and with the index take turns: medians of {rounds} starts each of the smaller number, "
        "one of the larger.",
        f"Cold: {how}. Warm: every header was read just before.",
        "The plain program lists and stats all files, reads one page of each and parses it. It "
        "checks nothing and keeps nothing: with one thread, no start without an index takes less.",
        f"store/upkeep/{' and '.join(_MODULES)}: {_lines()} lines that are not empty.",
    ]
    title = "A start with the index and without it"
    return Section("start", title, "without ÷ with", ratios, notes, log_axis=True)


def _prepare(root: Path, heat: str) -> str:
    if heat == _COLD:
        return local_files.make_cold(root)
    local_files.read_headers(root)
    return ""


def _plain(root: Path, count: int) -> float:
    """Seconds."""
    began = time.perf_counter()
    read = local_files.read_headers(root)
    seconds = time.perf_counter() - began
    if read != count:
        raise RuntimeError(f"{read} of {count} headers were read")
    return seconds


def _ratios(
    count: int, heat: str, without: Sequence[Start], with_index: Sequence[Start], bare: float
) -> Iterator[Ratio]:
    case = f"{count:,} blocks, {heat}"
    for name, what in _WHAT.items():
        ours, other = _median(with_index, name), _median(without, name)
        yield Ratio(f"{case}: {what}", f"{other:.2f} s", f"index, {ours:.2f} s", other / ours)
    known = _median(with_index, "known")
    what = f"{case}: a plain program reads every header"
    yield Ratio(what, f"{bare:.2f} s", f"index, every block known, {known:.2f} s", bare / known)
    ours, other = _median(with_index, "peak_bytes"), _median(without, "peak_bytes")
    measured, against = f"{other / 1e6:.0f} MB", f"index, {ours / 1e6:.0f} MB"
    yield Ratio(f"{case}: most memory", measured, against, other / ours)


def _median(runs: Sequence[Start], name: str) -> float:
    return statistics.median(float(getattr(run, name)) for run in runs)


def start(directory: Path, files: int, *, index: bool) -> Start:
    """In a process of its own, which ends when all files are known and counted."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(directory, files, index, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        found: Start = ours.recv()
    except EOFError:
        raise RuntimeError("the store did not start") from None
    finally:
        process.join()
    return found


def run(directory: Path, files: int, index: bool, answer: Any) -> None:
    """What the process does: sends a Start."""
    chains = conversations(files)
    asked = {"newest": _prompt(chains[-1]), "oldest": _prompt(chains[0])}
    began = time.perf_counter()
    seconds: dict[str, float] = {}
    store = TieredStore(
        [(FsTier(TierKind.LOCAL, directory), local_files.ENOUGH_BYTES)],
        index_path=directory / local_files.INDEX_NAME if index else None,
        measure=False,
    )
    try:
        while len(seconds) < len(_WHAT):
            (level,) = store.report().tiers
            so = {"known": level.blocks >= files, "counted": level.surveyed}
            for name, (namespace, keys, tokens) in asked.items():
                if name not in seconds:
                    found = store.match(namespace, keys, tokens, BLOCK_TOKENS)
                    so[name] = len(found) == len(keys)
            now = time.perf_counter() - began
            for name in so:
                if so[name]:
                    seconds.setdefault(name, now)
            time.sleep(_POLL_SECONDS)
        answer.send(Start(**seconds, peak_bytes=_peak_bytes()))
    finally:
        store.close()


def _prompt(conversation: Conversation) -> tuple[NamespaceId, list[BlockKey], bytes]:
    return conversation.ns.digest(), conversation.keys, conversation.tokens


def _peak_bytes() -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return 1024.0 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmHWM")


def _lines() -> int:
    upkeep = Path(ollama_tiering.store.__file__).parent / "upkeep"
    texts = [(upkeep / name).read_text(encoding="utf-8") for name in _MODULES]
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())
