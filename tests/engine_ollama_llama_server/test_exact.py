"""Exact attention in the tree of links, with a real llama-server: one answer however a prompt is
cut, taken only where it is asked for and the processor is the one that it was compiled for; and
what comes back from the store is what was in memory.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from ollama_tiering.patchset.llama_server import guard, link_tree, links
from tests.engine_llama_server.server import Answer, LlamaServer
from tests.engine_ollama_llama_server.conftest import SHAPES
from tests.engine_ollama_llama_server.servers import Place, Stock, Up, tiering
from tests.engine_ollama_llama_server.test_ollama_llama_server import CHARACTERS, ENDS, START
from tests.places import short_directory
from tests.sidecar import SidecarProcess

VARIABLE = "OLLAMA_CPU_ATTENTION"
EXACT, STOCK = {VARIABLE: "exact"}, {VARIABLE: "stock"}
FIXED = ("-c", "2048", "-np", "1", "-ngl", "0", "-fa", "on")
CUTS = ((64, 1), (100, 2), (1, 1), (7, 2))  # tokens of a batch, threads; against 512 and 1
PROMPT = [1 + number * number * 7 % 89 for number in range(206)]  # no multiple of 4 or 7
OTHER = 95  # a token that is not in it
ANSWER = 6
# Those that are named in docs/exact.md. Of experts, GGML multiplies one column at a time.
ONE_ANSWER = (
    *(("llama-tiny", dtype) for dtype in ("f32", "f16", "bf16", "q8_0", "q4_k_m")),
    *(("mixtral-tiny", dtype) for dtype in ("f16", "q4_k_m")),
    ("mla-tiny", "f16"),
)


@pytest.fixture(scope="session")
def exact(tree: Path) -> Path:
    """The tree's llama-server, without the guard."""
    found = link_tree.read(tree)
    assert found is not None
    if not found.runs_exact:
        pytest.skip(f"the tree has no exact attention: {found.attention_here}")
    return found.lib / guard.COPY


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    folder = tmp_path_factory.mktemp("exact")

    def made(shape: str, dtype: str = "f16") -> Path:
        path = folder / f"{shape}-{dtype}.gguf"
        if not path.exists():
            make_model(make_shape(shape, dtype=dtype), path)
        return path

    return made


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Any]:
    @contextmanager
    def started(
        program: Path, model: Path, *options: str, env: dict[str, str], sidecar: Any = None
    ) -> Iterator[LlamaServer]:
        engine = None if sidecar is None else sidecar.socket.with_name("s.engine")
        given = (*FIXED, *options)
        with LlamaServer(program, model, tmp_path / "log", *given, sidecar=engine, env=env) as one:
            yield one

    return started


Serve = Callable[..., Any]
Models = Callable[..., Path]


def cpu_library(pid: int | None) -> str:
    """The one that is loaded."""
    text = Path(f"/proc/{pid}/maps").read_text()
    names = {line.rsplit("/", 1)[-1] for line in text.splitlines() if "libggml-cpu" in line}
    (name,) = names
    return name


def pid_of(server: LlamaServer) -> int:
    assert server.process is not None
    return server.process.pid


@pytest.mark.parametrize(("shape", "dtype"), ONE_ANSWER)
def test_one_answer_for_every_cut(
    exact: Path, model: Models, serve: Serve, shape: str, dtype: str
) -> None:
    """Also of a hit, and of a text that was generated and is read."""
    file = model(shape, dtype)
    with serve(exact, file, env=EXACT) as server:
        assert cpu_library(pid_of(server)) == links.EXACT
        whole = server.complete(PROMPT, ANSWER)
        assert whole.cached == 0
        for left in (1, 2, 3, 5, 130):  # columns that are computed
            server.complete([*PROMPT[:-left], OTHER], 1)
            hit = server.complete(PROMPT, ANSWER)
            assert hit.cached == len(PROMPT) - left
            assert hit.bits == whole.bits, left
    read = [*PROMPT, *whole.tokens[:-1]]
    for batch, threads in CUTS:
        cut = ("-ub", str(batch), "-t", str(threads), "-tb", str(threads))
        with serve(exact, file, *cut, env=EXACT) as server:
            again = server.complete(read, 1)
            assert again.cached == 0
            assert again.bits == whole.bits[-1:], (batch, threads)
            assert server.complete(PROMPT, ANSWER).bits == whole.bits, (batch, threads)


