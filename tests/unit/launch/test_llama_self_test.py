"""What the self-test of a tree does not let pass. The servers are made up; the real ones are tested
in tests/engine_ollama_llama_server.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ollama_tiering.errors import MissingTool, ResultDiffers, ServiceError, TieringError
from ollama_tiering.launch import llama_self_test
from ollama_tiering.launch.llama_self_test import (
    require_same_bits,
    require_same_bits_on_gpus,
    require_same_devices,
)
from ollama_tiering.launch.llama_server import Completed
from ollama_tiering.models import make
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.report import Report

QUIET = Report(quiet=True)
CUDA = Path("cuda_v12/libggml-cuda.so")
LISTED = (
    '#!/bin/sh\necho "Available devices:"\necho "  {device} $(basename "$GGML_BACKEND_PATH")"\n'
)


def side(folder: Path, device: str) -> InstalledOllama:
    lib = folder / "lib/ollama"
    (lib / "cuda_v12").mkdir(parents=True)
    (lib / "cuda_v12/libggml-cuda.so").touch()
    (lib / "llama-server").write_text(LISTED.replace("{device}", device))
    (lib / "llama-server").chmod(0o755)
    return InstalledOllama(folder / "bin/ollama", lib)


def test_the_same_devices(tmp_path: Path) -> None:
    require_same_devices(side(tmp_path / "a", "GPU"), side(tmp_path / "b", "GPU"))


def test_another_device(tmp_path: Path) -> None:
    with pytest.raises(ResultDiffers, match=r"GPU.*, ours .*CPU"):
        require_same_devices(side(tmp_path / "a", "GPU"), side(tmp_path / "b", "CPU"))


def test_another_device_with_a_library_for_gpus(tmp_path: Path) -> None:
    installed, tree = side(tmp_path / "a", "GPU"), side(tmp_path / "b", "GPU")
    tree.server.write_text(
        '#!/bin/sh\necho "Available devices:"\n[ -z "$GGML_BACKEND_PATH" ] && '
        'echo "  GPU " || exit 0\n'
    )
    with pytest.raises(ResultDiffers, match=r"with cuda_v12/libggml-cuda\.so"):
        require_same_devices(installed, tree)


def test_memory_that_is_free_is_another_in_each_run(tmp_path: Path) -> None:
    gpu = "CUDA0: NVIDIA GeForce RTX 3090 (24081 MiB, {} MiB free)"
    sides = [side(tmp_path / free, "") for free in ("23456", "23455")]
    for one in sides:
        free = one.lib.parents[1].name
        one.server.write_text(
            f'#!/bin/sh\necho "Available devices:"\necho "  {gpu.format(free)}"\n'
        )
    assert require_same_devices(*sides) == [None, CUDA]
    sides[1].server.write_text(sides[1].server.read_text().replace("3090", "4090"))
    with pytest.raises(ResultDiffers, match="RTX 4090"):
        require_same_devices(*sides)


def test_a_gpu_is_tested_with_the_library_that_finds_it(tmp_path: Path) -> None:
    """BLAS is listed as a device without memory."""
    text = (
        '#!/bin/sh\necho "Available devices:"\necho "  BLAS: OpenBLAS (0 MiB, 0 MiB free)"\n'
        '[ -n "$GGML_BACKEND_PATH" ] && echo "  CUDA0: GPU (8 MiB, 7 MiB free)"\nexit 0\n'
    )
    sides = [side(tmp_path / name, "") for name in "ab"]
    for one in sides:
        one.server.write_text(text)
    assert require_same_devices(*sides) == [CUDA]


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    installed, tree = side(tmp_path / "a", "GPU"), side(tmp_path / "b", "GPU")
    tree.server.write_text("#!/bin/sh\necho undefined symbol >&2; exit 127\n")
    with pytest.raises(ResultDiffers, match="undefined symbol"):
        require_same_devices(installed, tree)


def test_a_server_that_hangs_is_said_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_self_test.llama_devices, "LIST_SECONDS", 0.2)
    installed, tree = side(tmp_path / "a", "GPU"), side(tmp_path / "b", "GPU")
    tree.server.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(TieringError, match=r"b/.*--list-devices did not end within"):
        require_same_devices(installed, tree)


COLD = Completed(0, (1, 2), ((1, -0.5), (2, -0.25)))
HIT = Completed(300, (1, 2), ((1, -0.5), (2, -0.125)))


class Answers:
    """Of the installed server, of the tree's, and of the tree's after the kill."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *said: Sequence[Completed]) -> None:
        self._said = iter(said)
        self.refused = ""
        self.started: list[tuple[Path, dict[str, str | None], tuple[str, ...]]] = []
        monkeypatch.setattr(make, "make_model", lambda *_: None)
        monkeypatch.setattr(llama_self_test, "serving", self._serving)
        monkeypatch.setattr(llama_self_test, "_service", lambda *_: self)
        monkeypatch.setattr(llama_self_test, "_wait_stored", lambda *_: self.refused)
        self.killed = self.stopped = 0

    @contextlib.contextmanager
    def _serving(
        self, program: Path, _model: Path, _log: Path, env: dict[str, str | None], *options: str
    ) -> Iterator[Any]:
        self.started.append((program, env, options))
        answers = iter(next(self._said))
        self.complete = lambda _prompt, _count: next(answers)
        yield self

    def kill(self) -> None:
        self.killed += 1

    def ensure(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped += 1


def check(tmp_path: Path) -> None:
    one = InstalledOllama(tmp_path / "ollama", tmp_path)
    require_same_bits(one, one, tmp_path)


def check_gpus(tmp_path: Path, *backends: Path | None, report: Report = QUIET) -> None:
    one, other = (InstalledOllama(tmp_path / n / "ollama", tmp_path / n / "lib") for n in "ab")
    require_same_bits_on_gpus(one, other, tmp_path, backends, report)


def test_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, (COLD, HIT), (COLD,), (HIT,))
    check(tmp_path)
    assert (answers.killed, answers.stopped) == (1, 1)


