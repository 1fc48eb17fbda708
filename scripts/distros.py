"""Maintainer: README's commands on a fresh system, as an ordinary user, in minimal roots.

    sudo scripts/distros [--list] [--fresh] [--no-build] [CASE...]   (no CASE: all)

debootstrap makes a minimal root for each distribution, which stays in the product's cache. A case
gets what README names under "What is needed" and nothing else, a copy of this checkout (what git
knows of, as it lies here) and a local clone of Ollama: the product's own source cache, or
TIERING_TEST_CLONE. scripts/distros_inside is what its user types.

Of an earlier run of the same distribution and compiler a case finds pip's downloads and Go's
caches, unless --fresh is given; what `tiering` itself builds is always built anew. A case lives in
mounts and processes of its own, which end with it. The settings of this machine for the network
(proxies, certificates, names, apt and pip) hold inside, too. It ends with a table; exit code 1 if a
case failed. Nothing is installed on this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.launch.address import free_address

REPO = Path(__file__).resolve().parent.parent
HERE = config.cache_dir() / "distros"
USER = 1000
COMPILERS = ("gcc", "g++")
SUITES = {"debian12": "bookworm", "debian13": "trixie"}
SETTINGS = re.compile(
    r"(?i)(https?|no|all)_proxy|PIP_(INDEX_URL|EXTRA_INDEX_URL|TRUSTED_HOST|CERT|DEFAULT_TIMEOUT)"
    r"|GO(PROXY|SUMDB|NOSUMDB|INSECURE)|SSL_CERT_(FILE|DIR)"
)
FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf")
PACKAGES = re.compile(r"apt-get install ([a-z0-9+. -]+)")


@dataclass(frozen=True)
class Case:
    """`instead`: packages in the place of gcc and g++. `more`: packages besides. `prepare`: a line
    of shell as root before the user begins.
    """

    suite: str
    about: str
    instead: tuple[str, ...] = COMPILERS
    more: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    home: str = "/home/user"
    checkout: str = ""  # default: tiering below the home
    prepare: str = ""
    noexec: bool = False  # of TMPDIR and /tmp


LATIN1 = {"LANG": "de_DE.ISO-8859-1", "LC_ALL": "de_DE.ISO-8859-1"}
MAKE_LATIN1 = "localedef -i de_DE -f ISO-8859-1 de_DE.ISO-8859-1"
# Who may not write a checkout can use it once its owner has set it up.
AS_ITS_OWNER = "cd /opt/tiering; ./scripts/tiering --version"
GCC12 = {"CC": "gcc-12", "CXX": "g++-12"}

CASES = {
    "debian13": Case("debian13", "Python 3.13, gcc 14, no Go, no CMake"),
    "debian12": Case("debian12", "Python 3.11, gcc 12, no Go, no CMake"),
    "debian13-clang": Case("debian13", "clang, no gcc", ("clang",)),
    "debian12-clang": Case("debian12", "clang, no gcc", ("clang",)),
    "debian13-gcc12": Case("debian13", "CC=gcc-12, no gcc", ("gcc-12", "g++-12"), env=GCC12),
    "debian13-space": Case("debian13", "a home with a space", home="/home/an ordinary user"),
    "debian13-c": Case("debian13", "LANG=C", env={"LANG": "C"}),
    "debian13-latin1": Case(
        "debian13", "a Latin-1 locale", more=("locales",), env=LATIN1, prepare=MAKE_LATIN1
    ),
    "debian13-readonly": Case(
        "debian13",
        "a checkout that the user may not write",
        checkout="/opt/tiering",
        prepare=AS_ITS_OWNER,
    ),
    "debian13-noexec": Case("debian13", "TMPDIR and /tmp are noexec", noexec=True),
    "debian13-tools": Case("debian13", "CMake and Go of the system", more=("cmake", "golang-go")),
}


def needed() -> list[str]:
    """The packages that README names."""
    section = (REPO / "README.md").read_text(encoding="utf-8").partition("## What is needed")[2]
    found = PACKAGES.search(section.partition("\n## ")[0])
    assert found, "README names no packages under 'What is needed'"
    return found[1].split()


def packages(case: Case) -> list[str]:
    rest = [name for name in needed() if name not in COMPILERS]
    return [*rest, *case.instead, *case.more]


def network_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if SETTINGS.fullmatch(name)}


def run(*command: str | Path, log: Path) -> int:
    with log.open("ab") as sink:
        sink.write(f"+ {' '.join(map(str, command))}\n".encode())
        sink.flush()
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, check=False
        ).returncode


def base_root(suite: str, log: Path) -> Path:
    """A minimal system, made once."""
    root = HERE / suite
    if not root.exists():
        part = root.with_name(f"{suite}.part")
        shutil.rmtree(part, ignore_errors=True)
        if run("debootstrap", "--variant=minbase", suite, part, log=log):
            raise SystemExit(f"debootstrap {suite} failed, see {log}")
        part.rename(root)
    return root


def layer(case: Case, log: Path) -> list[Path]:
    """The folders that a case's root is laid over: its packages, and the minimal system."""
    suite = SUITES[case.suite]
    base, wanted = base_root(suite, log), packages(case)
    made = HERE / f"{suite}+{'+'.join(wanted)}"
    if not made.exists():
        part = made.with_name(f"{made.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        install = (
            "export DEBIAN_FRONTEND=noninteractive; apt-get -qq update && "
            f"apt-get install -qq --no-install-recommends {' '.join(wanted)}"
        )
        if inside([base], part, install, log, {}):
            raise SystemExit(f"installing {' '.join(wanted)} failed, see {log}")
        part.rename(made)
    return [made, base]