def test_one_answer_with_a_quantised_cache(exact: Path, model: Models, serve: Serve) -> None:
    file, cache = model("llama-tiny", "q4_k_m"), ("-ctk", "q8_0", "-ctv", "q8_0")
    with serve(exact, file, *cache, env=EXACT) as server:
        whole = server.complete(PROMPT, ANSWER)
        server.complete([*PROMPT[:-3], OTHER], 1)
        assert server.complete(PROMPT, ANSWER).bits == whole.bits
    read = [*PROMPT, *whole.tokens[:-1]]
    for batch, threads in CUTS:
        cut = ("-ub", str(batch), "-t", str(threads), "-tb", str(threads))
        with serve(exact, file, *cut, *cache, env=EXACT) as server:
            assert server.complete(read, 1).bits == whole.bits[-1:], (batch, threads)


def says_one_answer(
    program: Path, file: Path, serve: Serve, sidecar: SidecarProcess, *options: str, **env: str
) -> bool:
    """As the namespace has it of what it stored."""
    known = {one.namespace for one in sidecar.stat().namespaces}
    with serve(program, file, *options, env={**TIERED, **env}, sidecar=sidecar) as server:
        server.complete(PROMPT, 1)
        server.wait_for(lambda: settled(sidecar))
    new = [one.namespace for one in sidecar.stat().namespaces if one.namespace not in known]
    (description,) = [
        json.loads((sidecar.local_dir / "v1" / name.hex() / "namespace.json").read_text())
        for name in new
    ]
    return "one_answer=1" in description["extra"].split(";")


def test_only_what_was_tested_is_said_to_have_one_answer(
    exact: Path, model: Models, serve: Serve, sidecar: SidecarProcess
) -> None:
    tiny, asked = model("llama-tiny", "q4_k_m"), {VARIABLE: "exact"}
    quantised = ("-ctk", "q8_0", "-ctv", "q8_0")
    for expected, file, options, env in (
        (True, tiny, (), asked),
        (True, tiny, quantised, asked),
        (True, model("mla-tiny"), (), asked),
        (False, tiny, (), {VARIABLE: "stock"}),
        (False, tiny, ("-fa", "off"), asked),
        (False, tiny, ("-np", "2", "-kvu"), asked),
        (False, model("gemma3-tiny"), (), asked),  # windows
        (False, model("lfm2-tiny"), (), asked),  # states
    ):
        assert says_one_answer(exact, file, serve, sidecar, *options, **env) == expected, (
            file.name,
            options,
        )


def test_three_threads_give_it_too(exact: Path, model: Models, serve: Serve) -> None:
    file = model("llama-tiny", "q4_k_m")
    answers = []
    for threads in ("1", "3"):
        with serve(exact, file, "-t", threads, "-tb", threads, env=EXACT) as server:
            answers.append(server.complete(PROMPT[:50], 2).bits)
    assert answers[0] == answers[1]


def test_stock_has_other_answers_for_other_cuts(exact: Path, model: Models, serve: Serve) -> None:
    """Else the tests above could not fail."""
    file, answers = model("llama-tiny"), set()
    for batch in ("512", "64"):
        with serve(exact, file, "-ub", batch, env=STOCK) as server:
            answers.add(server.complete(PROMPT, ANSWER).bits)
    assert len(answers) == 2


def test_two_slots_at_once(exact: Path, model: Models, serve: Serve) -> None:
    """Each in cells of its own, in one batch: streams."""
    file = model("llama-tiny")
    other = PROMPT[::-1]
    with serve(exact, file, env=EXACT) as server:
        alone = [server.complete(prompt, ANSWER).bits for prompt in (PROMPT, other)]
    with serve(exact, file, "-np", "2", "--no-kv-unified", "-c", "4096", env=EXACT) as server:
        both = server.complete_all([PROMPT, other], ANSWER)
    assert [one.bits for one in both] == alone


