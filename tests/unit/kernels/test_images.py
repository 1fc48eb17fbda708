"""Which kernels are compiled ahead for which GPUs, and where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.errors import MissingTool, UsageError
from ollama_tiering.kernels import images, nvrtc
from ollama_tiering.kernels.gpu import instance_of
from ollama_tiering.kernels.known_models import MODELS, KnownModel
from ollama_tiering.kernels.nvrtc import Image, Instance
from ollama_tiering.kernels.shape import Dtype, Shape
from ollama_tiering.models.shapes import SHAPES

ONE = [Instance(64, 64, "f16", "f16", 4, 16)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Instance, int]]:
    """NVRTC is there, and what it is asked for."""
    asked: list[tuple[Instance, int]] = []

    def image(instance: Instance, arch: int) -> Image:
        asked.append((instance, arch))
        return Image(f"{instance} {arch}".encode(), "")

    monkeypatch.setattr(nvrtc, "compiler", lambda: None)
    monkeypatch.setattr(nvrtc, "image", image)
    return asked


@pytest.mark.parametrize(
    ("named", "archs"),
    [
        ("8.6", [86]),
        ("86", [86]),
        ("sm_90", [90]),
        ("90a", [90]),
        ("12.0,5.2", [52, 120]),
        ("75;8.6 90", [75, 86, 90]),
        ("native", []),
        ("native,8.6,86", [86]),
    ],
)
def test_compute_capabilities_are_taken_as_people_write_them(
    monkeypatch: pytest.MonkeyPatch, named: str, archs: list[int]
) -> None:
    monkeypatch.setattr(images, "archs_here", lambda: [])
    assert images.archs(named) == archs


def test_unless_they_are_named_they_are_those_of_the_gpus_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "archs_here", lambda: [86, 89])
    assert images.archs(None) == images.archs("native") == [86, 89]
    assert images.archs("native,52") == [52, 86, 89]


@pytest.mark.parametrize("named", ["", "RTX", "8", "8.6.1", "1234", "compute", "5.0", "37"])
def test_what_is_none_is_bad_usage(named: str) -> None:
    with pytest.raises(UsageError, match="--cuda-arch") as caught:
        images.archs(named)
    assert caught.value.hint


def test_every_known_model_has_its_image() -> None:
    """The one that a plan for its shape would take."""
    wanted = set(images.usual())
    for model in MODELS:
        for kind, align in (("f16", 16), ("q8_0", 4)):
            dtype, d = Dtype[kind.upper()], model.head_dim
            shape = Shape(model.heads, model.kv_heads, d, d, 1, 64, dtype, dtype)
            assert instance_of(shape, align) in wanted, model.name
    assert len(wanted) == len(images.usual())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_q8_0_rows_lie_as_their_image_expects(model: KnownModel) -> None:
    """K/V of a head is one row, rows of heads lie one after the other."""
    assert Dtype.Q8_0.row_bytes(model.head_dim) % images._ALIGN["q8_0"] == 0
    assert Dtype.F16.row_bytes(model.head_dim) % images._ALIGN["f16"] == 0


def test_images_lie_under_names_that_say_what_they_are(
    tmp_path: Path, made: list[tuple[Instance, int]]
) -> None:
    folder = tmp_path / "lib/paged_attn"
    assert images.put(folder, [52, 86], instances=ONE) == 2
    assert {path.name for path in folder.iterdir()} == {
        "sm_52-64x64-f16-f16-rows4-align16.cubin",
        "sm_86-64x64-f16-f16-rows4-align16.cubin",
    }
    assert made == [(ONE[0], 52), (ONE[0], 86)]
    said: list[str] = []
    images.put(folder, [90], said.append, ONE)
    (path,) = folder.iterdir()
    assert path.read_bytes() == f"{ONE[0]} 90".encode()
    assert said == [f"1 of 1: {ONE[0]}, CC 9.0"]
    assert list(folder.parent.iterdir()) == [folder]


def test_what_was_there_stays_when_one_does_not_compile(
    tmp_path: Path, made: list[tuple[Instance, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "paged_attn"
    images.put(folder, [86], instances=ONE)

    def refused(instance: Instance, arch: int) -> Image:
        raise nvrtc.NvrtcError("no luck")

    monkeypatch.setattr(nvrtc, "image", refused)
    with pytest.raises(nvrtc.NvrtcError):
        images.put(folder, [86, 90], instances=ONE)
    assert len(list(folder.iterdir())) == 1
    assert list(tmp_path.iterdir()) == [folder]


def test_without_nvrtc_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = MissingTool("a kernel on a GPU needs nvidia.cuda_nvrtc", hint="pip install it")

    def none(*_: object) -> None:
        raise lacking

    monkeypatch.setattr(nvrtc, "compiler", none)
    monkeypatch.setattr(images.extras, "need", none)
    with pytest.raises(MissingTool) as caught:
        images.put(tmp_path / "paged_attn", [86], instances=ONE)
    assert caught.value is lacking
    assert not list(tmp_path.iterdir())


def test_without_a_driver_there_is_no_gpu() -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    assert images.archs_here() == []


@pytest.mark.slow
def test_a_real_image_is_made(tmp_path: Path) -> None:
    try:
        nvrtc.compiler()
    except MissingTool as error:
        pytest.skip(f"{error.message}; {error.hint}")
    images.put(tmp_path / "paged_attn", [86], instances=ONE)
    (path,) = (tmp_path / "paged_attn").iterdir()
    assert path.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("known", "made"),
    [("qwen3:0.6b", "qwen3-0.6b"), ("llama3.2:1b", "llama-3.2-1b"), ("gemma3:4b", "gemma3-4b")],
)
def test_known_models_are_those_that_can_be_made(known: str, made: str) -> None:
    model = next(one for one in MODELS if one.name == known)
    shape = SHAPES[made]
    assert (model.arch, model.layers, model.heads, model.kv_heads, model.head_dim) == (
        shape.arch, shape.layers, shape.heads, shape.kv_heads, shape.head_dim,
    )  # fmt: skip
    assert model.window == shape.window
    full = shape.layers
    if shape.window:
        full = sum((layer + 1) % 6 == 0 for layer in range(shape.layers))
    assert model.full_layers == full
    all_layers = model.bytes_per_token(Dtype.F16) * shape.layers // full
    assert all_layers == shape.kv_bytes_per_token


def test_a_window_stops_growing() -> None:
    gemma = next(one for one in MODELS if one.name == "gemma3:4b")
    a_layer = 2 * 4 * 256 * 2
    assert gemma.bytes_per_token(Dtype.F16) == 5 * a_layer
    assert gemma.kv_bytes(1000, Dtype.F16) == 34 * 1000 * a_layer
    assert gemma.kv_bytes(5000, Dtype.F16) == (5 * 5000 + 29 * 1024) * a_layer
