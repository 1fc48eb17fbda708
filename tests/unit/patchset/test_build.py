from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ollama_tiering.config import MemoryLimit
from ollama_tiering.errors import BuildError, MissingTool, UnsupportedUpstream
from ollama_tiering.patchset import build, estimate, finished, go_env, manifest
from ollama_tiering.patchset.finished import source_of
from ollama_tiering.patchset.go_env import go_environment
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run
from ollama_tiering.patchset.upstream import SourceCache
from tests.unit.patchset.conftest import FAKE_GO, FakeTools, Make

NATIVE = build.BuildOptions(tag="v0.16.0", cpu="native", cuda="off")
VARIANTS = replace(NATIVE, cpu="variants")


def _newest(options: build.BuildOptions) -> Path:
    return finished.programs(build.plan(options).name)[0]


def test_native_needs_no_cmake_and_compiles_for_this_cpu(fake_tools: FakeTools, make: Make) -> None:
    fake_tools.remove("cmake")
    binary = make(NATIVE)
    assert binary == _newest(NATIVE)
    assert binary.read_text().startswith("built with -O3 -march=native -DTIERING_CPU_")
    assert "tierInit" in (source_of(binary) / "kvcache/causal.go").read_text()
    (command,) = fake_tools.calls("go build")
    assert "-mod=readonly" in command
    assert "-X=github.com/ollama/ollama/version.Version=0.16.0" in command


def test_the_first_build_compiles_cpp_while_modules_are_fetched(
    fake_tools: FakeTools, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    monkeypatch.setattr(estimate, "is_first", lambda _cache: True)
    make(replace(NATIVE, go_tags=("x",)))
    early, whole = fake_tools.calls("go build")
    assert early.split()[-2:] == list(build._WITHOUT_MODULES)
    options = early.removesuffix(" ".join(build._WITHOUT_MODULES))
    assert whole.startswith(options), "else Go's cache takes them for other packages"
    assert "-tags x" in options
    for package in build._WITHOUT_MODULES:
        assert package.startswith("./")


def test_variants_run_upstreams_presets_first(fake_tools: FakeTools, make: Make) -> None:
    binary = make(VARIANTS)
    assert fake_tools.calls("cmake --") == [
        "cmake --version",
        "cmake --preset CPU -DCMAKE_CUDA_COMPILER=NOTFOUND",
        f"cmake --build --preset CPU --parallel {os.cpu_count()}",
    ]
    assert binary.read_text() == "built with \n"
    assert binary == _newest(VARIANTS)
    assert not finished.programs("v0.16.0-native")


def test_nothing_changed_compiles_nothing_and_is_quick(fake_tools: FakeTools, make: Make) -> None:
    make(VARIANTS)
    count = len(fake_tools.calls("go build")) + len(fake_tools.calls("cmake"))
    started = time.monotonic()
    make(VARIANTS)
    assert time.monotonic() - started < 5
    assert len(fake_tools.calls("go build")) + len(fake_tools.calls("cmake")) == count


def test_a_changed_overlay_file_compiles_again_in_the_same_tree(
    patches: Path, cache: SourceCache, report: Report, fake_tools: FakeTools
) -> None:
    first = build.build(NATIVE, manifest.load(patches), cache, report)
    tree = source_of(first)
    kept = (tree / "main.go").stat()
    (patches / "overlay/kvcache/tier.go").write_text("package kvcache // new\n")
    second = build.build(NATIVE, manifest.load(patches), cache, report)
    assert second != first
    assert source_of(second) == tree
    assert len(fake_tools.calls("go build")) == 2
    assert (tree / "main.go").stat().st_mtime_ns == kept.st_mtime_ns
    assert (tree / "kvcache/tier.go").read_text() == "package kvcache // new\n"


@pytest.mark.parametrize("damage", ["deleted", "overwritten"])
def test_a_lost_binary_is_built_again(damage: str, make: Make) -> None:
    binary = make(NATIVE)
    wanted = binary.read_text()
    binary.unlink()
    if damage == "overwritten":
        binary.write_text("")
    assert make(NATIVE).read_text() == wanted


def test_other_flags_or_another_go_compile_again(
    fake_tools: FakeTools, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    make(NATIVE)
    monkeypatch.setenv("CGO_CFLAGS", "-O1")
    assert make(NATIVE).read_text() == "built with -O1\n"
    assert len(fake_tools.calls("go build")) == 2


def test_stock_is_built_beside_without_the_patch_set(make: Make) -> None:
    patched = make(NATIVE)
    stock = make(replace(NATIVE, stock=True))
    assert "tierInit" not in (source_of(stock) / "kvcache/causal.go").read_text()
    assert build.built_binaries() == [patched]


def test_build_tags_make_a_binary_beside_the_ordinary_one(
    fake_tools: FakeTools, make: Make
) -> None:
    plain = make(NATIVE)
    tagged = make(replace(NATIVE, go_tags=("x",)))
    assert (source_of(tagged), tagged.name) == (source_of(plain), "ollama-x")
    assert "-tags x" in fake_tools.calls("go build")[1]
    make(NATIVE)
    assert len(fake_tools.calls("go build")) == 2


def test_a_compile_failure_names_the_log_and_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    monkeypatch.setenv("FAKE_GO_FAILS", "kvcache/tier.go:3: undefined: nonsense")
    with pytest.raises(BuildError, match=r"exit code 1; log: .*build\.log") as caught:
        make(NATIVE)
    assert caught.value.exit_code == 7
    assert "undefined: nonsense" in caught.value.message
    log = build.plan(NATIVE).log.read_text()
    assert log.startswith("+ ")
    assert "undefined: nonsense" in log
    monkeypatch.delenv("FAKE_GO_FAILS")
    assert make(NATIVE).is_file()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("write /x: No space left on device", "no space left"),
        ("g++: fatal error: Killed signal terminated program", "--jobs 1"),
        ("dial tcp: lookup proxy: no such host", "GOPROXY"),
    ],
)
def test_known_causes_get_their_cure(
    monkeypatch: pytest.MonkeyPatch, output: str, said: str, make: Make
) -> None:
    monkeypatch.setenv("FAKE_GO_FAILS", output)
    with pytest.raises(BuildError) as caught:
        make(NATIVE)
    assert said in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(("gone", "said"), [("gcc", "C compiler"), ("g++", r"C\+\+ compiler")])
