"""Where K/V lie is told as it is: by `tiering status`, `tiering doctor` and `ollama ps`, on a GPU
that is not there (tests/attention/fakegpu).
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.doctor import check_running
from ollama_tiering.doctor.check import CheckState
from tests.engine.attention import paged
from tests.engine.attention.fake_gpu import MINIMUM_MIB, NO_DEVICE, devices
from tests.engine.harness import Server, Sidecar
from tests.engine.test_reasons import status

MIB = 1 << 20
TOKEN_BYTES = 8 << 10  # of the model, over its 8 layers


def _ps(server: Server) -> tuple[dict[str, Any], list[str]]:
    """What the API says of the one model, and the lines about it for people: a cell of the table
    that has more than 30 characters goes on in the next.
    """
    (model,) = server.http.get(server.url + "/api/ps").json()["models"]
    environment = server.environment | {"OLLAMA_HOST": server.url}
    done = subprocess.run(
        [server.binary, "ps"], env=environment, capture_output=True, text=True, check=True
    )
    return model, done.stdout.splitlines()[1:]


@pytest.mark.parametrize(
    ("env", "num_ctx", "layers", "processor"),
    [
        (paged.hot(2) | devices(1024), 4096, (2, 6, 0), "100% GPU, K/V pinned: 25 MB "),
        (paged.ON | devices(1024), 4096, (8, 0, 0), "100% GPU "),
        (paged.FLASH | devices(1024), 4096, (8, 0, 0), "100% GPU "),
        (paged.CPU, 4096, (0, 0, 8), "100% CPU "),
    ],
    ids=["paged", "nothing to page", "off", "CPU"],
)
@pytest.mark.timeout(300)
def test_where_k_and_v_lie_is_told(
    paged_binary: Path,
    models: Path,
    eight: str,
    tmp_path: Path,
    sidecar: Sidecar,
    env: dict[str, str],
    num_ctx: int,
    layers: tuple[int, int, int],
    processor: str,
) -> None:
    with Server(paged_binary, tmp_path / "s", models, socket=sidecar.socket, env=env) as server:
        server.generate(eight, "a", num_ctx=num_ctx)
        sidecar.settle(server, eight)
        model, lines = _ps(server)
        text, document = status(sidecar), json.loads(status(sidecar, "--json"))
        allocated = paged.kv_bytes(server)
    of_layer = num_ctx * TOKEN_BYTES // 8
    sizes = [of_layer * count for count in layers]
    assert [allocated.get(place, 0) for place in ("CUDA0", "Pinned", "CPU")] == sizes
    (runner,) = document["runners"]
    memory = runner["cache_memory"]
    places = ("device", "pinned", "host")
    assert tuple(memory[f"{place}_layers"] for place in places) == layers
    assert [memory[f"{place}_bytes"] for place in places] == sizes
    assert memory["paging_asked"] == ("OLLAMA_PAGED_ATTN" in env)
    words = f"{layers[1]} layers ({sizes[1] / MIB:.1f} MiB) paged, in pinned memory of the system"
    assert (words in text) == (layers[1] > 0)
    assert memory["mirrored_bytes"] == 0
    assert "size_mirrored" not in model
    assert model.get("size_pinned", 0) == sizes[1]
    assert ("size_pinned" in model) == (layers[1] > 0)
    if not layers[2]:
        assert model["size"] - model["size_vram"] == sizes[1]
    assert len(lines) == 1
    assert f" {processor}" in lines[0]


@pytest.mark.parametrize("devices_mib", [(1024,), (1024, 1024)], ids=["one GPU", "two GPUs"])
@pytest.mark.timeout(300)
def test_what_gpus_have_of_paged_layers_as_well_is_told(
    paged_binary: Path,
    models: Path,
    eight: str,
    tmp_path: Path,
    sidecar: Sidecar,
    devices_mib: tuple[int, ...],
) -> None:
    """512 of 4096 cells, on whatever GPU their layer is. They are a part of its memory, and of none
    beside it.
    """
    env = paged.hot(2) | paged.mirrors(512) | devices(*devices_mib)
    env |= {"OLLAMA_SCHED_SPREAD": "1"}
    with Server(paged_binary, tmp_path / "s", models, socket=sidecar.socket, env=env) as server:
        server.generate(eight, "a", num_ctx=4096)
        sidecar.settle(server, eight)
        model, lines = _ps(server)
        text, document = status(sidecar), json.loads(status(sidecar, "--json"))
        said = len(re.findall(r"have a mirror on CUDA\d", server.log_text()))
    mirrored = 512 * 6 * TOKEN_BYTES // 8
    assert said == len(devices_mib)
    assert document["runners"][0]["cache_memory"]["mirrored_bytes"] == mirrored == 3 * MIB
    assert "paged, in pinned memory of the system (3.0 MiB of it in GPU memory as well)" in text
    assert model["size_mirrored"] == mirrored
    assert model["size"] - model["size_vram"] == model["size_pinned"] == 4096 * 6 * TOKEN_BYTES // 8
    assert " 100% GPU, K/V pinned: 25 MB " in lines[0]
    assert [line.strip() for line in lines[1:]] == ["(3.1 MB of it on GPU as well)"]


@pytest.mark.parametrize(
    ("device", "states"),
    [
        (devices(MINIMUM_MIB + 180), [CheckState.OK]),
        (devices(MINIMUM_MIB + 90), [CheckState.WARN]),
        (NO_DEVICE, [CheckState.WARN]),
    ],
    ids=["one layer's staging", "too small", "no GPU"],
)
@pytest.mark.timeout(300)
def test_k_and_v_that_cannot_be_paged_as_asked_are_a_warning(
    paged_binary: Path,
    models: Path,
    eight: str,
    tmp_path: Path,
    sidecar: Sidecar,
    device: dict[str, str],
    states: list[CheckState],
) -> None:
    env = paged.ON | device
    with Server(paged_binary, tmp_path / "s", models, socket=sidecar.socket, env=env) as server:
        server.generate(eight, "a", num_ctx=65536)
        sidecar.settle(server, eight)
        report = sidecar.report(server.runner_pid(eight))
    checks = [check for check in check_running.runner(report, {}) if "K/V" in check.name]
    assert [check.state for check in checks] == states
    assert report.cache_memory.in_turn == (states == [CheckState.OK])
    assert ("none is copied ahead of its turn" in checks[0].finding) == (states == [CheckState.OK])
