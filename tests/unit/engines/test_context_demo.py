"""What the demonstration of a long context calls a success, and its table."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from ollama_tiering.cli import cli, demo_context
from ollama_tiering.config import MIB
from ollama_tiering.engines import context_demo
from ollama_tiering.engines.context_demo import ContextOutcome, Env
from ollama_tiering.engines.context_driver import paging_binary
from ollama_tiering.errors import MissingTool, UsageError
from ollama_tiering.launch.ollama import Generated
from ollama_tiering.launch.server_log import LoadPlan, LoggedGpu
from ollama_tiering.patchset.binary import ENV_BINARY
from ollama_tiering.patchset.gpu_libraries import SHIM

CARD = LoggedGpu("GPU-1", "A card", "8.9", 8192 * MIB, 8000 * MIB)


def plan(on_gpu: int, **kv_mib: int) -> LoadPlan:
    kv = {place: size * MIB for place, size in kv_mib.items()}
    return LoadPlan(on_gpu, 9, {"CUDA0": 15 * MIB}, kv, {"CUDA0": 100 * MIB, "CPU": MIB})


def answer(logprob: float = -0.5, token: str = "a", rate: float = 100.0) -> Generated:
    return Generated([token], [[(token, logprob), ("b", -1.0)]], 0.25, 0.5, 1500, rate)


Result = tuple[LoadPlan, Generated]
FITS, DIVIDED = (plan(9, CUDA0=64), answer()), (plan(4, CUDA0=256, CPU=256), answer(rate=25.0))
OURS = (plan(9, CUDA0=192, Pinned=320), answer(rate=75.0))


@dataclass
class FakeServers:
    """Answers with `results`, one after the other; notes what it was started with and asked."""

    results: list[Result]
    found: list[LoggedGpu] = field(default_factory=lambda: [CARD])
    started: list[dict[str, str]] = field(default_factory=list)
    asked: list[tuple[int, int]] = field(default_factory=list)
    open: int = 0

    @contextlib.contextmanager
    def serve(self, env: Env) -> Iterator[FakeServers]:
        self.started.append(dict(env))
        self.open += 1
        try:
            yield self
        finally:
            self.open -= 1

    def gpus(self) -> list[LoggedGpu]:
        return self.found

    def run(self, num_ctx: int, prompt: str, new_tokens: int) -> Result:
        assert self.open == 1
        self.asked.append((len(self.started), num_ctx))
        return self.results.pop(0)


def outcome(fits: Result = FITS, divided: Result = DIVIDED, ours: Result = OURS) -> ContextOutcome:
    return context_demo.show(FakeServers([fits, divided, ours]).serve, "prompt", lambda _line: None)


def test_the_same_is_asked_where_it_fits_by_stocks_plan_and_paged() -> None:
    servers = FakeServers([FITS, DIVIDED, OURS])
    found = context_demo.show(servers.serve, "prompt", lambda _line: None)
    assert servers.asked == [(2, 4096), (2, 32768), (3, 32768)]
    assert servers.open == 0
    assert ["OLLAMA_PAGED_ATTN" in env for env in servers.started] == [False, False, True]
    assert found.failures == []
    assert [found.verdict(run) for run in found.runs] == ["the reference", "yes", "yes"]


def test_a_large_card_is_made_small_and_only_the_first_is_used() -> None:
    servers = FakeServers([FITS, DIVIDED, OURS], found=[CARD, LoggedGpu("GPU-2", "", "", 1, 1)])
    found = context_demo.show(servers.serve, "prompt", lambda _line: None)
    assert "OLLAMA_GPU_OVERHEAD" not in servers.started[0]
    for env in servers.started[1:]:
        assert int(env["OLLAMA_GPU_OVERHEAD"]) == (8000 - 457 - 480) * MIB
        assert env["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert found.used_bytes == (457 + 480) * MIB
    assert context_demo.overhead_bytes(LoggedGpu("", "", "", 0, 900 * MIB)) == 0


def test_last_bits_of_layers_on_the_cpu_are_no_failure() -> None:
    found = outcome(divided=(DIVIDED[0], answer(-0.5000001)))
    assert found.failures == []
    assert found.verdict(found.runs[1]) == "tokens yes, last bits no"


@pytest.mark.parametrize("other", [answer(-0.5000001), answer(token="c"), Generated()])
def test_one_bit_of_the_paged_answer_is_a_failure(other: Generated) -> None:
    found = outcome(ours=(OURS[0], other))
    assert found.failures == ["the paged answer differs from that with all K/V on the GPU"]
    assert found.verdict(found.runs[2]) == "NO"


def test_no_answer_is_no_answer_that_agrees() -> None:
    silent = Generated()
    found = outcome((FITS[0], silent), (DIVIDED[0], silent), (OURS[0], silent))
    assert found.failures == ["the paged answer differs from that with all K/V on the GPU"]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ({"fits": (plan(7, CUDA0=50, CPU=14), answer())}, "not all layers are on the GPU"),
        ({"divided": (plan(9, CUDA0=512), answer())}, "stock has all layers"),
        ({"ours": (plan(8, CUDA0=192, Pinned=320), answer())}, "8 of 9 layers"),
        ({"ours": (plan(9, CUDA0=512), answer())}, "no K/V were paged"),
    ],
)
def test_a_plan_that_shows_nothing_is_a_failure(runs: dict[str, Result], words: str) -> None:
    [failure] = outcome(**runs).failures
    assert words in failure


def test_without_a_gpu_nothing_is_asked() -> None:
    servers = FakeServers([], found=[])
    with pytest.raises(MissingTool, match="finds no NVIDIA GPU on this machine"):
        context_demo.show(servers.serve, "prompt", lambda _line: None)
    assert len(servers.started) == 1


def test_the_table_has_the_figures() -> None:
    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    console.print(demo_context.table(outcome()))
    text = console.export_text()
    cells = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    rows = {row[1]: row[2:-1] for row in cells if len(row) > 3}
    assert rows["all fits"] == [
        *("4096", "9/9", "179.0 MiB", "64.0 MiB", "-", "-", "0.250", "100.0", "the reference"),
    ]
    assert rows["stock's plan"] == [
        *("32768", "4/9", "371.0 MiB", "256.0 MiB", "-", "256.0 MiB", "0.250", "25.0", "yes"),
    ]
    assert rows["paged"] == [
        *("32768", "9/9", "307.0 MiB", "192.0 MiB", "320.0 MiB", "-", "0.250", "75.0", "yes"),
    ]
    assert "A card, 8.0 GiB, of which at most 937.0 MiB are used" in text


def test_what_is_printed_as_json_is_what_was_seen() -> None:
    document = json.loads(json.dumps(outcome().as_json()))
    assert document["gpu"]["description"] == "A card"
    ours = document["runs"][2]
    assert (ours["layers_on_gpu"], ours["pinned_bytes"]) == (9, 320 * MIB)
    assert (ours["same_tokens"], ours["same_logprobs"]) == (True, True)
    assert document["failures"] == []


def program(folder: Path, *libraries: str) -> Path:
    """A program with these libraries for GPUs beside it."""
    lib = folder / "lib/ollama/cuda_v13"
    lib.mkdir(parents=True)
    for name in libraries:
        (lib / name).touch()
    binary = folder / "bin/ollama"
    binary.parent.mkdir()
    binary.touch(mode=0o755)
    return binary


def test_the_newest_build_that_pages_is_taken(tmp_path: Path) -> None:
    without = program(tmp_path / "a", "libggml-cuda.so")
    with_it = program(tmp_path / "b", "libggml-cuda.so", SHIM)
    assert paging_binary(None, [without, with_it]) == with_it
    assert paging_binary(with_it, [without]) == with_it
    with pytest.raises(MissingTool, match=f"no {SHIM} beside {without}"):
        paging_binary(without, [with_it])
    with pytest.raises(MissingTool, match="no patched Ollama was built"):
        paging_binary(None, [])


def test_a_build_that_cannot_page_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_BINARY, str(program(tmp_path, "libggml-cuda.so")))
    done = CliRunner().invoke(cli, ["demo", "--context"])
    assert isinstance(done.exception, MissingTool)
    assert done.exception.exit_code == 6
    assert "needs it and an NVIDIA GPU" in done.exception.message
    assert done.exception.hint
    assert "tiering patch --gpu stock" in done.exception.hint


def test_the_numpy_engine_has_no_gpu() -> None:
    done = CliRunner().invoke(cli, ["demo", "--context", "--engine", "reference"])
    assert isinstance(done.exception, UsageError)
