"""What `-march=native` switches on is what cgo has code for: AMX is left out, by what the compiler
says. Where a compiler and GGML's source are here, both are asked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from ollama_tiering.errors import BuildError
from ollama_tiering.patchset import identity, processor
from tests.unit.patchset.conftest import FakeTools

# A compiler of a processor with AMX: it predefines a macro for each part that no flag switched off.
AMX = """
case " $* " in *" -dM "*) echo '#define __VERSION__ "1"'
for part in ${FAKE_AMX-TILE INT8 BF16 FP16 COMPLEX}; do
    off=$(echo "-mno-amx-$part" | /usr/bin/tr A-Z_ a-z-)
    case " $* " in
    *" ${FAKE_DEAF-$off} "*) ;;
    *march=native*|*sapphire*|*-mamx*) echo "#define __AMX_${part}__ 1" ;;
    esac
done ;; esac
"""
OFF = "-mno-amx-bf16 -mno-amx-complex -mno-amx-fp16 -mno-amx-int8 -mno-amx-tile"


@pytest.fixture
def compilers(fake_tools: FakeTools) -> FakeTools:
    for name in ("gcc", "g++"):
        fake_tools.add(name, AMX)
    return fake_tools


def _without_processor(flags: dict[str, str]) -> dict[str, str]:
    return {name: re.sub(r" -DTIERING_CPU_\w+", "", text) for name, text in flags.items()}


def test_each_part_of_amx_that_the_compiler_switches_on_is_switched_off(
    compilers: FakeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = f"-O3 -march=native {OFF}"
    made = processor.cgo_flags("native")
    assert _without_processor(made) == {"CGO_CFLAGS": wanted, "CGO_CXXFLAGS": wanted}
    assert "-DTIERING_CPU_" in made["CGO_CFLAGS"]
    monkeypatch.setenv("FAKE_AMX", "INT8 OF_2030")
    made = processor.cgo_flags("native")
    assert made["CGO_CXXFLAGS"].endswith(" -mno-amx-int8 -mno-amx-of-2030")
    monkeypatch.setenv("FAKE_AMX", "")
    assert "amx" not in str(processor.cgo_flags("native"))


def test_a_persons_own_flags_have_the_same_cure(
    compilers: FakeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CGO_CFLAGS", "-O2 -march=native")
    monkeypatch.setenv("CGO_CXXFLAGS", "-O2 -march=sapphirerapids")
    for march in ("native", None):  # also of a build for every processor
        made = processor.cgo_flags(march)
        assert _without_processor(made) == {
            "CGO_CFLAGS": f"-O2 -march=native {OFF}",
            "CGO_CXXFLAGS": f"-O2 -march=sapphirerapids {OFF}",
        }
        assert "-DTIERING_CPU_" in made["CGO_CFLAGS"], "Go's cache goes by the text of the flags"


@pytest.mark.parametrize("variable", ["CC", "CGO_CPPFLAGS"])
def test_also_where_they_stand_elsewhere(
    compilers: FakeTools, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "gcc -mamx-int8" if variable == "CC" else "-mamx-int8")
    assert processor.cgo_flags(None)["CGO_CFLAGS"] == OFF


def test_what_a_person_set_is_not_changed_without_need(
    compilers: FakeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert processor.cgo_flags(None) == {}
    monkeypatch.setenv("CGO_CFLAGS", "-O1")
    assert processor.cgo_flags(None) == {"CGO_CFLAGS": "-O1"}
    assert processor.cgo_flags("native")["CGO_CFLAGS"] == "-O1"


def test_a_compiler_that_does_not_listen_is_an_error_with_a_cure(
    compilers: FakeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DEAF", "nothing")
    with pytest.raises(BuildError, match="does not switch AMX off") as caught:
        processor.cgo_flags("native")
    assert "-march=x86-64-v4" in str(caught.value.hint)


# --- real compilers, real source ------------------------------------------------------------------

MARCHES = (
    *("sapphirerapids", "graniterapids", "diamondrapids"),  # with AMX: these are always tried
    *("native", "x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "haswell", "alderlake"),
    *(f"znver{number}" for number in range(1, 6)),
)
COMPILERS = tuple(name for name in ("g++", "clang++") if shutil.which(name))
GGML = "ml/backend/ggml/ggml"


def _knows(compiler: str, march: str) -> bool:
    command = [compiler, f"-march={march}", "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


KNOWN = [(c, m) for c in COMPILERS for m in MARCHES if _knows(c, m)]


def _flags(compiler: str, march: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("CC", {"g++": "gcc", "clang++": "clang"}[compiler])
    monkeypatch.setenv("CXX", compiler)
    return processor.cgo_flags(march)["CGO_CXXFLAGS"].split()


@pytest.mark.parametrize(("compiler", "march"), KNOWN)
def test_no_compiler_here_keeps_amx(
    compiler: str, march: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = _flags(compiler, march, monkeypatch)
    assert "__AMX_" not in identity.macros([compiler], flags, "c++")
    others = identity.macros([compiler], ["-O3", f"-march={march}"], "c++")
    kept = [line for line in others.splitlines() if "__AMX_" not in line]
    now = identity.macros([compiler], flags, "c++").splitlines()
    assert [line for line in now if "TIERING_CPU" not in line] == kept, "nothing else is left out"
