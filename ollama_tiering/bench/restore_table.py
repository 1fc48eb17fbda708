"""What `bench restore` measured, as a table: a row for each prompt length and tier. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ollama_tiering.bench.baselines import BEST, DEFAULT
from ollama_tiering.bench.restore import RestoreCase, hits
from ollama_tiering.bench.table import Table, rate, ratio, seconds

NOT_MEASURED = "not measured"


def table(shape: str, cases: Sequence[RestoreCase], stock: str) -> Table:
    """`stock` says which program computed stock's columns."""
    headings = ["prompt", "from", "restored", "cold, ours", "gain (ours ÷ restored)",
                "stock's best ÷ restored", "stock's default ÷ restored",
                "in-memory hit (restored ÷ hit)", "bytes", "look-up + fetch + copy",
                "copy, of memcpy", "whole restore, of memcpy"]  # fmt: skip
    rows = [
        [
            f"{case.prompt_tokens:,}",
            case.tier,
            seconds(case.restored_median),
            seconds(case.cold_seconds),
            f"**{ratio(case.gain)}**",
            _against(case, BEST),
            _against(case, DEFAULT),
            f"{seconds(case.hit_seconds)} ({ratio(case.of_hit)})",
            f"{case.restored_bytes / 1e6:,.0f} MB",
            " + ".join(
                f"{1e3 * part:.0f}"
                for part in (case.lookup_seconds, case.fetch_seconds, case.copy_seconds)
            )
            + " ms",
            _of_memcpy(case, case.copy_seconds),
            _of_memcpy(case, case.whole_seconds),
        ]
        for case in cases
    ]
    repeat = len(cases[0].restored_seconds)
    notes = [
        "Seconds are to the first token with the model loaded; cold is one run, ours without the "
        f"prompt's last {hits(repeat)} tokens, restored the median of {repeat} restarts of "
        f"sidecar and server. The in-memory hit is the median of {hits(repeat)} requests, each "
        "one token longer than what is in memory.",
        f"Ours: computed by the restoring engine itself, attention {cases[0].attention}. Stock's "
        "default: as Ollama runs this model unless told otherwise. Stock's best: the faster of "
        f"with and without flash attention. Stock: {stock}.",
        "No other prompt length was measured.",
        "Every restored answer began where the in-memory hit does, and had its tokens and top-5 "
        "log probabilities.",
        "`from ram`: the RAM tier (tmpfs) lived through the restart. `from local`: it was emptied "
        "and the files of the local tier were dropped from the page cache, as after a reboot.",
        "Copy is what happens under the runner's lock; the whole restore is look-up, fetch with "
        "check, and copy. The shares are of a memcpy of the same bytes in the same process: by "
        f"one thread, then by as many threads as the restore uses; medians of {repeat} restarts.",
    ]
    return Table(f"Restore instead of recompute, {shape}", headings, rows, notes)


def _against(case: RestoreCase, name: str) -> str:
    cold, gain = case.colds[name], case.gains[name]
    if cold is None or gain is None:
        return NOT_MEASURED
    return f"{ratio(gain)} ({seconds(cold.seconds)}, {cold.attention.removeprefix('stock ')})"


def _of_memcpy(case: RestoreCase, spent: float) -> str:
    if not spent or not case.memcpy_seconds:
        return NOT_MEASURED
    one, every = (100 * t / spent for t in (case.memcpy_seconds, case.memcpy_all_seconds))
    return f"{rate(case.restored_bytes / spent)}, {one:.0f} % / {every:.0f} %"
