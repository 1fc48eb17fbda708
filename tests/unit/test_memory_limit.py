"""The smallest limit counts: of the machine, and of every memory group around this process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ollama_tiering.config import (
    GIB,
    MIB,
    MemoryLimit,
    limit_of,
    load,
    memory_limit,
    unit_limit,
)
from ollama_tiering.config.memory_limit import machine_memory_bytes
from ollama_tiering.store import TierKind, cut_budget
from ollama_tiering.store.tiers import memory_group

V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
OTHER_V1 = "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
UNLIMITED_V1 = 9223372036854771712


def machine(root: Path, mounts: str, groups: str, limits: Mapping[str, int | str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(mounts)
    (root / "proc/self/cgroup").write_text(groups)
    for path, limit in limits.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    return root


CASES: dict[str, tuple[str, str, dict[str, int | str], str]] = {
    "a container, version 2": (
        V2.format(root="/"),
        "0::/\n",
        {"memory.max": 500_000_000, "memory.high": "max"},
        "memory.max",
    ),
    "memory.high is a limit, too": (
        V2.format(root="/"),
        "0::/a\n",
        {"a/memory.max": 10**9, "a/memory.high": 500_000_000},
        "a/memory.high",
    ),
    "of a group around it": (
        V2.format(root="/"),
        "0::/user.slice/user-1000.slice/app.slice/x.scope\n",
        {
            "user.slice/user-1000.slice/app.slice/x.scope/memory.max": 10**9,
            "user.slice/user-1000.slice/memory.max": 500_000_000,
            "user.slice/memory.max": "max",
        },
        "user.slice/user-1000.slice/memory.max",
    ),
    "a container that sees the host's name of its group": (
        V2.format(root="/../.."),
        "0::/../../docker/abc\n",
        {"memory.max": 500_000_000},
        "memory.max",
    ),
    "version 1": (
        OTHER_V1 + V1.format(root="/"),
        "5:cpu:/\n4:memory:/a/b\n0::/\n",
        {
            "memory/memory.limit_in_bytes": UNLIMITED_V1,
            "memory/a/memory.limit_in_bytes": 500_000_000,
            "memory/a/b/memory.limit_in_bytes": UNLIMITED_V1,
        },
        "memory/a/memory.limit_in_bytes",
    ),
    "a container, version 1": (
        V1.format(root="/docker/abc"),
        "4:memory:/docker/abc\n",
        {"memory/memory.limit_in_bytes": 500_000_000},
        "memory/memory.limit_in_bytes",
    ),
    "both versions, the limit in the first": (
        V1.format(root="/") + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        "4:cpuacct,memory:/a\n0::/a\n",
        {"memory/a/memory.limit_in_bytes": 500_000_000, "unified/a/cgroup.procs": 1},
        "memory/a/memory.limit_in_bytes",
    ),
    "not the limit that is made from the budget": (
        V2.format(root="/"),
        "0::/system.slice/ollama-tiering.service\n",
        {
            "system.slice/ollama-tiering.service/memory.max": 300_000_000,
            "system.slice/memory.max": 500_000_000,
        },
        "system.slice/memory.max",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_limit_is_found(tmp_path: Path, name: str) -> None:
    mounts, groups, limits, counts = CASES[name]
    found = memory_limit(machine(tmp_path, mounts, groups, limits))
    assert found == MemoryLimit(500_000_000, tmp_path / "sys/fs/cgroup" / counts)


@pytest.mark.parametrize(
    ("mounts", "groups", "limits"),
    [
        ("", "", {}),
        (V2.format(root="/"), "0::/a\n", {"a/memory.max": "max"}),
        (V1.format(root="/"), "4:memory:/\n", {"memory/memory.limit_in_bytes": UNLIMITED_V1}),
        ("x\n - \n1 2 3 4 - cgroup2\n", "nonsense\n::\n0\n", {}),
        (V2.format(root="/"), "0::/a\n", {"a/memory.max": "many"}),
    ],
)
def test_without_one_the_machine_is_the_limit(
    tmp_path: Path, mounts: str, groups: str, limits: dict[str, int | str]
) -> None:
    found = memory_limit(machine(tmp_path, mounts, groups, limits))
    assert found == MemoryLimit(machine_memory_bytes())
    assert found.why_no_sidecar() == ""


GROUP = Path("/sys/fs/cgroup/memory.max")


def limited(monkeypatch: pytest.MonkeyPatch, limit: MemoryLimit) -> None:
    loading = sys.modules["ollama_tiering.config.load"]  # the package has a function of this name
    monkeypatch.setattr(loading, "memory_limit", lambda: limit)
    monkeypatch.setattr(memory_group, "memory_limit", lambda: limit)
    monkeypatch.setattr(memory_group, "in_memory", lambda _: True)


@pytest.mark.parametrize("limit_bytes", [220_000_000, 500_000_000, 1_000_000_000, 4 * GIB])
def test_no_budget_takes_a_groups_memory_from_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int
) -> None:
    limited(monkeypatch, MemoryLimit(limit_bytes, GROUP))
    monkeypatch.setenv("OLLAMA_TIERING_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").touch()
    room = max(0, limit_bytes - 256 * MIB)
    assert load().sidecar.ram_budget_bytes == room // 4
    assert cut_budget(tmp_path, 64 * GIB, TierKind.RAM) == room // 2
    assert cut_budget(tmp_path, room // 3, TierKind.RAM) == room // 3


def test_a_configured_budget_of_a_machine_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, MemoryLimit(1 * GIB))
    assert cut_budget(tmp_path, 900 * MIB, TierKind.RAM) == 900 * MIB


def test_a_group_that_holds_a_model_only_has_no_sidecar() -> None:
    said = MemoryLimit(220_000_000, GROUP).why_no_sidecar()
    assert "220.0 MB" in said
    assert str(GROUP) in said
    assert MemoryLimit(500_000_000, GROUP).why_no_sidecar() == ""
    assert MemoryLimit(220_000_000).why_no_sidecar() == ""


UNIT = "system.slice/ollama-tiering.service"


def test_the_sidecars_own_unit_is_told_from_the_groups_around_it(tmp_path: Path) -> None:
    limits = {f"{UNIT}/memory.max": 300_000_000, "system.slice/memory.max": 500_000_000}
    root = machine(tmp_path, V2.format(root="/"), f"0::/{UNIT}\n", limits)
    groups = root / "sys/fs/cgroup"
    assert memory_limit(root) == MemoryLimit(500_000_000, groups / "system.slice/memory.max")
    own = MemoryLimit(300_000_000, groups / UNIT / "memory.max")
    assert unit_limit(root) == own
    (root / "proc/self").rename(root / "proc/77")  # seen by another process
    assert limit_of(77, root) == own
    assert limit_of(78, root).group is None


def test_a_unit_as_it_was_made_cuts_nothing_and_a_lowered_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, MemoryLimit(16 * GIB))
    budget = 4 * GIB + 12345
    as_made = (budget + GIB) // MIB * MIB  # systemd/units.py: MemoryHigh
    monkeypatch.setattr(memory_group, "unit_limit", lambda: MemoryLimit(as_made, GROUP))
    assert cut_budget(tmp_path, budget, TierKind.RAM) == budget
    for lowered, left in ((3 * GIB, 2 * GIB), (GIB, GIB // 2)):
        unit = MemoryLimit(lowered, GROUP)
        monkeypatch.setattr(memory_group, "unit_limit", lambda unit=unit: unit)
        assert cut_budget(tmp_path, budget, TierKind.RAM) == left
