"""Well-formed lies of a sidecar against llama-server's library, under sanitizers: it reads nothing
behind its memory, changes no file of its user's, goes on; and where checksums show a lie, no row
is wrong. `make fuzz-lies` tells 50,000.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.fuzz.campaign import SEED
from tests.fuzz.lies import BLOCK_TOKENS, BLOCKS, ROW_BYTES, LyingSidecar, Truth
from tests.integration.engine_program import Talk, compiled
from tests.places import tmpfs_directory

PROMPTS = int(os.environ.get("TIERING_LIES", "400"))  # in all
WAYS = [(states, harmless) for states in (False, True) for harmless in (True, False)]
SECONDS_PER_PROMPT = 0.5  # on a slow core that others use


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("kvt_slots", "address,undefined", tmp_path_factory.mktemp("kvt"))


@pytest.mark.parametrize(("states", "harmless"), WAYS)
@pytest.mark.timeout(300 + PROMPTS * SECONDS_PER_PROMPT)
def test_no_lie_does_harm(
    program: Path, monkeypatch: pytest.MonkeyPatch, states: bool, harmless: bool
) -> None:
    monkeypatch.setenv("KVT_ROW_BYTES", str(ROW_BYTES))
    rng = random.Random(f"{SEED} {states} {harmless}")
    with tmpfs_directory() as folder:
        blocks = folder / "blocks"
        blocks.mkdir()
        truth = Truth(blocks)
        options = "128", "128", "1" if states else "0"
        with (
            LyingSidecar(folder / "s", truth, rng, harmless=harmless) as lying,
            Talk(program, folder / "s", *options) as talk,
        ):
            restored = 0
            while lying.prompts < PROMPTS / len(WAYS):
                said = prompt(talk, rng)
                assert "have" in said, f"after {lying.prompts} prompts it ended"
                assert not harmless or "BROKEN" not in said, f"prompt {lying.prompts}: {said}"
                restored += " restored 0 " not in said
            assert restored > lying.prompts / 100, "it believes the truth"
        assert truth.changed() == []


def prompt(talk: Talk, rng: random.Random) -> str:
    """One, of a slot that holds some of it; sometimes an answer is stored first."""
    count = rng.randrange(1, BLOCKS * BLOCK_TOKENS + 40)
    if rng.random() < 0.2:
        talk.say("answer", 1, 0, count)
        talk.say("room")
        talk.say("room")
    talk.say("direct", rng.choice((-1, 0, 2)))
    talk.say("heal", 0)
    talk.say("hold", 0, 0, rng.choice((0, 0, 0, rng.randrange(count))))
    return talk.say("prompt", 0, 0, count)
