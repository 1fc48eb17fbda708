"""Numbers and sizes as people read and write them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ollama_tiering
from ollama_tiering.cli import status
from ollama_tiering.config import GIB, SidecarConfig, agreeing, count, format_size, load, parse_size
from ollama_tiering.errors import ConfigError
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.books.report import LeftOver
from tests.unit.cli.test_main import invoke


def test_one_of_a_thing_is_singular_and_thousands_are_separated() -> None:
    assert count(0, "block") == "0 blocks"
    assert count(1, "block") == "1 block"
    assert count(12345, "block") == "12,345 blocks"
    assert count(1, "call to the sidecar") == "1 call to the sidecar"
    assert count(2, "call to the sidecar", "has") == "2 calls to the sidecar have"
    assert [agreeing(n, verb) for n in (1, 2) for verb in ("is", "was")] == [
        *("is", "was"),
        *("are", "were"),
    ]


def test_status_speaks_of_one_thing_as_of_one() -> None:
    tier = adm.TierStat(tier=pb.TIER_LOCAL, blocks=1, sidecars=1, budget_bytes=1)
    runner = pb.RunnerReport(
        pid=5, tiered=True, requests=1, prompt_tokens=1, failures=1, memory_short_tokens=1234
    )
    runner.last_request.prompt_tokens = 1
    runner.shortfalls.add(reason=pb.SHORTFALL_ENDS, requests=1, tokens=1)
    answer = adm.StatResponse(
        has_calls=1000, asked_tokens=77824, matched_tokens=38800, queued_demotions=1
    )
    answer.tiers.append(tier)
    answer.runners.append(runner)
    answer.model_uses.add(requests=1, prompt_tokens=1)
    text = "\n".join(status.lines(Path("/s"), answer))
    assert "lookups 1,000: 38,800 of 77,824 prompt tokens were in the store" in text
    assert "1 block (0 B) is still to be written to disk" in text
    assert "1 request, 1 prompt token = " in text
    assert "1 call to the sidecar failed" in text
    assert "1 token of 1 request: " in text
    assert "1,234 of the recomputed tokens" in text
    assert not re.search(r"(?<![\d,.])1 [a-z]+( [a-z]+)?s\b(?! [a-z])", text), text
    one = adm.StatResponse(has_calls=1, asked_tokens=1)
    assert "0 of 1 prompt token was in the store" in "\n".join(status.lines(Path("/s"), one))


PLURAL = re.compile(
    r"\{[^{}]*\} (\w+ )?(blocks|requests|tokens|calls|sidecars|conversations|files|hooks|leases|"
    r"versions|runners|layers|processes|models)\b"
)
ALWAYS_MANY = ("of the ", "MAX_", "_BYTES", "wanted.layers", "len(prompt)", "{tokens}", "{prompt}")


def test_every_count_in_a_message_is_made_by_one_helper() -> None:
    """Numbers that can be 1, in what commands, doctor and processes of `up` say."""
    package = Path(ollama_tiering.__file__).parent
    places = [package / name for name in ("cli", "doctor", "launch", "sidecar", "systemd")]
    found = [
        f"{file.relative_to(package)}: {line.strip()}"
        for place in places
        for file in place.rglob("*.py")
        if not file.name.startswith("bench")
        for line in file.read_text(encoding="utf-8").splitlines()
        if 'f"' in line and PLURAL.search(line) and "count(" not in line
        if not any(sign in line for sign in ALWAYS_MANY)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        *(("50GB", "50.0 GB"), ("1GB", "1.0 GB"), ("40MB", "40.0 MB"), ("1.5g", "1.5 GB")),
        *(("2TB", "2.0 TB"), ("1234MB", "1234.0 MB"), ("8GiB", "8.0 GiB"), ("512MiB", "512.0 MiB")),
        *(("0", "0 B"), ("4096", "4.0 KiB"), ("1048576", "1.0 MiB"), ("100KiB", "100.0 KiB")),
    ],
)
def test_a_size_is_shown_in_the_kind_of_unit_it_was_written_in(written: str, shown: str) -> None:
    assert format_size(parse_size(written)) == shown


def test_a_budget_in_decimal_units_is_shown_so_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_KV_TIER_LOCAL_GB", "1GB")
    assert invoke("config", "sidecar.local_budget", "sidecar.daily_write") == 0
    out = capsys.readouterr().out
    assert "1.0 GB  (environment" in out
    assert "50.0 GB  (default)" in out
    tier = adm.TierStat(tier=pb.TIER_LOCAL, budget_bytes=10**9, daily_write_bytes=50 * 10**9)
    tier.surveyed = True
    text = "\n".join(status.lines(Path("/s"), adm.StatResponse(tiers=[tier])))
    assert "0 B of 1.0 GB" in text
    assert "written today (UTC) 0 B of 50.0 GB" in text


@pytest.mark.parametrize("flag", ["--ram-gb", "--local-gb", "--remote-gb"])
def test_a_flag_takes_what_its_variable_takes(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = []

    def serve(settings: SidecarConfig, **_: object) -> LeftOver:
        served.append(settings)
        return LeftOver(0, 0)

    monkeypatch.setattr("ollama_tiering.sidecar.server.serve", serve)
    name = f"{flag.removeprefix('--').removesuffix('-gb')}_budget_bytes"
    for text in ("8GiB", "8", "8.0", "0.5", "500MB", "1.5g", "0", "1e-3"):
        assert invoke("sidecar", flag, text) == 0
        with monkeypatch.context() as patch:
            patch.setenv(f"OLLAMA_KV_TIER_{name.partition('_')[0].upper()}_GB", text)
            assert getattr(load().sidecar, name) == getattr(served[-1], name)
    assert [getattr(one, name) for one in served] == [
        *(8 * GIB, 8 * GIB, 8 * GIB, GIB // 2, 500 * 10**6, 1500 * 10**6, 0, int(GIB * 1e-3))
    ]
    capsys.readouterr()
    for text in ("lots", "-1", "nan", "inf", "8 gigs"):
        assert invoke("sidecar", flag, text) == ConfigError.exit_code
        assert capsys.readouterr().err.startswith(f"error: flag {flag}: ")


def test_a_size_that_is_a_fraction_in_the_file_is_told_how_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[sidecar]\nram_budget = 8.5\n")
    with pytest.raises(ConfigError, match=r"ram_budget: 8\.5 is not a size; write it like 8GiB"):
        load(path=file)
