"""Maintainer: a Debian package of a wheel, with the Python packages that it needs.

    .venv/bin/python -m scripts.deb WHEEL FOLDER [--python /usr/bin/python3] [--uv UV]

It is for the Debian or Ubuntu whose own python3 is named (3.11 is Debian 12's, 3.13 Debian 13's):
compiled packages are of one version. All lies in /usr/lib/ollama-tiering, which is a virtual
environment at a fixed place; `dpkg` owns every file of it, also what Python would compile at its
first start, so that it removes all of them. SOURCE_DATE_EPOCH dates the files, and the same inputs
give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from email.parser import HeaderParser
from email.utils import formatdate
from pathlib import Path
from string import Template
from typing import Final

from ollama_tiering import __version__
from scripts import man_page

REPO: Final = Path(__file__).resolve().parent.parent
OURS: Final = REPO / "packaging/debian"
NAME: Final = "ollama-tiering"
PLACE: Final = f"usr/lib/{NAME}"
_START: Final = """\
#!/{place}/bin/python3 -I
from ollama_tiering.cli import main

main()
"""
_COMPLETIONS: Final = {
    "bash": "usr/share/bash-completion/completions/tiering",
    "zsh": "usr/share/zsh/vendor-completions/_tiering",
    "fish": "usr/share/fish/vendor_completions.d/tiering.fish",
}
_RUN: Final = (Path(PLACE, "bin/tiering"), Path("DEBIAN/prerm"))
_STEADY: Final = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}


def said(*command: str | Path, **env: str) -> str:
    done = subprocess.run(
        command, env=os.environ | env, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"error: {' '.join(map(str, command[:3]))} … failed")
    return done.stdout.strip()


def make(wheel: Path, folder: Path, python: Path, uv: Path, epoch: int) -> Path:
    """The package's file, in `folder`."""
    minor = said(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    architecture = said("dpkg", "--print-architecture")
    version = f"{__version__}+python{minor}"
    with tempfile.TemporaryDirectory(prefix="tiering-deb-") as scratch:
        root = Path(scratch) / "root"
        site = root / PLACE / f"lib/python{minor}/site-packages"
        site.mkdir(parents=True)
        _packages(wheel, site, python, uv)
        _environment(root, minor)
        _documents(root, site, version, epoch)
        _compile(root, site, python)
        _control(root, version, architecture, minor)
        _steady(root, epoch)
        target = folder / f"{NAME}_{version}_{architecture}.deb"
        # one thread, whatever the machine has: more cut the data otherwise
        pack = ("dpkg-deb", "--root-owner-group", "--threads-max=1", "-Zxz", "--build")
        said(*pack, root, target, SOURCE_DATE_EPOCH=str(epoch))
    return target


def _packages(wheel: Path, site: Path, python: Path, uv: Path) -> None:
    """Those of the lock, and the wheel, without what no command loads."""
    lock = REPO / "requirements.lock"
    options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-config")
    copied = ("--link-mode", "copy", "--target", site, "--python", python)
    said(uv, "pip", "install", *options, *copied, "-r", lock)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    shutil.rmtree(site / "bin", ignore_errors=True)
    (site / ".lock").unlink(missing_ok=True)
    venv = site.parents[2]
    light = 'repo=$1; . "$repo/scripts/venv.sh"; venv=$2; lighten'
    said("bash", "-euc", light, "bash", REPO, venv)


def _environment(root: Path, minor: str) -> None:
    """What makes a folder a virtual environment, and the command."""
    place = root / PLACE
    (place / "bin").mkdir()
    (place / "bin/python3").symlink_to(f"../../../bin/python{minor}")
    home = "home = /usr/bin\ninclude-system-site-packages = false\n"
    (place / "pyvenv.cfg").write_text(f"{home}version = {minor}\n")
    start = place / "bin/tiering"
    start.write_text(_START.format(place=PLACE))
    (root / "usr/bin").mkdir()
    (root / "usr/bin/tiering").symlink_to(f"../lib/{NAME}/bin/tiering")


def _documents(root: Path, site: Path, version: str, epoch: int) -> None:
    """Manual, completions, licences, what changed."""
    day = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    _zipped(root / "usr/share/man/man1/tiering.1.gz", man_page.page(day))
    for shell, path in _COMPLETIONS.items():
        script = said(sys.executable, "-m", "ollama_tiering", "completion", shell)
        _write(root / path, f"{script}\n")
    about = root / "usr/share/doc" / NAME
    _write(about / "copyright", _licences(site))
    _zipped(about / "changelog.gz", (REPO / "docs/changes.md").read_text(encoding="utf-8"))
    entry = f"{NAME} ({version}) unstable; urgency=medium\n\n  * See changelog.gz.\n\n"
    signed = f" -- {_maintainer()}  {formatdate(epoch)}\n"
    _zipped(about / "changelog.Debian.gz", entry + signed)
    overrides = (OURS / "lintian-overrides").read_text()
    _write(root / "usr/share/lintian/overrides" / NAME, overrides)


def _licences(site: Path) -> str:
    """Ours, and for each package that is in it what its makers say."""
    text = [f"{NAME}\n\n{(REPO / 'LICENSE').read_text()}"]
    text.append(f"\n\nPython packages in /{PLACE}, with the licences that their makers name.\n")
    text.append("Apache-2.0 is also in /usr/share/common-licenses/Apache-2.0.\n\n")
    for metadata in sorted(site.glob("*.dist-info/METADATA")):
        said_of = HeaderParser().parsestr(metadata.read_text(encoding="utf-8"))
        name, licence = said_of["Name"], said_of["License-Expression"] or said_of["License"]
        kinds = (one for one in said_of.get_all("Classifier", []) if one.startswith("License ::"))
        short = (licence or next(kinds, "see its files")).splitlines()[0].strip()
        text.append(f"{name} {said_of['Version']}: {short}\n")
        where = metadata.parent
        files = [*where.glob("LICEN[CS]E*"), *where.glob("COPYING*"), *where.glob("licenses/**/*")]
        root = site.parents[5]
        text += [f"    /{one.relative_to(root)}\n" for one in sorted(files) if one.is_file()]
    return "".join(text)


def _compile(root: Path, site: Path, python: Path) -> None:
    """All of it: who starts it may not write there, and root must not."""
    how = ("--invalidation-mode", "unchecked-hash", "-q", "-q", "-s", root, "-p", "/")
    # not checked: a package may carry a file for another Python, which is never loaded
    subprocess.run(
        [python, "-I", "-m", "compileall", *how, site], env=os.environ | _STEADY, check=False
    )


def _control(root: Path, version: str, architecture: str, minor: str) -> None:
    sizes = (path.lstat().st_size for path in root.rglob("*"))
    text = Template((OURS / "control").read_text()).substitute(
        version=version,
        architecture=architecture,
        installed_kib=sum(-(-size // 1024) for size in sizes),
        python=f"python{minor}",
        maintainer=_maintainer(),
    )
    _write(root / "DEBIAN/control", text)
    _write(root / "DEBIAN/prerm", (OURS / "prerm").read_text())
    lines = []
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        if path.is_file() and not path.is_symlink() and inside.parts[0] != "DEBIAN":
            lines.append(f"{hashlib.md5(path.read_bytes()).hexdigest()}  {inside}\n")
    _write(root / "DEBIAN/md5sums", "".join(lines))


def _steady(root: Path, epoch: int) -> None:
    """Modes and times that do not depend on who builds it, and when."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.relative_to(root) in _RUN else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def _maintainer() -> str:
    """Whoever made the commit."""
    return said("git", "-C", REPO, "log", "-1", "--format=%cn <%ce>")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _zipped(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path, default=Path("/usr/bin/python3"))
    parser.add_argument("--uv", type=Path, default=Path("uv"))
    given = parser.parse_args()
    lacking = [tool for tool in ("dpkg-deb", given.uv) if not shutil.which(tool)]
    if lacking:
        raise SystemExit(f"error: {lacking[0]}: not found")
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    given.folder.mkdir(parents=True, exist_ok=True)
    print(make(given.wheel, given.folder, given.python, given.uv, epoch))


if __name__ == "__main__":
    main()
