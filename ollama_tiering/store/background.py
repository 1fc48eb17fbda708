"""A store's threads: one counts its files after a start, one moves blocks until the store closes.

What a shared tier needs is done by a thread of its own (upkeep/remote_mover.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.upkeep.survey import Survey

log = logging.getLogger(__name__)

_IDLE_SECONDS: Final = 1.0
_SURVEY_WAIT_SECONDS: Final = 0.5  # a small store is complete when it opens


class Background:
    """`first` is done once, `step` again and again: one piece of work, and whether there is more.

    `stop` is set when the store closes; whatever waits for a while should wait for it.
    """

    def __init__(
        self, state: StoreState, first: Callable[[], None], step: Callable[[], bool]
    ) -> None:
        self._state = state
        self._first = first
        self._step = step
        self.stop = threading.Event()
        self.survey_thread: threading.Thread | None = None
        self._mover_thread: threading.Thread | None = None
        self._seen = 0.0

    def count_files(self, survey: Survey) -> None:
        """Waits for a short while only."""
        self.survey_thread = threading.Thread(
            target=survey.run_until_done, name="block-survey", daemon=True
        )
        self.survey_thread.start()
        survey.done.wait(_SURVEY_WAIT_SECONDS)

    def start(self) -> None:
        self._seen = self._state.clock()
        self._mover_thread = threading.Thread(target=self._run, name="block-mover", daemon=True)
        self._mover_thread.start()

    def silent_seconds(self) -> float:
        """Since a piece of work was begun; 0 where there is no thread."""
        return self._state.clock() - self._seen if self._mover_thread is not None else 0.0

    def end(self, deadline: float) -> None:
        """Tells both to end, and waits for them until the (clock) deadline."""
        self.stop.set()
        self._state.work.set()
        for thread in (self.survey_thread, self._mover_thread):
            if thread is not None:
                thread.join(max(0.0, deadline - self._state.clock()))

    def wait(self) -> None:
        """For what the mover's thread is at, as long as it takes."""
        if self._mover_thread is not None:
            self._mover_thread.join()

    def _run(self) -> None:
        state = self._state
        self._first()
        while not self.stop.is_set():
            self._seen = state.clock()
            try:
                busy = self._step()
            except Exception:  # the thread must outlive any bug in one piece of work
                log.exception("mover failed")
                busy = False
            if not busy:
                state.work.wait(_IDLE_SECONDS)
                state.work.clear()
