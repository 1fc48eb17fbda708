"""What the person sees while work goes on: one line a stage on stderr, a live line on a terminal,
nothing when quiet.

Everything else (each command and its output) goes to the log file that `run` writes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Report:
    """Stage lines. `verbose` also shows each command as it is run."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose

    def say(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def command(self, line: str) -> None:
        if self.verbose:
            self.say(f"+ {line}")

    @contextmanager
    def stage(self, text: str) -> Iterator[Callable[[str], None]]:
        """Prints `text` and, when it went well, the seconds it took. Yields a setter for the live
        detail.
        """
        started = time.monotonic()
        if self.quiet or not sys.stderr.isatty():
            self.say(f"{text} ...")
            yield lambda _detail: None
        else:
            from rich.console import Console
            from rich.markup import escape

            console = Console(stderr=True)
            width = max(20, console.width - len(text) - 12)
            with console.status(escape(text)) as live:
                yield lambda detail: live.update(
                    f"{escape(text)}  [dim]{escape(detail[:width])}[/dim]"
                )
        self.say(f"{text}: done in {time.monotonic() - started:.1f} s")