def inside(below: list[Path], upper: Path, command: str, log: Path, shared: dict[str, Path]) -> int:
    """A shell command as root in a root of its own; `shared` are folders of ours, by their path
    there. Mounts and processes end with it.
    """
    work = upper.with_name(f"{upper.name}.work")
    root = upper.with_name(f"{upper.name}.root")
    for folder in (work, root):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    archives = HERE / "archives" / below[-1].name
    archives.mkdir(parents=True, exist_ok=True)
    lower = ":".join(str(path).replace(":", "\\:") for path in below)
    lines = [
        "set -e",
        f"mount -t overlay overlay -o 'lowerdir={lower},upperdir={upper},workdir={work}' '{root}'",
        f"cd '{root}'",
        "mount -t proc proc proc; mount -t sysfs -o ro sysfs sys; mount --rbind /dev dev",
        "mount -t tmpfs -o mode=1777 shm dev/shm",
        *(f"mkdir -p '.{Path(f).parent}'; cp -L '{f}' '.{f}'" for f in FILES if Path(f).exists()),
        "apt-config dump Acquire | grep -E '^Acquire::https?::' >etc/apt/apt.conf.d/90host || true",
        "rm -f etc/apt/apt.conf.d/docker-clean",
        f"mount --bind '{archives}' var/cache/apt/archives",
    ]
    for path, folder in shared.items():
        folder.mkdir(parents=True, exist_ok=True)
        lines += [f"mkdir -p '.{path}'; mount --bind '{folder}' '.{path}'"]
    lines += ['exec chroot . /bin/sh -ec "$0"']
    own = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")
    try:
        return run(*own, "bash", "-c", "\n".join(lines), command, log=log)
    finally:
        for folder in (work, root):
            shutil.rmtree(folder, ignore_errors=True)


