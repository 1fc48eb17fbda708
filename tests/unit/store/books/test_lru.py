"""ByteLru: budgets, order, holds, victims."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ollama_tiering.store.books.lru import ByteLru


def lru(budget: int = 100, **entries: int) -> ByteLru[str]:
    made: ByteLru[str] = ByteLru(budget)
    for key, stored_bytes in entries.items():
        made.add(key, stored_bytes)
    return made


def victims(made: ByteLru[str], need: int, *, partial: bool = False) -> list[str]:
    return made.victims(need, lambda key: True, lambda key: None, partial=partial)


def test_a_reservation_at_capacity_is_refused() -> None:
    made = lru(100, a=60)
    assert made.reserve(41) is None
    reservation = made.reserve(40)
    assert reservation is not None
    assert made.reserve(1) is None


def test_a_reservation_ends_once() -> None:
    made = lru()
    reservation = made.reserve(70)
    assert reservation is not None
    assert made.counted_bytes == 70
    reservation.release()
    assert made.counted_bytes == 0
    reservation.release()
    reservation.commit("a", 10)
    assert made.counted_bytes == 0


def test_commit_counts_what_was_stored() -> None:
    made = lru()
    reservation = made.reserve(70)
    assert reservation is not None
    reservation.commit("a", 50)
    assert (made.used_bytes, made.reserved_bytes) == (50, 0)


def test_adding_a_key_again_replaces_its_size() -> None:
    made = lru(a=30)
    made.add("a", 20)
    assert made.used_bytes == 20
    assert made.remove("a") == 20
    assert made.remove("a") == 0
    assert made.used_bytes == 0


def test_retired_bytes_stay_counted_until_released() -> None:
    made = lru(a=30)
    reservation = made.retire("a")
    assert "a" not in made
    assert made.counted_bytes == 30
    reservation.release()
    assert made.counted_bytes == 0


def test_overhead_counts_against_the_budget() -> None:
    made = lru(100)
    made.overhead_bytes = 60
    assert made.reserve(41) is None
    assert made.shortfall_bytes(41) == 1
    made.add("a", 50)
    assert made.excess_bytes == 10


def test_the_oldest_are_the_victims_and_touch_makes_young() -> None:
    made = lru(a=10, b=10, c=10)
    made.touch(["unknown", "a"])
    assert victims(made, 15) == ["b", "c"]
    assert list(made) == ["b", "c", "a"]


def test_no_victims_when_not_enough_can_be_freed() -> None:
    made = lru(a=10, b=10)
    made.hold("a")
    assert victims(made, 15) == []
    assert victims(made, 15, partial=True) == ["b"]


def test_holds_are_counted() -> None:
    made = lru(a=10)
    made.hold("a")
    made.hold("a")
    made.let_go("a")
    assert made.held("a")
    made.let_go("a")
    made.let_go("a")
    assert not made.held("a")
    assert victims(made, 5) == ["a"]


def test_what_a_victim_unblocks_is_taken_in_the_same_pass() -> None:
    made = lru(a=10, b=10, c=10, x=10)  # a is the parent of b, b of c
    parents = {"c": "b", "b": "a"}
    gone: set[str] = set()

    def may_evict(key: str) -> bool:
        return all(child in gone for child, parent in parents.items() if parent == key)

    def unblocks(key: str) -> str | None:
        gone.add(key)
        return parents.get(key)

    assert made.victims(25, may_evict, unblocks) == ["c", "b", "a"]


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 50)), max_size=30),
    st.integers(0, 120),
)
def test_reservations_never_exceed_the_budget(steps: list[tuple[str, int]], budget: int) -> None:
    made: ByteLru[str] = ByteLru(budget)
    for key, need in steps:
        reservation = made.reserve(need)
        if reservation is None:
            for victim in victims(made, made.shortfall_bytes(need)):
                made.remove(victim)
            reservation = made.reserve(need)
        if reservation is not None:
            reservation.commit(key, need)
        assert made.counted_bytes <= budget
    assert made.used_bytes == sum(made.stored_bytes(key) for key in made)


def test_a_hit_protects_from_what_was_only_written() -> None:
    made = lru(100, a=10, b=10, c=10)
    made.touch(["a"], hit=True)
    made.touch(["b"])
    assert list(made) == ["c", "b", "a"]
    assert victims(made, 30) == ["c", "b", "a"]
    made.add("d", 10)
    assert list(made) == ["c", "b", "d", "a"]
    assert list(reversed(made)) == ["a", "d", "b", "c"]


def test_the_protected_fall_back_when_they_are_too_many() -> None:
    made = lru(100, **{name: 10 for name in "abcdefghij"})
    made.touch("abcdefghij", hit=True)
    assert list(made)[:2] == ["a", "b"]  # the oldest of them, on probation again
    assert [list(segment) for segment in made.segments()] == [list("ab"), list("cdefghij")]
    assert made.used_bytes == 100


def test_a_size_is_corrected_in_place() -> None:
    made = lru(a=10, b=10)
    made.touch(["a"], hit=True)
    made.resize("a", 30)
    made.resize("b", 5)
    made.resize("unknown", 5)
    assert list(made) == ["b", "a"]
    assert made.used_bytes == 35
    assert made.remove("a") == 30
    assert made.used_bytes == 5


def test_an_entry_may_start_as_the_oldest() -> None:
    made = lru(a=10)
    made.add("b", 10, oldest=True)
    made.add("c", 10, oldest=True, hit=True)
    assert list(made) == ["b", "a", "c"]


def test_a_reservation_gives_back_a_part_and_no_more_than_it_has() -> None:
    made = lru()
    reservation = made.reserve(50)
    assert reservation is not None
    reservation.shrink(20)
    assert made.reserved_bytes == 30
    reservation.shrink(1000)
    reservation.shrink(-5)
    assert made.reserved_bytes == 0
    reservation.release()
    assert made.reserved_bytes == 0