def test_a_missing_compiler_says_how_to_install_one(
    fake_tools: FakeTools, gone: str, said: str, make: Make
) -> None:
    fake_tools.remove(gone)
    fake_tools.add("apt-get", "")
    with pytest.raises(MissingTool, match=said) as caught:
        make(NATIVE)
    assert caught.value.exit_code == 6
    assert "apt-get install build-essential" in str(caught.value.hint)


def test_cuda_on_without_nvcc_is_a_missing_tool(make: Make) -> None:
    if Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("this machine has a CUDA toolkit at the usual place")
    with pytest.raises(MissingTool, match="nvcc"):
        make(replace(NATIVE, cuda="on"))


def test_cuda_goes_through_the_preset_of_its_version(fake_tools: FakeTools, make: Make) -> None:
    fake_tools.add("nvcc", 'echo "Cuda compilation tools, release 12.8, V12.8.93"')
    options = replace(VARIANTS, cuda="auto", cuda_arch="90")
    binary = make(options)
    assert binary.parents[1].name == "v0.16.0-variants-cuda12"
    calls = fake_tools.calls("cmake --")
    nvcc = fake_tools.bin / "nvcc"
    assert calls[1] == (
        f"cmake --preset CUDA 12 -DCMAKE_CUDA_COMPILER={nvcc} -DCMAKE_CUDA_ARCHITECTURES=90"
    )
    assert [call.split("--preset ")[1].split(" --")[0] for call in calls[2:]] == ["CPU", "CUDA 12"]


def test_a_cuda_without_preset_is_unsupported(fake_tools: FakeTools, make: Make) -> None:
    fake_tools.add("nvcc", 'echo "release 10.2"')
    with pytest.raises(UnsupportedUpstream, match="no preset for CUDA 10"):
        make(replace(NATIVE, cuda="on"))


def test_an_unpinned_tag_needs_allow_untested(upstream_repo: Path, make: Make) -> None:
    options = replace(NATIVE, tag="v0.18.0")
    with pytest.raises(UnsupportedUpstream):
        make(options)


@pytest.mark.parametrize("named", [None, "clang-15"])
def test_go_is_told_of_the_compiler_that_is_there(
    fake_tools: FakeTools, monkeypatch: pytest.MonkeyPatch, named: str | None, make: Make
) -> None:
    """By itself it looks for gcc and g++. What the person names counts before all."""
    for name in ("gcc", "g++"):
        fake_tools.remove(name)
    for name in ("clang", "clang++", "clang-15"):
        fake_tools.add(name, "")
    if named:
        monkeypatch.setenv("CC", named)
    fake_tools.add("go", FAKE_GO.replace("built with", "$CC $CXX"))
    binary = make(NATIVE)
    assert binary.read_text().split()[:2] == [named or "clang", "clang++"]


