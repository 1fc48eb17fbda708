"""A build that fails: what is said, and what is built instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.errors import BuildError, MissingTool, TieringError
from ollama_tiering.patchset import binary, build, failure, finished
from ollama_tiering.patchset.binary import own_build
from ollama_tiering.patchset.failure import DoesNotCompile
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache
from tests.unit.patchset.conftest import FakeTools, Make

NATIVE = build.BuildOptions(tag="v0.16.0", cpu="native", cuda="off")
TAG = {"tag": "v0.16.0", "cuda": "off"}
# As Go says it where the linker finds something missing.
LINKER = (
    "# github.com/ollama/ollama\n"
    "/usr/local/go/pkg/tool/linux_amd64/link: running gcc failed: exit status 1\n"
    f"/usr/bin/gcc -m64 -o $WORK/a.out {' '.join(f'/tmp/go-link-1/{n:06}.o' for n in range(230))}\n"
    "/usr/bin/ld: /tmp/go-link-1/000065.o: in function `extra_types()':\n"
    "ggml-cpu.cpp:(.text+0x1): undefined reference to `ggml_backend_amx_buffer_type()'\n"
    "collect2: error: ld returned 1 exit status"
)
# cgo fails in a native build only.
GO = """
case "$1 $2" in
"env GOVERSION") echo go1.26.0 ;;
"build "*)
    case "$CGO_CFLAGS" in *march=native*) echo "$FAKE_NATIVE_FAILS" >&2; exit 1;; esac
    [ -z "$FAKE_GO_FAILS" ] || { echo "$FAKE_GO_FAILS" >&2; exit 1; }
    while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
    echo "built with $CGO_CFLAGS" >"$out" ;;
esac
"""


@pytest.fixture
def world(
    patchset: Patchset,
    cache: SourceCache,
    fake_tools: FakeTools,
    monkeypatch: pytest.MonkeyPatch,
) -> FakeTools:
    monkeypatch.setattr(binary.manifest, "load", lambda: patchset)
    monkeypatch.setenv("FAKE_NATIVE_FAILS", LINKER)
    fake_tools.add("go", GO)
    return fake_tools


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]


def test_the_linker_is_heard_and_not_its_objects(world: FakeTools, make: Make) -> None:
    with pytest.raises(DoesNotCompile) as caught:
        make(NATIVE)
    first, *told = caught.value.message.splitlines()
    assert first.startswith("go failed with exit code 1; log: ")
    assert told == [
        "  ggml-cpu.cpp:(.text+0x1): undefined reference to `ggml_backend_amx_buffer_type()'",
        "  collect2: error: ld returned 1 exit status",
    ]


def test_the_first_errors_are_shown_however_much_follows(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    noise = "\n".join(f"x.h:{n}: note: here, error: or there" for n in range(400))
    said = (
        f"old.c:1: error: the first\nold.c:1: error: the first\nwide: error: {'x' * 5000}\n{noise}"
    )
    monkeypatch.setenv("FAKE_GO_FAILS", said)
    for _ in range(2):  # the log of an earlier build is not read
        with pytest.raises(DoesNotCompile) as caught:
            make(NATIVE)
        _, *told = caught.value.message.splitlines()
        assert told[0] == "  old.c:1: error: the first"
        assert len(told) == 2
        assert len(told[1]) < 400
        assert failure.first_error(caught.value) == "old.c:1: error: the first"
        monkeypatch.setenv("FAKE_GO_FAILS", said + "\n")


def test_what_does_not_compile_for_this_processor_is_built_for_every_one(
    world: FakeTools, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ({}, {"cpu": "native"}):
        made = own_build(Report(quiet=True), **TAG, **given)
        assert made.parents[1].name == "v0.16.0-variants"
        assert made.read_text() == "built with \n"
        (said,) = _lines(capsys)
        assert "undefined reference to `ggml_backend_amx_buffer_type()'" in said
        assert "--cpu variants" in said
    count = len(world.calls("go build"))
    assert own_build(Report(quiet=True), **TAG) == made  # and from now on that is the kind
    assert len(world.calls("go build")) == count
    assert _lines(capsys) == []


@pytest.mark.parametrize(
    "said",
    [
        "write /x: No space left on device",
        "dial tcp: lookup proxy.golang.org: no such host",
        "x: module lookup disabled by GOPROXY=off",
        'x: reading https://proxy/x.zip: 502 Bad Gateway\n\tserver response: "x"',
        "g++: fatal error: Killed signal terminated program cc1plus",
    ],
)
def test_what_a_second_build_cannot_cure_starts_none(
    world: FakeTools, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv("FAKE_NATIVE_FAILS", said)
    with pytest.raises(BuildError) as caught:
        own_build(Report(quiet=True), **TAG)
    assert type(caught.value) is BuildError
    assert len(world.calls("go build")) == 1


def test_nor_does_an_interrupt_or_a_missing_compiler(
    world: FakeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (KeyboardInterrupt(), MissingTool("x")):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(binary, "build", fail)
        with pytest.raises(type(error)):
            own_build(Report(quiet=True), **TAG)


@pytest.mark.parametrize("second", ["compiler", "tool"])
def test_where_both_fail_the_first_error_is_the_one_to_see(
    world: FakeTools,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    second: str,
) -> None:
    if second == "compiler":
        monkeypatch.setenv("FAKE_GO_FAILS", "another.c:1: error: no")
    else:
        world.remove("make")
    with pytest.raises(TieringError, match="ggml_backend_amx_buffer_type"):
        own_build(Report(quiet=True), **TAG)
    assert len(_lines(capsys)) == 2
    assert finished.programs() == []


def test_a_build_for_every_processor_has_no_other_kind_to_go_to(
    world: FakeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GO_FAILS", "x.c:1: error: no")
    with pytest.raises(DoesNotCompile):
        own_build(Report(quiet=True), **TAG, cpu="variants")
    assert len(world.calls("go build")) == 1


def test_the_log_may_be_gone(tmp_path: Path) -> None:
    done = failure.Finished(1, "", ("x.go:3: undefined: nonsense",))
    error = failure.failed("go", done, tmp_path / "nothing", tmp_path)
    assert "undefined: nonsense" in error.message
