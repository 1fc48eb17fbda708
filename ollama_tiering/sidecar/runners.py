"""What the runners last reported, by process id. In memory only: a dead runner is forgotten."""

from __future__ import annotations

import os
import threading

from ollama_tiering.store import block_store_pb2 as pb

_MAX_RUNNERS = 256
_MAX_REPORT_BYTES = 16 << 10  # all are kept, and sent in one answer to everybody who asks


class RunnerTable:
    """Thread-safe: reports come on the event loop, the metrics are asked for in another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[int, pb.RunnerReport] = {}

    def put(self, report: pb.RunnerReport) -> None:
        if report.pid <= 0:
            raise ValueError(f"{report.pid} is no process id")
        if report.ByteSize() > _MAX_REPORT_BYTES:
            raise ValueError(f"a report of {report.ByteSize()} bytes is too long")
        with self._lock:
            self._reports.pop(report.pid, None)
            self._reports[report.pid] = report
            if len(self._reports) > _MAX_RUNNERS:
                del self._reports[next(iter(self._reports))]

    def alive(self) -> list[pb.RunnerReport]:
        with self._lock:
            self._reports = {pid: r for pid, r in self._reports.items() if _alive(pid)}
            return list(self._reports.values())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
