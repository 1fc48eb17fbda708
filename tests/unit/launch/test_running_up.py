"""One `tiering up` for a port; the next one learns who has it."""

import os
from pathlib import Path

import pytest

from ollama_tiering.launch.address import Address
from ollama_tiering.launch.running_up import (
    AlreadyUp,
    RunningUp,
    binaries,
    hold,
    record_path,
    records,
    running,
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "own-state"))


def test_a_held_port_tells_who_has_it() -> None:
    record = RunningUp(pid=os.getpid(), url="http://127.0.0.1:1", ready=True)
    with hold(Address(port=1)) as held:
        held.write(RunningUp(pid=os.getpid(), url="x" * 200))
        held.write(record)
        with pytest.raises(AlreadyUp) as caught, hold(Address("localhost", 1)):
            pass
    assert caught.value.record == record


def test_other_ports_are_other_records() -> None:
    with hold(Address(port=1)), hold(Address(port=2)) as held:
        assert held.left is None


def test_an_orderly_end_leaves_nothing() -> None:
    with hold(Address(port=1)) as held:
        held.write(RunningUp(pid=7, url=""))
    with hold(Address(port=1)) as held:
        assert held.left is None


def test_where_the_models_were_outlives_an_orderly_end_and_nothing_else(tmp_path: Path) -> None:
    with hold(Address(port=1)) as held:
        held.write(RunningUp(pid=os.getpid(), url="u", binary="b", sidecar_pid=9, models="/m"))
        assert running(Address(port=1)) is not None
    assert records() == [RunningUp(pid=0, url="", models="/m")]
    assert binaries() == []
    assert running(Address(port=1)) is None
    with hold(Address(port=1)) as held:
        assert held.left is None


def test_a_record_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    with hold(Address(port=1)):
        pass
    record_path(Address(port=1)).write_text('{"pid": 7, "url": "u", "colour": "red"}')
    assert records() == [RunningUp(pid=7, url="u")]


def test_what_a_killed_one_left_is_told() -> None:
    with hold(Address(port=1)):
        pass
    record_path(Address(port=1)).write_text('{"pid": 7, "url": "u", "sidecar_pid": 8}')
    with hold(Address(port=1)) as held:
        assert held.left == RunningUp(pid=7, url="u", sidecar_pid=8)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"unknown": 1}', "null"])
def test_a_record_that_makes_no_sense_is_none(content: str) -> None:
    with hold(Address(port=1)):
        pass
    record_path(Address(port=1)).write_text(content)
    with hold(Address(port=1)) as held:
        assert held.left is None


def test_where_the_runtime_directory_is_somebody_elses_the_record_lies_in_the_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file" / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    record = RunningUp(pid=os.getpid(), url="u")
    with hold(Address(port=1)) as held:
        held.write(record)
        assert running(Address(port=1)) == record
        with pytest.raises(AlreadyUp) as caught, hold(Address(port=1)):
            pass
    assert caught.value.record == record
    assert running(Address(port=1)) is None


def test_a_home_that_another_machine_shares_keeps_this_one_from_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")  # so the state directory is the only place
    with hold(Address(port=1)) as there:
        there.write(RunningUp(pid=(1 << 31) - 1, url="http://127.0.0.1:1", ready=True))
        with hold(Address(port=1)) as here:
            assert "another machine" in here.lacks
