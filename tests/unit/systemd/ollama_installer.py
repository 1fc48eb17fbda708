"""Ollama's own installer, run below a directory: programs that stand for sudo, curl, systemctl and
the like are all that it finds, and what it has sudo do is done there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

# What it does of itself, in the order in which it does it; for where there is no source of Ollama.
STEPS = """set -eu
[ -d "$OLLAMA_INSTALL_DIR/lib/ollama" ] && sudo rm -rf /usr/local/lib/ollama
sudo install -d /usr/local/bin /usr/local/lib/ollama
curl | sudo tar -xzf - -C /usr/local
id ollama || sudo useradd ollama
echo "[Service]
ExecStart=/usr/local/bin/ollama serve
User=ollama
Environment=\"PATH=$PATH\"" | sudo tee /etc/systemd/system/ollama.service >/dev/null
systemctl is-system-running
sudo systemctl daemon-reload
sudo systemctl enable ollama
sudo systemctl restart ollama
"""

_REAL = "awk cat chmod dirname env grep gzip install ln mkdir mktemp rm sed sh tar tee uname xargs"
_SUDO = """#!/bin/sh
case "$1" in install|ln|rm|systemctl|tar|tee|useradd|usermod) ;; *) echo "no: $*" >&2; exit 99; esac
command=$1; shift; left=$#
while [ $left -gt 0 ]; do
  word=$1; shift; left=$((left - 1))
  case "$word" in
    -o0|-g0) continue;;  # only root may give files away
    /etc/*|/usr/*|/bin/*) word="$ROOT$word";;
  esac
  set -- "$@" "$word"
done
exec "$command" "$@"
"""
_SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$ASKED"
case "$1" in
  is-system-running) echo running;;
  enable)
    mkdir -p "$ROOT/etc/systemd/system/default.target.wants"
    ln -sf /etc/systemd/system/ollama.service "$ROOT/etc/systemd/system/default.target.wants/";;
esac
"""
_STAND_INS = {
    "sudo": _SUDO,
    "systemctl": _SYSTEMCTL,
    "curl": '#!/bin/sh\ncase "$*" in *--head*) exit 22; esac\nexec cat "$RELEASE"\n',
    "id": '#!/bin/sh\n[ "$1" = -u ] && echo 1000\n',  # not root, and the user `ollama` is there
    "whoami": "#!/bin/sh\necho somebody\n",
    "getent": "#!/bin/sh\nexit 2\n",
    "useradd": "#!/bin/sh\n",
    "usermod": "#!/bin/sh\n",
}


class OllamaInstaller:
    """`script` is the installer's text; what it installs is what lies in a folder."""

    def __init__(self, script: str, root: Path, scratch: Path) -> None:
        looks = '[ -d "$OLLAMA_INSTALL_DIR'
        assert looks in script  # the one place where it reads without sudo
        self._script = script.replace(looks, looks.replace('"$', '"$ROOT$'))
        self._root, self._scratch = root, scratch
        # The name tells the installer that /usr/local/bin is on the PATH.
        self._programs = scratch / "usr/local/bin"
        self._programs.mkdir(parents=True)
        for name in _REAL.split():
            real = shutil.which(name)
            assert real, name
            (self._programs / name).symlink_to(real)
        for name, text in _STAND_INS.items():
            (self._programs / name).write_text(text)
            (self._programs / name).chmod(0o755)
        (root / "etc/systemd/system").mkdir(parents=True, exist_ok=True)

    def run(self, release: Path) -> list[str]:
        """Installs `release`, a folder with bin and lib; what systemctl was asked."""
        archive, asked = self._scratch / "release.tgz", self._scratch / "asked"
        with tarfile.open(archive, "w:gz") as file:
            for name in ("bin", "lib"):
                file.add(release / name, name)
        asked.write_text("")
        shell = os.path.realpath(self._programs / "sh")
        done = subprocess.run(
            [shell, "-c", self._script],
            env={
                "PATH": str(self._programs),
                "ROOT": str(self._root),
                "RELEASE": str(archive),
                "ASKED": str(asked),
                "TMPDIR": str(self._scratch),
                "OLLAMA_INSTALL_DIR": "/usr/local",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return asked.read_text().splitlines()
