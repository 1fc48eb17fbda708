"""`tiering completion`: the script with which a shell completes commands,
options and their values.
"""

from __future__ import annotations

import click

from ollama_tiering.cli import CONTEXT_SETTINGS

VARIABLE = "_TIERING_COMPLETE"  # what Click asks for in its own environment


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands in SHELL.

    \b
    bash:  eval "$(tiering completion bash)"            in ~/.bashrc
    zsh:   eval "$(tiering completion zsh)"             in ~/.zshrc
    fish:  tiering completion fish | source             in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    from ollama_tiering.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    maker = kind(cli, {}, "tiering", VARIABLE)
    # not maker.source(): that runs the shell to look at its version
    click.echo(maker.source_template % maker.source_vars())
