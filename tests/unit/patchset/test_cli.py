"""`tiering fetch` and `tiering patch` as a person meets them, on the small upstream."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ollama_tiering import cli
from ollama_tiering.errors import MissingTool
from ollama_tiering.kernels import images
from ollama_tiering.patchset import manifest
from tests.unit.patchset import fake_stock
from tests.unit.patchset.conftest import FakeTools, snapshot
from tests.unit.patchset.test_release_archive import archive

Tiering = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tiering(
    patches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Tiering:
    """Runs the command; exit code, stdout, stderr."""
    monkeypatch.setattr(manifest, "default_root", lambda: patches)

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(args)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert isinstance(caught.value.code, int)
        return caught.value.code, said.out, said.err

    return run


def test_all_of_it_with_one_command(
    tiering: Tiering, upstream_repo: Path, fake_tools: FakeTools
) -> None:
    build = ("patch", "--tag", "0.16.1", "--source", str(upstream_repo), "--cuda", "off")
    code, out, err = tiering(*build)
    assert code == 0, err
    binary = Path(out.splitlines()[-1])
    assert binary.is_file()
    assert "compiling Ollama v0.16.1" in err
    assert tiering(*build)[2] == f"{binary} is up to date\n"


def test_fetch_says_what_it_did(tiering: Tiering, upstream_repo: Path) -> None:
    code, out, _ = tiering("fetch", "--all-tags", "--source", str(upstream_repo))
    assert code == 0
    assert out.count("fetched") == 3
    assert tiering("fetch", "--tag", "v0.16.0")[1].endswith("already cached\n")
    assert tiering("fetch", "--list")[1].count("cached") == 3
    listed = json.loads(tiering("fetch", "--list", "--json")[1])
    assert listed["v0.17.0"]["cached"] is True


def test_the_source_may_come_from_the_environment(
    tiering: Tiering, upstream_repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_TIERING_SOURCE", str(upstream_repo))
    assert tiering("fetch", "--tag", "v0.16.0")[0] == 0


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("fetch", "--tag", "v7.7.7"), 3, "has no tag v7.7.7"),
        (("patch", "--tag", "v7.7.7"), 4, "v7.7.7 is not a supported version"),
        (("fetch", "--tag", "v0.16.0", "--source", "http://127.0.0.1:9/x"), 3, "cannot fetch"),
        (("fetch", "--tag", "v0.16.0", "--source", "/nowhere"), 3, "no such directory"),
        (("fetch", "--tag", "v0.16.0", "--all-tags"), 2, "exclude each other"),
        (("patch", "check", "--tree", "/nowhere"), 2, "no such directory"),
        (("patch", "--tag", "v0.16.0", "status"), 2, "after the subcommand"),
        (("patch", "build", "--cpu", "quantum"), 2, "quantum"),
    ],
)
def test_a_bad_request_is_one_line_with_its_exit_code(
    tiering: Tiering,
    upstream_repo: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    monkeypatch.setenv("OLLAMA_TIERING_SOURCE", str(upstream_repo))
    found, _, err = tiering(*args)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (found, len(errors)) == (code, 1), err
    assert said in errors[0]
    assert "hint: " in err or code == 2


def test_an_unreadable_setting_stops_before_any_work(
    tiering: Tiering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.toml").write_text("[patch\n")
    monkeypatch.setenv("OLLAMA_TIERING_CONFIG", str(tmp_path / "bad.toml"))
    code, _, err = tiering("patch")
    assert code == 10
    assert "bad.toml:1:" in err


def test_check_apply_status_revert_of_a_plain_tree(tiering: Tiering, tree: Path) -> None:
    before = snapshot(tree)
    where = ("--tree", str(tree))
    assert tiering("patch", "check", *where)[1] == f"{tree}: v0.16.0, applies\n"
    assert "would patch" in tiering("patch", "apply", "--dry-run", *where)[1]
    assert snapshot(tree) == before
    code, out, err = tiering("patch", "apply", *where)
    assert (code, out) == (0, f"{tree}\n")
    assert "4 files changed" in err
    assert "already applied" in tiering("patch", "apply", *where)[2]
    (row,) = json.loads(tiering("patch", "status", "--json", *where)[1])["trees"]
    assert (row["state"], row["tag"], row["binary"]) == ("patched", "v0.16.0", None)
    assert "would restore 4 files" in tiering("patch", "revert", "--dry-run", *where)[1]
    assert tiering("patch", "revert", *where)[0] == 0
    assert snapshot(tree) == before
    assert "not patched" in tiering("patch", "revert", *where)[2]


def test_check_all_tags_names_what_conflicts_and_what_is_not_cached(
    tiering: Tiering, cache: object, patches: Path
) -> None:
    code, out, err = tiering("patch", "check", "--all-tags")
    assert code == 0
    assert out == "v0.16.0: applies\nv0.17.0: applies\n"
    assert "not checked: v0.16.1" in err
    hook = patches / "hooks/go/cells.patch"
    hook.write_text(hook.read_text().replace(" \tb()", " \tbb()"))
    code, out, err = tiering("patch", "check", "--all-tags")
    assert code == 5
    assert "does not apply to v0.16.0, v0.17.0" in err


def test_check_of_nothing_is_no_success(tiering: Tiering) -> None:
    assert tiering("patch", "check", "--tag", "v0.16.1")[0] == 2


def test_status_without_any_tree(tiering: Tiering) -> None:
    code, out, _ = tiering("patch", "status")
    assert code == 0
    assert "2 hooks, 2 overlay files" in out
    assert "no build tree yet" in out


def test_apply_in_the_cache_makes_the_tree(
    tiering: Tiering, upstream_repo: Path, fake_tools: FakeTools
) -> None:
    given = ("--tag", "v0.16.0", "--cpu", "native", "--cuda", "off")
    assert "would patch" in tiering("patch", "apply", "--dry-run", *given)[1]
    code, out, err = tiering("patch", "apply", *given, "--source", str(upstream_repo))
    assert code == 0, err
    assert "tierInit" in (Path(out.strip()) / "kvcache/causal.go").read_text()
    assert "patched v0.16.0" in tiering("patch", "status")[1]
    assert tiering("patch", "revert", *given)[0] == 0
    assert "pristine v0.16.0" in tiering("patch", "status")[1]


# --- with the library of a stock Ollama -----------------------------------------------------------


@pytest.fixture
def images_made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where kernels of ours were compiled to; nothing is."""
    folders: list[Path] = []
    monkeypatch.setattr(images, "put", lambda folder, *_: folders.append(folder))
    monkeypatch.setattr(images, "archs_here", list)
    return folders


