"""What a build with `--gpu stock` has beside it, and what GGML loads of that."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ollama_tiering import config
from ollama_tiering.errors import BuildError, MissingTool, UnsupportedUpstream
from ollama_tiering.patchset import (
    build,
    gpu_libraries,
    gpus,
    identity,
    release_archive,
    stock,
    tools,
)
from ollama_tiering.patchset import shim as compiled
from ollama_tiering.patchset.binary import stock_of_newest
from ollama_tiering.patchset.finished import source_of
from ollama_tiering.patchset.gpu_libraries import BELOW, SHIM, Loaded
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.plan import BuildOptions, plan
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache
from tests.unit.patchset.conftest import FakeTools, Make
from tests.unit.patchset.fake_stock import library, ollama, program
from tests.unit.patchset.test_release_archive import archive

NATIVE = BuildOptions(tag="v0.16.0", cpu="native")
LIBRARY = stock.LIBRARY


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return ollama(tmp_path / "stock")


@pytest.fixture(autouse=True)
def shim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Sources of a shim, and what "compiles" them."""
    sources = tmp_path / "csrc-shim"
    sources.mkdir()
    (sources / "device.cpp").write_text("int main;")

    def put_beside(folder: Path, sources: Path, tree: Path, report: Report) -> bool:
        text = (sources / "device.cpp").read_text()
        if "error" in text:
            raise BuildError("g++: no luck")
        assert (tree / "main.go").is_file()
        if not (folder / SHIM).is_file() or (folder / SHIM).read_text() != text:
            (folder / SHIM).unlink(missing_ok=True)
            (folder / SHIM).write_text(text)
        return True

    monkeypatch.setattr(compiled, "default_sources", lambda _root: sources)
    monkeypatch.setattr(compiled, "put_beside", put_beside)
    return sources


def _of(place: Path, **options: object) -> BuildOptions:
    return replace(NATIVE, cuda=f"stock={place}", **options)  # type: ignore[arg-type]


@pytest.fixture
def built(place: Path, make: Make) -> Path:
    return make(_of(place))


def test_libraries_lie_where_the_loader_looks(built: Path, place: Path) -> None:
    assert built.parents[1].name == "v0.16.0-native-cudastock"
    target = built.parent / BELOW
    files = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    assert files == {
        "libggml-base.so.0",  # the name by which it is asked for; no CPU library
        *(f"cuda_v{n}/{name}" for n in (12, 13) for name in (
            LIBRARY, SHIM, f"libcublas.so.{n}", f"libcublas.so.{n}.8.4")),
    }  # fmt: skip
    for name in ("libggml-base.so.0", f"cuda_v12/{LIBRARY}"):
        own, theirs = target / name, place / "lib/ollama" / name
        assert own.read_bytes() == theirs.read_bytes()
        assert not own.is_symlink()
        assert not own.samefile(theirs), "an update of the stock Ollama would change it"
    cublas = target / "cuda_v13/libcublas.so.13"
    assert cublas.readlink() == place / "lib/ollama/cuda_v13/libcublas.so.13.8.4"
    assert (target / "cuda_v13" / SHIM).read_text() == "int main;"


def test_a_build_for_every_processor_keeps_its_own_base(
    place: Path, fake_tools: FakeTools, make: Make
) -> None:
    """Upstream's own build makes one, with the CPU libraries that load it."""
    mkdir = shutil.which("mkdir", path="/bin:/usr/bin")
    script = f"{mkdir} -p build/lib/ollama; echo own >build/lib/ollama/libggml-base.so.0\n"
    fake_tools.add("cmake", f'[ "$1" = --version ] && echo version 3.25.1 && exit\n{script}')
    binary = make(_of(place, cpu="variants"))
    assert (binary.parent / BELOW / "libggml-base.so.0").read_text() == "own\n"
    assert (binary.parent / BELOW / "cuda_v12" / LIBRARY).is_file()


