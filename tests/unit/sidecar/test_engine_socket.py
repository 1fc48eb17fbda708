"""A fake engine against a real sidecar: what it stores comes back, and whatever becomes of it or of
its connection, nothing is left behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.client.engine_client import EngineRefused
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.contract.fake_engine import FakeEngine, hello, nothing_is_held, prompt
from tests.sidecar import SidecarProcess

SECONDS = 20.0


# --- rows -----------------------------------------------------------------------------------------


def test_what_an_engine_stored_comes_back_to_the_token(engine: FakeEngine) -> None:
    tokens = prompt(10_000, 200)
    files, reasons = engine.store(tokens)
    assert [(file.first_position, file.rows) for file in files] == [
        (0, 64),
        (64, 64),
        (128, 64),
        (192, 8),
    ]
    assert reasons == []
    other = [*tokens[:150], 1, 2, 3]
    found = engine.look_up(other)
    assert (found.rows, found.reason, found.at) == (150, pb.SHORTFALL_DIFFERS, 150)
    assert engine.restore(other) == 150
    assert engine.store(tokens) == ([], [])


def test_the_last_token_of_a_prompt_is_never_restored(engine: FakeEngine) -> None:
    tokens = prompt(11_000, 128)
    engine.store(tokens)
    found = engine.look_up(tokens)
    assert (found.rows, found.reason) == (127, pb.SHORTFALL_UNSPECIFIED)
    longer = engine.look_up([*tokens, 5, 6])
    assert (longer.rows, longer.reason, longer.at) == (128, pb.SHORTFALL_ENDS, 128)
    assert engine.look_up([]).rows == engine.look_up([7]).rows == 0


def test_only_what_the_slot_lacks_is_named(engine: FakeEngine) -> None:
    tokens = prompt(12_000, 300)
    engine.store(tokens)
    mine = engine.fingerprints(tokens)[:2]
    found = engine.look_up(tokens, have=130, fingerprints=mine)
    assert [file.first_position for file in found.files] == [128, 192, 256]
    assert engine.restore(tokens, have=130, fingerprints=mine) == 299
    assert engine.look_up(tokens, have=299, fingerprints=mine).reason == pb.SHORTFALL_TOO_SHORT


def test_a_sequence_that_goes_on_is_stored_from_where_it_ended(engine: FakeEngine) -> None:
    tokens = prompt(13_000, 100)
    engine.store(tokens)
    files, reasons = engine.store([*tokens, *prompt(500, 100)])
    assert [file.first_position for file in files] == [64, 128, 192]
    assert reasons == []


def test_prompts_of_one_connection_do_not_mix(daemon: SidecarProcess, engine: FakeEngine) -> None:
    shared = prompt(13_100, 100)
    prompts = [[*shared, *prompt(first, 200)] for first in (13_200, 13_300)]
    prompts += [prompt(13_400, 300), [1, *shared]]
    for tokens in prompts:
        assert engine.store(tokens)[1] == []
    with FakeEngine(daemon.socket) as other:
        for tokens in prompts:  # a chain that nothing of this connection came before
            assert other.restore([*tokens, 1]) == len(tokens)


def test_asking_what_is_missing_is_no_look_up(daemon: SidecarProcess, engine: FakeEngine) -> None:
    tokens = prompt(13_500, 700 * 64)  # in more than one piece
    engine.store(tokens)
    before = daemon.stat().has_calls
    assert engine.store(tokens) == ([], [])
    assert daemon.stat().has_calls == before
    engine.look_up(tokens)
    assert daemon.stat().has_calls == before + 1


def test_an_image_separates_what_has_the_same_tokens(engine: FakeEngine) -> None:
    tokens = prompt(14_000, 130)
    seen, other = (m.EngineExtra(70, bytes([number]) * 32) for number in (1, 2))
    planned = engine.plan(tokens, extras=(seen,))
    engine.client.commit(m.Commit(tuple(engine.fill(f, tokens, {}) for f in planned.files)))
    assert engine.restore([*tokens, 1], extras=(seen,)) == 130
    assert engine.restore([*tokens, 1], extras=(other,)) == 70
    assert engine.restore([*tokens, 1]) == 70
    plain = prompt(14_500, 130)
    engine.store(plain)
    assert engine.restore([*plain, 1], extras=(seen,)) == 70


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (hello(), pb.SHORTFALL_NOTHING_STORED),
        (hello(gate=m.GateMode.RECOMPUTE), pb.SHORTFALL_RECOMPUTE),
        (hello(min_tokens=100), pb.SHORTFALL_TOO_SHORT),
    ],
    ids=["nothing stored", "never restore", "too short"],
)
def test_nothing_has_a_reason(daemon: SidecarProcess, said: m.Hello, reason: int) -> None:
    with FakeEngine(daemon.socket, said) as engine:
        found = engine.look_up(prompt(15_000, 90))
    assert (found.rows, found.reason, found.lease_id) == (0, reason, 0)


def test_restoring_that_does_not_pay_is_refused_with_the_reason(daemon: SidecarProcess) -> None:
    fast = m.EngineFinished(
        *(10**6, 0, 0, pb.SHORTFALL_NOTHING_STORED, 0, 10**6, 0, 0), *(1e-6, 0.0, 0.0, 0.0)
    )
    with FakeEngine(daemon.socket, hello(fields={"rope": "gate"})) as engine:
        tokens = prompt(16_000, 200)
        engine.store(tokens)
        assert engine.restore(tokens) == 199
        engine.client.finished(fast)  # 10^12 tokens a second
        assert engine.look_up(tokens).reason == pb.SHORTFALL_GATE
    always = hello(fields={"rope": "gate"}, gate=m.GateMode.RESTORE)
    with FakeEngine(daemon.socket, always) as engine:
        assert engine.restore(tokens) == 199


# --- states ---------------------------------------------------------------------------------------


@pytest.fixture
def stateful(daemon: SidecarProcess) -> Iterator[FakeEngine]:
    with FakeEngine(daemon.socket, hello(states=True)) as connected:
        yield connected


def test_a_match_ends_where_a_state_does(stateful: FakeEngine) -> None:
    tokens = prompt(20_000, 200)
    states = {70: b"early", 150: os.urandom((16 << 20) + 5)}
    files, reasons = stateful.store(tokens, states)
    assert [(file.first_position, file.rows) for file in files[-2:]] == [(70, 0), (150, 0)]
    assert reasons == []
    found = stateful.look_up([*tokens, 1])
    assert (found.rows, found.reason, found.at) == (150, pb.SHORTFALL_STATE_MISSING, 150)
    *blocks, state = found.files
    assert [file.used for file in blocks] == [64, 64, 22]
    assert (state.rows, state.first_position) == (0, 150)
    assert b"".join(stateful.read(3, state)) == states[150]
    assert stateful.restore([*tokens[:149], 9]) == 70
    assert stateful.restore([*tokens, 1], have=100) == 150
    assert stateful.restore(tokens[:150]) == 70  # its last token is computed
    again = stateful.look_up([*tokens, 1], have=150)
    assert (again.rows, again.reason) == (0, pb.SHORTFALL_STATE_MISSING)
    assert stateful.store(tokens, states) == ([], [])


def test_a_state_of_a_tail_that_is_covered_is_not_stored(
    daemon: SidecarProcess, stateful: FakeEngine
) -> None:
    tokens = prompt(21_000, 100)
    stateful.store(tokens, {90: b"x"})
    daemon.wait_written()  # a tail that is just being copied to the disk stays beside a longer one
    longer = prompt(21_000, 130)
    files, _ = stateful.store(longer, {90: b"x", 129: b"y"})
    assert [(f.first_position, f.rows) for f in files] == [(64, 64), (128, 2), (90, 0), (129, 0)]
    assert stateful.restore([*tokens, 1]) == 90
    assert stateful.restore([*longer, 1]) == 129
    # The longer block may have other rows than the tail that this one was made with.
    assert stateful.store(tokens, {95: b"z"}) == ([], [])
    assert stateful.restore([*tokens, 1]) == 90


def test_without_a_state_nothing_comes_back(stateful: FakeEngine) -> None:
    tokens = prompt(22_000, 150)
    stateful.store(tokens)
    assert stateful.look_up(tokens).reason == pb.SHORTFALL_STATE_MISSING


@pytest.mark.parametrize(
    "offer",
    [m.StateOffer(151, 1), m.StateOffer(0, 1), m.StateOffer(1, 0), m.StateOffer(1, 1 << 40)],
)
def test_a_state_that_fits_nowhere_is_refused(daemon: SidecarProcess, offer: m.StateOffer) -> None:
    with (
        FakeEngine(daemon.socket, hello(states=True)) as engine,
        pytest.raises(EngineRefused) as caught,
    ):
        engine.plan(prompt(23_000, 150), states=(offer,))
    assert caught.value.code is m.EngineFailure.REFUSED


# --- what an engine may not do --------------------------------------------------------------------


def test_what_an_engine_writes_before_the_payload_does_not_count(engine: FakeEngine) -> None:
    tokens = prompt(30_000, 64)
    (file,) = engine.plan(tokens).files
    filled = engine.fill(file, tokens, {})
    with Path(file.path).open("r+b") as opened:
        opened.write(b"a header of its own")
    assert engine.client.commit(m.Commit((filled,))).reasons == ("",)
    assert engine.restore([*tokens, 1]) == 64


def test_a_link_in_place_of_a_reserved_file_is_not_followed(
    engine: FakeEngine, tmp_path: Path
) -> None:
    tokens = prompt(31_000, 64)
    (file,) = engine.plan(tokens).files
    filled = engine.fill(file, tokens, {})
    precious = tmp_path / "precious"
    precious.write_text("precious")
    Path(file.path).unlink()
    Path(file.path).symlink_to(precious)
    (reason,) = engine.client.commit(m.Commit((filled,))).reasons
    assert reason
    assert precious.read_text() == "precious"
    assert engine.look_up(tokens).rows == 0


def test_a_commit_without_a_checksum_for_each_segment_is_refused(daemon: SidecarProcess) -> None:
    with FakeEngine(daemon.socket) as engine:
        (file,) = engine.plan(prompt(32_000, 64)).files
        with pytest.raises(EngineRefused, match="checksum"):
            engine.client.commit(m.Commit((m.EngineFilled(file.reservation_id, bytes(4)),)))
    daemon.wait(nothing_is_held, "what was reserved is given back", SECONDS)


def test_one_connection_cannot_touch_what_another_holds(daemon: SidecarProcess) -> None:
    tokens = prompt(33_000, 130)
    with FakeEngine(daemon.socket) as first, FakeEngine(daemon.socket) as second:
        planned = first.plan(tokens)
        filled = tuple(first.fill(file, tokens, {}) for file in planned.files)
        assert second.client.commit(m.Commit(filled)).reasons == ("no such reservation",) * 3
        # Being written counts as present: no block is written twice.
        assert second.plan(tokens).files == ()
        assert first.client.commit(m.Commit(filled)).reasons == ("", "", "")
        lease = first.look_up(tokens).lease_id
        second.client.release(lease)
        daemon.wait(lambda stat: stat.open_leases == 1, "the lease stays", SECONDS)
        assert second.client.wait(lease).files == ()
        assert len(first.client.wait(lease).files) == 3


def test_a_lease_lasts_as_long_as_its_engine_asks_again(tmp_path: Path) -> None:
    """Files that nobody holds make room for others. The lease is much longer than one round takes,
    on a busy machine too.
    """
    lease_seconds = 3
    tokens, others = prompt(37_000, 64 * 4), [prompt(38_000 + 400 * i, 64 * 4) for i in range(15)]
    small = {"ram_gb": 0.0005, "local_gb": 0.0005, "settings": {"lease_seconds": lease_seconds}}
    with SidecarProcess(tmp_path, **small) as daemon, FakeEngine(daemon.socket) as engine:
        engine.store(tokens)
        found = engine.look_up(tokens)
        assert len(found.files) == 4
        began, rounds = time.monotonic(), 0
        while time.monotonic() < began + 2 * lease_seconds or rounds < len(others):
            assert engine.client.wait(found.lease_id) == found
            _use(engine, others[rounds % len(others)])
            rounds += 1
            time.sleep(0.1)
        assert [len(engine.read(i, file)) for i, file in enumerate(found.files)] == [4] * 4
        time.sleep(1.5 * lease_seconds)
        for one in others:
            _use(engine, one)
        assert engine.client.wait(found.lease_id).files == ()
        assert not any(Path(file.path).exists() for file in found.files)


def _use(engine: FakeEngine, one: list[int]) -> None:
    engine.store(one)
    engine.restore(one)


def test_a_plan_goes_on_behind_what_another_engine_is_writing(daemon: SidecarProcess) -> None:
    tokens = prompt(35_000, 64 * 6)
    with FakeEngine(daemon.socket) as first, FakeEngine(daemon.socket) as second:
        ours = first.plan(tokens, most_files=2)
        assert ours.outcome is m.EngineOutcome.MORE
        assert [file.first_position for file in ours.files] == [0, 64]
        theirs = second.plan(tokens, most_files=2)
        assert theirs.outcome is m.EngineOutcome.MORE
        assert [file.first_position for file in theirs.files] == [128, 192]
        for engine, planned in ((second, theirs), (first, ours)):
            filled = tuple(engine.fill(file, tokens, {}) for file in planned.files)
            assert engine.client.commit(m.Commit(filled)).reasons == ("", "")
        assert first.look_up(tokens).rows == 256


def test_engines_of_two_namespaces_do_not_see_each_other(daemon: SidecarProcess) -> None:
    tokens = prompt(34_000, 100)
    with (
        FakeEngine(daemon.socket, hello(fields={"rope": "1"})) as first,
        FakeEngine(daemon.socket, hello(fields={"rope": "2"})) as second,
    ):
        first.store(tokens)
        assert second.look_up(tokens).reason == pb.SHORTFALL_NOTHING_STORED
        second.store(tokens)
        assert first.restore(tokens) == second.restore(tokens) == 99


# --- what people see ------------------------------------------------------------------------------


def test_status_shows_an_engine_as_it_shows_a_runner(daemon: SidecarProcess) -> None:
    said = hello(fields={"rope": "status"})
    request = m.EngineFinished(
        *(200, 10, 150, pb.SHORTFALL_ENDS, 160, 40, 1, 4096), *(0.5, 0.01, 0.02, 0.03)
    )
    with FakeEngine(daemon.socket, said) as engine:
        engine.store(prompt(60_000, 128))
        engine.client.finished(request)
        engine.client.finished(request)
        assert engine.client.welcome is not None
        namespace = engine.client.welcome.namespace
    stat = daemon.stat()
    (runner,) = [one for one in stat.runners if one.namespace == namespace]
    assert (runner.pid, runner.engine, runner.model) == (os.getpid(), "fake/1+0", "sha256-fake")
    assert (runner.tiered, runner.requests, runner.restored_tokens) == (True, 2, 300)
    assert (runner.snapshot_blocks, runner.caches) == (2, "plain f16")
    (use,) = [one for one in stat.model_uses if one.namespace == namespace]
    assert (use.prompt_tokens, use.memory_tokens, use.recomputed_tokens) == (400, 20, 80)


def test_status_says_why_an_engine_is_not_tiered(daemon: SidecarProcess) -> None:
    said = hello(unsupported="a cache of an unknown kind")
    with FakeEngine(daemon.socket, said) as engine:
        assert engine.client.welcome is None
        runners = {one.pid: one for one in daemon.stat().runners}
        assert runners[os.getpid()].reason == "a cache of an unknown kind"
        assert not runners[os.getpid()].tiered
        with pytest.raises(EngineRefused, match="hello"):
            engine.client.match(m.EngineMatch(b""))


def test_blocks_and_states_of_an_engine_are_sound_for_every_tool(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path) as daemon:
        with FakeEngine(daemon.socket, hello(states=True)) as engine:
            assert engine.store(prompt(61_000, 150), {140: b"a state"})[1] == []
        finished = subprocess.run(
            [sys.executable, "-m", "ollama_tiering", "verify", "--socket", str(daemon.socket)],
            env=daemon.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert finished.returncode == 0, finished
    assert "all sound" in finished.stdout + finished.stderr
