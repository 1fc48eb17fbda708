"""What the page of `tiering web` shows: the values that other commands print, from where they are
made.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ollama_tiering.cli import config as config_command
from ollama_tiering.cli import ls, pin, report_days, rm, status, why, why_lines
from ollama_tiering.cli.first_words import Words
from ollama_tiering.cli.model_names import known_names
from ollama_tiering.cli.reach import memory_of, require_there
from ollama_tiering.cli.top import SidecarWatch
from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.config import config_file
from ollama_tiering.config.origins import in_force
from ollama_tiering.doctor.examine import examine
from ollama_tiering.errors import TieringError
from ollama_tiering.launch.names import models_dirs
from ollama_tiering.store.values import Selection
from ollama_tiering.why.explain import causes

if TYPE_CHECKING:
    from ollama_tiering.web.data import Document

_LOOK_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 5.0  # where nobody has the page open
_WATCHED_SECONDS: Final = 10.0  # without a question: it is closed
_MOST_PARTINGS: Final = 256


class SidecarData:
    """Of the sidecar on `socket`. Without `text`, nothing is shown of what prompts say."""

    def __init__(self, socket: Path, *, text: bool) -> None:
        self._socket = socket
        self._text = text
        self._watch = SidecarWatch(socket)
        self._watching = threading.Lock()
        self._reading = threading.Lock()  # vocabularies are read once
        self._words = Words(models_dirs())
        self._asked = 0.0

    def watch(self, ended: threading.Event) -> None:
        """Looks now and then, so that requests are seen that end while no page is open."""
        while not ended.is_set():
            with suppress(TieringError, OSError):  # a sidecar may come
                self._look()
            open_now = time.monotonic() - self._asked < _WATCHED_SECONDS
            ended.wait(_LOOK_SECONDS if open_now else _IDLE_SECONDS)

    def live(self) -> Document:
        self._asked = time.monotonic()
        answer = self._look() or status.ask(self._socket)
        seen = self._watch.seen
        return {
            "status": status.document(self._socket, answer, memory_of(self._socket)),
            "flow": asdict(seen.flow),
            "requests": [asdict(request) for request in list(seen.requests)],
        }

    def conversations(self, most: int | None = None) -> Document:
        with self._admin() as admin:
            listing = admin.listing(words=self._text)
        summary = ls.summary(listing, shown=len(listing.chains), blocks=False)
        chains = sorted(listing.chains, key=lambda chain: -chain.last_use)[:most]
        with self._reading:
            texts = ls.texts_of(listing, chains, self._words) if self._text else None
        useless = ls.useless_in(listing, self._socket)
        found = ls.document(listing, chains, ls.labels_of(listing), texts, useless, blocks=False)
        return found | {"summary": summary}

    def why(self) -> Document:
        with self._admin() as admin:
            explained = why.explained_by(admin, "", _MOST_PARTINGS)
            since = admin.stat().started_unix_seconds
        found = causes(explained)
        return {
            "causes": [
                {
                    "headline": why_lines.headline_of(cause),
                    "rows": list(why_lines.rows_of(cause, text=self._text)),
                }
                for cause in found
            ],
            "last_line": why_lines.last_line_of(found, explained, since),
        }

    def report(self, days: int) -> Document:
        from ollama_tiering.cli.report_page import calendar

        with self._admin() as admin:
            found = report_days.reported(admin.days(days))
        by_day = report_days.of_days(found)
        return {
            "calendar": calendar(days, by_day),
            "days": {date: asdict(sums) for date, sums in by_day.items()},
            "models": {name: asdict(sums) for name, sums in report_days.of_models(found).items()},
            "all": asdict(report_days.sum_of(found)),
        }

    def doctor(self) -> Document:
        """And all that `status` prints."""
        return {"checks": [asdict(check) for check in examine()], "status": self._status()}

    def config(self) -> Document:
        rows, broken = in_force()
        shown: dict[str, Any] = {row.key: row.shown for row in rows}
        wrong = broken.message if broken else None
        return config_command.document(rows, config_file()) | {"shown": shown, "error": wrong}

    def pin(self, chain_id: str, *, unpin: bool) -> Document:
        with self._admin() as admin:
            done = admin.unpin(chain_id) if unpin else admin.pin(chain_id)
            model = pin.model_of(admin, chain_id, known_names())
        return {"sentence": pin.sentence(done, model, unpin=unpin, dry_run=False)}

    def remove(self, chain_id: str, *, dry_run: bool) -> Document:
        selection = Selection(ids=(chain_id,))
        with self._admin() as admin:
            about = rm.about_of(admin, selection)
            done = admin.remove(selection, dry_run=dry_run)
        return {"sentence": rm.sentence(done, about, dry_run=dry_run)}

    def _status(self) -> list[str]:
        try:
            answer = status.ask(self._socket)
        except TieringError as error:
            return [error.message]
        return list(status.lines(self._socket, answer, memory_of(self._socket)))

    def _look(self) -> Any:
        with self._watching:
            return self._watch.look()

    def _admin(self) -> SidecarAdministration:
        require_there(self._socket)
        return SidecarAdministration(self._socket)
