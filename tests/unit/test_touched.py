"""Of the tests that run by turns those run whole that the change touches (tests/touched.py)."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import touched, turns

DAY = 24 * 3600
NOW = 1_800_000_000
SOCKET = "ollama_tiering/sidecar/service.py"
ABUSE = "tests/fault/test_abuse.py"
HELPER = "tests/fault/abuse.py"
DEEP = "tests/sidecar.py"
STORM = "tests/engine/test_storm.py"
ENGINES = "tests/engine/conftest.py"
PATHS = {SOCKET: "", ABUSE: "from tests.fault import abuse\n", STORM: "", ENGINES: ""} | {
    HELPER: "from tests.sidecar import SidecarProcess\n",
    DEEP: "import os\n",
    "docs/design.md": "",
}


class Repository:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str, at: int = NOW) -> str:
        who = {
            f"GIT_{role}_{of}": "a@b"
            for role in ("AUTHOR", "COMMITTER")
            for of in ("NAME", "EMAIL")
        }
        when = {"GIT_COMMITTER_DATE": f"{at} +0000", "GIT_AUTHOR_DATE": f"{at} +0000"}
        done = subprocess.run(
            ["git", "-C", self.root, *words],
            env={**os.environ, **who, **when},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def commit(self, at: int = NOW) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "x", at=at)
        return self.git("rev-parse", "HEAD")

    def touched(self) -> list[str]:
        return touched.touched(self.root, touched.changed(self.root, touched.base(self.root)))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """On a branch, where nothing changed yet."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    made = Repository(tmp_path)
    for path, text in PATHS.items():
        made.write(path, text)
    made.commit(NOW - 9 * DAY)
    made.commit()
    made.git("checkout", "-q", "-b", "branch")
    return made


def sidecar_files() -> list[str]:
    return [name for name, covered in turns.TURNS.items() if SOCKET.startswith(covered)]


def test_what_changed_nothing_touches_nothing(repository: Repository) -> None:
    repository.commit()
    assert repository.touched() == []


def test_a_page_touches_nothing(repository: Repository) -> None:
    repository.write("docs/design.md", "more\n")
    repository.commit()
    assert repository.touched() == []


def test_a_module_touches_the_files_that_test_it_and_no_others(repository: Repository) -> None:
    repository.write(SOCKET, "more\n")
    repository.commit()
    assert repository.touched() == sidecar_files()
    assert ABUSE in sidecar_files()
    assert STORM not in sidecar_files()


@pytest.mark.parametrize("path", [ABUSE, HELPER, DEEP])
def test_the_file_and_what_it_imports_touch_it(repository: Repository, path: str) -> None:
    repository.write(path, PATHS[path] + "\n\n")
    repository.commit()
    assert repository.touched() == [ABUSE]


def test_fixtures_touch_the_files_beside_them(repository: Repository) -> None:
    repository.write(ENGINES, "more = 1\n")
    repository.commit()
    assert repository.touched() == sorted(
        name for name in turns.TURNS if name.startswith("tests/engine/")
    )


def test_a_deleted_module_touches_too(repository: Repository) -> None:
    repository.git("rm", "-q", SOCKET)
    repository.commit()
    assert repository.touched() == sidecar_files()


def test_a_module_that_was_moved_away_touches_too(repository: Repository) -> None:
    repository.write(SOCKET, "a line\n" * 50)
    repository.commit()
    repository.git("branch", "-f", "main")
    repository.git("mv", SOCKET, "docs/service.py")
    repository.commit()
    assert repository.touched() == sidecar_files()


@pytest.mark.parametrize("known", [True, False], ids=["changed", "new"])
def test_what_is_not_committed_touches_too(repository: Repository, known: bool) -> None:
    repository.write(SOCKET if known else "ollama_tiering/sidecar/new one.py", "more\n")
    assert repository.touched() == sidecar_files()


def test_all_of_a_branch_counts_however_old_and_nothing_of_main(repository: Repository) -> None:
    repository.write(SOCKET, "more\n")
    repository.commit(NOW + DAY)
    repository.commit(NOW + 5 * DAY)
    repository.git("checkout", "-q", "main")
    repository.write(STORM, "more = 1\n")
    repository.commit(NOW + 5 * DAY)
    repository.git("checkout", "-q", "branch")
    assert repository.touched() == sidecar_files()


def test_origin_is_asked_before_the_own_main(repository: Repository) -> None:
    """Which may be anything: the branch itself, for instance."""
    repository.git("update-ref", "refs/remotes/origin/main", "main")
    repository.write(SOCKET, "more\n")
    repository.commit(NOW + DAY)
    repository.commit(NOW + 5 * DAY)
    repository.git("branch", "-f", "main")
    assert repository.touched() == sidecar_files()


def test_on_main_the_last_commit_counts(repository: Repository) -> None:
    repository.git("checkout", "-q", "main")
    repository.write(STORM, "more = 1\n")
    old = repository.commit()
    repository.write(SOCKET, "more\n")
    repository.commit()
    assert touched.base(repository.root) == old
    assert repository.touched() == sidecar_files()


def test_what_a_merge_brought_counts_however_old(repository: Repository) -> None:
    repository.write(SOCKET, "more\n")
    repository.commit(NOW + 2 * DAY)
    repository.git("checkout", "-q", "main")
    repository.commit(NOW + DAY)
    repository.git("merge", "-q", "--no-ff", "branch", at=NOW + 9 * DAY)
    assert repository.touched() == sidecar_files()


def test_a_shallow_clone_is_no_change_that_is_known(repository: Repository, tmp_path: Path) -> None:
    repository.commit(NOW + 9 * DAY)
    clone = tmp_path / "clone"
    url = repository.root.as_uri()
    repository.git("clone", "-q", "--depth", "1", url, str(clone))
    with pytest.raises(touched.Unknown, match="shallow"):
        touched.base(clone)


def test_where_git_cannot_say_it_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert touched.main() == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"what the change touches is not known: .*git repository.*\n", said.err)


def test_without_git_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(touched.Unknown, match="git: No such file"):
        touched.base(tmp_path)


def test_the_names_are_lines(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(touched, "ROOT", repository.root)
    repository.write(SOCKET, "more\n")
    assert touched.main() == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == sidecar_files()
    assert said.err.startswith(f"{len(sidecar_files())} files of tests/turns.py ")


def test_what_is_said_to_be_tested_is_there() -> None:
    tracked = subprocess.run(
        ["git", "-C", touched.ROOT, "ls-files"], capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("not a git repository")
    paths = tracked.stdout.splitlines()
    for file, covered in {**turns.TURNS, **turns.ONE_CASE}.items():
        for one in covered:
            assert any(path.startswith(one) for path in paths), f"{file}: {one}"
        assert not any(one.startswith("docs") for one in covered)


def test_the_sanitizers_of_the_kernels_run_whole_where_the_kernels_are_touched(
    tmp_path: Path,
) -> None:
    """A script, of which nothing is read as Python."""
    for path in ("csrc/src/plan.cpp", "scripts/test-csrc"):
        assert "scripts/test-csrc" in touched.touched(tmp_path, [path])
    assert touched.touched(tmp_path, ["docs/design.md", "csrc.md"]) == []


def test_each_script_is_there_and_so_is_what_it_tests() -> None:
    for script, covered in turns.SCRIPTS.items():
        assert (touched.ROOT / script).is_file()
        assert all((touched.ROOT / path).exists() for path in covered)
        assert script in (touched.ROOT / "scripts/test").read_text()
