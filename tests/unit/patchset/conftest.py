"""A small upstream with tags, a patch set that fits it, and stand-ins for the tools of a build."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ollama_tiering.patchset import build, estimate, finished, manifest
from ollama_tiering.patchset.plan import BuildOptions
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache

CAUSAL = "package kvcache\n\nfunc Init() {\n\ta()\n\tb()\n\tc()\n}\n\nfunc Put() {\n\td()\n}\n"
RUNNER = "package runner\n\nfunc Run() {\n\tstart()\n\tserve()\n\tstop()\n}\n"

FIRST_TAG = {
    "go.mod": "module github.com/ollama/ollama\n\ngo 1.24.1\n\nrequire golang.org/x/sys v0.37.0\n",
    "go.sum": "golang.org/x/sys v0.37.0 h1:abc=\ngolang.org/x/sys v0.37.0/go.mod h1:def=\n",
    "main.go": "package main\n\nfunc main() {}\n",
    "CMakePresets.json": '{"configurePresets": [{"name": "CPU"}, {"name": "CUDA 12"}]}\n',
    "kvcache/causal.go": CAUSAL,
    "kvcache/cache.go": "package kvcache\n",
    "kvcache/sub/x.go": "package sub\n",
    "runner/runner.go": RUNNER,
    "runner/tool.sh": "#!/bin/sh\n",
    "docs/a.md": "docs\n",
    "integration/testdata/big.txt": "big\n",
}

HOOK_CAUSAL = """kvcache: tell the tier about new cells

The cells are known here and nowhere else.

Reason: incompatible
Upstream: N/A needs a sidecar
Removes-When: upstream has a cache interface
---
diff --git a/kvcache/causal.go b/kvcache/causal.go
--- a/kvcache/causal.go
+++ b/kvcache/causal.go
@@ -3,6 +3,7 @@ package kvcache
 func Init() {
 \ta()
 \tb()
+\ttierInit()
 \tc()
 }
 
"""

HOOK_RUNNER = """runner: restore before serving

Only the runner knows the prompt.