def put_checkout(target: Path, owner: int) -> None:
    """What git knows of, as it lies here."""
    listed = subprocess.run(
        ["git", "-C", REPO, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split(b"\0")):
        source = REPO / os.fsdecode(name)
        if source.is_file():
            place = target / os.fsdecode(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place, follow_symlinks=False)
    for place in (target, *target.rglob("*")):
        os.chown(place, owner, owner, follow_symlinks=False)


def clone() -> Path:
    return Path(os.environ.get("TIERING_TEST_CLONE", config.cache_dir() / "source.git"))


def try_case(name: str, case: Case, log: Path, given: argparse.Namespace) -> bool:
    below = layer(case, log)
    upper = HERE / f"case-{name}"
    shutil.rmtree(upper, ignore_errors=True)
    home = upper / case.home.lstrip("/")
    home.mkdir(parents=True)
    checkout = case.checkout or f"{case.home}/tiering"
    put_checkout(upper / checkout.lstrip("/"), 0 if case.checkout else USER)
    shutil.copytree(clone(), upper / "srv/ollama.git", symlinks=True)
    (upper / "srv/inside").write_bytes((REPO / "scripts/distros_inside").read_bytes())
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        **network_settings(),
        **case.env,
        "HOME": case.home,
        "USER": "user",
        "CHECKOUT": checkout,
        "ADDRESS": str(free_address()),
        "BUILD": "" if given.no_build else "1",
    }
    words = " ".join(f"'{key}={value}'" for key, value in environment.items())
    cache = f"{case.home}/.cache"
    tools = f"{SUITES[case.suite]}-{'-'.join(case.instead)}"
    shared = {f"{cache}/pip": HERE / "pip", f"{cache}/ollama-tiering/go": HERE / "go" / tools}
    begin = [
        f"echo 'user:x:{USER}:{USER}::{case.home}:/bin/bash' >>/etc/passwd",
        f"echo 'user:x:{USER}:' >>/etc/group",
        case.prepare,
        f"chown -R {USER}:{USER} '{case.home}' /srv",
        "mount -t tmpfs -o noexec,mode=1777 tmp /tmp" if case.noexec else "",
        f"exec chroot --userspec={USER}:{USER} --groups= / env -i {words} bash /srv/inside",
    ]
    code = inside(below, upper, "\n".join(begin), log, {} if given.fresh else shared)
    if code == 0:
        shutil.rmtree(upper, ignore_errors=True)
    return code == 0


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines[-60:] if line.startswith(("error:", "FAILED"))]
    return (errors or lines or [""])[-1][:100]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", metavar="CASE", nargs="*")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--fresh", action="store_true", help="nothing of an earlier run but roots")
    parser.add_argument("--no-build", action="store_true", help="only commands that build nothing")
    given = parser.parse_args()
    if given.list:
        for name, case in CASES.items():
            print(f"{name:18} {case.about}")
        return 0
    if unknown := [name for name in given.cases if name not in CASES]:
        parser.error(f"no such case: {', '.join(unknown)} (--list names them)")
    missing = [tool for tool in ("debootstrap", "unshare", "chroot") if not shutil.which(tool)]
    if missing:
        print(
            f"error: {', '.join(missing)}: not found: apt-get install debootstrap", file=sys.stderr
        )
        return 6
    if os.geteuid() != 0:
        print("error: roots and mounts are made by root: run it with sudo", file=sys.stderr)
        return 6
    if not (clone() / "HEAD").is_file():
        print(f"error: no clone of Ollama at {clone()}: scripts/tiering fetch", file=sys.stderr)
        return 6
    (HERE / "logs").mkdir(parents=True, exist_ok=True)
    rows = []
    for name in given.cases or list(CASES):
        log = HERE / "logs" / f"{name}.log"
        log.unlink(missing_ok=True)
        print(f"{name} ... (log: {log})", flush=True)
        started = time.monotonic()
        passed = try_case(name, CASES[name], log, given)
        took = f"{time.monotonic() - started:.0f} s"
        rows.append((name, CASES[name].about, took, passed, last_line(log)))
    print()
    for name, about, took, passed, said in rows:
        print(f"{name:18} {about:40} {took:>7}  {'ok' if passed else f'FAILED: {said}'}")
    return 0 if all(row[3] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
