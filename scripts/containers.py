"""Maintainer: builds the image of packaging/docker, and tries it as a container.

    sudo scripts/containers [--list] [--build-only] [CASE...]   (no CASE: all)

buildah builds it, as everybody's tool would. A case is a base: a minimal Debian, which debootstrap
makes once (no registry of images is needed), or that with an Ollama from v0.30 on in it, as
`make installed-ollama` makes one. What the first stage builds of Ollama stays in a folder of the
product's cache, so a second build takes minutes. The network settings of this machine (pip,
certificates) are part of that Debian, and not of the image's Dockerfile.

tests/integration/test_containers.py then runs what was built, with the image's own entry point,
variables and health check: mounts, processes, network and memory are the container's own, and its
root is read-only. Docker's daemon is not needed. Exit code 1 if something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ollama_tiering import config
from scripts import distros

REPO: Final = Path(__file__).resolve().parent.parent
HERE: Final = config.cache_dir() / "containers"
SUITE: Final = "bookworm"
DEBIAN: Final = "localhost/tiering-debian"
OWN_CERTIFICATES: Final = Path("/usr/local/share/ca-certificates")
TEST: Final = "tests/integration/test_containers.py"
INSTALLED: Final = (
    config.cache_dir() / "installed-ollama-test/ollama"
)  # scripts/installed_ollama.py
LLAMA_CPP: Final = config.cache_dir() / "llama-cpp/llama_cpp_python-0.3.35.tar.gz"


@dataclass(frozen=True)
class Case:
    """`added`: folders of the machine that lie over Debian. `mounted`: what the first stage sees of
    the machine, by its path there. `arguments`: of the build.
    """

    about: str
    added: dict[str, Path] = field(default_factory=dict)
    mounted: dict[str, Path] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[Path]:
        places = (*self.added.values(), *self.mounted.values())
        return [place for place in places if not place.exists()]


CASES: Final = {
    "debian": Case(
        "a Debian without Ollama: the Go engine is built",
        mounted={"/srv/ollama.git": distros.clone()},
        arguments={"CPU": "native", "SOURCE": "/srv/ollama.git"},
    ),
    "installed": Case(
        "an Ollama from v0.30 on: a tree beside it (make installed-ollama)",
        added={"/usr/bin": INSTALLED / "bin", "/usr/lib": INSTALLED / "lib"},
        mounted={"/srv/llama.tar.gz": LLAMA_CPP},
        arguments={"LLAMA_SOURCE": "/srv/llama.tar.gz"},
    ),
}


def buildah(*words: str | Path) -> list[str]:
    """The command, with a storage of our own that needs no file system of a kind."""
    places = ("--root", HERE / "storage", "--runroot", HERE / "run", "--storage-driver", "vfs")
    return ["buildah", *map(str, (*places, *words))]


def said(*words: str | Path) -> str:
    """What buildah prints. SystemExit if it fails."""
    done = subprocess.run(buildah(*words), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"buildah {words[0]} failed")
    return done.stdout.strip()


def make_debian() -> None:
    """A minimal Debian as an image, with this machine's settings for pip and its certificates."""
    if DEBIAN in said("images", "--format", "{{.Name}}").split():
        return
    root = HERE / SUITE
    if not root.exists():
        part = root.with_name(f"{root.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        subprocess.run(["debootstrap", "--variant=minbase", SUITE, part], check=True)
        for source in (Path("/etc/pip.conf"), *OWN_CERTIFICATES.glob("*.crt")):
            if source.is_file():
                place = part / source.relative_to("/")
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, place)
        part.rename(root)
    commit("scratch", {"/": root}, DEBIAN)


def commit(base: str, added: dict[str, Path], name: str) -> None:
    working = said("from", base)
    for place, folder in added.items():
        said("add", "--quiet", working, folder, place)
    said("commit", "--quiet", "--rm", working, name)


def build(name: str, case: Case) -> str:
    """The image's name, which is built by its Dockerfile."""
    cache, base = HERE / "cache", DEBIAN
    cache.mkdir(exist_ok=True)
    if case.added:
        base = f"{DEBIAN}-{name}"
        commit(DEBIAN, case.added, base)
    image = f"localhost/ollama-tiering-{name}"
    words: list[str | Path] = ["bud", "--isolation", "chroot", "--format", "docker"]
    words += ["--file", REPO / "packaging/docker/Dockerfile", "--tag", image]
    words += ["--volume", f"{cache}:/var/cache/ollama-tiering"]
    for place, file in case.mounted.items():
        words += ["--volume", f"{file}:{place}:ro"]
    arguments = {"BASE": base} | case.arguments | distros.network_settings()
    for argument, value in arguments.items():
        words += ["--build-arg", f"{argument}={value}"]
    if subprocess.run(buildah(*words, REPO), check=False).returncode:
        raise SystemExit("the image could not be built")
    return image


def unpack(name: str, image: str) -> Path:
    """A folder with `root`, a link to what lies in the image, and `image.json`, what it says."""
    for old in said("containers", "--quiet", "--filter", f"ancestor={image}").split():
        said("rm", old)
    root = Path(said("mount", said("from", "--pull-never", image)))
    folder = HERE / f"image-{name}"
    folder.mkdir(exist_ok=True)
    link = folder / "root"
    link.unlink(missing_ok=True)
    link.symlink_to(root)
    says = json.loads(said("inspect", "--type", "image", image))["Docker"]["config"]
    (folder / "image.json").write_text(json.dumps(says, indent=1) + "\n", encoding="utf-8")
    said("rmi", "--prune")  # what earlier builds left
    return folder


def try_image(folder: Path) -> bool:
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", TEST]
    environment = os.environ | {"OLLAMA_TIERING_TEST_IMAGE": str(folder)}
    return subprocess.run(words, cwd=REPO, env=environment, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", metavar="CASE", nargs="*")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--build-only", action="store_true", help="do not try it")
    given = parser.parse_args()
    if given.list:
        for name, case in CASES.items():
            print(f"{name:12} {case.about}")
        return 0
    if unknown := [name for name in given.cases if name not in CASES]:
        parser.error(f"no such case: {', '.join(unknown)} (--list names them)")
    missing = [tool for tool in ("buildah", "debootstrap", "unshare") if not shutil.which(tool)]
    if missing:
        print(
            f"error: {', '.join(missing)}: not found: apt-get install buildah debootstrap",
            file=sys.stderr,
        )
        return 6
    if os.geteuid() != 0:
        print("error: roots and mounts are made by root: run it with sudo", file=sys.stderr)
        return 6
    HERE.mkdir(parents=True, exist_ok=True)
    make_debian()
    passed = True
    for name in given.cases or CASES:
        case = CASES[name]
        if lacking := case.missing:
            print(f"SKIPPED {name}: {case.about}: there is no {lacking[0]}", flush=True)
            passed = passed and not given.cases
            continue
        folder = unpack(name, build(name, case))
        print(f"{name}: {folder}", flush=True)
        passed = (given.build_only or try_image(folder)) and passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
