"""What `tiering status` says of a runner."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ollama_tiering.cli import status
from ollama_tiering.config import MemoryLimit
from ollama_tiering.launch import router_models
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.unit.sidecar.ollama_models import blob, name_model


@pytest.fixture(autouse=True)
def universal_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_attention_on_the_cpu_is_told_of_tiered_and_other_runners_alike() -> None:
    said = "exact (avx512), but stock where rows are not dense"
    tiered = pb.RunnerReport(pid=1, model="m", tiered=True, cpu_attention=said)
    other = pb.RunnerReport(pid=2, model="m", reason="sliding window", cpu_attention="stock")
    on_gpu = pb.RunnerReport(pid=3, model="m", tiered=True)
    answer = adm.StatResponse(version="1", runners=[tiered, other, on_gpu])
    lines = list(status.lines(Path("s"), answer))
    told = [line for line in lines if "attention" in line]
    assert told == [f"  attention on the CPU: {said}", "  attention on the CPU: stock"]
    document = status.document(Path("s"), answer)
    assert [runner["cpu_attention"] for runner in document["runners"]] == [said, "stock", ""]


def test_a_model_of_a_router_has_the_name_by_which_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_models, "name_of", lambda pid: "qwen3:8b" if pid == 2 else "")
    runners = [pb.RunnerReport(pid=pid, model="m.gguf", tiered=True) for pid in (1, 2)]
    answer = adm.StatResponse(version="1", runners=runners)
    lines = list(status.lines(Path("s"), answer))
    told = [line for line in lines if line.startswith("runner ") or "router" in line]
    assert [line.partition(":")[0] for line in told] == [
        *("runner 1 m.gguf", "runner 2 m.gguf", "  a router's model"),
    ]
    assert told[-1] == "  a router's model: qwen3:8b"
    document = status.document(Path("s"), answer)
    assert [runner["router_name"] for runner in document["runners"]] == ["", "qwen3:8b"]


def test_what_was_not_read_for_lack_of_memory_is_told() -> None:
    short = pb.RunnerReport(pid=1, model="m", tiered=True, memory_short_tokens=4096)
    other = pb.RunnerReport(pid=2, model="m", tiered=True)
    answer = adm.StatResponse(version="1", runners=[short, other])
    told = [line for line in status.lines(Path("s"), answer) if "memory was" in line]
    assert told == [
        "  4,096 of the recomputed tokens were stored: too little memory was available to read them"
    ]
    runners = status.document(Path("s"), answer)["runners"]
    assert [runner["memory_short_tokens"] for runner in runners] == [4096, 0]


def test_where_k_and_v_lie_is_told_of_tiered_and_other_runners_alike() -> None:
    paged = pb.CacheMemory(
        device_layers=1, device_bytes=128 << 20, pinned_layers=7, pinned_bytes=896 << 20
    )
    split = pb.CacheMemory(
        device_layers=2, device_bytes=6 << 20, host_layers=6, host_bytes=18 << 20
    )
    split.paging_asked = True
    runners = [
        pb.RunnerReport(pid=1, model="m", tiered=True, cache_memory=paged),
        pb.RunnerReport(pid=2, model="m", reason="embedding model", cache_memory=split),
        pb.RunnerReport(pid=3, model="m", tiered=True, cache_memory=pb.CacheMemory()),
        pb.RunnerReport(pid=4, model="m", tiered=True),
    ]
    answer = adm.StatResponse(version="1", runners=runners)
    told = [line for line in status.lines(Path("s"), answer) if "K/V" in line]
    assert told == [
        "  K/V: 1 layer (128.0 MiB) in GPU memory, "
        "7 layers (896.0 MiB) paged, in pinned memory of the system",
        "  K/V: 2 layers (6.0 MiB) in GPU memory, "
        "6 layers (18.0 MiB) in the CPU's memory, which computes them",
    ]
    said = [one["cache_memory"] for one in status.document(Path("s"), answer)["runners"]]
    assert said[0] == {
        "device_layers": 1,
        "device_bytes": 128 << 20,
        "pinned_layers": 7,
        "pinned_bytes": 896 << 20,
        "mirrored_bytes": 0,
        "host_layers": 0,
        "host_bytes": 0,
        "paging_asked": False,
        "in_turn": False,
    }
    assert said[1]["paging_asked"]
    assert said[2]["pinned_layers"] == 0
    assert said[3] is None


def test_what_of_paged_layers_a_gpu_has_as_well_is_told() -> None:
    memory = pb.CacheMemory(
        device_layers=1, device_bytes=4 << 20, pinned_layers=7, pinned_bytes=28 << 20
    )
    memory.mirrored_bytes = 3 << 20
    answer = adm.StatResponse(runners=[pb.RunnerReport(pid=1, tiered=True, cache_memory=memory)])
    told = [line for line in status.lines(Path("s"), answer) if "K/V" in line]
    assert told == [
        "  K/V: 1 layer (4.0 MiB) in GPU memory, 7 layers (28.0 MiB) paged, "
        "in pinned memory of the system (3.0 MiB of it in GPU memory as well)"
    ]
    (said,) = (one["cache_memory"] for one in status.document(Path("s"), answer)["runners"])
    assert said["mirrored_bytes"] == 3 << 20


def test_what_a_model_was_loaded_with_is_told_by_the_names_of_options() -> None:
    settings = pb.RunnerSettings(context_tokens=4096, slots=2, batch_tokens=512, threads=8)
    runners = [
        pb.RunnerReport(pid=1, model="m", tiered=True, settings=settings),
        pb.RunnerReport(pid=2, model="m", settings=pb.RunnerSettings(slots=1)),
        pb.RunnerReport(pid=3, model="m", tiered=True),
    ]
    answer = adm.StatResponse(version="1", runners=runners)
    told = [line for line in status.lines(Path("s"), answer) if "settings" in line]
    assert told == [
        "  settings: num_ctx 4,096, 2 slots, num_batch 512, num_thread 8",
        "  settings: 1 slot",
    ]
    said = [one["settings"] for one in status.document(Path("s"), answer)["runners"]]
    assert said[0] == {"num_ctx": 4096, "slots": 2, "num_batch": 512, "num_thread": 8}
    assert said[2] is None


def test_paged_layers_that_are_not_copied_ahead_are_told() -> None:
    memory = pb.CacheMemory(pinned_layers=8, pinned_bytes=1 << 30, in_turn=True)
    answer = adm.StatResponse(runners=[pb.RunnerReport(pid=1, tiered=True, cache_memory=memory)])
    told = [line for line in status.lines(Path("s"), answer) if "K/V" in line]
    assert told == [
        "  K/V: 8 layers (1.0 GiB) paged, in pinned memory of the system, "
        "none is copied ahead of its turn, for want of GPU memory"
    ]


def use(namespace: bytes, model: str, name: str = "", **more: Any) -> adm.ModelUse:
    counts = {"requests": 3, "prompt_tokens": 1900, "memory_tokens": 400, "restored_tokens": 1000}
    counts |= {"recomputed_tokens": 500}
    times = {"since_unix_seconds": 86400 * 365, "last_used_unix_seconds": 86400 * 366}
    return adm.ModelUse(namespace=namespace, model=model, name=name, **counts | times | more)


MEASURED = {"prefill_tokens": 2000, "prefill_seconds": 20.0, "restore_seconds": 0.5}


def test_what_was_done_for_a_model_is_told_by_name_when_it_is_not_loaded_too() -> None:
    answer = adm.StatResponse(
        version="1",
        runners=[pb.RunnerReport(pid=5, model=blob(2), tiered=True)],
        model_uses=[
            use(b"a", blob(1), "qwen3:0.6b", **MEASURED),
            use(b"b", blob(2), "llama3:8b", loaded=True),
        ],
    )
    lines = list(status.lines(Path("s"), answer))
    at = lines.index("use of qwen3:0.6b, since 1971-01-01 00:00")
    assert lines[1] == (
        "all models, since 1971-01-01 00:00: saved 9.5 s: 1,000 tokens restored in 0.50 s, "
        "computing them takes about 10 s at 100 tokens/s "
        "(without 1,000 restored tokens: not measured yet)"
    )
    assert lines[at : at + 8] == [
        "use of qwen3:0.6b, since 1971-01-01 00:00",
        "  3 requests, 1,900 prompt tokens = 400 in memory + 1,000 restored + 500 recomputed",
        "  saved 9.5 s: 1,000 tokens restored in 0.50 s, computing them takes about 10 s at "
        "100 tokens/s",
        "  not loaded now, last used 1971-01-02 00:00",
        "use of llama3:8b, since 1971-01-01 00:00",
        "  3 requests, 1,900 prompt tokens = 400 in memory + 1,000 restored + 500 recomputed",
        "  saved: not measured yet (1,000 tokens restored)",
        "  loaded, last used 1971-01-02 00:00",
    ]
    assert "runner 5 llama3:8b: tiered, " in lines
    document = status.document(Path("s"), answer)
    named, unmeasured = document["model_uses"]
    assert (named["name"], named["model"], named["loaded"]) == ("qwen3:0.6b", blob(1), False)
    assert (named["saved_seconds"], unmeasured["saved_seconds"]) == (9.5, None)
    assert named["measured_prefill_tokens_per_second"] == 100
    assert unmeasured["measured_prefill_tokens_per_second"] is None
    assert document["saved_seconds"] == 9.5
    assert document["runners"][0]["name"] == "llama3:8b"
    assert document["runners"][0]["model"] == blob(2)
    json.dumps(document, allow_nan=False)


def test_reasons_of_a_model_that_is_not_loaded_any_more_are_told_of_all_its_engines() -> None:
    ends, new = pb.SHORTFALL_ENDS, pb.SHORTFALL_NOTHING_STORED
    of_one = [pb.ShortfallCount(reason=ends, requests=2, tokens=100)]
    of_other = [*of_one, pb.ShortfallCount(reason=new, requests=1, tokens=900)]
    uses = [use(b"a", "m", shortfalls=of_one), use(b"b", "m", shortfalls=of_other)]
    lines = list(status.lines(Path("s"), adm.StatResponse(version="1", model_uses=uses)))
    at = lines.index("  recomputed, by reason:")
    assert lines[at + 1 : at + 3] == [
        "    900 tokens of 1 request: nothing stored begins like this prompt",
        "    200 tokens of 4 requests: what is stored of the prompt ends",
    ]
    uses[0].loaded = True  # then its runner says it
    lines = list(status.lines(Path("s"), adm.StatResponse(version="1", model_uses=uses)))
    assert not [line for line in lines if "by reason" in line]


def test_on_a_terminal_lines_break_at_words_and_elsewhere_they_stay_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = "  saved 9.5 s: " + "word " * 20 + "/a/path/of/which/nothing/is/cut/however/long/it/is"
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert list(status._wrapped([line])) == [line]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    first, *more = status._wrapped([line])
    assert first.startswith("  saved")
    assert len(more) > 1
    assert all(len(one) <= 50 for one in [first, *more[:-1]])
    assert all(one.startswith("      ") and one[6] != " " for one in more)
    assert " ".join([first.strip(), *(one.strip() for one in more)]) == line.strip()
    assert list(status._wrapped([""])) == [""]


def test_it_is_shown_again_until_somebody_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, slept = [], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    def show(socket: Path | None, as_json: bool, *, clear: bool = False) -> None:
        shown.append(clear)

    monkeypatch.setattr(status, "_show", show)
    monkeypatch.setattr(time, "sleep", sleep)
    run = CliRunner().invoke
    assert run(status.status, ["--watch"]).exit_code == 0
    assert (shown, slept) == ([True] * 3, [2.0] * 3)
    slept.clear()
    assert run(status.status, ["--watch", "0.5"]).exit_code == 0
    assert slept == [0.5] * 3
    assert run(status.status, ["--watch", "--json"]).exit_code == 2


def test_after_an_unload_no_model_is_loaded_before_the_first_none_has_reported() -> None:
    used = adm.StatResponse(version="1", model_uses=[use(b"a", "m")])
    assert list(status.lines(Path("s"), used))[-1] == "runners: no model is loaded"
    fresh = adm.StatResponse(version="1")
    assert list(status.lines(Path("s"), fresh))[-1] == "runners: none has reported"


def test_two_engines_of_one_model_are_one_and_each_saves_at_its_own_speed() -> None:
    uses = [use(b"a", blob(1), **MEASURED), use(b"b", blob(1), **MEASURED | {"prefill_seconds": 2})]
    answer = adm.StatResponse(version="1", model_uses=uses)
    lines = [line for line in status.lines(Path("s"), answer) if "saved" in line]
    assert [line.split(":")[0] for line in lines] == ["  saved 10 s"]


def test_a_name_the_sidecar_does_not_know_is_looked_for_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_model(tmp_path, "mine:latest", blob(1))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    runners = [pb.RunnerReport(pid=5, model=blob(1), tiered=True), pb.RunnerReport(pid=6)]
    unknown = [use(b"b", blob(2)), use(b"c", "made.gguf", last_used_unix_seconds=1e300)]
    answer = adm.StatResponse(version="1", runners=runners, model_uses=unknown)
    text = "\n".join(status.lines(Path("s"), answer))
    assert "runner 5 mine:latest: tiered" in text
    assert "runner 6 ?: not tiered" in text
    assert "use of 000000000000, since" in text
    assert "use of made.gguf, since" in text
    assert "last used 1e+300 s" in text
    assert blob(2) not in text


def test_a_limit_of_the_sidecars_memory_group_is_said_and_of_the_machine_is_not() -> None:
    answer = adm.StatResponse(version="1")
    limit = MemoryLimit(500_000_000, Path("/sys/fs/cgroup/memory.max"))
    told = "  memory at most 500.0 MB (/sys/fs/cgroup/memory.max)"
    assert [line for line in status.lines(Path("s"), answer, limit) if "memory" in line] == [told]
    assert not [line for line in status.lines(Path("s"), answer) if "memory at most" in line]
    document = status.document(Path("s"), answer, limit)
    assert document["memory_limit_bytes"] == 500_000_000
    assert document["memory_group"] == "/sys/fs/cgroup/memory.max"
    assert status.document(Path("s"), answer)["memory_limit_bytes"] is None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, []),
        (10.0, []),
        (10.5, ["computed again in 24 h: 10 s in 3 prompts; tiering why says why"]),
    ],
)
def test_what_partings_cost_is_said_in_one_line_if_it_is_worth_one(
    seconds: float, said: list[str]
) -> None:
    lost = adm.PartingsSum(requests=3, lost_tokens=900, lost_seconds=seconds)
    answer = adm.StatResponse(version="1", partings=lost)
    assert [line for line in status.lines(Path("s"), answer) if "again in" in line] == said
    document = status.document(Path("s"), answer)
    assert document["partings"] == {"requests": 3, "lost_tokens": 900, "lost_seconds": seconds}


def test_what_is_written_to_the_disk_is_said_by_day_request_and_year() -> None:
    answer = adm.StatResponse(version="1")
    assert not [line for line in status.lines(Path("s"), answer) if "TBW" in line]
    assert status.document(Path("s"), answer)["wear"]["terabytes_a_year"] is None
    answer.wear.days, answer.wear.written_bytes, answer.wear.requests = 2, 6 * 10**9, 100
    [line] = [line for line in status.lines(Path("s"), answer) if "TBW" in line]
    assert line.strip() == (
        "written to disk 3.0 GB a day, 60.0 MB a request (the last 2 whole days); at this rate "
        "1.1 TB a year (compare with the TBW in the disk's data sheet)"
    )
    wear = status.document(Path("s"), answer)["wear"]
    assert (wear["bytes_a_day"], wear["bytes_a_request"]) == (3 * 10**9, 6 * 10**7)
    assert wear["terabytes_a_year"] == 1.095
    answer.wear.requests = 0
    [line] = [line for line in status.lines(Path("s"), answer) if "TBW" in line]
    assert "request" not in line
