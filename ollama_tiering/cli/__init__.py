"""The `tiering` command. Subcommands are imported when they run: a start costs Click and nothing
else.

COMMANDS is the table of them. A command whose module does not exist is not listed. `main` turns a
TieringError into `error: ...` and `hint: ...` on stderr and its exit code; anything else is a bug:
exit 1, traceback with --debug.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from ollama_tiering import __version__, extras
from ollama_tiering.errors import TieringError, UsageError, did_you_mean
from ollama_tiering.system import own_process

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

COMMANDS = {
    "up": ("ollama_tiering.cli.up:up", "Everything with one command: patch, sidecar, serve."),
    "demo": (
        "ollama_tiering.cli.demo:demo",
        "Show a restart that keeps its KV cache, on this machine.",
    ),
    "fetch": ("ollama_tiering.cli.fetch:fetch", "Put upstream source into the source cache."),
    "patch": (
        "ollama_tiering.cli.patch:patch",
        "Check, apply, revert and build the patched Ollama.",
    ),
    "sidecar": (
        "ollama_tiering.cli.sidecar:sidecar",
        "Run the block store service.",
    ),
    "status": (
        "ollama_tiering.cli.status:status",
        "What the store holds and found, and which models use it.",
    ),
    "logs": ("ollama_tiering.cli.logs:logs", "The logs of `tiering up`."),
    "config": (
        "ollama_tiering.cli.config:config",
        "The settings in force, and where each comes from.",
    ),
    "ls": ("ollama_tiering.cli.ls:ls", "What is stored, by conversation."),
    "rm": ("ollama_tiering.cli.rm:rm", "Remove conversations from the store."),
    "pin": ("ollama_tiering.cli.pin:pin", "Keep conversations from being evicted."),
    "unpin": ("ollama_tiering.cli.pin:unpin", "Let them be evicted again."),
    "verify": ("ollama_tiering.cli.verify:verify", "Read and check every stored block."),
    "gc": ("ollama_tiering.cli.gc:gc", "Remove what nobody can use any more."),
    "export": (
        "ollama_tiering.cli.archive:export_command",
        "Write a conversation to a file or directory.",
    ),
    "import": ("ollama_tiering.cli.archive:import_command", "Store an exported conversation."),
    "systemd": (
        "ollama_tiering.cli.systemd:systemd",
        "Install sidecar and patched Ollama as services.",
    ),
    "doctor": ("ollama_tiering.cli.doctor:doctor", "Check this machine and name what is missing."),
    "completion": (
        "ollama_tiering.cli.completion:completion",
        "What a shell needs to complete commands.",
    ),
    "model": ("ollama_tiering.cli.model:model", "Make and register small test models."),
    "kernel": ("ollama_tiering.cli.kernel:kernel", "Check this machine's attention kernels."),
    "bench": (
        "ollama_tiering.cli.bench:bench",
        "Measure; every number against one of the same run.",
    ),
}


class LazyGroup(click.Group):
    """A group whose commands are named in COMMANDS and imported on use; `--help` imports none of
    them.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (target, _) in COMMANDS.items() if _exists(target)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target, _ = COMMANDS.get(cmd_name, ("", ""))
        if not target or not _exists(target):
            return None
        module, _, attribute = target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click knows the names of a group's commands only where they are loaded."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            raise click.UsageError(f"no such command {name!r}{did_you_mean(name, known)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, COMMANDS[name][1]) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _exists(target: str) -> bool:
    return importlib.util.find_spec(target.partition(":")[0]) is not None


@click.group(cls=LazyGroup, context_settings=CONTEXT_SETTINGS)
@click.version_option(__version__, prog_name="tiering")
@click.option(
    "--debug", is_flag=True, envvar="OLLAMA_TIERING_DEBUG", help="Tracebacks instead of one line."
)
def cli(debug: bool) -> None:
    """Stock Ollama with a KV cache that outlives restarts."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point. Never returns."""
    arguments = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in arguments or own_process.is_set("OLLAMA_TIERING_DEBUG")
    sys.exit(_run(arguments, debug))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        outcome: Any = cli.main(arguments, prog_name="tiering", standalone_mode=False)
    except TieringError as error:
        if debug:
            traceback.print_exc()
        _complain(error.message, error.hint)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return UsageError.exit_code
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        _complain(error.format_message(), f"{context.command_path} -h" if context else None)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _complain("interrupted", None)
        return 130
    except BrokenPipeError:
        own_process.silence_stdout()
        return 141
    except ModuleNotFoundError as error:
        if debug or not (extra := extras.of_module(error.name)):
            return _bug(error, debug)
        lacking = extras.lacking(extra)
        _complain(lacking.message, lacking.hint)
        return lacking.exit_code
    except OSError as error:
        if debug:
            traceback.print_exc()
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"{where}{error.strerror or error}", "check that path, its owner and free space")
        return 1
    except Exception as error:
        return _bug(error, debug)
    return outcome if isinstance(outcome, int) else 0


def _bug(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
    cure = "this is a bug; run again with `tiering --debug …` and report what it prints"
    _complain(f"unexpected {type(error).__name__} at {where}: {error}", None if debug else cure)
    return 1


def _complain(message: str, hint: str | None) -> None:
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
