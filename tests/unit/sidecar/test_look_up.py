"""While a long look-up runs, the event loop serves others."""

from __future__ import annotations

import asyncio

import pytest

from ollama_tiering.sidecar.look_up import MAX_KEYS, LookUps
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.unit.store.chains import MANY, MOST_PER_HOLD, in_books
from tests.unit.store.support import BLOCK_TOKENS, NAMESPACE, Bench


def request_for(keys: list[bytes], tokens: bytes) -> pb.HasRequest:
    return pb.HasRequest(namespace=NAMESPACE, keys=keys, tokens=tokens, block_tokens=BLOCK_TOKENS)


def test_a_short_one_is_answered_while_a_long_one_runs() -> None:
    bench = Bench(ram=MANY, local=MANY)
    keys, tokens = in_books(bench, MANY)
    look_ups = LookUps(bench.store)
    long_request = request_for(list(keys), tokens)
    short_request = request_for(list(keys[:2]), tokens[: 2 * 4 * BLOCK_TOKENS])

    async def go() -> None:
        long = asyncio.create_task(look_ups.answer(long_request))
        turns = 0
        while not long.done():
            await asyncio.sleep(0)
            if turns in (3, 100, 200):  # keys are read, looked up, marked as used
                assert (await look_ups.answer(short_request)).matched_tokens == 2 * BLOCK_TOKENS
                assert not long.done()
            turns += 1
        answer = await long
        assert [block.key for block in answer.blocks] == list(keys)
        assert answer.matched_tokens == MANY * BLOCK_TOKENS
        assert turns >= 4 * MANY / MOST_PER_HOLD

    asyncio.run(go())


def test_two_long_ones_take_turns_and_both_are_answered() -> None:
    bench = Bench(ram=3000, local=3000)
    keys, tokens = in_books(bench, 3000)
    look_ups = LookUps(bench.store)
    request = request_for(list(keys), tokens)

    async def go() -> None:
        answers = await asyncio.gather(look_ups.answer(request), look_ups.answer(request))
        assert [len(answer.blocks) for answer in answers] == [3000, 3000]
        given_up = asyncio.create_task(look_ups.answer(request))
        await asyncio.sleep(0)
        given_up.cancel()
        assert len((await look_ups.answer(request)).blocks) == 3000

    asyncio.run(go())


def test_a_key_that_is_none_is_refused_wherever_it_stands() -> None:
    look_ups = LookUps(Bench().store)
    for at in (0, 700, 999):
        keys = [bytes(32)] * 1000
        keys[at] = b"short"
        with pytest.raises(ValueError, match="a block key has 32 bytes"):
            asyncio.run(look_ups.answer(request_for(keys, b"")))


def test_more_keys_than_a_message_may_have_are_refused() -> None:
    request = request_for([bytes(32)] * (MAX_KEYS + 1), b"")
    with pytest.raises(ValueError, match="65537 keys are more than 65536"):
        asyncio.run(LookUps(Bench().store).answer(request))