Reason: incompatible
Upstream: N/A needs a sidecar
Removes-When: never
---
--- a/runner/runner.go
+++ b/runner/runner.go
@@ -2,5 +2,6 @@ package runner
 
 func Run() {
 \tstart()
+\ttierRestore()
 \tserve()
 \tstop()
"""


def git(*args: str, cwd: Path) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *args], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Content and mode of everything below `root`, folders included."""
    found = {}
    for path in sorted(root.rglob("*")):
        content = path.read_bytes() if path.is_file() else b"<folder>"
        found[path.relative_to(root).as_posix()] = (content, path.stat().st_mode)
    return found


@pytest.fixture(autouse=True)
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees the person's cache, settings or git configuration."""
    for name in list(os.environ):
        if name.startswith(("OLLAMA_", "GIT_", "CGO_", "XDG_")) or name in ("CC", "CXX", "GOFLAGS"):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    yield
    finished.release()


@pytest.fixture
def upstream_repo(tmp_path: Path) -> Path:
    """v0.16.0, v0.16.1 (other docs), v0.17.0 (other cache, hooks fit), v0.18.0 (they do not)."""
    repo = tmp_path / "upstream"
    repo.mkdir()
    git("init", "-q", "-b", "main", cwd=repo)
    write_files(repo, FIRST_TAG)
    (repo / "runner/tool.sh").chmod(0o755)
    steps = {
        "v0.16.0": {},
        "v0.16.1": {"docs/a.md": "more docs\n"},
        "v0.17.0": {"kvcache/causal.go": "// new header\n\n" + CAUSAL},
        "v0.18.0": {"kvcache/causal.go": CAUSAL.replace("b()", "bb()")},
    }
    for tag, changes in steps.items():
        write_files(repo, changes)
        git("add", "-A", cwd=repo)
        git("commit", "-q", "--allow-empty", "-m", tag, cwd=repo)
        git("tag", "-a", "-m", tag, tag, cwd=repo)
    return repo


def write_pins(root: Path, repo: Path, tags: list[str]) -> None:
    lines = [f'url = "{repo}"', ""]
    for tag in tags:
        lines += [
            f'[tags."{tag}"]',
            f'commit = "{git("rev-parse", tag + "^{commit}", cwd=repo)}"',
            f'tree = "{git("rev-parse", tag + "^{tree}", cwd=repo)}"',
            f'[tags."{tag}".folders]',
        ]
        lines += [
            f'"{f}" = "{git("rev-parse", f"{tag}:{f}", cwd=repo)}"' for f in ("kvcache", "runner")
        ]
        lines += [f'[tags."{tag}".files]']
        lines += [
            f'"{f}" = "{git("rev-parse", f"{tag}:{f}", cwd=repo)}"' for f in ("go.mod", "go.sum")
        ]
    (root / "upstream.toml").write_text("\n".join(lines) + "\n")


@pytest.fixture
def patches(tmp_path: Path, upstream_repo: Path) -> Path:
    """Two hooks and two overlay files, one in a new folder; pins of v0.16.0 to v0.17.0."""
    root = tmp_path / "patches"
    write_files(
        root,
        {
            "series": "# order\nhooks/go/cells.patch\nhooks/go/restore.patch  # last\n",
            "hooks/go/cells.patch": HOOK_CAUSAL,
            "hooks/go/restore.patch": HOOK_RUNNER,
            "overlay/kvcache/tier.go": "package kvcache\n\nfunc tierInit() {}\n",
            "overlay/tier/deep/proto.go": "package deep\n",
        },
    )
    write_pins(root, upstream_repo, ["v0.16.0", "v0.16.1", "v0.17.0"])
    return root


@pytest.fixture
def patchset(patches: Path) -> manifest.Patchset:
    return manifest.load(patches)


@pytest.fixture
def report() -> Report:
    return Report(quiet=True)


@pytest.fixture
def cache(upstream_repo: Path, patchset: manifest.Patchset, report: Report) -> SourceCache:
    """v0.16.0 and v0.17.0 are fetched."""
    cache = SourceCache()
    cache.fetch(["v0.16.0", "v0.17.0"], str(upstream_repo), patchset, report)
    return cache


@pytest.fixture
def tree(tmp_path: Path, cache: SourceCache) -> Path:
    """A plain tree of v0.16.0."""
    target = tmp_path / "tree"
    cache.extract("v0.16.0", target)
    return target


@dataclass
class FakeTools:
    """A PATH with nothing but stand-ins: what they were asked to do is in `log`."""

    bin: Path
    log: Path

    def add(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.log}"\n{script}\n')
        path.chmod(0o755)

    def remove(self, name: str) -> None:
        (self.bin / name).unlink()

    def calls(self, start: str) -> list[str]:
        if not self.log.exists():
            return []
        return [line for line in self.log.read_text().splitlines() if line.startswith(start)]


FAKE_GO = """
case "$1 $2" in
"env GOVERSION") echo go1.26.0 ;;
"build "*)
    [ -z "$FAKE_GO_FAILS" ] || { echo "$FAKE_GO_FAILS" >&2; exit 1; }
    while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
    echo "built with $CGO_CFLAGS" >"$out" ;;
esac
"""


@pytest.fixture
def fake_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTools:
    """They count what is compiled; it is not the first build of this machine."""
    monkeypatch.setattr(estimate, "is_first", lambda _cache: False)
    folder = tmp_path / "bin"
    folder.mkdir()
    tools = FakeTools(folder, tmp_path / "calls.log")
    tools.add("go", FAKE_GO)
    tools.add("cmake", 'echo "cmake version 3.25.1"')
    for name in ("gcc", "g++", "make"):
        tools.add(name, "")
    for name in ("git", "sh", "env", "cat"):
        real = next(
            Path(d) / name for d in os.environ["PATH"].split(":") if (Path(d) / name).exists()
        )
        (folder / name).symlink_to(real)
    monkeypatch.setenv("PATH", str(folder))
    return tools


Make = Callable[[BuildOptions], Path]


@pytest.fixture
def make(
    patchset: manifest.Patchset, cache: SourceCache, report: Report, fake_tools: FakeTools
) -> Make:
    """Builds with the tools that stand in."""
    return lambda options: build.build(options, patchset, cache, report)
