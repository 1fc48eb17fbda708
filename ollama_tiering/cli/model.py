"""`tiering model`: small GGUF models with random weights, for tests, demos and benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ollama_tiering.cli import NamedPath
from ollama_tiering.errors import UsageError, plain

_EPILOG = "`tiering model shapes` lists the shapes; the options change one part of a shape."


@click.group()
def model() -> None:
    """Make small test models: real architectures, random weights from a seed, no download.

    One printable character is one token, so a prompt of 3000 characters has 3000 tokens.
    """


@model.command(epilog=_EPILOG)
@click.argument("shape")
@click.argument("file", type=NamedPath(dir_okay=False, path_type=Path))
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of the random weights.",
)
@click.option("--layers", type=int, help="Number of layers.")
@click.option("--heads", type=int, help="Number of query heads.")
@click.option("--kv-heads", type=int, help="Number of K/V heads; --heads is a multiple of it.")
@click.option("--head-dim", type=int, help="Elements of one head.")
@click.option("--embd", type=int, help="Width of the residual stream.")
@click.option("--ffn", type=int, help="Width of the feed-forward layer.")
@click.option("--ctx", type=int, help="Context length that the file states.")
@click.option(
    "--dtype",
    type=click.Choice(["f16", "bf16", "q8_0", "q4_k_m", "f32"]),
    help="Type of the weights.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
def make(
    shape: str,
    file: Path,
    seed: int,
    layers: int | None,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    embd: int | None,
    ffn: int | None,
    ctx: int | None,
    dtype: str | None,
    force: bool,
    dry_run: bool,
) -> None:
    """Write a model of SHAPE with random weights to FILE.

    The same shape, options and seed give the same bytes. FILE appears only when it is complete.
    """
    from ollama_tiering.models.shapes import make_shape

    wanted = make_shape(
        shape, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        embd=embd, ffn=ffn, ctx=ctx, dtype=dtype,
    )  # fmt: skip
    if file.is_dir():
        raise UsageError(f"{file} is a directory", hint="name a file in it")
    if (file.exists() or file.is_symlink()) and not force:
        raise UsageError(f"{file} exists", hint="--force replaces it")
    if not file.parent.is_dir():
        raise UsageError(
            f"{file.parent} is not a directory", hint=f"make it: mkdir -p {file.parent}"
        )
    tensors = wanted.tensors()
    what = (
        f"{wanted.arch}, {wanted.layers} layers, {wanted.heads}/{wanted.kv_heads} heads of "
        f"{wanted.head_dim}, {sum(t.elements for t in tensors):,} weights in {wanted.dtype}, "
        f"seed {seed}, {wanted.kv_bytes_per_token:,} bytes of K/V per token"
    )
    if dry_run:
        stored_bytes = sum(t.stored_bytes for t in tensors)
        click.echo(plain(f"would write {file}: {stored_bytes:,} bytes of weights ({what})"))
        return

    from ollama_tiering.models.make import make_model

    try:
        with click.progressbar(
            length=len(tensors), label="writing", file=sys.stderr, hidden=not sys.stderr.isatty()
        ) as bar:
            stored_bytes = make_model(wanted, file, seed, lambda _: bar.update(1))
    except OSError as error:
        raise UsageError(
            f"cannot write {file}: {error.strerror or error}",
            hint="name a file in a directory of your own, on a disk with room",
        ) from error
    click.echo(plain(f"{file}: {stored_bytes:,} bytes ({what})"))


@model.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def shapes(as_json: bool) -> None:
    """List the shapes, and how many bytes of K/V a token takes in each."""
    from ollama_tiering.models.shapes import SHAPES

    if as_json:
        fields = ("name", "arch", "layers", "embd", "heads", "kv_heads", "head_dim", "ffn", "ctx",
                  "dtype", "kv_bytes_per_token", "about")  # fmt: skip
        rows = [{f: getattr(shape, f) for f in fields} for shape in SHAPES.values()]
        click.echo(json.dumps(rows, indent=2))
        return
    click.echo(f"{'shape':<15} {'layers':>6} {'heads':>6} {'dim':>4} {'embd':>5} {'ffn':>5} "
               f"{'ctx':>6} {'dtype':>6} {'K/V per token':>14}  about")  # fmt: skip
    for shape in SHAPES.values():
        click.echo(
            f"{shape.name:<15} {shape.layers:>6} {f'{shape.heads}/{shape.kv_heads}':>6} "
            f"{shape.head_dim:>4} {shape.embd:>5} {shape.ffn:>5} {shape.ctx:>6} {shape.dtype:>6} "
            f"{shape.kv_bytes_per_token:>8} bytes  {shape.about}"
        )
