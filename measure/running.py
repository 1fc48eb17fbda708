"""What the programs here share: how they are run, and how they end with a record."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ollama_tiering import cli
from ollama_tiering.bench.machine import Beginning, this_machine


def main(command: click.Command) -> None:
    """Runs a Click command; errors and exit codes are those of `tiering`. Never returns."""
    command.context_settings = cli.CONTEXT_SETTINGS
    cli.main(command=command, name=f"python -m measure.{command.name}")


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the record to this file, in Markdown")
    return parser


def publish(
    program: str, title: str, began: Beginning, engine: str, lines: Sequence[str], out: Path | None
) -> None:
    """The record of a program, to stdout and to --out."""
    command = shlex.join(["python", "-m", f"measure.{program}", *sys.argv[1:]])
    head = [f"# {title}", "", *this_machine(began).lines(engine), f"- Command: `{command}`"]
    text = "\n".join([*head, *lines]) + "\n"
    print(text, end="")
    if out:
        out.write_text(text, encoding="utf-8")