def test_nothing_changed_copies_and_compiles_nothing(
    built: Path, place: Path, fake_tools: FakeTools, make: Make
) -> None:
    before = {path: path.lstat() for path in (built.parent / BELOW).rglob("*")}
    assert make(_of(place)) == built
    assert {path: path.lstat() for path in (built.parent / BELOW).rglob("*")} == before
    assert len(fake_tools.calls("go build")) == 1


def test_an_update_of_the_stock_ollama_is_taken_over_under_another_name(
    built: Path, place: Path, fake_tools: FakeTools, make: Make
) -> None:
    """The name of the build is that of everything it stores: other kernels, other bits."""
    fresh = library(
        place / "lib/ollama/cuda_v12" / LIBRARY,
        defined=["ggml_backend_init", "better"],
        needed=["libggml-base.so.0"],
    )
    shutil.rmtree(place / "lib/ollama/cuda_v13")
    target = make(_of(place)).parent / BELOW
    assert (target / "cuda_v12" / LIBRARY).read_bytes() == fresh.read_bytes()
    assert not (target / "cuda_v13").exists()
    assert len(fake_tools.calls("go build")) == 2


def test_the_name_of_a_build_covers_the_library(place: Path, patchset: Patchset) -> None:
    given = {
        "tag": "v0.16.0", "tree": "t", "kind": "k", "go_tags": (), "go": (1, 24), "flags": {},
        "cuda": None, "cuda_arch": None,
    }  # fmt: skip
    found = stock.at(place)
    assert found is not None
    without = identity.build_id(patchset, **given)  # type: ignore[arg-type]
    first = identity.build_id(patchset, **given, stock_cuda=found.content())  # type: ignore[arg-type]
    library(place / "lib/ollama/cuda_v13" / LIBRARY, defined=["ggml_backend_init", "x"])
    second = identity.build_id(patchset, **given, stock_cuda=found.content())  # type: ignore[arg-type]
    assert len({without, first, second}) == 3


def test_a_changed_shim_is_compiled_again(built: Path, place: Path, shim: Path, make: Make) -> None:
    (shim / "device.cpp").write_text("int better;")
    second = make(_of(place))
    for folder in ("cuda_v12", "cuda_v13"):
        assert (second.parent / BELOW / folder / SHIM).read_text() == "int better;"
        assert (built.parent / BELOW / folder / SHIM).read_text() == "int main;"


def test_a_shim_that_does_not_compile_is_tried_again(
    built: Path, place: Path, shim: Path, make: Make
) -> None:
    (shim / "device.cpp").write_text("error")
    for _ in range(2):
        with pytest.raises(BuildError, match="no luck"):
            make(_of(place))


def test_a_version_without_a_shim_builds_without(place: Path, shim: Path, make: Make) -> None:
    shutil.rmtree(shim)
    binary = make(_of(place))
    assert not list((binary.parent / BELOW).rglob(SHIM))
    assert (binary.parent / BELOW / "cuda_v12" / LIBRARY).is_file()


def test_out_of_an_archive_it_shares_the_bytes_that_were_unpacked(
    tmp_path: Path, place: Path, make: Make
) -> None:
    path = archive(tmp_path / "o.tgz", root=place)
    binary = make(_of(path))
    own = binary.parent / BELOW / "cuda_v12" / LIBRARY
    assert own.read_bytes() == (place / "lib/ollama/cuda_v12" / LIBRARY).read_bytes()
    assert any(own.samefile(one) for one in release_archive.folder().rglob(LIBRARY))


def test_of_a_build_tree_in_our_cache_it_is_a_copy(place: Path, make: Make) -> None:
    """A linker writes into the file that it finds there."""
    tree = config.cache_dir() / "trees/other"
    tree.parent.mkdir(parents=True)
    place.rename(tree)
    binary = make(_of(tree))
    own = binary.parent / BELOW / "cuda_v12" / LIBRARY
    assert not own.samefile(tree / "lib/ollama/cuda_v12" / LIBRARY)
    assert own.read_bytes() == (tree / "lib/ollama/cuda_v12" / LIBRARY).read_bytes()


