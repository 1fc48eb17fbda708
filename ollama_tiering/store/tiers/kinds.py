"""What is true of a tier because of its kind. The store asks the tier, and never for its kind."""

from __future__ import annotations

from typing import Final

from ollama_tiering.store.tiers.contract import FirstGuess, TierKind

VOLATILE: Final = frozenset((TierKind.RAM,))  # see Tier.is_volatile
SHARED: Final = frozenset((TierKind.REMOTE,))  # see Tier.is_shared

_ON_A_DISK_OF_OURS: Final = frozenset((TierKind.LOCAL,))
_FIRST_GUESSES: Final = {
    TierKind.RAM: FirstGuess(1e9, 20e-6),
    TierKind.LOCAL: FirstGuess(150e6, 100e-6),
    TierKind.REMOTE: FirstGuess(50e6, 500e-6),
}


class TierOfKind:
    """The part of a tier that says what it is."""

    announces = False

    def __init__(self, kind: TierKind) -> None:
        self.kind = kind
        self.is_volatile = kind in VOLATILE
        self.wears_disk = kind in _ON_A_DISK_OF_OURS
        self.is_shared = kind in SHARED
        self.clients_open = not self.is_shared
        self.first_guess = _FIRST_GUESSES[kind]