@pytest.fixture
def as_installed(installed: Path, model: Models, serve: Serve) -> Answer:
    with serve(installed / links.LIB / "llama-server", model("llama-tiny"), env={}) as server:
        answer = server.complete(PROMPT, ANSWER)
        assert isinstance(answer, Answer)
        return answer


@pytest.mark.parametrize("value", [None, "", "stock", "exactly", "exact stock", "1"])
def test_without_the_variable_the_installed_library_computes(
    exact: Path, model: Models, serve: Serve, as_installed: Answer, value: str | None
) -> None:
    env = {} if value is None else {VARIABLE: value}
    with serve(exact, model("llama-tiny"), env=env) as server:
        assert cpu_library(pid_of(server)) != links.EXACT
        assert server.complete(PROMPT, ANSWER) == as_installed


@pytest.mark.parametrize("value", ["exact", ' "exact" ', "exact\n"])
def test_spaces_and_quotes_do_not_count(
    exact: Path, model: Models, serve: Serve, as_installed: Answer, value: str
) -> None:
    with serve(exact, model("llama-tiny"), env={VARIABLE: value}) as server:
        assert cpu_library(pid_of(server)) == links.EXACT
        assert server.complete(PROMPT, ANSWER).bits != as_installed.bits


def test_on_another_processor_the_installed_library_computes(
    exact: Path, model: Models, serve: Serve, as_installed: Answer, tmp_path: Path
) -> None:
    """The library is not changed but for one instruction set, which it asks for."""
    folder = tmp_path / "tree"
    shutil.copytree(exact.parent, folder, symlinks=True)
    library = folder / links.EXACT
    content = library.read_bytes()
    assert content.count(b" fma fpu ") == 1
    library.write_bytes(content.replace(b" fma fpu ", b" xma fpu "))
    with serve(folder / exact.name, model("llama-tiny"), env=EXACT) as server:
        assert cpu_library(pid_of(server)) != links.EXACT
        assert server.complete(PROMPT, ANSWER) == as_installed


@pytest.fixture
def sidecar() -> Iterator[SidecarProcess]:
    with (
        short_directory() as directory,
        short_directory(in_memory=True) as fast,
        SidecarProcess(directory, fast=fast) as running,
    ):
        yield running


ROWS = 192  # of PROMPT, in whole blocks
TRIES = 3  # a look-up has 80 ms, and the machine may be busy
TIERED = {"OLLAMA_KV_TIER_GATE": "restore", "OLLAMA_KV_TIER_MIN_TOKENS": "1"}


def stored(sidecar: SidecarProcess) -> int:
    return sum(one.blocks for one in sidecar.stat().namespaces)


@pytest.mark.parametrize("shape", ["gemma3-tiny", "gemma2-tiny", "lfm2-tiny"])
def test_windows_and_states_come_back_as_they_were(
    exact: Path, model: Models, serve: Serve, sidecar: SidecarProcess, shape: str
) -> None:
    """The next turn of a conversation: windows have no one answer for every cut, and need none."""
    file, env = model(shape), {**EXACT, **TIERED}
    prompt = [1 + number * number * 7 % 89 for number in range(700)]
    with serve(exact, file, env=EXACT) as memory:
        cold = memory.complete(prompt)
        turn = [*prompt, *cold.tokens, *PROMPT[:40]]
        hit = memory.complete(turn)
    assert hit.cached > 64
    with serve(exact, file, env=env, sidecar=sidecar) as server:
        assert server.complete(prompt) == cold
        server.wait_for(lambda: settled(sidecar))
        server.kill()
    for _ in range(TRIES):
        with serve(exact, file, env=env, sidecar=sidecar) as server:
            restored = server.complete(turn)
        if restored.cached == hit.cached:
            break
    assert restored == hit


def settled(sidecar: SidecarProcess) -> bool:
    """Whether something is stored, and for a second nothing more came."""
    before = stored(sidecar)
    time.sleep(1.0)
    return stored(sidecar) == before > 0