def test_what_a_killed_run_left_is_removed(built: Path, place: Path, make: Make) -> None:
    target = source_of(built) / BELOW
    shutil.rmtree(built.parent)
    for name in (".filling-x/cuda_v12", "cuda_v11"):
        (target / name).mkdir(parents=True)
        (target / name / LIBRARY).write_bytes(b"half")
    (source_of(built).parent / gpu_libraries.RECORD).unlink()
    make(_of(place))
    target = built.parent / BELOW
    assert {path.name for path in target.iterdir()} == {"cuda_v12", "cuda_v13", "libggml-base.so.0"}


def test_what_does_not_fit_stops_before_anything_is_compiled(
    place: Path, fake_tools: FakeTools, make: Make
) -> None:
    program(place / "bin/ollama", "0.5.0")
    with pytest.raises(UnsupportedUpstream, match=r"0\.5\.0") as caught:
        make(_of(place))
    assert caught.value.exit_code == 4
    assert not fake_tools.calls("go build")


def test_stock_without_the_patch_set_has_no_shim(place: Path, make: Make) -> None:
    binary = make(_of(place, stock=True))
    assert (binary.parent / BELOW / "cuda_v12" / LIBRARY).is_file()
    assert not list((binary.parent / BELOW).rglob(SHIM))


def test_the_same_place_by_another_name_is_the_same_build(
    built: Path, place: Path, fake_tools: FakeTools, make: Make
) -> None:
    assert make(_of(place / "lib/ollama")) == built
    assert len(fake_tools.calls("go build")) == 1


def test_other_commands_go_on_with_the_place_that_was_built_with(
    built: Path, place: Path, tmp_path: Path
) -> None:
    """`up` would else build a second Ollama, for the CPU."""
    assert stock_of_newest("v0.16.0", [built]) == f"stock={place}"
    assert stock_of_newest("v0.16", [built]) is None
    other = tmp_path / "v0.16.0-native/src/ollama"
    assert stock_of_newest("v0.16.0", [other, built]) is None
    shutil.rmtree(place)
    assert stock_of_newest("v0.16.0", [built]) is None


def test_of_an_archive_that_is_gone_what_was_unpacked_serves_on(
    tmp_path: Path, place: Path, fake_tools: FakeTools, make: Make
) -> None:
    path = archive(tmp_path / "o.tgz", root=place)
    binary = make(_of(path))
    assert stock_of_newest("v0.16.0", [binary]) == f"stock={path}"
    path.unlink()
    option = stock_of_newest("v0.16.0", [binary])
    assert option is not None
    assert make(replace(NATIVE, cuda=option)) == binary
    assert len(fake_tools.calls("go build")) == 1


# --- auto -----------------------------------------------------------------------------------------


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_tools: FakeTools) -> Path:
    """A machine with a GPU and no toolkit; where its Ollama would be."""
    monkeypatch.setattr(tools, "NVIDIA_DEVICE", tmp_path)
    monkeypatch.setattr(gpus, "ROOT", tmp_path / "none")
    monkeypatch.setattr(tools, "find_cuda", lambda: None)
    monkeypatch.setattr(stock, "USUAL", (tmp_path / "usual",))
    return tmp_path / "usual"


def test_by_itself_it_takes_the_installed_ollama_where_a_gpu_is(
    gpu: Path, patchset: Patchset, monkeypatch: pytest.MonkeyPatch
) -> None:
    ollama(gpu)
    assert plan(NATIVE, patchset).kind == "native-cudastock"
    assert plan(replace(NATIVE, cuda="off"), patchset).kind == "native"
    monkeypatch.setattr(tools, "NVIDIA_DEVICE", gpu / "no-such-device")
    assert plan(NATIVE, patchset).kind == "native"


