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


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """A checkout whose Python makes the files that it is asked for, of no content."""
    place = tmp_path / "checkout"
    files = {
        "scripts/release": (REPO / "scripts/release").read_text(),
        "scripts/venv.sh": 'ensure_venv() { python="$repo/python"; }\n',
        "packaging/release.lock": "",
        ".gitignore": "/build/\n/dist/\n",
        "python": "#!/bin/sh\ncase $2 in\n"
        'hatchling) touch "$5/ollama_tiering-1.tar.gz" "$5/ollama_tiering-1-py3-none-any.whl";;\n'
        'scripts.deb) touch "$4/ollama-tiering_1_amd64.deb";;\n'
        'scripts.sbom) touch "$4";;\nesac\n',
    }
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    tools = place / "build/release-tools"
    tools.mkdir(parents=True)
    (tools / "release.lock").touch()
    git = ("git", "-C", place, "-c", "user.name=x", "-c", "user.email=x@x")
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "-m", "x")):
        subprocess.run([*git, *words], check=True)
    return place


def test_a_release_takes_away_what_is_ours_and_a_package_takes_nothing(made_up: Path) -> None:
    dist = made_up / "dist"
    dist.mkdir()
    for name in ("notes.txt", "ollama_tiering-0.tar.gz", "ollama-tiering_0_amd64.deb"):
        (dist / name).touch()
    subprocess.run([made_up / "scripts/release"], check=True, capture_output=True)
    names = {
        "ollama_tiering-1.tar.gz",
        "ollama_tiering-1-py3-none-any.whl",
        "ollama-tiering_1_amd64.deb",
        "ollama-tiering_1_amd64.cdx.json",
    }
    assert {path.name for path in dist.iterdir()} == {*names, "SHA256SUMS", "notes.txt"}
    sums = (dist / "SHA256SUMS").read_text()
    assert {line.split()[1] for line in sums.splitlines()} == names
    (dist / "ollama-tiering_1_amd64.deb").write_text("released")
    subprocess.run([made_up / "scripts/release", "deb"], check=True, capture_output=True)
    assert {path.name for path in dist.iterdir()} == {*names, "SHA256SUMS", "notes.txt"}
    assert (dist / "ollama-tiering_1_amd64.deb").read_text() == "released"
    assert (made_up / "build/deb/ollama-tiering_1_amd64.deb").exists()


@pytest.mark.parametrize(
    ("unit", "python", "action", "is_called"),
    [
        ("ollama-tiering.service", "/usr/lib/ollama-tiering/bin/python3", "remove", True),
        ("ollama.service.d/tiering.conf", "/usr/lib/ollama-tiering/bin/python3", "remove", True),
        ("ollama-tiering.service", "/usr/lib/ollama-tiering/bin/python3", "upgrade", False),
        ("ollama-tiering.service", "/opt/tiering/.venv/bin/python", "remove", False),
        ("other.service", "/usr/lib/ollama-tiering/bin/python3", "remove", False),
    ],
)
def test_removing_the_package_stops_only_its_own_services(
    tmp_path: Path, unit: str, python: str, action: str, is_called: bool
) -> None:
    units, command, called = tmp_path / "units", tmp_path / "tiering", tmp_path / "called"
    file = units / unit
    file.parent.mkdir(parents=True)
    file.write_text(f"[Service]\nExecStart={python} -m ollama_tiering sidecar\n")
    command.write_text(f'#!/bin/sh\necho "$*" > {called}\nexit 1\n')
    command.chmod(0o755)
    text = (REPO / "packaging/debian/prerm").read_text()
    for named, here in (
        ("/etc/systemd/system/", f"{units}/"),
        ("/usr/bin/tiering ", f"{command} "),
    ):
        assert named in text
        text = text.replace(named, here)
    done = subprocess.run(
        ["sh", "-s", action], input=text, capture_output=True, text=True, check=True
    )
    assert called.exists() == is_called
    if is_called:
        assert called.read_text() == "systemd uninstall\n"
    assert ("services of it are left" in done.stderr) == is_called  # this one removed none
