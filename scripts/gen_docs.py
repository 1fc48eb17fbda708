"""Maintainer: writes docs/commands.md, docs/models.md, the tables of settings in
docs/configuration.md, and of docs/attention/long-context.md the tables and whether this version has
what it describes.

    make docs

Commands, options, settings, defaults and exit codes come from the code: to change a line change the
help of an option, `ollama_tiering/config/words.py` or a docstring of `ollama_tiering/errors.py`. A
test compares the pages with what this makes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from ollama_tiering import errors
from ollama_tiering.cli import COMMANDS, cli
from ollama_tiering.config import SETTINGS
from ollama_tiering.config.words import MEANINGS, default_in_words
from scripts import models_page
from scripts.attention import long_context_page

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- begin: made by `make docs` -->", "<!-- end: made by `make docs` -->"
_NOTE = re.compile(r"\s*\[(?:env (?P<env>\w+))?(?:; )?(?:default: (?P<default>.+))?\]$")
_SHORT = {
    "INTEGER": "N",
    "INTEGER RANGE": "N",
    "FLOAT": "N",
    "FLOAT RANGE": "N",
    "DIRECTORY": "DIR",
}

_INTRODUCTION = """\
# Every command

Made by `make docs` from the commands themselves; `tiering COMMAND -h` says the same. What they are
for, and the JSON they print: [cli.md](cli.md). The settings behind the defaults, and the places
they name: [configuration.md](configuration.md).
"""

_CODES = """\
## Exit codes

| code | meaning |
|---|---|
"""


def pages() -> dict[Path, str]:
    """Every page that is made, or partly so, with the content it must have."""
    settings = ROOT / "docs/configuration.md"
    return {
        ROOT / "docs/commands.md": commands_page(),
        ROOT / "docs/models.md": models_page.page(),
        settings: _between_marks(settings, settings_tables()),
        long_context_page.PAGE: _between_marks(long_context_page.PAGE, *long_context_page.parts()),
    }


def commands_page() -> str:
    rows = [
        f"| [`tiering {name}`](#tiering-{name}) | {text} |\n"
        for name, (_, text) in COMMANDS.items()
    ]
    index = "| command | does |\n|---|---|\n" + "".join(rows)
    sections = [_section(command, path, context) for command, path, context in walk(cli, "tiering")]
    return "\n".join([_INTRODUCTION, index, *sections, _exit_codes()])


def walk(
    command: click.Command, path: str, parent: click.Context | None = None
) -> Iterator[tuple[click.Command, str, click.Context]]:
    """The command and all below it, in the order of its help."""
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    yield command, path, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from walk(found, f"{path} {name}", context)


def _section(command: click.Command, path: str, context: click.Context) -> str:
    level = "##" if path.count(" ") < 2 else "###"
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    text = [f"{level} {path}\n", f"```text\n{usage}\n```\n", *_paragraphs(command.help or "")]
    options = [param for param in command.params if isinstance(param, click.Option)]
    if options:
        rows = "".join(_row(option, context) for option in options)
        text.append(f"| option | meaning | default |\n|---|---|---|\n{rows}")
    return "\n".join(text)


def _paragraphs(text: str) -> Iterator[str]:
    """As Click understands a docstring: one marked by \\b keeps its lines."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            yield "```text\n" + paragraph.removeprefix("\b").strip("\n") + "\n```\n"
        else:
            yield "\n".join(_folded(paragraph.replace("*", "\\*").split())) + "\n"


def _row(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    if not option.is_flag:
        name = (option.make_metavar(context) or "").strip("[]<>")
        names += f" `{_SHORT.get(name, name)}`"
    text = option.help or ""
    note = _NOTE.search(text)
    meaning = text[: note.start()] if note else text
    default = _default(option, note["env"] if note else None, note["default"] if note else None)
    return f"| {_cell(names)} | {_cell(meaning)} | {_cell(default)} |\n"


def _default(option: click.Option, variable: str | None, default: str | None) -> str:
    if option.show_default and default is None:
        default = str(option.default)
    variable = variable or (option.envvar if isinstance(option.envvar, str) else None)
    said = f"`${variable}`" if variable else ""
    return f"{said}{', else ' if said and default else ''}{default or ''}"


def exit_codes() -> list[tuple[int, str]]:
    """Each code and what it means."""
    kinds = (kind for _, kind in inspect.getmembers(errors, inspect.isclass))
    found = {
        kind.exit_code: (inspect.getdoc(kind) or "").rstrip(".")
        for kind in kinds
        if issubclass(kind, errors.TieringError)
    }
    first = [
        (0, "done"),
        (
            1,
            "a bug, a failed check, or a refusal: no room, too much to pin, `rm` of what is pinned",
        ),
    ]
    last = [(130, "interrupted"), (141, "whoever read the output has gone")]
    own = [(code, text[0].lower() + text[1:]) for code, text in sorted(found.items()) if code > 1]
    return [*first, *own, *last]


def _exit_codes() -> str:
    return _CODES + "".join(f"| {code} | {_cell(text)} |\n" for code, text in exit_codes())


def settings_tables() -> str:
    """One table for each section of the file."""
    tables = []
    for section in dict.fromkeys(setting.key.partition(".")[0] for setting in SETTINGS):
        rows = "".join(
            f"| `{setting.key.partition('.')[2]}` | {_variable(setting.env)} | "
            f"{_cell(MEANINGS[setting.key])} | {_cell(default_in_words(setting.key))} |\n"
            for setting in SETTINGS
            if setting.key.startswith(f"{section}.")
        )
        head = "| key | variable | meaning | default |\n|---|---|---|---|\n"
        tables.append(f"### `[{section}]`\n\n{head}{rows}")
    return "\n".join(tables)


def _variable(name: str | None) -> str:
    return f"`{name}`" if name else ""


def _between_marks(page: Path, *made: str) -> str:
    """The page with each part between its pair of marks."""
    rest, text = page.read_text(encoding="utf-8"), ""
    for part in made:
        before, begin, rest = rest.partition(BEGIN)
        _, end, rest = rest.partition(END)
        if not begin or not end:
            raise SystemExit(f"error: {page} lacks {BEGIN} or {END}")
        text += f"{before}{begin}\n\n{part}\n{end}"
    return text + rest


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _folded(words: Iterable[str], width: int = 100) -> Iterator[str]:
    line = ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


def main() -> None:
    for path, content in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