@pytest.mark.parametrize(
    ("computed", "restored", "said"),
    [
        (HIT, HIT, "computed: 300 tokens of the prompt were not computed"),
        (COLD, COLD, "after a kill: 0 tokens of the prompt were not computed, and 300"),
        (COLD, Completed(300, (1, 3), HIT.bits), "restored after a kill: the answer is not"),
        (COLD, Completed(300, (1, 2), COLD.bits), "restored after a kill: the answer is not"),
        (Completed(0, (1, 2), HIT.bits), HIT, "computed: the answer is not"),
    ],
)
def test_what_differs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    computed: Completed,
    restored: Completed,
    said: str,
) -> None:
    answers = Answers(monkeypatch, (COLD, HIT), (computed,), (restored,))
    with pytest.raises(ResultDiffers, match=said):
        check(tmp_path)
    assert answers.stopped == 1


def test_a_stock_that_kept_nothing_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Answers(monkeypatch, (COLD, COLD), (COLD,), (COLD,))
    with pytest.raises(ResultDiffers, match="stock had 0 tokens"):
        check(tmp_path)


def test_the_cpu_is_tested_and_then_what_there_is_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[Any, ...]] = []

    def same_bits(
        _one: Any, _other: Any, folder: Path, backend: Path | None = None, *, layers: str = "0"
    ) -> str:
        done.append((folder.name, backend, layers))
        return ""

    monkeypatch.setattr(llama_self_test, "require_same_bits", same_bits)
    monkeypatch.setattr(llama_self_test, "require_same_devices", lambda *_: [None, CUDA])
    one = InstalledOllama(Path("/ollama"), Path("/lib"))
    llama_self_test.self_test(one, one, QUIET)
    assert done == [("cpu", None, "0"), ("0", None, "99"), ("1", CUDA, "99")]


def test_on_the_cpu_no_layer_is_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_BACKEND_PATH", "/somebody/else's.so")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/lib/ollama")
    answers = Answers(monkeypatch, (COLD, HIT), (COLD,), (HIT,))
    check(tmp_path)
    for program, env, options in answers.started:
        assert options[options.index("-ngl") + 1] == "0"
        assert env["GGML_BACKEND_PATH"] is None
        # our library, and not the one that the variable would find first
        assert env["LD_LIBRARY_PATH"] == f"{program.parent}:/usr/local/lib/ollama"


def test_each_gpu_library_computes_all_layers_as_ollama_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    answers = Answers(monkeypatch, *([(COLD, HIT), (COLD,), (HIT,)] * 2))
    check_gpus(tmp_path, CUDA, Path("vulkan/libggml-vulkan.so"))
    assert len(answers.started) == 6
    for (program, env, options), folder in zip(
        answers.started, ["cuda_v12"] * 3 + ["vulkan"] * 3, strict=True
    ):
        assert options[options.index("-ngl") + 1] == "99"
        assert env["LD_LIBRARY_PATH"] == f"{program.parent}:{program.parent / folder}"
        assert str(env["GGML_BACKEND_PATH"]).startswith(f"{program.parent / folder}/libggml-")


def test_other_bits_on_a_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Answers(monkeypatch, (COLD, HIT), (COLD,), (COLD,))
    with pytest.raises(ResultDiffers, match=r"restored after a kill with cuda_v12/"):
        check_gpus(tmp_path, CUDA)


