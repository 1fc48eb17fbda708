"""The gate against both sides: what is compared with what."""

from __future__ import annotations

from dataclasses import dataclass, field

from ollama_tiering.bench import gate


@dataclass
class Answer:
    seconds_to_first_token: float
    restored_tokens: int


@dataclass
class Engine:
    """Restoring takes 10 ms, computing 1 ms for every 10 tokens; the gate says `auto`."""

    auto: str
    gate: str = ""
    gates: list[str] = field(default_factory=list)
    last: str = ""
    asked: list[str] = field(default_factory=list)

    def with_gate(self, gate: str) -> None:
        self.gate = gate
        self.gates.append(gate)

    def ask(self, prompt: str, new_tokens: int) -> Answer:
        assert prompt != self.last  # it would be in memory
        self.last = prompt
        self.asked.append(self.gate)
        chosen = self.auto if self.gate == "auto" else self.gate
        if chosen == "restore":
            return Answer(0.010, len(prompt))
        return Answer(len(prompt) / 10_000, 0)


def measured(auto: str, tokens: int) -> gate.GateChoice:
    engine = Engine(auto)
    (choice,) = gate.measure(
        engine, lambda n, seed: f"{seed:08}".ljust(n, "x"), [tokens], lambda text: None,
        tier="ram", repeat=3,
    )  # fmt: skip
    assert engine.gates == 3 * ["restore", "recompute", "auto"]
    return choice


def test_the_better_side_is_what_counts() -> None:
    right, wrong = measured("restore", 400), measured("recompute", 400)
    assert (right.ratio, right.restored) == (1.0, 3)
    assert (wrong.ratio, wrong.restored) == (4.0, 0)
    assert measured("recompute", 50).ratio == 1.0
    assert measured("restore", 50).ratio == 2.0


def test_the_table_says_what_was_met() -> None:
    choices = [measured("restore", 400), measured("recompute", 400)]
    table = gate.table("tiny", choices, "exact (avx2)")
    assert "Attention: exact (avx2)" in " ".join(table.notes)
    rows = table.rows
    assert [row[-1] for row in rows] == ["met", "not met"]
    assert rows[0][2:6] == ["10.0 ms", "40.0 ms", "10.0 ms", "3 of 3"]
    assert rows[0][7] == "± 0 %"


def test_the_sides_take_turns_and_are_asked_as_often_as_was_said() -> None:
    engine = Engine("recompute")
    gate.measure(
        engine, lambda n, seed: f"{seed:08}".ljust(n, "x"), [50], lambda text: None,
        tier="ram", repeat=12,
    )  # fmt: skip
    assert engine.gates == 5 * ["restore", "recompute", "auto"]
    assert engine.asked.count("recompute") == engine.asked.count("restore")
    warm, stored, asked = 2 * 5, 5, 2 * 12  # each ask takes one of another prompt before it
    assert engine.asked.count("restore") == warm + stored + asked
