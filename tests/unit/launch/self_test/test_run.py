"""What the self-test of a tree does not let pass. The servers are made up; the real ones are tested
in tests/engine_ollama_llama_server.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.errors import MissingTool, ResultDiffers, ServiceError
from ollama_tiering.launch.llama_server import Completed
from ollama_tiering.launch.self_test import checks, pair, run
from ollama_tiering.launch.self_test.checks import ALL, ROWS, SelfCheck, after_a_kill
from ollama_tiering.launch.self_test.pair import ServerPair, TooFew
from ollama_tiering.launch.self_test.store import NotTiered
from ollama_tiering.patchset.llama_server.installation import InstalledOllama, ServerBuild
from ollama_tiering.patchset.report import Report

QUIET = Report(quiet=True)
CUDA = Path("cuda_v12/libggml-cuda.so")
VULKAN = Path("vulkan/libggml-vulkan.so")
COLD = Completed(0, (1, 2), ((1, -0.5), (2, -0.25)))
HIT = Completed(300, (1, 2), ((1, -0.5), (2, -0.125)))


class Answers:
    """Of the installed server, of the tree's, and of the tree's after the kill."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *said: Sequence[Completed]) -> None:
        self._said = iter(said)
        self.refused = ""
        self.started: list[tuple[Path, dict[str, str | None], tuple[str, ...]]] = []
        self.fails: Callable[[dict[str, str | None]], str] = lambda _env: ""
        monkeypatch.setattr(pair, "serving", self._serving)
        self.killed = 0
        self.pid = 7
        self.socket = Path("/run/s")

    @contextlib.contextmanager
    def _serving(
        self, program: Path, _model: Path, _log: Path, env: dict[str, str | None], *options: str
    ) -> Iterator[Any]:
        if why := self.fails(env):
            raise ServiceError(why)
        self.started.append((program, env, options))
        answers = iter(next(self._said))
        self.complete = lambda _prompt, _count, _slot=None: next(answers)
        yield self

    def kill(self) -> None:
        self.killed += 1

    def wait(self, _server: object, _blocks: int) -> None:
        if self.refused:
            raise NotTiered(self.refused)


ROWS_CHECK = SelfCheck("rows", ROWS, "llama-tiny", ("-np", "1"), after_a_kill)


@pytest.fixture
def bench(tmp_path: Path) -> Callable[[Answers], run._Bench]:
    sides = [InstalledOllama(tmp_path / n / "ollama", tmp_path / n / "lib") for n in "ab"]
    models = {("llama-tiny", "f16"): tmp_path / "model"}

    def made(answers: Answers) -> run._Bench:
        return run._Bench(*sides, tmp_path, answers, models)  # type: ignore[arg-type]

    return made


Bench = Callable[[Answers], run._Bench]


def test_the_same_bits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, (COLD, HIT), (COLD,), (HIT,))
    assert run._result(ROWS_CHECK, bench(answers)).passed
    assert answers.killed == 1


@pytest.mark.parametrize(
    ("computed", "restored", "said"),
    [
        (HIT, HIT, "computed: 300 tokens of the prompt were not computed"),
        (COLD, Completed(300, (1, 3), HIT.bits), "restored after a kill: the answer is not"),
        (COLD, Completed(300, (1, 2), COLD.bits), "restored after a kill: the answer is not"),
        (COLD, Completed(301, HIT.tokens, HIT.bits), "301 tokens of the prompt were not computed"),
        (Completed(0, (1, 2), HIT.bits), HIT, "computed: the answer is not"),
    ],
)
def test_what_differs_is_not_tried_again(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    computed: Completed,
    restored: Completed,
    said: str,
) -> None:
    answers = Answers(monkeypatch, (COLD, HIT), (computed,), (restored,))
    result = run._result(ROWS_CHECK, bench(answers))
    assert result.error is not None
    assert said in result.error.message
    assert not result.passed


