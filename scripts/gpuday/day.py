"""A day with a GPU: what it is told, and its steps in order."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.gpuday.steps import Step

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/gpu_day"
PACK = FOLDER / "pack"
PACK_CURE = f"`scripts/gpu_day pack` where there is a network; carry {PACK.relative_to(ROOT)}"
DAY = "day.json"


@dataclass(frozen=True, slots=True)
class Day:
    """`program`: an installed Ollama that pages; None: it is made here, from the pack. `stand_in`:
    its library simulates a GPU.
    """

    out: Path
    work: Path
    pack: Path
    program: Path | None = None
    stand_in: bool = False
    small: bool = False

    @property
    def installed(self) -> Path:
        """The program that is asked."""
        return self.program or self.work / "ollama/bin/ollama"

    def write(self) -> None:
        words = {name: str(value) if isinstance(value, Path) else value
                 for name, value in asdict(self).items()}  # fmt: skip
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / DAY).write_text(json.dumps(words), encoding="utf-8")

    @classmethod
    def read(cls, work: Path) -> Day:
        words = json.loads((work / DAY).read_text(encoding="utf-8"))
        paths = {name: Path(words[name]) for name in ("out", "work", "pack")}
        program = Path(words["program"]) if words["program"] else None
        return cls(**{**words, **paths, "program": program})


def steps_of(day: Day) -> list[Step]:
    """In the order of their worth, if not all can be done: paging first, then the kernels."""
    ollama, model = ("gpu", "library", "model"), day.work / "model.gguf"
    csrc = ("gpu", "unpack", "csrc")
    return [
        Step("look", "what is there", 60, 5, always=True),
        Step("gpu", "a GPU", 60, 5, ("look",), always=True),
        Step("unpack", "the pack", 120, 20, ("look",), (day.work / "unpacked",)),
        Step("library", "libggml-cuda for this GPU, the shim beside it", 500, 120,
             ("gpu", "unpack"), (day.installed,)),
        Step("model", "a model of a real shape, random weights", 400, 60,
             ("gpu", "unpack"), (model,), beside=True),
        Step("csrc", "csrc's launcher, compiled", 400, 60,
             ("gpu", "unpack"), (day.work / "compiled",), beside=True),
        Step("rates", "what bus and memory give", 120, 40, csrc),
        Step("stock", "stock's library: the reference", 120, 40, ollama),
        Step("sequential", "paged, each layer copied in its turn", 240, 60, ("stock",)),
        Step("prefetch", "paged, copied ahead", 240, 60, ("stock",)),
        Step("planner", "a long context in little room", 240, 60, ("stock",)),
        Step("tiering", "restored into hot and pinned layers", 240, 60, ollama),
        Step("graphs", "CUDA graphs, nothing paged", 300, 90, ("stock",)),
        Step("kernels", "csrc's kernels: `tiering kernel report`", 500, 120, csrc),
        Step("suite", "csrc's kernels: tests/gpu", 300, 60, csrc),
        Step("sanitizer", "csrc's kernels: compute-sanitizer", 120, 40, csrc),
    ]  # fmt: skip
