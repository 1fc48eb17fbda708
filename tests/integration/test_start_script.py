"""scripts/tiering from a plain checkout: first, interrupted and simultaneous starts. No network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a lock that asks for nothing and a package that says its arguments."""
    root = tmp_path / "check out"
    shutil.copytree(REPO / "scripts", root / "scripts")
    (root / "requirements.lock").write_text("# nothing\n")
    (root / "ollama_tiering").mkdir()
    (root / "ollama_tiering/__init__.py").write_text("")
    (root / "ollama_tiering/__main__.py").write_text("import sys; print(sys.argv[1:])\n")
    return root


def start(root: Path, *args: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"PATH": path} if path else {})
    environment.pop("TIERING_PYTHON", None)
    script = [str(root / "scripts/tiering"), *args]
    return subprocess.run(script, env=environment, capture_output=True, text=True, check=False)


def test_the_first_start_installs_and_the_second_is_quick(checkout: Path) -> None:
    first = start(checkout, "a b", "c")
    assert (first.returncode, first.stdout) == (0, "['a b', 'c']\n")
    (line,) = first.stderr.splitlines()
    assert line.startswith("tiering: installing the packages of requirements.lock into ")
    assert "90 MB of disk" in line
    assert re.search(r"done in \d+ s$", line)
    started = time.monotonic()
    second = start(checkout, "a b", "c")
    assert time.monotonic() - started < 1
    assert (second.stdout, second.stderr) == (first.stdout, "")


def test_a_changed_lock_installs_again_and_a_moved_checkout_works(checkout: Path) -> None:
    start(checkout)
    (checkout / "requirements.lock").write_text("# nothing new\n")
    assert "installing" in start(checkout).stderr
    moved = checkout.rename(checkout.with_name("moved"))
    assert start(moved, "x").stdout == "['x']\n"


def test_an_interrupted_install_is_repaired(checkout: Path) -> None:
    start(checkout)
    (checkout / ".venv.installing").write_text("")
    half = checkout / ".venv/half"
    half.write_text("")
    again = start(checkout)
    assert again.returncode == 0
    assert not half.exists(), "made anew"
    assert not (checkout / ".venv.installing").exists()