def test_by_itself_it_builds_for_the_cpu_where_none_fits_and_says_why(
    gpu: Path,
    patchset: Patchset,
    cache: SourceCache,
    report: Report,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "no Ollama with" in plan(NATIVE, patchset).remark
    ollama(gpu, version="0.5.0")
    binary = build.build(NATIVE, patchset, cache, report)
    assert binary.parents[1].name == "v0.16.0-native"
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert len(said) == 1
    assert "is Ollama 0.5.0, whose GGML is not known to fit v0.16.0" in said[0]
    assert "--gpu stock=FILE" in said[0]


def test_asked_for_a_toolkit_it_does_not_take_stock_instead(gpu: Path, patchset: Patchset) -> None:
    ollama(gpu)
    with pytest.raises(MissingTool, match="nvcc") as caught:
        plan(replace(NATIVE, cuda="on"), patchset)
    assert "--gpu stock" in str(caught.value.hint)


# --- what is loaded -------------------------------------------------------------------------------


def test_what_is_loaded_depends_on_the_variable(built: Path) -> None:
    folders = [built.parent / BELOW / name for name in ("cuda_v12", "cuda_v13")]
    assert gpu_libraries.loaded_by(built, paged=False) == [Loaded(f, LIBRARY, ()) for f in folders]
    assert gpu_libraries.loaded_by(built, paged=True) == [Loaded(f, SHIM, ()) for f in folders]
    (folders[0] / SHIM).unlink()
    assert gpu_libraries.loaded_by(built, paged=True)[0].library == LIBRARY


def test_a_stock_ollama_that_went_away_is_seen(built: Path, place: Path) -> None:
    record = gpu_libraries.of_stock(built)
    assert gpu_libraries.changed_since(record) == []
    shutil.rmtree(place / "lib")
    first, second = gpu_libraries.loaded_by(built, paged=False)
    assert first.broken == ("libcublas.so.12", "libcublas.so.12.8.4")
    assert second.broken == ("libcublas.so.13", "libcublas.so.13.8.4")
    assert len(gpu_libraries.changed_since(record)) == len(record["files"])


def test_an_installed_program_is_looked_at_as_ollama_does(tmp_path: Path) -> None:
    """`lib/ollama` above the program comes before a build's."""
    root = ollama(tmp_path / "opt")
    folders = [one.folder for one in gpu_libraries.loaded_by(root / "bin/ollama", paged=False)]
    assert folders == [root / "lib/ollama/cuda_v12", root / "lib/ollama/cuda_v13"]
    (root / "bin/build/lib/ollama/cuda_v9").mkdir(parents=True)
    (root / "bin/build/lib/ollama/cuda_v9" / LIBRARY).touch()
    assert len(gpu_libraries.loaded_by(root / "bin/ollama", paged=False)) == 2


def test_a_build_for_the_cpu_loads_none(make: Make) -> None:
    binary = make(replace(NATIVE, cuda="off"))
    assert gpu_libraries.loaded_by(binary, paged=True) == []
    assert gpu_libraries.of_stock(binary) == {}


def _vulkan(root: Path, needed: str = "libvulkan.so.1") -> Path:
    return library(
        root / "lib/ollama/vulkan/libggml-vulkan.so",
        defined=["ggml_backend_init"],
        wanted=["ggml_init"],
        needed=["libggml-base.so.0", needed],
    )


def _rocm(root: Path) -> Path:
    """As in Ollama's archive for ROCm, whose kernels lie in folders."""
    folder = root / "lib/ollama/rocm"
    (folder / "rocblas/library/gfx1100").mkdir(parents=True)
    (folder / "librocblas.so.4").write_bytes(b"rocblas")
    (folder / "libamdhip64.so.6").write_bytes(b"hip")
    return library(
        folder / "libggml-hip.so",
        defined=["ggml_backend_init"],
        wanted=["ggml_init"],
        needed=["libggml-base.so.0", "libamdhip64.so.6", "librocblas.so.4", "libc.so.6"],
    )


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_libraries_of_all_vendors_are_taken(
    tmp_path: Path, place: Path, make: Make, packed: bool
) -> None:
    rocm, vulkan = _rocm(place), _vulkan(place)
    (place / "lib/ollama/vulkan/libvulkan.so.1").write_bytes(b"loader")
    (place / "lib/ollama/rocm/rocblas/library/gfx1100/Kernels.co").write_bytes(b"kernels")
    binary = make(_of(archive(tmp_path / "o.tgz", root=place) if packed else place))
    target = binary.parent / BELOW
    folders = {path.name for path in target.iterdir() if path.is_dir()}
    assert folders == {"cuda_v12", "cuda_v13", "rocm", "vulkan"}
    for of_stock in (rocm, vulkan):
        own = target / of_stock.parent.name / of_stock.name
        assert own.read_bytes() == of_stock.read_bytes()
        assert not (own.parent / SHIM).exists(), "it is CUDA's"
    assert (target / "rocm/rocblas/library/gfx1100/Kernels.co").read_bytes() == b"kernels"
    assert (target / "vulkan/libvulkan.so.1").read_bytes() == b"loader"
    assert [one.library for one in gpu_libraries.loaded_by(binary, paged=True)] == [
        *(SHIM, SHIM, "libggml-hip.so", "libggml-vulkan.so")
    ]


def test_another_library_of_any_vendor_is_another_build(place: Path, make: Make) -> None:
    """What it computes has other bits; the name of a build is made of this content."""
    _rocm(place)
    first, before = make(_of(place)), stock.at(place)
    assert before is not None
    content = before.content()
    library(
        place / "lib/ollama/rocm/libggml-hip.so",
        defined=["ggml_backend_init", "better"],
        wanted=["ggml_init"],
    )
    assert make(_of(place)) != first
    assert before.content() != content
    assert {name for name in content if name.startswith("rocm")} == {
        *("rocm", "rocm/librocblas.so.4", "rocm/libamdhip64.so.6", "rocm/rocblas")
    }


def test_what_lacks_a_library_is_left_out_and_said_in_a_line(
    place: Path, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    _rocm(place)
    (place / "lib/ollama/rocm/librocblas.so.4").unlink()
    _vulkan(place, "libvulkan.so.999")
    target = make(_of(place)).parent / BELOW
    folders = {path.name for path in target.iterdir() if path.is_dir()}
    assert folders == {"cuda_v12", "cuda_v13"}
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert len(said) == 2
    assert "libggml-hip.so needs librocblas.so.4" in said[0]
    assert "libggml-vulkan.so needs libvulkan.so.999" in said[1]
    assert all("install it, or name a release archive" in line for line in said)


def test_where_nothing_can_be_used_it_is_refused(place: Path, make: Make) -> None:
    for name in ("cuda_v12", "cuda_v13"):
        shutil.rmtree(place / "lib/ollama" / name)
    _vulkan(place, "libvulkan.so.999")
    with pytest.raises(MissingTool, match=r"libggml-vulkan\.so needs libvulkan\.so\.999"):
        make(_of(place))


@pytest.mark.parametrize("vendor", ["0x1002", "0x8086"], ids=["AMD", "Intel"])
def test_by_itself_it_takes_stocks_libraries_for_any_gpu(
    gpu: Path, patchset: Patchset, monkeypatch: pytest.MonkeyPatch, vendor: str
) -> None:
    monkeypatch.setattr(tools, "NVIDIA_DEVICE", gpu / "no-such-device")
    monkeypatch.setattr(gpus, "ROOT", gpu / "root")
    ollama(gpu)
    assert plan(NATIVE, patchset).stock is None
    card = gpu / "root/sys/bus/pci/devices/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text(vendor)
    (card / "class").write_text("0x030000")
    assert plan(NATIVE, patchset).stock == "stock"
    shutil.rmtree(gpu)
    (card / "x").parent.mkdir(parents=True)
    (card / "vendor").write_text(vendor)
    (card / "class").write_text("0x030000")
    assert "no Ollama with" in plan(NATIVE, patchset).remark
