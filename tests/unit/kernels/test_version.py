"""The version of the exact attention is part of every namespace: it may not be forgotten."""

from __future__ import annotations

import re

from ollama_tiering.patchset import kernels, manifest

# Version -> digest of the kernels' sources, as KVTIER_ATTN_HEADERS has it. Where this test fails:
# if a bit of any result changed (csrc/tests and `tiering bench attention` say), raise
# CPUAttentionVersion in patches/overlay/kvtier/attention.go; then record the digest here.
RECORDED = {1: "9fd03766aee29d6726613952e5a8c77840494ccc3d59a76ec386974c83b6ab5b"}


def test_changed_kernels_raise_the_version_or_are_recorded_as_the_same_bits() -> None:
    root = manifest.default_root()
    stamp = kernels.overlay(kernels.default_include(root))[kernels.STAMP].decode()
    digest = re.search(r'"([0-9a-f]{64})"', stamp)
    go = (root / "overlay/kvtier/attention.go").read_text(encoding="utf-8")
    version = re.search(r"const CPUAttentionVersion = (\d+)", go)
    assert digest
    assert version
    assert RECORDED.get(int(version[1])) == digest[1]