def test_where_too_few_rows_came_back_the_machine_may_have_been_busy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [(COLD, HIT), (COLD,), (COLD,)]
    in_time = [(COLD, HIT), (COLD,), (HIT,)]
    assert run._result(ROWS_CHECK, bench(Answers(monkeypatch, *late * 2, *in_time))).passed
    result = run._result(ROWS_CHECK, bench(Answers(monkeypatch, *late * 3)))
    assert isinstance(result.error, TooFew)
    assert "after a kill: 0 tokens of the prompt were not computed, and 300" in result.error.message


def test_a_stock_that_kept_nothing_proves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run._result(ROWS_CHECK, bench(Answers(monkeypatch, (COLD, COLD), (COLD,), (COLD,))))
    assert "stock had 0 tokens" in str(result.error)


def test_on_the_cpu_no_layer_is_on_a_gpu(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_BACKEND_PATH", "/somebody/else's.so")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/lib/ollama")
    answers = Answers(monkeypatch, (COLD, HIT), (COLD,), (HIT,))
    assert run._result(ROWS_CHECK, bench(answers)).passed
    for program, env, options in answers.started:
        assert options[options.index("-ngl") + 1] == "0"
        assert env["GGML_BACKEND_PATH"] is None
        # our library, and not the one that the variable would find first
        assert env["LD_LIBRARY_PATH"] == f"{program.parent}:/usr/local/lib/ollama"


def on_gpus(bench: run._Bench, *backends: Path | None) -> None:
    run._require_same_bits_on_gpus(bench, ROWS_CHECK, backends, QUIET)


def test_each_gpu_library_computes_all_layers_as_ollama_starts_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    answers = Answers(monkeypatch, *([(COLD, HIT), (COLD,), (HIT,)] * 2))
    on_gpus(bench(answers), CUDA, VULKAN)
    assert len(answers.started) == 6
    for (program, env, options), folder in zip(
        answers.started, ["cuda_v12"] * 3 + ["vulkan"] * 3, strict=True
    ):
        assert options[options.index("-ngl") + 1] == "99"
        assert env["LD_LIBRARY_PATH"] == f"{program.parent}:{program.parent / folder}"
        assert str(env["GGML_BACKEND_PATH"]).startswith(f"{program.parent / folder}/libggml-")


def test_other_bits_on_a_gpu_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, (COLD, HIT), (COLD,), (COLD,))
    with pytest.raises(ResultDiffers, match=r"restored after a kill with cuda_v12/"):
        on_gpus(bench(answers), CUDA)


def test_a_library_with_which_stock_does_not_serve_is_left_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As CUDA 13 on an old GPU; but one library has to serve, or nothing was tested."""
    answers = Answers(monkeypatch, (COLD, HIT), (COLD,), (HIT,))
    answers.fails = lambda env: (
        "llama-server was ended by SIGABRT" if "vulkan" in str(env["GGML_BACKEND_PATH"]) else ""
    )
    on_gpus(bench(answers), CUDA, VULKAN)
    assert len(answers.started) == 3
    said = capsys.readouterr().err
    assert f"not tested: with {VULKAN} the installed llama-server was ended" in said
    with pytest.raises(ServiceError, match="there is a GPU, and it cannot be tested"):
        on_gpus(bench(answers), VULKAN)


def test_the_trees_own_failure_on_a_gpu_is_no_such_case(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers(monkeypatch, (COLD, HIT), (COLD,), (HIT,))
    answers.fails = lambda _env: (
        "llama-server was ended by SIGSEGV" if len(answers.started) == 1 else ""
    )
    with pytest.raises(ServiceError, match="SIGSEGV") as caught:
        on_gpus(bench(answers), CUDA)
    assert "cannot be tested" not in caught.value.message


def test_models_that_are_not_tiered_on_a_gpu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = Answers(monkeypatch, (COLD, HIT), (COLD,))
    answers.refused = "V is transposed on the device"
    on_gpus(bench(answers), CUDA)
    assert f"models are not tiered with {CUDA}: V is" in capsys.readouterr().err


class Whole:
    """A run of `self_test`: each check does what `does` says for its name."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.does: dict[str, Exception] = {}
        self.ran: list[str] = []
        self.installed = InstalledOllama(tmp_path / "ollama", tmp_path / "lib")
        monkeypatch.setattr(InstalledOllama, "version", lambda _self: "v0.40.0")
        monkeypatch.setattr(InstalledOllama, "build", lambda _self: ServerBuild(1, "abc"))
        monkeypatch.setattr(run, "require_same_devices", lambda *_: [])
        monkeypatch.setattr(run, "TrialStore", lambda _folder: contextlib.nullcontext())
        monkeypatch.setattr(
            run,
            "_models",
            lambda *_: dict.fromkeys(
                (key for c in ALL for key in ((c.shape, c.dtype), run._encoder(c))), tmp_path
            ),
        )
        made = [SelfCheck(c.name, c.kind, c.shape, c.options, self._check(c.name)) for c in ALL]
        monkeypatch.setattr(checks, "ALL", made)
        monkeypatch.setattr(checks, "SHORT", made[:1])
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        self.reports = tmp_path / "ollama-tiering"

    def _check(self, name: str) -> Callable[[ServerPair], None]:
        def check(_pair: ServerPair) -> None:
            self.ran.append(name)
            if error := self.does.get(name):
                raise error

        return check

    def __call__(self, *, is_whole: bool = True) -> Any:
        return run.self_test(self.installed, self.installed, is_whole, QUIET)


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Whole:
    return Whole(tmp_path, monkeypatch)


