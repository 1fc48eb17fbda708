from __future__ import annotations

import pytest

from ollama_tiering.errors import PatchConflict
from ollama_tiering.patchset.diff import parse
from tests.unit.patchset.conftest import HOOK_CAUSAL, HOOK_RUNNER


def test_header_trailers_files_and_counts_are_read() -> None:
    diff = parse("x.patch", HOOK_CAUSAL)
    assert diff.subject == "kvcache: tell the tier about new cells"
    assert diff.body.startswith("The cells are known here")
    assert diff.trailers["Reason"] == "incompatible"
    assert diff.touched == ("kvcache/causal.go",)
    assert diff.added_lines == 1


def test_a_diff_of_two_files_without_git_lines() -> None:
    second = HOOK_RUNNER[HOOK_RUNNER.index("--- a/") :]
    diff = parse("x.patch", HOOK_CAUSAL + second)
    assert diff.touched == ("kvcache/causal.go", "runner/runner.go")
    assert diff.added_lines == 2


def test_mail_format_with_signature_is_read() -> None:
    mail = "From 0123 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] kvcache: x\n\n" + HOOK_CAUSAL
    assert parse("x.patch", mail + "-- \n2.39.5\n").added_lines == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prose only\n", "no diff in it"),
        (HOOK_CAUSAL.replace("+\ttierInit()\n", ""), "hunk"),
        (HOOK_CAUSAL.replace("-3,6 +3,7", "-3,9 +3,7"), "hunk"),
        (HOOK_CAUSAL.replace("+++ b/kvcache", "+++ b/other"), "expected"),
        (HOOK_CAUSAL.replace("--- a/", "new file mode 100644\n--- a/"), "existing files"),
        (HOOK_CAUSAL.replace("--- a/", "rename from x\n--- a/"), "existing files"),
        (HOOK_CAUSAL + "stray text\n", "neither a file nor a hunk"),
    ],
)
def test_what_is_no_hook_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(PatchConflict, match=rf"x\.patch:\d+: .*{said}"):
        parse("x.patch", text)
