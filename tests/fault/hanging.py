"""A real sidecar whose disk dies on demand: `hanging.py DIRECTORY CALL sidecar OPTIONS…`.

Once DIRECTORY/dead exists, CALL of the local tier never returns, as on a disk that does not answer.
Whoever enters it leaves DIRECTORY/entered.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from ollama_tiering.cli import main
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier

PLACE, CALL = Path(sys.argv[1]), sys.argv[2]

real = getattr(FsTier, CALL)


def hanging(self: FsTier, *args: Any, **kwargs: Any) -> Any:
    if self.kind is TierKind.LOCAL and (PLACE / "dead").exists():
        (PLACE / "entered").touch()
        threading.Event().wait()
    return real(self, *args, **kwargs)


setattr(FsTier, CALL, hanging)
main(sys.argv[3:])
