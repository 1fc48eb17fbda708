"""A release of the last commit, made twice, and the ways to install it. `make installs` runs it.

TIERING_INSTALLS=1               without it all of these are skipped: they take a quarter of an hour
TIERING_INSTALLS=PLACE           a clone in which `scripts/release` has run: nothing is made
OLLAMA_TIERING_TEST_OLLAMA       an installed Ollama, which is then patched where nothing but g++ is
OLLAMA_TIERING_TEST_LLAMA_CPP    llama.cpp's source of it (tests/engine_ollama_llama_server)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ollama_tiering import __version__, config
from scripts import distros

REPO = Path(__file__).parents[2]
OLLAMA = os.environ.get("OLLAMA_TIERING_TEST_OLLAMA")
SOURCE = os.environ.get("OLLAMA_TIERING_TEST_LLAMA_CPP")
NO_NEED = ("git", "cc", "gcc", "make", "cmake", "ninja", "go", "protoc", "strip", "ldconfig")
SUITES = {"3.11": "bookworm", "3.13": "trixie"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not os.environ.get("TIERING_INSTALLS"), reason="`make installs` tries a release"
    ),
]


@dataclass
class Release:
    """A clone of this repository, and what `scripts/release` made in it."""

    clone: Path

    @property
    def dist(self) -> Path:
        return self.clone / "dist"

    def file(self, pattern: str) -> Path:
        (found,) = self.dist.glob(pattern)
        return found

    @property
    def uv(self) -> str:
        return str(self.clone / "build/release-tools/bin/uv")


def released(place: Path, umask: int) -> Release:
    subprocess.run(["git", "clone", "--quiet", REPO, place], check=True)
    done = subprocess.run(
        [place / "scripts/release"], capture_output=True, text=True, umask=umask, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return Release(place)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    place = Path(os.environ["TIERING_INSTALLS"])
    if place.is_absolute():
        return Release(place)
    return released(tmp_path_factory.mktemp("release") / "one", 0o022)


def test_a_commit_has_one_release_wherever_it_is_made(release: Release, tmp_path: Path) -> None:
    other = released(tmp_path / "another folder", 0o077)
    said = [(one.dist / "SHA256SUMS").read_text() for one in (release, other)]
    assert said[0] == said[1]
    for line in said[0].splitlines():
        digest, name = line.split()
        assert hashlib.sha256((release.dist / name).read_bytes()).hexdigest() == digest
    kinds = (".cdx.json", ".deb", ".tar.gz", ".whl", "SHA256SUMS")
    assert len(said[0].splitlines()) == len(kinds) - 1
    assert all(len(list(release.dist.glob(f"*{kind}"))) == 1 for kind in kinds)


def test_the_sbom_names_each_package_of_the_lock(release: Release) -> None:
    document = json.loads(release.file("*.cdx.json").read_text())
    root = document["metadata"]["component"]
    assert (root["name"], root["version"]) == ("ollama-tiering", __version__)
    listed = {(normal(c["name"]), c["version"]) for c in document["components"]}
    locked = set()
    for line in (REPO / "requirements.lock").read_text().splitlines():
        found = re.match(r"([\w.-]+)==(\S+) ", line)
        if found and "sys_platform" not in line:
            locked.add((normal(found[1]), found[2]))
    assert listed <= locked
    assert {name for name, _ in listed} == {name for name, _ in locked}
    assert str(release.clone) not in json.dumps(document)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass
class Bare:
    """A user of a machine that has uv, g++ with what belongs to it, and coreutils."""

    root: Path
    uv: str

    def __post_init__(self) -> None:
        self.bin.mkdir(parents=True)
        listed = subprocess.run(["dpkg", "-L", "coreutils"], capture_output=True, text=True)
        files = [line for line in listed.stdout.splitlines() if re.match(r"(/usr)?/bin/.", line)]
        more = [shutil.which(name) for name in ("g++", "as", "ld", "sh")]
        more.append(f"{sys.base_prefix}/bin/python3")
        for path in filter(None, [*files, *more]):
            if not (self.bin / Path(path).name).exists():
                (self.bin / Path(path).name).symlink_to(Path(path).resolve())
        (self.root / "run").mkdir(mode=0o700)

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    def run(self, *command: str, path: str = "") -> subprocess.CompletedProcess[str]:
        network = {n: v for n, v in os.environ.items() if distros.SETTINGS.fullmatch(n)}
        env = network | {
            "PATH": f"{self.root / 'links'}:{self.bin}{path}",
            "HOME": str(self.root / "home"),
            "UV_TOOL_DIR": str(self.root / "tools"),
            "UV_TOOL_BIN_DIR": str(self.root / "links"),
            "UV_CACHE_DIR": str(config.cache_dir() / "uv"),
            "OLLAMA_TIERING_CACHE": str(self.root / "cache"),
            "XDG_RUNTIME_DIR": str(self.root / "run"),
        }
        assert not [name for name in NO_NEED if shutil.which(name, path=env["PATH"])]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(params=["wheel", "sdist"])
def bare(request: pytest.FixtureRequest, release: Release, tmp_path: Path) -> Bare:
    """With one line."""
    user = Bare(tmp_path, release.uv)
    what = release.file("*.whl" if request.param == "wheel" else "*.tar.gz")
    done = user.run(release.uv, "tool", "install", "--no-managed-python", str(what))
    assert done.returncode == 0, done.stderr
    return user


def test_uv_and_a_compiler_are_enough_for_an_installed_ollama(bare: Bare) -> None:
    assert bare.run("tiering", "--version").stdout == f"tiering, version {__version__}\n"
    lacking = bare.run("tiering", "patch")
    assert lacking.returncode == 6
    error, hint = lacking.stderr.splitlines()
    assert error.startswith("error: git: not found")
    assert hint.startswith("hint: install git (Debian, Ubuntu: apt-get install git)")
    if not OLLAMA or not SOURCE:
        pytest.skip("OLLAMA_TIERING_TEST_OLLAMA and OLLAMA_TIERING_TEST_LLAMA_CPP name none")
    there = f":{OLLAMA}/bin"
    assert "fail" not in bare.run("tiering", "doctor", path=there).stdout
    patched = bare.run("tiering", "patch", "--llama-source", SOURCE, path=there)
    assert patched.returncode == 0, patched.stderr
    assert Path(patched.stdout.splitlines()[-1]).is_file()


def test_a_git_url_is_one_line_too_and_says_its_commit(release: Release, tmp_path: Path) -> None:
    places = {"UV_TOOL_DIR": f"{tmp_path}/tools", "UV_TOOL_BIN_DIR": f"{tmp_path}/links"}
    line = [release.uv, "tool", "install", "--no-managed-python", f"git+file://{release.clone}"]
    subprocess.run(line, env=os.environ | places, check=True, timeout=900)
    said = subprocess.run([tmp_path / "links/tiering", "--version"], capture_output=True, text=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=release.clone, capture_output=True, text=True
    )
    assert f"(commit {commit.stdout[:8]})" in said.stdout


_ON_DEBIAN = """
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --no-install-recommends /srv/tiering.deb
test "$(tiering --version)" = "tiering, version $VERSION"
test -s /usr/share/man/man1/tiering.1.gz
bash -n /usr/share/bash-completion/completions/tiering
useradd --create-home user
su user -c 'tiering model make llama-tiny /home/user/tiny.gguf && tiering doctor' || test $? = 1
mkdir -p /home/user/.local/share/ollama-tiering && touch /home/user/.local/share/ollama-tiering/kept
tiering --help >/dev/null; tiering web --help >/dev/null; tiering up --help >/dev/null  # as root
tiering systemd install --sidecar-only --run-as user
test -e /etc/systemd/system/ollama-tiering.service
apt-get -qq remove ollama-tiering
find / -xdev \\( -path /proc -o -path /var/cache -o -path /srv \\) -prune -o -name '*tiering*' -print >/srv/left
"""  # noqa: E501


def test_debian_installs_the_package_and_removes_all_of_it(
    release: Release, tmp_path: Path
) -> None:
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("a root of its own takes root and debootstrap")
    deb = release.file("*.deb")
    suite = SUITES.get(deb.name.partition("+python")[2].partition("_")[0])
    if suite is None:
        pytest.skip("the package is for no Debian that is known here")
    log, upper = tmp_path / "log", tmp_path / "upper"
    distros.HERE.mkdir(parents=True, exist_ok=True)
    (upper / "srv").mkdir(parents=True)
    shutil.copy(deb, upper / "srv/tiering.deb")
    script = f"VERSION={__version__}\n{_ON_DEBIAN}"
    code = distros.inside([distros.base_root(suite, log)], upper, script, log, {})
    assert code == 0, log.read_text()[-3000:]
    left = (upper / "srv/left").read_text().split()
    assert "/home/user/.local/share/ollama-tiering" in left
    assert all(path.startswith("/home/user/") for path in left), left
