"""What the demonstration calls a success, for any engine."""

from dataclasses import dataclass, field, replace

import pytest

from ollama_tiering.engines import demo
from ollama_tiering.engines.drivers import Answer

LOGPROBS = ((("a", -0.5), ("b", -1.0)),)


def answer(memory: int = 0, restored: int = 0) -> Answer:
    return Answer(
        tokens=("a",),
        logprobs=LOGPROBS,
        seconds_to_first_token=0.1,
        prompt_tokens=100,
        memory_tokens=memory,
        restored_tokens=restored,
        recomputed_tokens=100 - memory - restored,
    )


GOOD = (answer(), answer(memory=99), answer(restored=99), answer(restored=99))


@dataclass
class FakeDriver:
    answers: list[Answer]
    name: str = "fake"
    one_answer: bool = False
    calls: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.calls.append("start")

    def ask(self, prompt: str, new_tokens: int) -> Answer:
        self.calls.append("ask")
        return self.answers.pop(0)

    def unload(self) -> None:
        self.calls.append("unload")

    def restart(self) -> None:
        self.calls.append("restart")

    def close(self) -> None:
        self.calls.append("close")


def outcome_of(*answers: Answer) -> demo.Outcome:
    return demo.show(FakeDriver(list(answers)), "prompt", lambda _line: None)


def test_the_prompt_is_asked_cold_from_memory_after_unload_and_after_restart() -> None:
    driver = FakeDriver(list(GOOD))
    outcome = demo.show(driver, "prompt", lambda _line: None)
    assert driver.calls == ["start", "ask", "ask", "unload", "ask", "restart", "ask"]
    assert outcome.failures == []
    assert [row.verdict for row in outcome.rows] == ["yes", "the reference", "yes", "yes"]


def test_last_bits_of_a_cold_run_decide_nothing_unless_the_engine_has_one_answer() -> None:
    cold = replace(GOOD[0], logprobs=((("a", -0.5000001), ("b", -1.0)),))
    outcome = outcome_of(cold, *GOOD[1:])
    assert outcome.failures == []
    assert outcome.rows[0].verdict == "tokens yes, last bits no"
    driver = FakeDriver([cold, *GOOD[1:]], one_answer=True)
    outcome = demo.show(driver, "prompt", lambda _line: None)
    assert outcome.failures == ["cold: the answer differs from that of the in-memory hit"]
    assert outcome.rows[0].verdict == "NO"


@pytest.mark.parametrize("which", [2, 3])
def test_one_bit_of_a_restored_answer_is_a_failure(which: int) -> None:
    answers = list(GOOD)
    answers[which] = replace(answers[which], logprobs=((("a", -0.5), ("b", -1.0000001)),))
    outcome = outcome_of(*answers)
    assert "differs" in outcome.failures[0]
    assert outcome.rows[which].verdict == "NO"


@pytest.mark.parametrize("which", [2, 3])
def test_nothing_restored_is_a_failure_although_the_answer_is_right(which: int) -> None:
    answers = list(GOOD)
    answers[which] = answer()
    assert "nothing was restored" in outcome_of(*answers).failures[0]


def test_without_a_hit_in_memory_there_is_no_reference() -> None:
    assert "no reference" in outcome_of(GOOD[0], answer(), *GOOD[2:]).failures[0]


def test_the_prompt_has_as_many_characters_as_tokens_were_asked_for() -> None:
    assert len(demo.make_prompt(1500)) == 1500
    assert demo.make_prompt(100, 1) != demo.make_prompt(100, 2)
