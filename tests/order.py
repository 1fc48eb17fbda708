"""The order in which files are begun: those that take longest first, then those of many tests, so
that two processes end at about the same time. scripts/beside.sh keeps pytest-xdist from an order of
its own, which ends with files of few tests, though each may take minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

LONGEST = (  # 30 seconds of a processor, or of waiting, and more
    "tests/integration/test_engine_allocations.py",
    "tests/integration/test_engine_slots.py",
    "tests/integration/test_up.py",
    "tests/integration/test_engine_client.py",
    "tests/integration/test_engine_hangs.py",
    "tests/integration/test_wheel.py",
    "tests/unit/measure/test_store.py",
    "tests/fault/test_kill.py",
    "tests/fault/test_chaos.py",
    "tests/fault/test_power_cuts.py",
    "tests/contract/test_store_machine.py",
    "tests/contract/test_shared_machine.py",
    "tests/fuzz/test_lies.py",
    "tests/fuzz/test_flips.py",
    "tests/fuzz/test_stored_files.py",
    "tests/integration/test_demo.py",
    "tests/integration/test_up_unharmed.py",
    "tests/integration/test_start_script.py",
    "tests/unit/web/test_browser.py",
    "tests/unit/cli/test_store_tools.py",
    "tests/unit/cli/test_why.py",
    "tests/unit/sidecar/test_server.py",
    "tests/unit/sidecar/test_engine_socket.py",
    "tests/integration/test_amx.py",
    "tests/integration/test_processors.py",
    "tests/unit/kernels/test_cuda_emulation.py",
    "tests/unit/kernels/test_cuda_fake.py",
    "tests/unit/kernels/test_cuda_nvrtc.py",
    "tests/fault/test_abuse.py",
)
_PLACE = {file: place for place, file in enumerate(LONGEST)}


def place(nodeids: Iterable[str]) -> Callable[[str], tuple[int, int]]:
    """By what to sort these: pytest's names of tests, from the repository."""
    tests = Counter(map(_file, nodeids))
    return lambda nodeid: (_PLACE.get(_file(nodeid), len(LONGEST)), -tests[_file(nodeid)])


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
