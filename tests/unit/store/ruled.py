"""A store whose models have rules that a test changes."""

from __future__ import annotations

from measure.store import samples
from ollama_tiering.store.block.key import prefix_chain, tokens_to_bytes
from ollama_tiering.store.books.terms import Terms
from tests.unit.store.support import BLOCK_TOKENS, NS, Bench

DAY = 86400.0
OTHER = samples.namespace("other", layers=len(NS.layers.split(";")))


class Ruled(Bench):
    """A bench whose terms a test writes, by the model's file name."""

    def __init__(self, *args: object, **options: object) -> None:
        self.terms: dict[str, Terms] = {}
        super().__init__(*args, decide=self.decide, **options)  # type: ignore[arg-type]

    def decide(self, model: str) -> Terms:
        return self.terms.get(model, Terms())

    def rule(self, terms: Terms, model: str = "sample") -> None:
        self.terms[model] = terms
        self.store.set_terms(self.decide)

    def put_other(self, tokens: range) -> list[samples.SampleBlock]:
        session, self.session = (
            self.session,
            self.store.open_session(OTHER.digest(), OTHER.fields(), BLOCK_TOKENS),
        )
        blocks = samples.sequence(OTHER, tokens)
        assert all(result.stored for result in self.try_put(blocks))
        self.store.close_session(self.session)
        self.session = session
        self.tick()
        return blocks

    def other_rows(self, tokens: range) -> int:
        data = tokens_to_bytes(tokens)
        keys = prefix_chain(OTHER.digest(), data, BLOCK_TOKENS)
        found = self.store.match(OTHER.digest(), keys, data, BLOCK_TOKENS)
        return sum(block.rows for block in found)

    def pass_days(self, days: float) -> None:
        for _ in range(100):
            self.tick(days * DAY / 100)
            self.store.run_pending()
