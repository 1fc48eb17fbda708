from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.errors import PatchConflict, UnsupportedUpstream, UsageError
from ollama_tiering.patchset import manifest
from scripts.refresh_pins import tag_entries


def test_series_gives_the_order_and_comments_do_not_count(patchset: manifest.Patchset) -> None:
    assert [hook.name for hook in patchset.hooks] == [
        "hooks/go/cells.patch",
        "hooks/go/restore.patch",
    ]
    assert patchset.hooked == ("kvcache/causal.go", "runner/runner.go")
    assert sum(hook.diff.added_lines for hook in patchset.hooks) == 2
    assert sorted(patchset.overlay) == ["kvcache/tier.go", "tier/deep/proto.go"]


def test_missing_series_and_overlay_mean_an_empty_patch_set(tmp_path: Path) -> None:
    (tmp_path / "upstream.toml").write_text('url = "x"\n')
    empty = manifest.load(tmp_path)
    assert (empty.hooks, empty.overlay, empty.pins) == ((), {}, {})


def test_a_hook_missing_on_disk_is_named(patches: Path) -> None:
    (patches / "hooks/go/cells.patch").unlink()
    with pytest.raises(PatchConflict, match=r"cells\.patch: no such file"):
        manifest.load(patches)


def test_a_hook_missing_in_series_is_named(patches: Path) -> None:
    (patches / "hooks/go/extra.patch").write_text("x")
    with pytest.raises(PatchConflict, match=r"hooks/go/extra\.patch is not in"):
        manifest.load(patches)


@pytest.mark.parametrize("line", ["hooks/go/cells.patch", "../outside.patch", "/etc/passwd"])
def test_a_double_or_outside_entry_is_refused(patches: Path, line: str) -> None:
    with (patches / "series").open("a") as series:
        series.write(line + "\n")
    with pytest.raises(PatchConflict, match=r"twice|outside"):
        manifest.load(patches)


def test_a_link_in_the_overlay_is_refused(patches: Path) -> None:
    (patches / "overlay/link.go").symlink_to("/etc/passwd")
    with pytest.raises(PatchConflict, match="link"):
        manifest.load(patches)


def test_editor_leftovers_are_not_part_of_the_overlay(patches: Path) -> None:
    for name in ("tier.go~", "tier.go.orig", ".DS_Store"):
        (patches / "overlay/kvcache" / name).write_text("x")
    assert sorted(manifest.load(patches).overlay) == ["kvcache/tier.go", "tier/deep/proto.go"]


def test_digest_follows_every_byte_that_decides(patches: Path) -> None:
    digests = [manifest.load(patches).digest]
    for name in ("overlay/kvcache/tier.go", "hooks/go/cells.patch"):
        path = patches / name
        path.write_text(path.read_text().replace("tierInit", "tierBegin"))
        digests.append(manifest.load(patches).digest)
    with (patches / "upstream.toml").open("a") as pins:
        pins.write(
            '[go.require."example.org/m"]\nversion = "v1.0.0"\nsum = "h1:a="\nmod_sum = "h1:b="\n'
        )
    digests.append(manifest.load(patches).digest)
    assert len(set(digests)) == 4
    assert manifest.load(patches).digest == digests[-1]


def test_a_tag_says_only_what_is_not_as_in_the_version_before(tmp_path: Path) -> None:
    pins = [
        manifest.TagPin("v0.9.0", "c1", "t1", {"llm": "a", "ml": "b"}, {"go.mod": "m"}),
        manifest.TagPin("v0.10.0", "c2", "t2", {"ml": "b"}, {"go.mod": "n"}),
        manifest.TagPin("v0.10.1", "c3", "t3", {"ml": "b"}, {"go.mod": "n"}),
    ]
    lines = ['url = "x"', *tag_entries(pins)]
    assert sum(line.startswith(("folders", "files")) for line in lines) == 3 + 2
    (tmp_path / "upstream.toml").write_text("\n".join(lines))
    assert manifest.load(tmp_path).pins == {pin.tag: pin for pin in pins}


def test_an_unpinned_tag_is_unsupported_and_the_range_is_named(patchset: manifest.Patchset) -> None:
    with pytest.raises(UnsupportedUpstream, match=r"v9\.9\.9 .*v0\.16\.0 … v0\.17\.0"):
        patchset.require_pin("v9.9.9")


def test_touched_pins_are_those_of_hooks_and_overlay(patchset: manifest.Patchset) -> None:
    pin = patchset.require_pin("v0.16.0")
    assert set(patchset.touched_pins(pin)) == {"kvcache", "runner"}
    assert set(patchset.emptied().touched_pins(pin)) == {"kvcache", "runner", "go.mod", "go.sum"}


def test_a_folder_that_is_no_patch_set_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a patch set"):
        manifest.load(tmp_path)


def test_broken_pins_name_the_file(patches: Path) -> None:
    (patches / "upstream.toml").write_text("[")
    with pytest.raises(PatchConflict, match=r"upstream\.toml"):
        manifest.load(patches)


def test_versions_sort_as_numbers() -> None:
    tags = ["v0.16.10", "v0.9.0", "v0.16.2", "v0.16.3-rc1"]
    assert sorted(tags, key=manifest.version_key) == [
        "v0.16.3-rc1",
        "v0.9.0",
        "v0.16.2",
        "v0.16.10",
    ]


def test_an_unsupported_version_gets_the_advice_that_is_true_of_it(
    patchset: manifest.Patchset,
) -> None:
    """From v0.30 on there is nothing to try untested: the installed Ollama is patched."""
    with pytest.raises(UnsupportedUpstream) as older:
        patchset.require_pin("v0.25.0")
    assert "--allow-untested" in str(older.value.hint)
    with pytest.raises(UnsupportedUpstream) as newer:
        patchset.require_pin("v0.30.0")
    assert "--allow-untested" not in str(newer.value.hint)
    assert "--ollama auto" in str(newer.value.hint)
