"""What a person sees during the work: one line per stage on stderr, a live line on a terminal,
nothing if quiet.

Everything else (each command and its output) goes to the log file that `run` writes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ollama_tiering.errors import plain

SECONDS_BETWEEN_LINES = 10.0


class Report:
    """Lines about stages. `verbose` also shows each command when it runs."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose

    def say(self, text: str) -> None:
        if not self.quiet:
            _print(text)

    def say_lines(self, text: str) -> None:
        """Of which each is shown as a line: a message with the last lines of a log."""
        for line in text.splitlines():
            self.say(line)

    def warn(self, text: str) -> None:
        _print(f"warning: {text}")

    def command(self, line: str) -> None:
        if self.verbose:
            self.say(f"+ {line}")

    @contextmanager
    def stage(self, text: str) -> Iterator[Callable[[str], None]]:
        """Prints `text` and, if it went well, the seconds it took. Yields a function that sets the
        detail: shown live on a terminal, elsewhere as a line every SECONDS_BETWEEN_LINES.
        """
        started, text = time.monotonic(), plain(text)
        if self.quiet:
            yield lambda _detail: None
        elif sys.stderr.isatty():
            from rich.console import Console
            from rich.markup import escape

            console = Console(stderr=True)
            width = max(20, console.width - len(text) - 20)
            with console.status(escape(text)) as live:

                def show(detail: str, seconds: float) -> None:
                    clock = f"{seconds // 60:.0f}:{seconds % 60:02.0f}"
                    shown = escape(plain(detail[:width]))
                    live.update(f"{escape(text)}  [dim]{clock} {shown}[/dim]")

                with _ticking(show, started, every=1.0) as detail:
                    yield detail
        else:
            self.say(f"{text} ...")

            def line(detail: str, seconds: float) -> None:
                self.say(f"{text}: {detail or 'at work'}, {seconds:.0f} s so far")

            with _ticking(line, started, every=SECONDS_BETWEEN_LINES) as detail:
                yield detail
        self.say(f"{text}: done in {time.monotonic() - started:.1f} s")


def _print(text: str) -> None:
    """Nothing ends because a terminal has gone, or the disk behind stderr is full."""
    with suppress(OSError):
        print(plain(text), file=sys.stderr, flush=True)


@contextmanager
def _ticking(
    show: Callable[[str, float], None], started: float, *, every: float
) -> Iterator[Callable[[str], None]]:
    """Calls `show` again and again with the last detail and the seconds since `started`, because a
    compiler may say nothing for a minute.
    """
    over, last = threading.Event(), [""]

    def tick() -> None:
        while not over.wait(every):
            show(last[0], time.monotonic() - started)

    thread = threading.Thread(target=tick, name="progress", daemon=True)
    thread.start()
    try:
        yield lambda detail: last.__setitem__(0, detail)
    finally:
        over.set()
        thread.join()