def test_all_checks_of_a_llama_cpp_that_nobody_has_tried(whole: Whole) -> None:
    outcome = whole()
    assert sorted(whole.ran) == sorted(check.name for check in ALL)
    assert str(outcome) == f"{len(ALL)} checks passed"
    assert not list(whole.reports.glob("*"))


def test_one_check_of_a_llama_cpp_that_is_on_the_list(whole: Whole) -> None:
    assert whole(is_whole=False).checks == 1
    assert whole.ran == ["rows"]


def test_a_kind_that_fails_is_refused_and_the_others_serve(
    whole: Whole, capsys: pytest.CaptureFixture[str]
) -> None:
    whole.does["q4_0"] = ResultDiffers("self-test: other bits", hint="h")
    whole.does["windows"] = ServiceError("the server died", told="a\nb")
    whole.does["states"] = NotTiered("recurrent layers alone")
    outcome = whole()
    assert outcome.refused == {
        "quantised": "q4_0: self-test: other bits",
        "windows": "windows: the server died",
    }
    assert outcome.checks == len(ALL) - 3
    assert str(outcome).endswith("passed; as stock: quantised, windows")
    assert "served as stock with this llama.cpp: windows: " in capsys.readouterr().err
    (report,) = whole.reports.glob("self-test-v0.40.0.txt")
    text = report.read_text()
    assert "q4_0: FAILED: self-test: other bits" in text
    assert "states: refused: recurrent layers alone" in text
    assert "two slots: passed" in text


@pytest.mark.parametrize("name", [check.name for check in ALL if check.kind == ROWS])
def test_without_rows_nothing_is_served(whole: Whole, name: str) -> None:
    whole.does[name] = ResultDiffers("self-test: other bits", hint="Ollama goes on")
    with pytest.raises(ResultDiffers, match="other bits") as caught:
        whole()
    assert f"a report that can be sent: {whole.reports}/self-test-v0.40.0.txt" in str(
        caught.value.hint
    )


def test_a_model_of_rows_that_is_not_tiered_would_make_the_tree_useless(whole: Whole) -> None:
    whole.does["rows"] = NotTiered("V is transposed on the device")
    with pytest.raises(ServiceError, match="the model is not tiered: V is transposed"):
        whole()


def test_a_report_that_cannot_be_written_hides_no_reason(whole: Whole) -> None:
    whole.reports.touch()
    whole.does["rows"] = ResultDiffers("self-test: other bits", hint="h")
    with pytest.raises(ResultDiffers, match="other bits") as caught:
        whole()
    assert "cannot be written" in str(caught.value.hint)


def test_a_broken_package_for_the_model_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ollama_tiering.models.make", None)
    with pytest.raises(MissingTool, match="a test model cannot be made") as caught:
        run._makers()
    assert caught.value.hint