def test_a_library_with_which_stock_does_not_serve_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As CUDA 13 on an old GPU; but one library has to serve, or nothing was tested."""
    new = Path("cuda_v13/libggml-cuda.so")
    answers = Answers(monkeypatch, (COLD, HIT), (COLD,), (HIT,))
    serve = llama_self_test.serving

    @contextlib.contextmanager
    def serving(*given: Any) -> Iterator[Any]:
        if "cuda_v13" in str(given[3]["GGML_BACKEND_PATH"]):
            raise ServiceError("llama-server was ended by SIGABRT")
        with serve(*given) as server:
            yield server

    monkeypatch.setattr(llama_self_test, "serving", serving)
    check_gpus(tmp_path, CUDA, new)
    assert len(answers.started) == 3
    said = capsys.readouterr().err
    assert "not tested: with cuda_v13/libggml-cuda.so the installed llama-server was ended" in said
    with pytest.raises(ServiceError, match="there is a GPU, and it cannot be tested"):
        check_gpus(tmp_path, new)


def test_the_trees_own_failure_on_a_gpu_is_no_such_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers(monkeypatch, (COLD, HIT), (COLD,), (HIT,))
    serve = llama_self_test.serving

    @contextlib.contextmanager
    def serving(*given: Any) -> Iterator[Any]:
        if len(answers.started) == 1:
            raise ServiceError("llama-server was ended by SIGSEGV")
        with serve(*given) as server:
            yield server

    monkeypatch.setattr(llama_self_test, "serving", serving)
    with pytest.raises(ServiceError, match="SIGSEGV") as caught:
        check_gpus(tmp_path, CUDA)
    assert "cannot be tested" not in caught.value.message


def test_models_that_are_not_tiered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU that is a word to the person; on the CPU the tree would be of no use."""
    answers = Answers(monkeypatch, (COLD, HIT), (COLD,), (COLD, HIT), (COLD,))
    answers.refused = "V is transposed on the device"
    check_gpus(tmp_path, CUDA)
    assert "models are not tiered with cuda_v12/libggml-cuda.so: V is" in capsys.readouterr().err
    with pytest.raises(ServiceError, match="the model is not tiered: V is transposed"):
        check(tmp_path)


def test_nothing_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason at once, or in the end what llama-server wrote last."""
    runner = SimpleNamespace(reason="LoRA adapters", tiered=False)
    answer = SimpleNamespace(namespaces=[], runners=[runner])
    monkeypatch.setattr(llama_self_test.block_service, "ask", lambda _socket: answer)
    server: Any = SimpleNamespace(tail=lambda: "  cannot connect")
    assert llama_self_test._wait_stored(tmp_path, 5, server) == "LoRA adapters"
    answer.runners.clear()
    monkeypatch.setattr(llama_self_test, "STORE_SECONDS", 0.1)
    with pytest.raises(ServiceError, match="never spoke to the sidecar") as caught:
        llama_self_test._wait_stored(tmp_path, 5, server)
    assert caught.value.message.endswith("cannot connect")
    assert caught.value.hint


def test_sockets_lie_where_their_names_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    place = llama_self_test._short_place()
    assert place in (Path("/tmp"), Path("/dev/shm"))
    longest = f"{place}/kvt-12345678/10/run/s.engine"
    assert len(os.fsencode(longest)) <= 107


def test_what_a_killed_one_left_long_ago_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(name: str, part: str, *, hours: float) -> Path:
        folder = tmp_path / name
        (folder / part).mkdir(parents=True)
        os.utime(folder, (time.time() - hours * 3600,) * 2)
        return folder

    gone = [left("kvt-aaaaaaaa", "cpu", hours=7), left("kvt-bbbbbbbb", "0", hours=7)]
    kept = [
        left("kvt-running1", "cpu", hours=1),
        left("kvt-notes", "mine", hours=7),
        left("other", "cpu", hours=7),
    ]
    (tmp_path / "kvt-file").touch()
    (tmp_path / "kvt-link").symlink_to(tmp_path / "other")
    llama_self_test._sweep(tmp_path)
    assert [folder.exists() for folder in gone] == [False, False]
    assert all(folder.exists() for folder in kept)
    again = left("kvt-cccccccc", "cpu", hours=7)
    monkeypatch.setattr(os, "geteuid", lambda: 0xFFFF0000)  # another user's
    llama_self_test._sweep(tmp_path)
    assert again.exists()


def test_the_sweep_is_made_where_the_test_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []
    monkeypatch.setattr(llama_self_test, "_short_place", lambda: tmp_path)
    monkeypatch.setattr(llama_self_test, "_sweep", swept.append)
    for name in ("require_same_devices", "require_same_bits", "require_same_bits_on_gpus"):
        monkeypatch.setattr(llama_self_test, name, lambda *_: [])
    one = side(tmp_path / "one", "GPU")
    llama_self_test.self_test(one, one, QUIET)
    assert swept == [tmp_path]


def test_a_broken_package_for_the_model_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ollama_tiering.models.make", None)
    with pytest.raises(MissingTool, match="a test model cannot be made") as caught:
        llama_self_test._makers()
    assert caught.value.hint
