"""Days of prompts, made up after what agents, chats and their user interfaces send: who asks what
in which order, as token ids. The same each time.

One token here stands for `REAL_TOKENS` of a model's, so that a block of 64 has four.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

REAL_TOKENS: Final = 16  # that one token stands for
BLOCK_TOKENS: Final = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, and what the model writes then; both are stored together."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    live: bool = False  # one of the conversation that a test watches


@dataclass(slots=True)
class Talk:
    """A conversation that goes on. `thinks`: its answers begin with so many real tokens that later
    prompts leave out.
    """

    words: Words
    prompt: list[int]
    thinks: int = 0
    live: bool = False

    def turn(self, asked: int, answered: int) -> Ask:
        """Asks with so many real tokens more."""
        self.prompt += self.words.new(asked)
        answer = self.words.new(answered)
        ask = Ask(tuple(self.prompt), (*self.words.new(self.thinks), *answer), self.live)
        self.prompt += answer
        return ask


@dataclass(slots=True)
class Words:
    """Tokens that nobody used before, and chance."""

    chance: random.Random = field(default_factory=lambda: random.Random(7))
    _next: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new(self, real_tokens: int) -> list[int]:
        return [next(self._next) for _ in range(round(real_tokens / REAL_TOKENS))]

    def around(self, real_tokens: int) -> int:
        return round(real_tokens * self.chance.uniform(0.5, 1.5))


def flood(words: Words) -> Iterator[Ask]:
    """A live chat, and beside it 32 documents of 20,000 tokens that are asked for once each."""
    yield from _chat_in_a_flood(words, thinks=0)


def flood_thinking(words: Words) -> Iterator[Ask]:
    """The same where each answer begins with thoughts that the next prompt leaves out."""
    yield from _chat_in_a_flood(words, thinks=1200)


def _chat_in_a_flood(words: Words, thinks: int) -> Iterator[Ask]:
    system = words.new(600)
    yield from itertools.islice(_some_chats(words, system), 60)
    talk = Talk(words, list(system), thinks, live=True)
    instruction = words.new(400)
    for _ in range(4):
        yield talk.turn(1500, 800)
    for documents_between in (2, 6, 8, 16):
        for _ in range(documents_between):
            yield Ask((*instruction, *words.new(20_000)), tuple(words.new(300)))
        yield talk.turn(700, 700)


def chat_interface(words: Words) -> Iterator[Ask]:
    """Chats of an interface that asks for title, tags and what to ask next by calls of its own."""
    system, tasks = words.new(300), [words.new(350) for _ in range(3)]
    for _ in range(40):
        talk = Talk(words, list(system))
        for turn in range(words.chance.randint(1, 8)):
            yield talk.turn(words.around(60), words.around(500))
            said = talk.prompt[len(system) :][-4000 // REAL_TOKENS :]
            for task in tasks if turn == 0 else tasks[2:]:
                yield Ask((*task, *said), tuple(words.new(50)))


def agent(words: Words) -> Iterator[Ask]:
    """A coding agent: a long beginning that all its sessions share, and many small steps. Now and
    then it asks for a summary, and goes on from that.
    """
    system = words.new(12_000)
    for _ in range(4):
        talk = Talk(words, list(system))
        for step in range(30):
            yield talk.turn(words.around(700), words.around(200))
            if step == 20:
                yield Ask((*talk.prompt, *words.new(300)), tuple(words.new(1500)))
                talk = Talk(words, [*system, *words.new(1500)])


def helpers(words: Words) -> Iterator[Ask]:
    """An agent that goes on, and 64 of its helpers: each has the same long beginning, a task of its
    own, and is asked once.
    """
    system = words.new(9000)
    main = Talk(words, [*system, *words.new(500)], live=True)
    for _ in range(8):
        yield main.turn(1500, 300)
        for _ in range(8):
            yield Ask((*system, *words.new(6000)), tuple(words.new(800)))


def people(words: Words) -> Iterator[Ask]:
    """36 people, whose chats go on, rest for long and go on again; some are more eager."""
    system = words.new(800)
    talks = [Talk(words, list(system), thinks=600 * (n % 2)) for n in range(36)]
    weights = [1 / (1 + n) for n in range(len(talks))]
    for _ in range(300):
        (number,) = words.chance.choices(range(len(talks)), weights)
        if len(talks[number].prompt) * REAL_TOKENS > 30_000:
            talks[number] = Talk(words, list(system), talks[number].thinks)
        yield talks[number].turn(words.around(300), words.around(600))


def documents(words: Words) -> Iterator[Ask]:
    """Questions about 60 documents of 8,000 tokens, a few of which are asked about often."""
    instruction = words.new(300)
    papers = [words.new(words.around(8000)) for _ in range(60)]
    weights = [1 / (1 + n) for n in range(len(papers))]
    for _ in range(200):
        (paper,) = words.chance.choices(papers, weights)
        yield Ask((*instruction, *paper, *words.new(60)), tuple(words.new(300)))


def loop(words: Words) -> Iterator[Ask]:
    """Ten documents of 20,000 tokens, one after the other, again and again."""
    papers = [words.new(20_000) for _ in range(10)]
    for _ in range(4):
        for paper in papers:
            yield Ask((*paper, *words.new(60)), tuple(words.new(200)))


def scan(words: Words) -> Iterator[Ask]:
    """A batch of 500 texts with one instruction, in the middle of somebody's chats."""
    instruction, system = words.new(1200), words.new(600)
    talks = [Talk(words, list(system)) for _ in range(5)]
    for number in range(500):
        if number % 20 == 0:
            yield words.chance.choice(talks).turn(words.around(300), words.around(600))
        yield Ask((*instruction, *words.new(words.around(800))), tuple(words.new(200)))


def _some_chats(words: Words, system: list[int]) -> Iterator[Ask]:
    while True:
        talks = [Talk(words, list(system)) for _ in range(4)]
        for _ in range(40):
            yield words.chance.choice(talks).turn(words.around(800), words.around(600))


def changing(words: Words) -> Iterator[Ask]:
    """Work that changes: some chats for a time, then others, and the first ones never again."""
    for _ in range(10):
        yield from itertools.islice(_some_chats(words, words.new(2000)), 40)


def everything(words: Words) -> Iterator[Ask]:
    """The shorter ones of these by turns."""
    parts: Sequence[Callable[[Words], Iterator[Ask]]] = (
        *(flood, chat_interface, documents, scan, helpers, changing),
    )
    running = [part(words) for part in parts]
    while running:
        one = words.chance.choice(running)
        taken = list(itertools.islice(one, words.chance.randint(1, 12)))
        yield from (Ask(ask.prompt, ask.answer) for ask in taken)
        if not taken:
            running.remove(one)


TRACES: Final[dict[str, Callable[[Words], Iterator[Ask]]]] = {
    "one-shot documents beside a chat": flood,
    "the same, a model that thinks": flood_thinking,
    "a chat interface": chat_interface,
    "a coding agent": agent,
    "an agent and its helpers": helpers,
    "several people": people,
    "questions about documents": documents,
    "a loop": loop,
    "a batch beside chats": scan,
    "work that changes": changing,
    "everything by turns": everything,
}
