"""`tiering kernel`: the attention kernels on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering.cli import CONTEXT_SETTINGS, NamedPath
from ollama_tiering.errors import ResultDiffers, TieringError

if TYPE_CHECKING:
    from ollama_tiering.kernels.check import CheckRow


@click.group(context_settings=CONTEXT_SETTINGS)
def kernel() -> None:
    """Check the attention kernels that this machine can run."""


@kernel.command()
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Number of threads.  [default: as many as there are cores]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(threads: int | None, as_json: bool) -> None:
    """Run every kernel that this CPU and GPU can run, and compare the results with f64.

    Exit code 1 if an error is above its bound, if a kernel fails, or if there is a GPU that cannot
    be used. A shape that a kernel does not serve is named, and is no failure.
    """
    import psutil

    from ollama_tiering.kernels import check as checking
    from ollama_tiering.kernels import check_gpu

    gpus: list[check_gpu.Gpu] = []
    fault: TieringError | None = None
    try:
        gpus, why_no_gpu = check_gpu.gpu_devices()
    except TieringError as error:  # raised below: the CPU's kernels are checked first
        fault, why_no_gpu = error, error.message
    devices: list[checking.Device] = [
        *checking.cpu_devices(threads or psutil.cpu_count(logical=False) or 1),
        *gpus,
    ]
    rows: list[CheckRow] = []
    for row in checking.check(devices):
        rows.append(row)
        if not as_json:
            click.echo(_line(row))
    if as_json:
        document: dict[str, Any] = {"version": 1, "no_gpu": why_no_gpu}
        click.echo(json.dumps(document | {"rows": [row.as_json() for row in rows]}, indent=1))
    elif why_no_gpu:
        click.echo(f"No GPU: {why_no_gpu}.")
    wrong = [f"{row.shape} on {row.device}" for row in rows if not row.ok]
    if wrong:
        raise ResultDiffers(
            f"error above its bound: {'; '.join(wrong)}",
            hint="do not use these kernels; report the table and the CPU's name",
        )
    if fault:
        raise fault


def _line(row: CheckRow) -> str:
    """One row, printed as soon as it is known, so that a fault in the next one does not lose it."""
    begin = f"{row.shape:<24} {row.device:<14}"
    if row.failed:
        return f"{begin} FAILED: {row.failed}"
    if row.error is None or row.seconds is None:
        return f"{begin} not served: {row.why}"
    verdict = "ok" if row.ok else "TOO LARGE"
    time = f"{1e3 * row.seconds:.3f} ms"
    return f"{begin} error {row.error:.1e} (bound {row.bound:.0e}) {time:>12}  {verdict}"


@kernel.command()
@click.option(
    "--out",
    type=NamedPath(dir_okay=False, path_type=Path),
    help="Also write every line to this file, as JSON.",
)
@click.option("--quick", is_flag=True, help="Leave out the bandwidths, which take minutes.")
@click.option(
    "--case",
    "cases",
    multiple=True,
    metavar="NAME",
    help="Run only this case; may be given more than once.",
)
def report(out: Path | None, quick: bool, cases: tuple[str, ...]) -> None:
    """Examine the attention kernels on this machine's GPU.

    The report names the GPU, its driver and compiler, and the kernels' registers and blocks. It
    measures errors against f64, and bandwidths as ratios. Each case runs in a process of its own,
    so a fault in one does not end the others; its line is printed when it ends. Exit code 0 only if
    every case ran and is within its bound.
    """
    from ollama_tiering.kernels import gpu_report

    chosen = gpu_report.chosen(cases, quick=quick)
    if out:
        out.write_text("")
    wrong = []
    for line in gpu_report.run(chosen):
        click.echo(gpu_report.text(line))
        if out:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if not line["ok"]:
            wrong.append(str(line["case"]))
    click.echo(f"Under the sanitizer: {gpu_report.sanitizer_command(wrong)}")
    if wrong:
        raise ResultDiffers(
            f"failed, or outside its bound: {'; '.join(wrong)}",
            hint="`--case NAME` runs a single case again",
        )