def _stock(upstream_repo: Path, place: Path) -> tuple[str, ...]:
    build = ("patch", "--tag", "0.16.0", "--source", str(upstream_repo), "--cpu", "native")
    return (*build, "--cuda", f"stock={place}")


def test_a_gpus_library_and_kernels_with_one_command(
    tiering: Tiering,
    upstream_repo: Path,
    fake_tools: FakeTools,
    images_made: list[Path],
    tmp_path: Path,
) -> None:
    build = _stock(upstream_repo, fake_stock.ollama(tmp_path / "stock"))
    code, out, err = tiering(*build)
    assert code == 0, err
    folder = Path(out.splitlines()[-1]).parent / "build/lib/ollama"
    assert (folder / "cuda_v12/libggml-cuda.so").is_file()
    assert "libraries for GPUs of Ollama 0.16.0" in err
    assert "--cuda-arch 8.6 names one" in err
    assert images_made == []
    code, _, err = tiering(*build, "--cuda-arch", "8.6,120")
    assert code == 0, err
    assert "our own kernels, compute capability 8.6, 12.0" in err
    assert images_made == [folder / "paged_attn"]


def test_without_nvrtc_the_build_is_done_all_the_same_unless_a_gpu_was_named(
    tiering: Tiering,
    upstream_repo: Path,
    fake_tools: FakeTools,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def lacking(*_: object) -> None:
        raise MissingTool("needs nvidia.cuda_nvrtc", hint="pip install it")

    monkeypatch.setattr(images, "put", lacking)
    monkeypatch.setattr(images, "archs_here", lambda: [86])
    build = _stock(upstream_repo, fake_stock.ollama(tmp_path / "stock"))
    code, out, err = tiering(*build)
    assert code == 0
    assert Path(out.splitlines()[-1]).is_file()
    assert "warning: our own kernels are not compiled: needs nvidia.cuda_nvrtc; pip install" in err
    code, out, err = tiering(*build, "--cuda-arch", "86")
    assert (code, out) == (6, "")
    assert "hint: pip install it" in err


@pytest.mark.parametrize("here", [[], [86]])
def test_kernels_of_an_earlier_build_are_removed_where_new_ones_cannot_be_made(
    tiering: Tiering,
    upstream_repo: Path,
    fake_tools: FakeTools,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    here: list[int],
) -> None:
    def lacking(*_: object) -> None:
        raise MissingTool("needs nvidia.cuda_nvrtc", hint="pip install it")

    monkeypatch.setattr(images, "put", lacking)
    monkeypatch.setattr(images, "archs_here", lambda: here)
    build = _stock(upstream_repo, fake_stock.ollama(tmp_path / "stock"))
    code, out, _ = tiering(*build)
    assert code == 0
    folder = Path(out.splitlines()[-1]).parent / "build/lib/ollama/paged_attn"
    folder.mkdir()
    folder.joinpath("sm_86-64x64-f16-f16-rows4-align16.cubin").write_bytes(b"of an earlier build")
    assert tiering(*build)[0] == 0
    assert not folder.exists()
    assert not list(folder.parent.glob(".paged_attn*"))


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("/nowhere", 2, "/nowhere: no such file or directory"),
        (
            "an empty folder",
            2,
            "no libggml-cuda.so or libggml-hip.so or libggml-vulkan.so in a folder of lib/ollama",
        ),
        ("an archive that leads out", 2, "leads out of it"),
        ("another version", 4, "is Ollama 0.1.0, whose GGML is not known to fit v0.16.0"),
        ("no program", 4, "no `ollama` beside the libraries"),
        ("no cuBLAS", 6, "needs libcublas.so.12"),
        ("a word that is no capability", 2, "'fast' is no compute capability"),
    ],
)
def test_what_a_stock_ollama_lacks_is_one_line_with_its_exit_code(
    tiering: Tiering,
    upstream_repo: Path,
    fake_tools: FakeTools,
    images_made: list[Path],
    tmp_path: Path,
    what: str,
    code: int,
    said: str,
) -> None:
    place = fake_stock.ollama(tmp_path / "stock")
    more: tuple[str, ...] = ()
    if what == "/nowhere":
        place = Path(what)
    elif what == "an empty folder":
        place = tmp_path / "empty"
        place.mkdir()
    elif what == "an archive that leads out":
        place = archive(tmp_path / "evil.tgz", ("../evil", b"x"))
    elif what == "another version":
        fake_stock.program(place / "bin/ollama", "0.1.0")
    elif what == "no program":
        (place / "bin/ollama").unlink()
    elif what == "no cuBLAS":
        for path in place.rglob("libcublas*"):
            path.unlink()
        fake_tools.add("ldconfig", "")
    else:
        more = ("--cuda-arch", "fast")
    found, out, err = tiering(*_stock(upstream_repo, place), *more)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (found, out, len(errors)) == (code, "", 1), err
    assert said in errors[0]
    assert "hint: " in err
    assert not fake_tools.calls("go build")


@pytest.mark.parametrize("word", ["stock=", "stocks", "on=x", "nvcc"])
def test_a_word_that_is_no_kind_of_gpu_code_is_a_bad_flag(tiering: Tiering, word: str) -> None:
    code, _, err = tiering("patch", "build", "--cuda", word)
    assert code == 10
    assert f"flag --cuda: '{word}' is not one of auto, on, off, stock, stock=PLACE" in err