@pytest.mark.parametrize(
    ("shape", "dtype"), [("llama-tiny", "f16"), ("llama-tiny", "q8_0"), ("llama-tiny", "q4_k_m")]
)
def test_after_a_kill_it_is_the_resident_hit(
    exact: Path, model: Models, serve: Serve, sidecar: SidecarProcess, shape: str, dtype: str
) -> None:
    file, env = model(shape, dtype), {**EXACT, **TIERED}
    one, two = ([*PROMPT, end, *PROMPT[:20]] for end in (3, 4))
    with serve(exact, file, env=EXACT) as memory:
        cold, hit = memory.complete(one), memory.complete(two)
    with serve(exact, file, env=env, sidecar=sidecar) as server:
        assert server.complete(one) == cold
        server.wait_for(lambda: stored(sidecar) >= 4)
        server.kill()
    with serve(exact, file, env=env, sidecar=sidecar) as server:
        restored = server.complete(two)
        assert cpu_library(pid_of(server)) == links.EXACT
    assert restored == hit
    assert restored.cached >= ROWS


def said_of(server: LlamaServer, sidecar: SidecarProcess) -> str:
    """How it computes attention, as `tiering status` has it."""
    pid = pid_of(server)

    def reports() -> list[str]:
        return [one.cpu_attention for one in sidecar.stat().runners if one.pid == pid]

    server.wait_for(lambda: bool(reports()))
    return reports()[0]


@pytest.mark.parametrize("first", ["exact", "stock"])
def test_rows_of_exact_and_of_stocks_attention_are_never_mixed(
    exact: Path, model: Models, serve: Serve, sidecar: SidecarProcess, first: str
) -> None:
    file = model("llama-tiny")
    second = "stock" if first == "exact" else "exact"
    with serve(exact, file, env={VARIABLE: first, **TIERED}, sidecar=sidecar) as server:
        server.complete(PROMPT, 1)
        server.wait_for(lambda: stored(sidecar) >= 4)
    with serve(exact, file, env={VARIABLE: second, **TIERED}, sidecar=sidecar) as server:
        assert server.complete(PROMPT, 1).cached == 0
        assert said_of(server, sidecar).startswith("exact ") == (second == "exact")
    with serve(exact, file, env={VARIABLE: first, **TIERED}, sidecar=sidecar) as server:
        assert server.complete(PROMPT, 1).cached >= ROWS
        assert said_of(server, sidecar).startswith("exact ") == (first == "exact")


SYSTEM = [1 + number * number * 7 % 89 for number in range(4200)]  # 65 blocks


