#!/usr/bin/env python3
"""Maintainer: of a lock, keeps the hashes of files that a machine of ours may install: source, and
wheels for Linux on x86-64 or ARM64 with Python 3.11 or later.

    scripts/linux_hashes.py LOCK PYLOCK    PYLOCK: the same releases as pylock.toml, which has names
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_PLATFORM = re.compile(r"any|(?:many|musl)?linux.*_(?:x86_64|aarch64)")
_PYTHON = re.compile(r"(?:py\d*\.)?py3|py3\d*|cp3(?:1[1-9]|[2-9]\d)")


def installable(url: str) -> bool:
    name = url.rpartition("/")[2]
    if not name.endswith(".whl"):
        return True
    pythons, abi, platforms = name.removesuffix(".whl").rsplit("-", 3)[1:]
    fits = abi == "abi3" or _PYTHON.fullmatch(pythons)
    return bool(fits) and any(map(_PLATFORM.fullmatch, platforms.split(".")))


def main(lock: Path, pylock: Path) -> None:
    kept = {
        f"--hash=sha256:{file['hashes']['sha256']}"
        for package in tomllib.loads(pylock.read_text())["packages"]
        for file in (*package.get("wheels", ()), *filter(None, [package.get("sdist")]))
        if installable(file["url"])
    }
    blocks = re.split(r"(?m)^(?=\S)", lock.read_text())  # a package each
    lock.write_text("".join(_block(block.splitlines(), kept) for block in blocks))


def _block(lines: list[str], kept: set[str]) -> str:
    hashes = [line.strip(" \\") for line in lines if line.startswith("    --hash")]
    found = [f"    {each}" for each in hashes if each in kept]
    if hashes and not found:
        raise SystemExit(f"no file of {lines[0]} can be installed")
    head = [line for line in lines if not line.startswith("    ")]
    notes = [line for line in lines if line.startswith("    #")]
    return "".join(
        f"{line}\n" for line in [*head, *[f"{each} \\" for each in found[:-1]], *found[-1:], *notes]
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
