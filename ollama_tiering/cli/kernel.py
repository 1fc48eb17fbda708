"""`tiering kernel`: the attention kernels on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering.cli import CONTEXT_SETTINGS
from ollama_tiering.errors import ResultDiffers

if TYPE_CHECKING:
    from rich.table import Table

    from ollama_tiering.kernels.check import Row


@click.group(context_settings=CONTEXT_SETTINGS)
def kernel() -> None:
    """The attention kernels of this machine."""


@kernel.command()
@click.option(
    "--threads", type=click.IntRange(1), help="Threads.  [default: as many as there are cores]"
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def check(threads: int | None, as_json: bool) -> None:
    """Compute with every kernel that this CPU and GPU can run, and compare with f64.

    Exit code 1 when an error is above its bound. A shape that a kernel does not serve is named,
    and is no error.
    """
    import psutil

    from ollama_tiering.kernels import check as checking
    from ollama_tiering.kernels import check_gpu

    gpus, why_no_gpu = check_gpu.gpu_devices()
    devices: list[checking.Device] = [
        *checking.cpu_devices(threads or psutil.cpu_count(logical=False) or 1),
        *gpus,
    ]
    rows = list(checking.check(devices))
    if as_json:
        document: dict[str, Any] = {"version": 1, "no_gpu": why_no_gpu}
        click.echo(json.dumps(document | {"rows": [row.as_json() for row in rows]}, indent=1))
    else:
        _print(rows, why_no_gpu)
    wrong = [f"{row.shape} on {row.device}" for row in rows if not row.ok]
    if wrong:
        raise ResultDiffers(
            f"not as exact as it must be: {'; '.join(wrong)}",
            hint="do not use these kernels; report the table and the CPU's name",
        )


def _print(rows: list[Row], why_no_gpu: str) -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(rows))
    if why_no_gpu:
        console.print(f"No GPU: {why_no_gpu}.", highlight=False)


def _table(rows: list[Row]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("SHAPE", "DEVICE"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ERROR", "BOUND", "TIME"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        if row.error is None or row.seconds is None:
            table.add_row(row.shape, row.device, "", "", "", f"not served: {row.why}")
            continue
        verdict = "ok" if row.ok else "[bold red]TOO LARGE[/bold red]"
        time = f"{1e3 * row.seconds:.3f} ms"
        table.add_row(row.shape, row.device, f"{row.error:.1e}", f"{row.bound:.0e}", time, verdict)
    return table