@pytest.fixture
def update(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Another build of the engine: one more library is in its memory."""

    def built(code: str, name: str = "libupdate.so") -> dict[str, str]:
        source, library = tmp_path / "update.c", tmp_path / name
        source.write_text(code)
        flags = ("-O1", "-fno-builtin", "-D_GNU_SOURCE", "-shared", "-fPIC", "-Wl,--build-id")
        command = ["cc", *flags, "-o", str(library), str(source), "-ldl", "-lm"]
        subprocess.run(command, check=True)
        return {"LD_PRELOAD": str(library)}

    return built


Update = Callable[..., dict[str, str]]
SAME_ARITHMETIC = "int of_the_update(void) { return 1; }"
# RoPE of a few positions is another one in its last bit: of rows from LATE on.
LATE = 4100
OTHER_ARITHMETIC = f"""
#include <dlfcn.h>
#include <math.h>
float cosf(float angle) {{
    float (*of_libm)(float) = (float (*)(float)) dlsym(RTLD_NEXT, "cosf");
    return angle < {LATE} ? of_libm(angle) : nextafterf(of_libm(angle), 2);
}}
void sincosf(float angle, float *sine, float *cosine) {{ /* what a compiler makes of both */
    void (*of_libm)(float, float *, float *) =
        (void (*)(float, float *, float *)) dlsym(RTLD_NEXT, "sincosf");
    of_libm(angle, sine, cosine);
    *cosine = angle < {LATE} ? *cosine : nextafterf(*cosine, 2);
}}
"""


def verdicts(sidecar: SidecarProcess) -> list[str]:
    return [one.verdict for one in sidecar.stat().builds]


CHAT = [*SYSTEM, *PROMPT, 5, *PROMPT]
TURN = [*CHAT, 6, *PROMPT[:50]]
LONG = ("-c", "8192")


def both_compute_the_system_prompt(
    program: Path, file: Path, serve: Serve, sidecar: SidecarProcess, update: dict[str, str]
) -> None:
    """The old build stores the chat, the new one what it begins with."""
    env = {**EXACT, **TIERED}
    for build, prompt in (({}, CHAT), (update, [*SYSTEM, 7, *PROMPT])):
        before = stored(sidecar)
        with serve(program, file, *LONG, env={**env, **build}, sidecar=sidecar) as server:
            assert server.complete(prompt, 1).cached == 0
            server.wait_for(lambda: stored(sidecar) > before and settled(sidecar))  # noqa: B023
            server.kill()
    assert verdicts(sidecar) == []


def next_load(
    program: Path,
    file: Path,
    serve: Serve,
    sidecar: SidecarProcess,
    update: dict[str, str],
    least: int,
) -> Answer:
    for _ in range(TRIES):
        env = {**EXACT, **TIERED, **update}
        with serve(program, file, *LONG, env=env, sidecar=sidecar) as server:
            answer: Answer = server.complete(TURN)
            server.kill()
        if answer.cached >= least:
            break
    return answer


@pytest.mark.parametrize(("shape", "dtype"), [("llama-tiny", "q4_k_m"), ("mixtral-tiny", "f16")])
def test_an_update_reads_what_was_stored_before_it(
    exact: Path,
    model: Models,
    serve: Serve,
    sidecar: SidecarProcess,
    update: Update,
    shape: str,
    dtype: str,
) -> None:
    """Once it has computed as much of the same text with the same bits."""
    file, new = model(shape, dtype), update(SAME_ARITHMETIC)
    with serve(exact, file, *LONG, env={**EXACT, **new}) as memory:
        memory.complete(CHAT, 1)
        hit = memory.complete(TURN)
    both_compute_the_system_prompt(exact, file, serve, sidecar, new)
    restored = next_load(exact, file, serve, sidecar, new, len(CHAT) - 64)
    assert verdicts(sidecar) == ["adopted"]
    assert restored.cached >= len(CHAT) - 64
    assert restored.bits == hit.bits


def test_an_update_that_computes_late_rows_otherwise_reads_nothing_of_it(
    exact: Path, model: Models, serve: Serve, sidecar: SidecarProcess, update: Update
) -> None:
    file, new = model("llama-tiny"), update(OTHER_ARITHMETIC)
    both_compute_the_system_prompt(exact, file, serve, sidecar, new)
    restored = next_load(exact, file, serve, sidecar, new, 4096)
    assert verdicts(sidecar) == ["different"]
    assert 4096 <= restored.cached <= len(SYSTEM)  # its own
    with serve(exact, file, *LONG, env={**EXACT, **new}) as memory:
        memory.complete(TURN, 1)
        assert memory.complete(TURN).bits == restored.bits


def recheck(sidecar: SidecarProcess, *options: str) -> subprocess.CompletedProcess[str]:
    words = ("recheck", "--now", "--tokens", "8192", "--socket", str(sidecar.socket), *options)
    command = [sys.executable, "-m", "ollama_tiering", *words]
    return subprocess.run(
        command, env=sidecar.environment(), capture_output=True, text=True, check=False
    )


def test_what_is_stored_is_computed_again_by_a_second_server(
    exact: Path, model: Models, serve: Serve, sidecar: SidecarProcess
) -> None:
    file = model("llama-tiny", "q4_k_m")
    with serve(exact, file, *LONG, env={**EXACT, **TIERED}, sidecar=sidecar) as server:
        whole = server.complete(CHAT, 20)
        server.wait_for(lambda: settled(sidecar))
        done = recheck(sidecar)
        assert done.returncode == 0, done.stderr
        blocks = (len(CHAT) + len(whole.tokens) - 1) // 64  # what was generated, too
        assert f"{blocks} blocks computed again and alike, 0 different" in done.stdout
        assert server.complete(TURN).cached >= len(CHAT)  # its slot is as it was


def test_wrong_rows_with_right_checksums_are_found_and_put_aside(
    exact: Path, model: Models, serve: Serve, sidecar: SidecarProcess, update: Update
) -> None:
    """A library that is taken for one that computes nothing, and changes a last bit."""
    file, env = model("llama-tiny"), {**EXACT, **TIERED}
    with serve(exact, file, *LONG, env=EXACT) as memory:
        memory.complete(CHAT, 1)
        hit = memory.complete(TURN)
    wrong = update(OTHER_ARITHMETIC, "libcurl-wrong.so")
    with serve(exact, file, *LONG, env={**env, **wrong}, sidecar=sidecar) as server:
        server.complete(CHAT, 1)
        server.wait_for(lambda: settled(sidecar))
        server.kill()
    with serve(exact, file, *LONG, env=env, sidecar=sidecar) as server:
        server.complete(PROMPT, 1)
        server.wait_for(lambda: settled(sidecar))
        done = recheck(sidecar, "--json")
        assert done.returncode == 8, done.stderr
        (found,) = json.loads(done.stdout)["rechecked"]
        assert found["blocks"] >= 64
        assert found["different"] == 1  # what follows it is reached by nobody
        assert sidecar.said("WRONG ROWS") == 1
        assert server.complete(TURN).bits == hit.bits


def test_ollama_serves_with_it(
    start_stock: Callable[..., Stock], start_up: Callable[..., Up], exact: Path
) -> None:
    """`tiering up` asks for it; its own variable, or the setting, turns it off."""
    up = start_up(**EXACT)
    first = up.generate(SHAPES[0], START + ENDS[0])
    (runner,) = up.runners()
    assert cpu_library(runner.pid) == links.EXACT
    (said,) = [one.cpu_attention for one in up.stat().runners if one.pid == runner.pid]
    assert said.startswith("exact ")
    up.wait_stored(10)
    up.unload(SHAPES[0])
    hit = up.generate(SHAPES[0], START + ENDS[1])
    (runner,) = up.runners()
    assert up.restored([runner.pid]) >= CHARACTERS * 9 // 10
    up.kill()

    memory = start_stock(exact.parents[2] / links.PROGRAM, **EXACT)
    assert memory.generate(SHAPES[0], START + ENDS[0]) == first
    assert memory.generate(SHAPES[0], START + ENDS[1]) == hit
    (runner,) = memory.runners()
    assert cpu_library(runner.pid) == links.EXACT


def test_up_rechecks_while_nobody_asks(
    installed: Path, exact: Path, place: Place, models: Path
) -> None:
    settings = "[server]\nrecheck_hours = 0.001\nidle_minutes = 0.1\n"
    up = Up(installed, replace(place, settings=settings), models, EXACT)
    try:
        up.start()
        first = up.generate(SHAPES[0], START + ENDS[0])
        up.wait_stored(10)
        up.wait(lambda: sum(one.blocks for one in up.stat().rechecked) >= 5, "it is rechecked")
        assert sum(one.different for one in up.stat().rechecked) == 0
        again = up.generate(SHAPES[0], START + ENDS[0])
        assert again == first
    finally:
        up.kill()


def test_num_batch_and_num_thread_change_no_bit_under_ollama(
    start_stock: Callable[..., Stock], exact: Path
) -> None:
    server = start_stock(exact.parents[2] / links.PROGRAM, **EXACT)
    answers = [
        server.generate(SHAPES[0], START, **options)
        for options in (
            {"num_batch": 512},
            {"num_batch": 64},
            {"num_batch": 100, "num_thread": 2},
        )
    ]
    assert answers[1:] == answers[:1] * 2


def test_what_is_said_of_it(place: Place, exact: Path) -> None:
    done = tiering(place, "patch", "status", "--json")
    (row,) = [
        one
        for one in json.loads(done.stdout)["installed"]
        if Path(one["binary"]).parents[1] == exact.parents[2]
    ]
    assert row["cpu_attention"].startswith("exact (")
    assert (
        f"attention on the CPU: {row['cpu_attention']}" in tiering(place, "patch", "status").stdout
    )
