"""What a release is made of, as far as nothing has to be built for it."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from ollama_tiering.cli import cli
from scripts import deb, gen_docs, man_page

REPO = Path(__file__).parents[2]
PAGE = man_page.page("2026-11-28")


def test_the_man_page_has_every_command_and_option() -> None:
    for command, path, _ in gen_docs.walk(cli, "tiering"):
        if command is not cli:
            assert f"\n.SS {man_page.roff(path)}\n" in PAGE
        for param in command.params:
            if isinstance(param, click.Option):
                assert man_page.roff(param.opts[-1]) in PAGE


def test_the_man_page_is_sound() -> None:
    """No line of it is a request that nobody knows."""
    if not shutil.which("man"):
        pytest.skip("no man here")
    words = ("man", "--warnings", "-E", "UTF-8", "-Tutf8", "-Z", "-l", "-")
    done = subprocess.run(words, input=PAGE, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [(".so /etc/passwd", r"\&.so /etc/passwd"), ("'x", r"\&'x"), ("-a \\ b", r"\-a \e b")],
)
def test_text_is_no_request_of_roff(text: str, shown: str) -> None:
    assert man_page.roff(text) == shown


def test_exit_codes_are_those_of_the_errors() -> None:
    codes = [code for code, _ in gen_docs.exit_codes()]
    assert codes == sorted(set(codes))
    assert {0, 1, 2, 6, 130} <= set(codes)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Most of its files are missing, which is a change."""
    place = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", REPO, place], check=True)
    (place / "scripts").mkdir()
    for name in ("release", "venv.sh"):
        shutil.copy(REPO / "scripts" / name, place / "scripts" / name)
    return place


def test_a_tree_with_changes_is_not_released(clone: Path) -> None:
    done = subprocess.run([clone / "scripts/release"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: this tree has changes that no commit has")
    assert done.stderr.count("\n") == 1
    assert not (clone / ".venv").exists()
    assert not (clone / "dist").exists()


def test_a_package_names_its_licences(tmp_path: Path) -> None:
    site = tmp_path / "usr/lib/ollama-tiering/lib/python3.11/site-packages"
    for name, head in {
        "one": "License-Expression: MIT",
        "two": "Classifier: License :: OSI Approved :: BSD License",
        "three": "License: Apache-2.0\n more of it",
        "four": "Summary: x",
    }.items():
        folder = site / f"{name}-1.dist-info"
        (folder / "licenses").mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1\n{head}\n\ntext\n")
    (site / "one-1.dist-info/licenses/LICENSE").touch()
    said = deb._licences(site)
    assert said.startswith(f"ollama-tiering\n\n{(REPO / 'LICENSE').read_text()}")
    assert "one 1: MIT\n    /usr/lib/ollama-tiering/lib/python3.11/site-packages/one-1" in said
    assert "two 1: License :: OSI Approved :: BSD License\n" in said
    assert "three 1: Apache-2.0\n" in said
    assert "four 1: see its files\n" in said


def test_files_of_a_package_have_the_modes_and_times_of_everybody(tmp_path: Path) -> None:
    place = tmp_path / deb.PLACE / "bin"
    place.mkdir(parents=True, mode=0o700)
    for name in ("tiering", "other"):
        (place / name).touch(0o700)
    (place / "link").symlink_to("tiering")
    deb._steady(tmp_path, 1_795_000_000)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in tmp_path.rglob("*")}
    assert (modes["bin"], modes["tiering"], modes["other"]) == (0o755, 0o755, 0o644)
    assert {path.lstat().st_mtime for path in tmp_path.rglob("*")} == {1_795_000_000}


def test_zipped_text_has_no_time_of_its_own(tmp_path: Path) -> None:
    deb._zipped(tmp_path / "a/x.gz", "text")
    deb._zipped(tmp_path / "b/y.gz", "text")
    assert (tmp_path / "a/x.gz").read_bytes() == (tmp_path / "b/y.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a/x.gz").read_bytes()) == b"text"


def test_the_tools_of_a_release_are_pinned_with_hashes() -> None:
    wanted = [
        line.split(";")[0].strip()
        for line in (REPO / "packaging/release.in").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    lock = (REPO / "packaging/release.lock").read_text()
    for pin in wanted:
        assert f"{pin} \\\n    --hash=sha256:" in lock