def test_a_failed_install_says_so_and_the_next_run_starts_over(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = checkout / "requirements.lock"
    lock.write_text(f"nothing-has-this-name==1 \\\n    --hash=sha256:{'0' * 64}\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    failed = start(checkout)
    assert failed.returncode == 6
    assert failed.stdout == ""
    assert "nothing-has-this-name" in failed.stderr, "pip's own reason"
    assert failed.stderr.splitlines()[-1].startswith("error: installing the packages of ")
    lock.write_text("# nothing\n")
    assert start(checkout, "x").stdout == "['x']\n"


def test_what_no_command_loads_goes_and_pip_with_it(checkout: Path) -> None:
    start(checkout)
    (site,) = checkout.glob(".venv/lib/python3*/site-packages")
    kept, gone = ["x/a.py", "zstandard/backend_c.so"], ["x/tests/y/z.py", "zstandard/_cffi.so"]
    for name in kept + gone:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("")
    (checkout / "requirements.lock").write_text("# nothing new\n")
    start(checkout)
    assert [name for name in kept + gone if (site / name).exists()] == kept
    assert not (site / "x/tests").exists()
    assert not (site / "pip").exists()


def test_an_extra_is_added_once(checkout: Path) -> None:
    (checkout / "requirements-cuda.lock").write_text("# nothing\n")
    script = [str(checkout / "scripts/extra"), "cuda"]
    said = [subprocess.run(script, capture_output=True, text=True, check=True) for _ in range(2)]
    assert "requirements-cuda.lock" in said[0].stderr
    assert said[1].stderr == ""
    unknown = subprocess.run([*script[:1], "nonsense"], capture_output=True, check=False)
    assert unknown.returncode == 2


def test_the_first_help_brings_at_most_90_mb(checkout: Path) -> None:
    shutil.copy(REPO / "requirements.lock", checkout)
    shutil.rmtree(checkout / "ollama_tiering")
    shutil.copytree(REPO / "ollama_tiering", checkout / "ollama_tiering")
    first = start(checkout, "--help")
    if any(sign in first.stderr for sign in ("new connection", "name resolution")):
        pytest.skip("no package registry can be reached")
    assert first.returncode == 0, first.stderr
    assert "Usage: tiering" in first.stdout
    stats = [path.lstat() for path in (checkout / ".venv").rglob("*")]
    assert sum(stat.st_blocks for stat in stats) * 512 <= 90 * 2**20
    everything = "import numpy, zstandard, grpc, google_crc32c, git, httpx, rich.console, psutil"
    python = checkout / ".venv/bin/python"
    subprocess.run([python, "-c", everything], check=True)
    lacks = subprocess.run([python, "-c", "import pip"], capture_output=True, check=False)
    assert lacks.returncode == 1


def test_a_venv_whose_python_is_gone_is_made_again(checkout: Path) -> None:
    start(checkout)
    (checkout / ".venv/bin/python").unlink()
    assert start(checkout, "x").stdout == "['x']\n"


def test_two_starts_at_once_install_once(checkout: Path) -> None:
    script = [str(checkout / "scripts/tiering"), "x"]
    both = [
        subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate() for process in both]
    assert [out for out, _ in said] == ["['x']\n"] * 2
    assert sum("installing the packages" in err for _, err in said) == 1


def test_a_link_to_the_script_works(checkout: Path, tmp_path: Path) -> None:
    start(checkout)
    link = tmp_path / "tiering"
    link.symlink_to(checkout / "scripts/tiering")
    done = subprocess.run([link, "x"], capture_output=True, text=True, check=True)
    assert done.stdout == "['x']\n"


def test_without_python_it_says_so_in_one_line(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "readlink", "cmp"):
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python3").chmod(0o755)
    done = start(checkout, path=str(tools))
    assert done.returncode == 6
    assert done.stderr.startswith("error: Python 3.11 or later is needed")
    assert len(done.stderr.splitlines()) == 1


def test_a_lock_holds_only_what_it_adds() -> None:
    locks = [path.read_text() for path in REPO.glob("requirements*.lock")]
    packages = [set(re.findall(r"^[\w.-]+(?===)", text, re.MULTILINE)) for text in locks]
    assert len(locks) == 4
    assert sum(map(len, packages)) == len(set.union(*packages))


@pytest.mark.parametrize("name", sorted(path.name for path in REPO.glob("requirements*.lock")))
def test_locks_name_no_index(name: str) -> None:
    text = (REPO / name).read_text()
    assert "index-url" not in text
    assert "://" not in text


def start_as_another(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """As a user who may read all of the checkout and write nothing of it."""
    another = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"}
    script = [str(root / "scripts/tiering"), *args]
    try:
        for path in (root, *root.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222 | 0o444)
        return subprocess.run(
            script, env=environment, capture_output=True, text=True, check=False, **another
        )
    finally:
        for path in (root, *root.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)


@pytest.fixture
def open_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same checkout where every user can read it."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # a Python that all may run
    if shutil.which("python3") is None:
        pytest.skip("no Python in /usr/bin")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield checkout.rename(Path(folder, "check out"))


def said_in_one_line(done: subprocess.CompletedProcess[str], root: Path) -> str:
    assert (done.returncode, done.stdout) == (6, ""), done.stderr
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: this user cannot write {root}"), done.stderr
    assert f"{root}/scripts/tiering" in hint
    return error


def test_a_checkout_of_another_user_is_used_or_said_in_one_line(open_checkout: Path) -> None:
    root = open_checkout
    assert said_in_one_line(start_as_another(root), root).endswith(".venv is not made yet")
    start(root)
    assert start_as_another(root, "x").stdout == "['x']\n"
    (root / "requirements.lock").write_text("# nothing new\n")
    said = said_in_one_line(start_as_another(root), root)
    assert said.endswith(".venv is of another version, or was moved")
    moved = root.rename(root.with_name("moved"))
    (moved / "requirements.lock").write_text("# nothing\n")
    said_in_one_line(start_as_another(moved), moved)


def test_a_python_that_only_its_owner_can_run_is_named(open_checkout: Path) -> None:
    start(open_checkout)
    python = open_checkout / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/root/.pyenv/versions/3.12/bin/python3")
    said = said_in_one_line(start_as_another(open_checkout), open_checkout)
    assert said.endswith("this user cannot run /root/.pyenv/versions/3.12/bin/python3")


def test_nobody_else_can_hold_the_lock_of_the_install(checkout: Path) -> None:
    (checkout / ".venv.lock").touch(0o644)
    start(checkout)
    assert (checkout / ".venv.lock").stat().st_mode & 0o777 == 0o600
