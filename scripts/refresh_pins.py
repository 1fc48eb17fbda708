"""Maintainer: write patches/upstream.toml from a source of Ollama: commits, tree hashes, sums of
the Go modules.

    .venv/bin/python scripts/refresh_pins.py --source PATH|URL [--first v0.16.0] [--last v0.24.0]

Names of objects come from git, sums from `go mod download -json`; nothing in the file is written by
hand.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ollama_tiering.errors import FetchError, TieringError
from ollama_tiering.patchset import manifest, run, upstream
from ollama_tiering.patchset.report import Report

ROOT = Path(__file__).resolve().parents[1] / "patches"
URL = "https://github.com/ollama/ollama.git"

# Everything a hook or an overlay file may touch, and GGML's headers, by which a stock library is
# known to fit (patchset/stock.py). Folders are pinned as a whole, files one by one.
FOLDERS = [
    "anthropic",
    "api",
    "discover",
    "envconfig",
    "kvcache",
    "llama",
    "llm",
    "middleware",
    "ml",
    "ml/backend/ggml/ggml/include",
    "model/input",
    "openai",
    "runner",
    "server",
    "version",
]
FILES = [
    "CMakeLists.txt",
    "CMakePresets.json",
    "cmd/cmd.go",
    "go.mod",
    "go.sum",
    "main.go",
    "ml/backend/ggml/ggml/src/ggml-backend-impl.h",
    "ml/backend/ggml/ggml/src/ggml-impl.h",
]
GO_REQUIRES = (
    ("google.golang.org/grpc", "v1.66.3"),
    ("google.golang.org/genproto/googleapis/rpc", "v0.0.0-20240604185151-ef581f913117"),
)


def stable_tags(source: str, first: str, last: str) -> list[str]:
    """Release tags (no candidates) of the source in the range, oldest first."""
    git = upstream.import_git().Git()
    local = upstream.local_git_dir(source)
    where = ["--git-dir", str(local), "for-each-ref", "--format=x\t%(refname)", "refs/tags"]
    listed = git.execute(
        ["git", *where] if local else ["git", "ls-remote", "--tags", "--refs", source]
    )
    names = (line.partition("refs/tags/")[2] for line in str(listed).splitlines())
    low, high = manifest.version_key(first), manifest.version_key(last)
    tags = [name for name in names if low <= manifest.version_key(name) <= high]
    return sorted(tags, key=manifest.version_key)


def go_require(module: str, version: str) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "go.mod").write_text("module pins\n\ngo 1.24\n")
        done = run.run("go", "mod", "download", "-json", f"{module}@{version}", cwd=Path(scratch))
    if done.returncode:
        raise FetchError(f"go mod download {module}@{version} failed: {done.tail[-1:]}")
    found = json.loads(done.stdout)
    return [
        f'[go.require."{module}"]',
        f'version = "{found["Version"]}"',
        f'sum = "{found["Sum"]}"',
        f'mod_sum = "{found["GoModSum"]}"',
        "",
    ]


def pin_of(cache: upstream.SourceCache, tag: str) -> manifest.TagPin:
    files = cache.files(tag)
    return manifest.TagPin(
        tag,
        cache.commit(tag),
        cache.tree(tag) or "",
        {name: oid for name in FOLDERS if (oid := cache.tree(tag, name))},
        {name: files[name][1] for name in FILES if name in files},
    )


def tag_entries(pins: Iterable[manifest.TagPin]) -> list[str]:
    """Of each tag only what is not as in the one before it; "" is what went."""
    lines: list[str] = []
    before: dict[str, str] = {}
    for pin in pins:
        now = {f'folders."{name}"': oid for name, oid in pin.folders.items()}
        now |= {f'files."{name}"': oid for name, oid in pin.files.items()}
        lines += [f'[tags."{pin.tag}"]', f'commit = "{pin.commit}"', f'tree = "{pin.tree}"']
        lines += [f'{name} = "{oid}"' for name, oid in now.items() if before.get(name) != oid]
        lines += [*(f'{name} = ""' for name in before if name not in now), ""]
        before = now
    return lines


def render(source: str, first: str, last: str, old: dict[str, str]) -> str:
    tags = stable_tags(source, first, last)
    unpinned = manifest.Patchset(ROOT, URL, {}, (), {}, (), {})
    lines = [
        "# Which upstream the patch set fits. Written by scripts/refresh_pins.py, not by hand.",
        "# Names are git object names of upstream's own commits, trees and files. What a tag",
        '# does not name is as in the version before it; "" is what went with that version.',
        f'url = "{URL}"',
        "",
    ]
    for module, version in GO_REQUIRES:
        lines += go_require(module, version)
    if old:
        said = "{build} is the name of what the binary was built from (patchset/identity.py)"
        lines += [f"# Link-time variables; {said}.", "[go.ldflags]"]
        lines += [f'"{name}" = "{value}"' for name, value in old.items()] + [""]
    with tempfile.TemporaryDirectory() as scratch:
        cache = upstream.SourceCache(Path(scratch) / "source.git")
        cache.fetch(tags, source, unpinned, Report(quiet=True))
        lines += tag_entries(pin_of(cache, tag) for tag in tags)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", default=URL)
    parser.add_argument("--first", default="v0.16.0")
    parser.add_argument("--last", default="v0.24.0")
    given = parser.parse_args()
    target = ROOT / "upstream.toml"
    try:
        old = manifest.load(ROOT).go_ldflags if target.is_file() else {}
        target.write_text(render(given.source, given.first, given.last, old), encoding="utf-8")
    except TieringError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