def test_where_gcc_is_nothing_is_said_of_compilers(fake_tools: FakeTools) -> None:
    assert not {"CC", "CXX"} & build.go_environment().keys()


def test_go_caches_are_ours_unless_the_person_has_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = go_environment()
    assert str(environment["GOCACHE"]).startswith(os.environ["OLLAMA_TIERING_CACHE"])
    assert environment["GOFLAGS"] == "-modcacherw"
    monkeypatch.setenv("GOCACHE", "/mine")
    monkeypatch.setenv("GOFLAGS", "-p=1")
    environment = go_environment()
    assert "GOCACHE" not in environment
    assert environment["GOFLAGS"] == "-p=1 -modcacherw"


@pytest.mark.parametrize(
    ("gib", "jobs", "own", "wanted"),
    [
        *[(16, 2, None, "400"), (4, 2, None, "400"), (3, 2, None, None), (16, 16, None, None)],
        (64, 2, "50", None),
    ],
)
def test_go_frees_memory_late_where_there_is_enough_for_each_job(
    monkeypatch: pytest.MonkeyPatch, gib: int, jobs: int, own: str | None, wanted: str | None
) -> None:
    monkeypatch.setattr(go_env, "memory_limit", lambda: MemoryLimit(gib << 30, None))
    monkeypatch.setenv("GOGC", own) if own else monkeypatch.delenv("GOGC", raising=False)
    assert go_env.collector(jobs).get("GOGC") == wanted


# What a person, a distribution or a packager leaves in the environment, or `go env -w` in a file.
TARGETS = {
    **{"GOARCH": "s390x", "GOOS": "windows", "GO111MODULE": "off", "GOWORK": "/x/go.work"},
    **{"GOEXPERIMENT": "boringcrypto", "CGO_ENABLED": "0", "GOTOOLCHAIN": "go1.99"},
    "GOFLAGS": "-mod=vendor -p=3 --modfile=/x/go.mod -overlay=/x",
}
ASKED = (*TARGETS, "CC", "CGO_CFLAGS", "GOAMD64", "GOPROXY", "GONOSUMDB")


def _go_says(go: str) -> dict[str, str]:
    said = run(go, "env", *ASKED, env=go_environment()).stdout.splitlines()
    return dict(zip(ASKED, said, strict=True))


@pytest.mark.skipif(not shutil.which("go"), reason="needs Go")
@pytest.mark.parametrize("how", ["environment", "go env -w"])
def test_the_target_is_ours_whatever_go_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    file = tmp_path / "home/.config/go/env"
    file.parent.mkdir(parents=True)
    go, fetching = shutil.which("go") or "", {"GOPROXY": "https://goproxy.cn", "GONOSUMDB": "x.org"}
    for name in ("GOPROXY", "GONOSUMDB", *TARGETS):
        monkeypatch.delenv(name, raising=False)
    plain = _go_says(go)
    if how == "environment":
        for name, value in (TARGETS | fetching).items():
            monkeypatch.setenv(name, value)
    else:
        more = {"CC": "nothing", "CGO_CFLAGS": "-Onothing", "GOAMD64": "v4"}
        told = {n: v for n, v in (TARGETS | fetching | more).items() if n != "GOFLAGS"}
        file.write_text("".join(f"{name}={value}\n" for name, value in told.items()))
    flags = {"GOFLAGS": "-p=3 -modcacherw"} if how == "environment" else {}
    assert _go_says(go) == plain | fetching | flags
    assert run(go, "env", "GOARCH", env=go_environment("arm64")).stdout == "arm64\n"


def test_every_call_of_go_has_it(
    fake_tools: FakeTools, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    monkeypatch.setenv("GOARCH", "s390x")
    fake_tools.add("go", f'echo "$GOARCH|$GO111MODULE|$GOENV $*" >>"{fake_tools.log}"\n{FAKE_GO}')
    make(NATIVE)
    calls = fake_tools.calls("|") + fake_tools.calls("s390x|")
    assert len(calls) >= 3
    assert all(call.startswith("|on|off ") for call in calls)
