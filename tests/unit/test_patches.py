"""The real patch set: bookkeeping, headers, budget, pins. Needs no source and no toolchain."""

from __future__ import annotations

import re

import pytest

from ollama_tiering.patchset import manifest
from ollama_tiering.patchset.diff import REASONS, TRAILERS

HOOK_LINES_BUDGET = 150
HOOK_LINES_EACH = 60

PATCHSET = manifest.load()
HOOK_LINES = sum(hook.diff.added_lines for hook in PATCHSET.hooks)


def test_series_hooks_and_overlay_fit_together() -> None:
    """Loading proves: each file in series exists, each hook is in series, all parse."""
    assert PATCHSET.pins
    assert len({hook.name for hook in PATCHSET.hooks}) == len(PATCHSET.hooks)


@pytest.mark.parametrize("hook", PATCHSET.hooks, ids=lambda hook: hook.name)
def test_a_hook_says_what_why_and_until_when(hook: manifest.Hook) -> None:
    diff = hook.diff
    assert re.match(r"[\w/,* -]+: \S", diff.subject), "subject: `<package>: <what>`"
    assert diff.body.strip("- \n"), "the body says why the hook is needed at all"
    assert set(diff.trailers) == set(TRAILERS)
    assert diff.trailers["Reason"] in REASONS
    assert re.match(r"https?://|N/A \S", diff.trailers["Upstream"])
    assert diff.trailers["Removes-When"]
    assert not re.search(r"v?\d+\.\d+", hook.name), "names describe, they carry no version"


@pytest.mark.parametrize("hook", PATCHSET.hooks, ids=lambda hook: hook.name)
def test_a_hook_is_a_call_site(hook: manifest.Hook) -> None:
    assert hook.diff.added_lines <= HOOK_LINES_EACH
    assert "go.mod" not in hook.diff.touched, "go.mod is edited by tool, see [go.require]"


def test_all_hooks_together_stay_within_the_budget() -> None:
    assert HOOK_LINES <= HOOK_LINES_BUDGET


def test_the_design_counts_the_hooks_as_they_are() -> None:
    counted = re.search(
        r"hooks add (\d+) lines in (\d+) files, .* the same (\d+) diffs apply",
        (PATCHSET.root.parent / "docs" / "design.md").read_text(encoding="utf-8"),
    )
    assert counted
    true = HOOK_LINES, len(PATCHSET.hooked), len(PATCHSET.hooks)
    assert tuple(map(int, counted.groups())) == true


def test_everything_touched_is_pinned_for_every_tag() -> None:
    """A folder that is new with us (overlay only) has no upstream name to pin."""
    for pin in PATCHSET.pins.values():
        for path in PATCHSET.hooked:
            assert manifest._place_of(path, pin), f"{path} is in no pinned folder: refresh the pins"


def test_conditions_look_where_every_tag_is_pinned() -> None:
    for pin in PATCHSET.pins.values():
        for name, one in PATCHSET.conditions.items():
            assert manifest._place_of(one.path, pin), f"overlay/{name}: {one.path} is in no folder"


def test_the_client_module_has_no_conditions() -> None:
    """`scripts/test-go` compiles all of it, without an upstream to look at."""
    alone = ("kvtier/", "exactattn/")
    assert not [name for name in PATCHSET.conditions if name.startswith(alone)]


def test_attention_has_a_name_of_its_own() -> None:
    """It works without the tiering: neither its files nor what calls it say the tiering's name."""
    files = {name: content.decode() for name, content in PATCHSET.overlay.items()}
    attention = {name: text for name, text in files.items() if "exactattn" in name}
    assert len(attention) > 10
    tiering = re.compile(r"kv.?tier", re.IGNORECASE)
    assert not [name for name, text in attention.items() if tiering.search(text)]
    mixed = re.compile(r"kv.?tier(ing)?[-_: ]*(attn|attention)", re.IGNORECASE)
    hooks = {hook.name: hook.text for hook in PATCHSET.hooks}
    assert not [name for name, text in {**files, **hooks}.items() if mixed.search(text)]


def test_pins_are_whole_git_names() -> None:
    for pin in PATCHSET.pins.values():
        names = [pin.commit, pin.tree, *pin.folders.values(), *pin.files.values()]
        assert all(re.fullmatch(r"[0-9a-f]{40}", name) for name in names)


def test_the_range_is_every_stable_version_of_it() -> None:
    tags = list(PATCHSET.pins)
    assert (tags[0], tags[-1], len(tags)) == ("v0.16.0", "v0.24.0", 36)
    assert tags == sorted(tags, key=manifest.version_key)


def test_go_sums_are_complete() -> None:
    for need in PATCHSET.go_requires:
        assert re.fullmatch(r"h1:[A-Za-z0-9+/]{43}=", need.sum)
        assert re.fullmatch(r"h1:[A-Za-z0-9+/]{43}=", need.mod_sum)
