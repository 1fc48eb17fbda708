"""Our attention, ggml's and the machine's peaks, in turns."""

from __future__ import annotations

import click
import psutil

from measure.attention import accuracy, decode, prefill, variants
from measure.attention.native import ggml_program, peaks_library
from measure.attention.peaks import Peaks
from measure.attention.rig import AttentionRig, running_isa
from measure.running import main
from measure.sections import Measured, sections
from ollama_tiering import config
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache

_PARTS = {
    "accuracy": accuracy.measure,
    "prefill": prefill.measure,
    "decode": decode.measure,
    "quant": variants.measure_quantised,
    "peaked": variants.measure_peaked,
}


@click.command()
@sections(_PARTS)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Number of threads.  [default: as many as there are cores]",
)
@click.option(
    "--isa",
    type=click.Choice(["auto", "avx512", "avx2", "neon", "scalar"]),
    default="auto",
    show_default=True,
    help="Instruction set of our kernels; ggml is built for the same one.",
)
@click.option("--keys", type=click.IntRange(1), help="At most this many keys, for a quick look.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="How often our kernels and ggml's take turns.",
)
def attention(
    parts: list[str], report: Report, threads: int | None, isa: str, keys: int | None, rounds: int
) -> Measured:
    """Measure attention on this CPU: its error, and its time beside ggml's and the machine's peaks.

    The error is against f64. ggml is that of Ollama v0.16.3, built from the cached source without
    our patches; without a cached source it is left out. All take turns on the same data. This
    takes minutes.
    """
    rig = _rig(threads, isa, keys, rounds, report)
    return f"Attention on the CPU with {rig.isa}, measured", [_PARTS[part](rig) for part in parts]


def _rig(
    threads: int | None, isa: str, keys: int | None, rounds: int, report: Report
) -> AttentionRig:
    threads = threads or psutil.cpu_count(logical=False) or 1
    isa = running_isa(isa)
    tag, cache, program, why = config.DEFAULT_TAG, SourceCache(), None, ""
    if cache.has(tag):
        program = ggml_program(cache, tag, "avx2" if isa == "avx2" else "native", report)
    else:
        why = f"no source of {tag} is cached (tiering fetch)"
        report.warn(f"ggml is left out: {why}")
    return AttentionRig(
        threads=threads,
        isa=isa,
        rounds=rounds,
        peaks=Peaks(peaks_library(report), threads),
        ggml_program=program,
        why_no_ggml=why,
        max_keys=keys,
        say=lambda text: report.say(f"* {text}"),
    )


if __name__ == "__main__":
    main(attention)
