"""The `tiering` command. Subcommands are imported when they run, so a start loads Click and nothing
else.

COMMANDS is the table of subcommands. A command whose module does not exist is not listed. `main`
turns a TieringError into `error: ...` and `hint: ...` on stderr, and into its exit code. Anything
else is a bug: exit code 1, and a traceback with --debug.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ollama_tiering import __version__, extras
from ollama_tiering.errors import TieringError, UsageError, did_you_mean, plain
from ollama_tiering.system import own_process

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

_WRONG_KIND = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)  # of a path

COMMANDS = {
    "up": ("ollama_tiering.cli.up:up", "Build the patched Ollama if needed, and serve with it."),
    "stop": ("ollama_tiering.cli.stop:stop", "Stop `tiering up`."),
    "llama-server": (
        "ollama_tiering.cli.llama_server:llama_server",
        "Serve with llama.cpp's own server, without Ollama.",
    ),
    "demo": (
        "ollama_tiering.cli.demo:demo",
        "Show on this machine that the KV cache outlives a restart.",
    ),
    "fetch": ("ollama_tiering.cli.fetch:fetch", "Fetch Ollama's source into the cache."),
    "patch": (
        "ollama_tiering.cli.patch:patch",
        "Patch Ollama's source and build it.",
    ),
    "sidecar": (
        "ollama_tiering.cli.sidecar:sidecar",
        "Run the sidecar, the service that keeps the stored blocks.",
    ),
    "status": (
        "ollama_tiering.cli.status:status",
        "Show what is stored, what it saved, and which models use it.",
    ),
    "top": ("ollama_tiering.cli.top:top", "Show live what is stored, restored and computed."),
    "web": ("ollama_tiering.cli.web:web", "Show it all on a page in the browser."),
    "report": (
        "ollama_tiering.cli.report:report",
        "Show what each day asked for, and what restoring saved.",
    ),
    "why": (
        "ollama_tiering.cli.why:why",
        "Show why prompts were computed again, and what to do about it.",
    ),
    "warm": (
        "ollama_tiering.cli.warm:warm",
        "Compute and store a prompt before it is needed.",
    ),
    "logs": ("ollama_tiering.cli.logs:logs", "Show the logs of `tiering up`."),
    "reload": (
        "ollama_tiering.cli.reload:reload",
        "Have the sidecar read its settings again.",
    ),
    "config": (
        "ollama_tiering.cli.config:config",
        "Show the settings in force, and where each comes from.",
    ),
    "ls": ("ollama_tiering.cli.ls:ls", "List the stored conversations."),
    "rm": ("ollama_tiering.cli.rm:rm", "Remove conversations from the store."),
    "pin": ("ollama_tiering.cli.pin:pin", "Keep conversations from being evicted."),
    "unpin": ("ollama_tiering.cli.pin:unpin", "Let pinned conversations be evicted again."),
    "verify": ("ollama_tiering.cli.verify:verify", "Read and check every stored block."),
    "recheck": (
        "ollama_tiering.cli.recheck:recheck",
        "Compute stored conversations again, and compare every bit.",
    ),
    "builds": (
        "ollama_tiering.cli.builds:builds",
        "Show which builds read what was stored before an update.",
    ),
    "gc": ("ollama_tiering.cli.gc:gc", "Remove what nobody can use any more."),
    "export": (
        "ollama_tiering.cli.archive:export_command",
        "Write a conversation to a file or directory.",
    ),
    "import": ("ollama_tiering.cli.archive:import_command", "Store an exported conversation."),
    "systemd": (
        "ollama_tiering.cli.systemd:systemd",
        "Install the sidecar and the patched Ollama as services.",
    ),
    "doctor": ("ollama_tiering.cli.doctor:doctor", "Check this machine and name what is missing."),
    "completion": (
        "ollama_tiering.cli.completion:completion",
        "Print the script that completes commands in a shell.",
    ),
    "model": ("ollama_tiering.cli.model:model", "Make small test models."),
    "kernel": ("ollama_tiering.cli.kernel:kernel", "Check this machine's attention kernels."),
    "bench": (
        "ollama_tiering.cli.bench:bench",
        "Run a benchmark on this machine.",
    ),
}


class NamedPath(click.Path):
    """A path that is not empty: with a variable that is not set, `--tree "$TREE"` does not mean the
    working directory.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


class LazyGroup(click.Group):
    """A group whose commands are named in COMMANDS and imported when they are used; `--help`
    imports none.
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
        """Click itself knows the names of a group's commands only if they are loaded."""
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


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        # here, because other commands need none of it
        from ollama_tiering.patchset.own_commit import commit

        found = commit()
        click.echo(f"tiering, version {__version__}{f' (commit {found})' if found else ''}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings=CONTEXT_SETTINGS)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version, and the commit if it is known, and exit.",
)
@click.option(
    "--debug",
    is_flag=True,
    envvar="OLLAMA_TIERING_DEBUG",
    help="Print a traceback with every error.",
)
def cli(debug: bool) -> None:
    """Ollama with a KV cache that outlives restarts."""


def main(
    args: Sequence[str] | None = None, command: click.Command = cli, name: str = "tiering"
) -> None:
    """Entry point. Never returns."""
    own_process.print_in_any_encoding()
    arguments = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in arguments or own_process.is_set("OLLAMA_TIERING_DEBUG")
    sys.exit(_run(command, name, arguments, debug))


def _run(command: click.Command, name: str, arguments: list[str], debug: bool) -> int:
    try:
        outcome: Any = command.main(
            arguments, prog_name=name, standalone_mode=False, color=own_process.colour()
        )
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
        said = error.format_message()
        choices = isinstance(error, click.MissingParameter)  # a line each
        hint = f"{context.command_path} -h" if context else None
        _complain(said if choices else plain(said), hint)
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
        from ollama_tiering.doctor.system_errors import cause_and_cure

        _complain(*map(plain, cause_and_cure(error)))
        return UsageError.exit_code if error.errno in _WRONG_KIND else 1
    except Exception as error:
        return _bug(error, debug)
    return outcome if isinstance(outcome, int) else 0


def echo_path(path: Path) -> None:
    """Prints a line for another program: the very bytes of the path, also those that a terminal
    lacks.
    """
    click.echo(own_process.bytes_of(path))


def _bug(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
    cure = "this is a bug; run again with `tiering --debug …` and report what it prints"
    said = plain(f"unexpected {type(error).__name__} at {where}: {error}")
    _complain(said, None if debug else cure)
    return 1


def _complain(message: str, hint: str | None) -> None:
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
