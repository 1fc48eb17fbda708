"""Maintainer: builds the image of packaging/docker, and tries it as a container.

    sudo scripts/containers [--base IMAGE] [--build-only]

buildah builds it, as everybody's tool would, on a minimal Debian that debootstrap makes once (no
registry of images is needed), or on IMAGE. What the first stage builds of Ollama stays in a folder
of the product's cache, so a second build takes a minute. The network settings of this machine (pip,
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
from pathlib import Path
from typing import Final

from ollama_tiering import config
from scripts import distros

REPO: Final = Path(__file__).resolve().parent.parent
HERE: Final = config.cache_dir() / "containers"
SUITE: Final = "bookworm"
BASE: Final = "localhost/tiering-base"
IMAGE: Final = "localhost/ollama-tiering"
OWN_CERTIFICATES: Final = Path("/usr/local/share/ca-certificates")
TEST: Final = "tests/integration/test_containers.py"


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


def make_base() -> None:
    """A minimal Debian as an image, with this machine's settings for pip and its certificates."""
    if BASE in said("images", "--format", "{{.Name}}").split():
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
    working = said("from", "scratch")
    said("add", "--quiet", working, root, "/")
    said("commit", "--quiet", "--rm", working, BASE)


def build(base: str) -> None:
    """The image, by its Dockerfile."""
    cache, clone = HERE / "cache", distros.clone()
    cache.mkdir(exist_ok=True)
    arguments = {"BASE": base, "CPU": "native", "SOURCE": "/srv/ollama.git"}
    arguments |= distros.network_settings()
    words: list[str | Path] = ["bud", "--isolation", "chroot", "--format", "docker"]
    words += ["--file", REPO / "packaging/docker/Dockerfile", "--tag", IMAGE]
    words += ["--volume", f"{cache}:/var/cache/ollama-tiering"]
    words += ["--volume", f"{clone}:/srv/ollama.git:ro"] if clone.is_dir() else []
    for name, value in arguments.items():
        words += ["--build-arg", f"{name}={value}"]
    if subprocess.run(buildah(*words, REPO), check=False).returncode:
        raise SystemExit("the image could not be built")


def unpack() -> Path:
    """A folder with `root`, a link to what lies in the image, and `image.json`, what it says."""
    for old in said("containers", "--quiet", "--filter", f"ancestor={IMAGE}").split():
        said("rm", old)
    root = Path(said("mount", said("from", "--pull-never", IMAGE)))
    folder = HERE / "image"
    folder.mkdir(exist_ok=True)
    link = folder / "root"
    link.unlink(missing_ok=True)
    link.symlink_to(root)
    image = json.loads(said("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    (folder / "image.json").write_text(json.dumps(image, indent=1) + "\n", encoding="utf-8")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", help="an image that buildah can get, instead of a Debian")
    parser.add_argument("--build-only", action="store_true", help="do not try it")
    given = parser.parse_args()
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
    if given.base is None:
        make_base()
    build(given.base or BASE)
    folder = unpack()
    print(folder, flush=True)
    if given.build_only:
        return 0
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", TEST]
    environment = os.environ | {"OLLAMA_TIERING_TEST_IMAGE": str(folder)}
    return subprocess.run(words, cwd=REPO, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
