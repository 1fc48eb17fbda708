"""Maintainer: lists what lies in a Debian package of ours, in CycloneDX's format (JSON).

    .venv/bin/python -m scripts.sbom DEB FILE [--tool CYCLONEDX-PY]

The tool reads the package's own environment: versions, licences, who needs whom. With
SOURCE_DATE_EPOCH the same package gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from ollama_tiering import __version__
from scripts.deb import PLACE, REPO


def write(deb: Path, file: Path, tool: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tiering-sbom-") as scratch:
        root = Path(scratch)
        subprocess.run(["dpkg-deb", "-x", deb, root], check=True)
        python = root / PLACE / "bin/python3"
        system = python.readlink().name  # python3.11 of /usr/bin, which no package of ours has
        (root / "usr/bin" / system).symlink_to(Path("/usr/bin", system))
        how = ("--pyproject", REPO / "pyproject.toml", "--output-reproducible", "--sv", "1.6")
        subprocess.run([tool, "environment", *how, "-o", file, python], check=True)
    document = json.loads(file.read_text())
    document["metadata"]["component"]["version"] = __version__  # pyproject.toml has none
    file.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("deb", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tool", type=Path, default=Path("cyclonedx-py"))
    given = parser.parse_args()
    write(given.deb, given.file, given.tool)


if __name__ == "__main__":
    main()
