"""Every command in the pages is one that there is: `tiering …` as Click takes it and, where that is
harmless, as it runs; scripts, make targets and files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ollama_tiering.cli import cli
from ollama_tiering.errors import TieringError
from tests.unit.docs.invocation import PROGRAMS, check, is_placeholder
from tests.unit.docs.pages import PAGES, ROOT, Line, fenced, spans
from tests.unit.docs.shell import commands

# What changes nothing and needs nothing, with the exit code that it has on a machine without a
# sidecar, a build or a log.
HARMLESS = {
    ("-h",): {0},
    ("--version",): {0},
    ("completion",): {0},
    ("config",): {0},
    ("doctor",): {0, 1},
    ("logs",): {9},
    ("ls",): {0},
    ("model", "shapes"): {0},
    ("patch", "status"): {0},
    ("status",): {9},
}
# Options of compilers, of llama-server and of `cuda_emulate`; ends of names of SQLite's files.
_OF_OTHERS = {
    "-",
    "-include",
    "-march",
    "--cache-ram",
    "--context-shift",
    "--spec-type",
    "-kvu",
    "-np",
    "--cache-reuse",
    "--control-vector",
    "--control-vector-scaled",
    "--fit",
    "--models-dir",
    "--models-max",
    "--models-preset",
    "--sleep-idle-seconds",
    "-ngl",
    "--lora",
    "--lora-scaled",
    "--mmproj",
    "--mutants",
    "--n-cpu-moe",
    "--no-op-offload",
    "--no-repack",
    "--override-kv",
    "--override-tensor",
    "--rope-scaling",
    "--yarn-orig-ctx",
    "-shm",
    "-wal",
    *("-p", "--gpus", "--group-add", "--init", "--memory", "--read-only", "--shm-size"),  # Docker's
    "--stop-timeout",
}
_FOLDERS = "csrc|docs|measure|ollama_tiering|packaging|patches|proto|scripts|tests"


def found() -> Iterator[tuple[Line, list[str], bool]]:
    """Where, the words of a command, and whether it only names one in a sentence."""
    for page in PAGES:
        for line in fenced(page):
            if re.search(r"\b(tiering|make|scripts)\b", line.text):  # else it may be no shell
                yield from ((line, words, False) for words in commands(line.text))
        for line in spans(page):
            if re.match(r"(sudo |eval |\./)?\W*(tiering|make|scripts/|python -m)", line.text):
                yield from ((line, words, True) for words in commands(line.text))


FOUND = list(found())
SHARED = "".join(  # options of programs in measure
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("ollama_tiering/cli/bench_run.py", "measure/sections.py", "measure/running.py")
)
TIERING = [(line, words[1:], mention) for line, words, mention in FOUND if words[0] in PROGRAMS]


def harmless(words: list[str]) -> set[int] | None:
    if {"-h", "--help"} & set(words) and not is_placeholder(words[0]):
        return {0}
    if any(map(is_placeholder, words)):
        return None
    try:
        check(words)
    except click.UsageError:  # named without what it needs
        return None
    return next((codes for key, codes in HARMLESS.items() if tuple(words[: len(key)]) == key), None)


def test_commands_are_found_wherever_a_page_has_them() -> None:
    where = {(str(line).partition(":")[0], " ".join(words)) for line, words, _ in TIERING}
    assert ("README.md", "demo --engine reference") in where  # ./scripts/tiering
    assert ("README.md", "status") in where  # with a comment behind it
    assert ("docs/operations.md", "systemd uninstall") in where  # behind sudo
    assert ("docs/operations.md", "patch") in where  # in $(…)
    assert ("docs/cli.md", "completion bash") in where  # quoted, in a table
    assert ("docs/operations.md", "systemd install --binary $binary") in where  # behind &&
    assert ("patches/README.md", "patch check --all-tags") in where


def test_every_command_is_one_that_click_takes() -> None:
    wrong = []
    for line, words, mention in TIERING:
        try:
            check(words, mention=mention)
        except click.UsageError as error:
            wrong.append(f"{line}: tiering {' '.join(words)}: {error.format_message()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "tiering up --hots 127.0.0.1:11435",
        "tiering statsu",
        "tiering patch bild",
        "tiering up --cpu fast",
        "tiering logs servers",
        "tiering export ID",
        "tiering rm ID --dry",
        "tiering ls --older-than 3y",
        "tiering completion bash zsh",
        "tiering config sidecar.ram_bugdet",
        "tiering bench restore --tier disk",
        "tiering model make qwen4 FILE",
        "tiering fetch --tag v0.1.2",
        "tiering systemd",
        "sudo scripts/tiering systemd install --bin x",
        "x=$(./scripts/tiering patch --stock) && true",
        "make && OLLAMA_HOST=:1 tiering up --model DIR >/dev/null",
        "tiering completion tcsh | source",
    ],
)
def test_a_wrong_one_is_refused(line: str) -> None:
    words = [words for words in commands(line) if words[0] in PROGRAMS]
    assert len(words) == 1
    with pytest.raises(click.UsageError):
        check(words[0][1:])


@pytest.mark.parametrize(
    "line",
    [
        "tiering rm ID --dry-run",
        "tiering --debug …",
        "tiering COMMAND -h",
        'tiering systemd install --binary "$binary" --now   # for the user `ollama`',
        "tiering import /path/to/file",
        "tiering config sidecar patch.cpu",
        "scripts/tiering gc --models DIR 2>/dev/null",
    ],
)
def test_a_right_one_is_taken(line: str) -> None:
    (words,) = commands(line)
    check(words[1:])


def test_a_sentence_may_name_a_command_without_what_it_needs_but_not_a_wrong_one() -> None:
    check(["export"], mention=True)
    check(["up", "--models"], mention=True)
    for words in (["exprot"], ["up", "--model"], ["export", "ID"]):
        with pytest.raises(click.UsageError):
            check(words, mention=True)


@pytest.mark.parametrize(
    "words",
    sorted({tuple(words) for _, words, _ in TIERING if words and harmless(words)}),
    ids=" ".join,
)
def test_what_is_harmless_runs(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("OLLAMA_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    result = CliRunner().invoke(cli, words, standalone_mode=False)
    failure = result.exception
    if failure is not None and not isinstance(failure, TieringError):
        raise failure
    code = failure.exit_code if isinstance(failure, TieringError) else result.return_value or 0
    assert code in (harmless(list(words)) or set()), failure


def test_what_is_run_is_not_nothing() -> None:
    run = {words[0] for _, words, _ in TIERING if words and harmless(words)}
    assert run >= {"status", "doctor", "ls", "config", "logs", "completion"}


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = {
        (str(line), word)
        for line, words, _ in FOUND
        if words[0] == "make"
        for word in words[1:]
        if "=" not in word  # of a variable
    }
    assert {word for _, word in named} >= {"measurements", "locks"}
    assert not {(line, word) for line, word in named if word not in targets}


def test_every_script_exists_and_has_the_options() -> None:
    checked = 0
    for line, words, _ in FOUND:
        at = 1 if words[0].endswith("python") and len(words) > 1 else 0
        script = words[at].removeprefix("./")
        if (at, script) == (1, "-m") and words[2].startswith("measure."):
            script = f"{words[2].replace('.', '/')}.py"
            if not (ROOT / script).is_file():
                script = script.replace(".py", "/__main__.py")
        elif not script.startswith("scripts/") or script in PROGRAMS:
            continue
        assert (ROOT / script).is_file(), f"{line}: {script}"
        text = (ROOT / script).read_text(encoding="utf-8")
        text += SHARED if script.startswith("measure/") else ""
        for option in (word for word in words[at + 1 :] if word.startswith("--")):
            assert f'"{option}"' in text, f"{line}: {script} has no {option}"
            checked += 1
    assert checked > 5


def test_every_file_of_the_repository_that_is_named_exists() -> None:
    checked, lacking = 0, []
    for page in PAGES:
        for line in spans(page):
            path = line.text.rstrip("/")
            if re.fullmatch(rf"({_FOLDERS})/[\w./-]+", path):
                checked += 1
                # from the page's own folder, too
                if not (ROOT / path).exists() and not (page.parent / path).exists():
                    lacking.append(f"{line}: {path}")
    assert not lacking, "\n".join(lacking)
    assert checked > 40


def test_every_option_that_a_sentence_names_is_one_of_some_command() -> None:
    known = {option for command in every_command(cli) for p in command.params for option in p.opts}
    known |= {"-h", "--help"} | {
        option
        for script in (*(ROOT / "scripts").iterdir(), *(ROOT / "measure").rglob("*.py"))
        if script.is_file()
        for option in re.findall(r"\"(--[a-z-]+)\"", script.read_text(encoding="utf-8"))
    }
    unknown = [
        f"{line}: {option[0]}"
        for page in PAGES
        for line in spans(page)
        if (option := re.match(r"--?[a-z-]+", line.text)) and option[0] not in known | _OF_OTHERS
    ]
    assert not unknown, "\n".join(unknown)


def every_command(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from every_command(found)
