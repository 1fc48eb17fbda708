"""Maintainer: prints the page `tiering(1)`, from the commands themselves, as docs/commands.md is.

.venv/bin/python -m scripts.man_page DATE >tiering.1    DATE: as 2026-11-28
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

import click

from ollama_tiering import __version__
from ollama_tiering.cli import COMMANDS, cli
from scripts.gen_docs import exit_codes, walk

_END = """\
.SH FILES
.TP
.I ~/.config/ollama\\-tiering/config.toml
Settings; \\fBtiering config\\fP shows them, and where each comes from.
.TP
.I ~/.local/share/ollama\\-tiering
Stored blocks: prompts, readable by their user only.
.TP
.I ~/.local/state/ollama\\-tiering
Logs, counts, the token of \\fBtiering web\\fP.
.TP
.I ~/.cache/ollama\\-tiering
What \\fBtiering patch\\fP makes, and sources.
.SH SEE ALSO
.BR ollama (1)
"""


def page(date: str) -> str:
    """Roff, of macros that every `man` has."""
    lines = [
        f'.TH TIERING 1 "{date}" "tiering {__version__}" "User Commands"',
        ".SH NAME",
        "tiering \\- KV cache for Ollama that outlives unload and restart",
        ".SH SYNOPSIS",
        ".B tiering",
        roff("[OPTIONS] COMMAND [ARGS]..."),
        ".SH DESCRIPTION",
        *_paragraphs(cli.help or ""),
        ".PP",
        "What they do:",
        *(line for name, (_, text) in COMMANDS.items() for line in _entry(name, text)),
        ".SH OPTIONS",
    ]
    for command, path, context in walk(cli, "tiering"):
        if command is not cli:
            pieces = command.collect_usage_pieces(context)
            lines += [".SH COMMANDS"] if path == f"tiering {next(iter(COMMANDS))}" else []
            lines += [f".SS {roff(path)}", f".B {roff(' '.join([path, *pieces]))}", ".PP"]
            lines += _paragraphs(command.help or "")
        for param in command.params:
            if isinstance(param, click.Option) and (record := param.get_help_record(context)):
                lines += _entry(*record)
    lines += [".SH EXIT STATUS"]
    lines += [line for code, text in exit_codes() for line in _entry(str(code), text)]
    return "\n".join(lines) + "\n" + _END


def roff(text: str) -> str:
    """Text as it is: a hyphen stays the minus that a command takes, no line is a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _entry(term: str, text: str) -> list[str]:
    return [".TP", f"\\fB{roff(term)}\\fP", roff(" ".join(text.split()))]


def _paragraphs(text: str) -> Iterator[str]:
    """As Click understands a docstring: one marked by \\b keeps its lines."""
    for number, paragraph in enumerate(inspect.cleandoc(text).split("\n\n")):
        if number:
            yield ".PP"
        if paragraph.startswith("\b"):
            kept = paragraph.removeprefix("\b").strip("\n").splitlines()
            yield from (".nf", *map(roff, kept), ".fi")
        else:
            yield roff(" ".join(paragraph.split()))


if __name__ == "__main__":
    sys.stdout.write(page(sys.argv[1]))
