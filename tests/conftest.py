"""What holds for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest

from tests import order, turns

# How long an example takes says what else the machine does.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

# A shell starts its background jobs with SIGINT ignored, and what is ignored stays so in every
# child. Tests that interrupt a process need the default there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is left in the state directory of whoever runs the tests."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a worker reports is UTF-8: a failure may show a path that is not."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_encodable(one) for one in value)
    return value


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    waiting = {item for item in items if turns.waits(item.nodeid)}
    if waiting:
        config.hook.pytest_deselected(items=waiting)
        items[:] = [item for item in items if item not in waiting]
    place = order.place(item.nodeid for item in items)
    items.sort(key=lambda item: place(item.nodeid))
