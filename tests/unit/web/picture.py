"""Makes docs/web.png, the picture of the page in README.md: `python -m tests.unit.web.picture`.

What is on it is made up, but for the page itself: a sidecar stores it, counts it and is asked.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx

from measure.store import samples
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.browser import open_browser
from tests.places import short_directory
from tests.sidecar import PutStream
from tests.unit.models.marked_text import encode
from tests.unit.web.stage import MODELS, Stage, page
from tests.unit.why.clients import chatml

FILE = Path(__file__).parents[3] / "docs/web.png"
WIDTH, HEIGHT = 1120, 740
REQUESTS = 48
SPEEDS = (112.0, 96.0)  # tokens a second that are computed


def main(file: Path) -> None:
    with short_directory(in_memory=True) as root, Stage(root, days=30) as stage:
        _store(stage)
        with page(stage.environment()) as url:
            _ask(stage, url)
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
                _take(url, Path(profile), file)
    print(f"{file}: {file.stat().st_size // 1024} KiB")


def _store(stage: Stage) -> None:
    """Some hundred MiB, in blocks of the size that a small model has."""
    channel = stage.sidecar.channel()
    stub = rpc.BlockStoreStub(channel)
    for number, (_, model) in enumerate(stage.files.items()):
        ns = samples.namespace(
            model.name, layers=2 + number, kv_heads=8, head_dim=128, block_tokens=64
        )
        stream = PutStream(stub, ns)
        for part in range(18):
            said = f"question {part} of {MODELS[number]}: " + "word " * (60 + 12 * (part % 5))
            assert stream.put(samples.sequence(ns, encode(chatml(("user", said)))))
        stream.close()
    channel.close()
    stage.sidecar.wait_written()


def _ask(stage: Stage, url: str) -> None:
    """Requests of two runners, as an agent's are: a long prompt that grows, and its model is
    unloaded now and then.
    """
    chance = random.Random(3)
    channel = stage.sidecar.channel()
    stub = rpc.BlockStoreStub(channel)
    assert stage.sidecar.process is not None
    living = os.getpid(), stage.sidecar.process.pid  # runners that have ended are forgotten
    runners = [
        pb.RunnerReport(
            pid=pid,
            engine="ollama-go/0.16.3",
            model=model.name,
            tiered=True,
            namespace=samples.namespace(model.name, layers=2 + number).digest(),
            started_unix_seconds=number + 1,
            prefill_tokens_per_second=SPEEDS[number],
        )
        for number, (pid, model) in enumerate(zip(living, stage.files.values(), strict=True))
    ]
    httpx.get(f"{url}/api/live", trust_env=False)
    turns = itertools.cycle([9, 3, 2, 2, 14])
    prompt = [6_000, 11_000]
    for number in range(REQUESTS):
        which = int(number % 5 == 4)
        prompt[which] += chance.randint(200, 1_500) if number % 17 else -2_500
        new = chance.randint(80, 420) if number not in (0, 4) else prompt[which]
        old = prompt[which] - new
        back = next(turns) >= 9
        _report(stub, runners[which], prompt[which], memory=0 if back else old, new=new)
        httpx.get(f"{url}/api/live", trust_env=False)
    channel.close()


def _report(
    stub: rpc.BlockStoreStub, runner: pb.RunnerReport, prompt: int, *, memory: int, new: int
) -> None:
    restored = prompt - memory - new
    runner.requests += 1
    runner.prompt_tokens += prompt
    runner.memory_tokens += memory
    runner.restored_tokens += restored
    runner.recomputed_tokens += new
    runner.prefill_tokens += new
    runner.prefill_seconds += new / runner.prefill_tokens_per_second
    runner.restore_seconds += restored / 30_000
    reason = pb.SHORTFALL_ENDS if memory or restored else pb.SHORTFALL_NOTHING_STORED
    last = pb.LastRequest(
        prompt_tokens=prompt,
        memory_tokens=memory,
        restored_tokens=restored,
        shortfall=reason,
        at_token=prompt - new,
    )
    runner.last_request.CopyFrom(last)
    stub.ReportRunner(runner, timeout=10)


def _take(url: str, profile: Path, file: Path) -> None:
    with open_browser(profile) as browser:
        tab = browser.tab()
        tab.look_like(WIDTH, HEIGHT)
        tab.tell("Emulation.setScrollbarsHidden", hidden=True)
        tab.open(f"{url}/#now")
        tab.wait("document.querySelector('#models tbody') !== null")
        time.sleep(1.5)  # all it shows is of one look
        tab.picture(file)
        assert tab.problems == []


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
