"""`tiering kernel check` on the real kernels of this machine."""

from __future__ import annotations

import json

import pytest

from ollama_tiering.cli import main
from ollama_tiering.kernels import check


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first compiles the library
def test_every_kernel_here_is_within_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["kernel", "check", "--threads", "2", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert caught.value.code == 0, [row for row in rows if not row["ok"]]
    assert {row["shape"] for row in rows} == set(check.PROBLEMS)
    assert "CPU, scalar" in {row["device"] for row in rows}
    assert all(row["error"] is not None for row in rows)
