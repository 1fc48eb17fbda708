"""`tiering bench attention`: our attention, ggml's and the machine's peaks, in turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ollama_tiering.cli.bench_sections import chosen, publish

if TYPE_CHECKING:
    from ollama_tiering.bench.attention.rig import AttentionRig
    from ollama_tiering.bench.tiers.results import Section

_PARTS = ("accuracy", "prefill", "decode", "quant", "peaked")


@click.command()
@click.option(
    "--only",
    default=",".join(_PARTS),
    show_default=True,
    help="Parts to measure, separated by commas.",
)
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the seconds of every run.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the record to this file, in Markdown, with plots beside it.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def attention(
    only: str,
    threads: int | None,
    isa: str,
    keys: int | None,
    rounds: int,
    as_json: bool,
    out: Path | None,
    quiet: bool,
) -> None:
    """Measure attention on this CPU: its error, and its time beside ggml's and the machine's peaks.

    The error is against f64. ggml is that of Ollama v0.16.3, built from the cached source without
    our patches; without a cached source it is left out. All take turns on the same data. This
    takes minutes.
    """
    from ollama_tiering.bench.machine import begin

    began, parts = begin(), chosen(only, _PARTS)
    rig = _rig(threads, isa, keys, rounds, quiet)
    sections = [_measure(part, rig) for part in parts]
    title = f"Attention on the CPU with {rig.isa}, measured"
    publish(title, sections, began, as_json=as_json, out=out)


def _rig(threads: int | None, isa: str, keys: int | None, rounds: int, quiet: bool) -> AttentionRig:
    import psutil

    from ollama_tiering import config
    from ollama_tiering.bench.attention.native import ggml_program, peaks_library
    from ollama_tiering.bench.attention.peaks import Peaks
    from ollama_tiering.bench.attention.rig import AttentionRig, running_isa
    from ollama_tiering.patchset.report import Report
    from ollama_tiering.patchset.upstream import SourceCache

    report = Report(quiet=quiet)
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


def _measure(part: str, rig: AttentionRig) -> Section:
    if part == "accuracy":
        from ollama_tiering.bench.attention import accuracy

        return accuracy.measure(rig)
    if part == "prefill":
        from ollama_tiering.bench.attention import prefill

        return prefill.measure(rig)
    if part == "decode":
        from ollama_tiering.bench.attention import decode

        return decode.measure(rig)
    from ollama_tiering.bench.attention import variants

    return variants.measure_quantised(rig) if part == "quant" else variants.measure_peaked(rig)
