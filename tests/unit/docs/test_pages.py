"""What holds on every page: lines a person can read in a terminal, links that lead somewhere, logs
and services that there are, one port everywhere, defaults as in the code.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ollama_tiering.config import state_dir, words
from ollama_tiering.launch.address import DEFAULT_PORT, Address
from ollama_tiering.launch.service_unit import UNIT_NAME
from ollama_tiering.launch.up import UpRequest
from ollama_tiering.sidecar.manifests import _DEFAULTS
from ollama_tiering.systemd.plan import MAKER_UNIT, SERVER_UNIT, SIDECAR_UNIT
from tests.unit.docs.pages import PAGES, ROOT, anchors, fenced, links, spans

README = ROOT / "README.md"
# Made from the code, or as a table, or of one word (a link) that cannot be divided.
_CHARACTERS = {README: 120}
_OTHERS = 140
_SOURCES = sorted((ROOT / "ollama_tiering").rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_not_too_long(page: Path) -> None:
    most = _CHARACTERS.get(page, _OTHERS)
    long = [
        f"{page.name}:{number} has {len(text)} characters"
        for number, text in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
        if len(text) > most and not text.lstrip().startswith("|") and len(text.split()) > 1
    ]
    assert not long, f"at most {most}: {long}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_page_and_to_a_heading_of_it(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.text.partition("#")
        if re.match(r"https?:", name):
            continue
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: {link.text}"
        assert not anchor or anchor in anchors(target), f"{link}: {link.text}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, ahead = set(), [README]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        found = {(page.parent / link.text.partition("#")[0]).resolve() for link in links(page)}
        ahead += [target for target in found - reached if target.suffix == ".md"]
    assert set(PAGES) <= reached


def test_every_log_that_a_page_names_is_one_that_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    request = UpRequest(Address(port=1), Path("s"))
    logs = request.server_log, request.sidecar_log, request.patch_log
    written = {log.name.replace("-1.", "-PORT.") for log in logs}
    assert written == {"ollama-PORT.log", "sidecar-PORT.log", "patch-PORT.log"}
    plan = (ROOT / "ollama_tiering/patchset/plan.py").read_text(encoding="utf-8")
    assert 'self.folder / "build.log"' in plan
    named, folders = set(), set()
    for page in PAGES:
        for span in spans(page):
            named |= set(re.findall(r"[\w.-]+\.log\b", span.text))
            folders |= set(re.findall(r"\S*/logs\b", span.text))
    assert named == written | {"build.log"}
    assert {Path(folder).expanduser() for folder in folders} == {request.server_log.parent}
    assert request.server_log.parent == state_dir() / "logs"


def test_every_unit_whose_journal_or_state_is_named_is_one_that_is_installed() -> None:
    texts = [page.read_text(encoding="utf-8") for page in (*PAGES, *_SOURCES)]
    units = {
        unit.removesuffix(".service")
        for text in texts
        for call in re.findall(r"(?:journalctl|systemctl)((?: +[\w.-]+)+)", text)
        for unit in re.findall(r"\b(ollama[\w-]*(?:\.service)?)", call)
    }
    ours = {name.removesuffix(".service") for name in (SIDECAR_UNIT, SERVER_UNIT, MAKER_UNIT)}
    assert units == ours | {"ollama"}  # the stock one, which is in the way of a port


def test_the_port_beside_a_stock_ollama_is_said_as_the_code_has_it() -> None:
    plan = (ROOT / "ollama_tiering/systemd/plan.py").read_text(encoding="utf-8")
    assert "Address(port=Address().port + 1) if stock.has_unit(stock_digests)" in plan
    beside, checked = str(DEFAULT_PORT + 1), 0
    for path in (*PAGES, *_SOURCES):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(rf"\b{beside}\b", text):
            around = text[max(0, match.start() - 90) : match.end() + 90]
            chosen = re.search(r"--host [\d.]*:$", text[: match.start()])
            assert UNIT_NAME in around or chosen, path.name
            checked += 1
    assert checked >= 3


def test_ports_of_ollama_are_these_two_and_no_other() -> None:
    for page in PAGES:
        found = set(
            re.findall(r"\b(?:127\.0\.0\.1|localhost):(11\d{3})\b", page.read_text("utf-8"))
        )
        assert found <= {str(DEFAULT_PORT), str(DEFAULT_PORT + 1)}, page.name


def test_the_readme_says_the_defaults_that_cost_memory_and_disk() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    for key, unit in (
        ("ram_budget", ""),
        ("local_budget", " of the disk"),
        ("min_free_percent", " %"),
        ("ttl_days", " days"),
    ):
        assert f"{words.default_in_words(f'sidecar.{key}')}{unit}" in text, key


def test_the_places_where_names_of_models_come_from_are_said() -> None:
    said = words.default_in_words("sidecar.models_dir")
    assert said == f"Ollama's own: {', else '.join(_DEFAULTS)}"


@pytest.mark.parametrize("phrase", ["look into it", "in a minute", "host tag", "host version"])
def test_phrases_that_said_nothing_do_not_come_back(phrase: str) -> None:
    for path in (*PAGES, *_SOURCES, ROOT / "docs/commands.md"):
        assert phrase not in path.read_text(encoding="utf-8"), path.name


def test_figures_of_the_readme_have_their_record() -> None:
    """Seconds and minutes: those of the record that is linked there."""
    text = " ".join(README.read_text(encoding="utf-8").split())
    record = (ROOT / "docs/measurements/first-run.md").read_text(encoding="utf-8")
    row = {
        name: float(seconds)
        for name, seconds in re.findall(r"^\| (`.+?) \| ([\d.]+) \|", record, re.MULTILINE)
    }
    demo, build = re.search(r"took (\d+) seconds", text), re.search(r": (\d+) minutes on 2", text)
    assert demo
    assert build
    both = row["`--help`"] + row["`demo --engine reference`"]
    assert abs(both - int(demo[1])) < 1
    assert abs(row["`fetch`"] + row["`patch` (what `up` builds)"] - 60 * int(build[1])) < 30
    restore = (ROOT / "docs/measurements/restore.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| 8,192 \| \w+ \| ([\d.]+) s \| ([\d.]+) s \|", restore, re.MULTILINE)
    said = re.search(r"8,192 tokens .* (\d+) s to .* ([\d.]+) s from RAM and ([\d.]+) s", text)
    assert said
    (ram, cold), (disk, _) = rows
    for figure, seconds in zip(said.groups(), (cold, ram, disk), strict=True):
        assert abs(float(figure) - float(seconds)) <= (0.5 if "." not in figure else 0.05)
    others = re.findall(r"\d+ (?:seconds|minutes)", text.replace(demo[0], "").replace(build[0], ""))
    assert not others
    assert fenced(README)  # the commands stand beside them
