"""What is built, and where: the options of a build with everything looked up."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.errors import MissingTool, TieringError
from ollama_tiering.patchset import finished, gpus, manifest, processor, stock, tools
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.report import Report


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """`cpu`: variants (upstream's CMake build) or native (cgo only, this CPU). `cuda`: auto, on,
    off, stock or stock=PLACE.
    """

    tag: str = config.DEFAULT_TAG
    cpu: str = "native"
    cuda: str = "auto"
    cuda_arch: str | None = None  # None: this machine's GPU if it has one, else upstream's list
    jobs: int | None = None
    allow_untested: bool = False
    go_tags: tuple[str, ...] = ()  # build tags; such a binary lies beside the ordinary one
    stock: bool = False  # without the patch set: what tests compare with
    march: str = processor.NATIVE  # of a native build, as the C compilers name it
    goarch: str | None = None  # None: this machine's; another one needs CC and CXX for it


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """Options with everything looked up."""

    options: BuildOptions
    cuda: tools.Cuda | None
    stock: str | None = None  # libraries for GPUs of the user's Ollama: stock or stock=PLACE
    remark: str = ""  # why a GPU that is here gets no code

    @property
    def kind(self) -> str:
        cuda = f"-cuda{self.cuda.major}" if self.cuda else "-cudastock" if self.stock else ""
        march = "" if self.options.march == processor.NATIVE else self.options.march
        named = "-".join(filter(None, (march, self.options.goarch)))
        other = finished.ELSEWHERE + named if named else ""
        return self.options.cpu + cuda + other + (finished.STOCK if self.options.stock else "")

    @property
    def name(self) -> str:
        """Of the folder to build in, and of that with what was finished there."""
        return f"{self.options.tag}-{self.kind}"

    @property
    def folder(self) -> Path:
        return config.cache_dir() / "trees" / self.name

    @property
    def tree(self) -> Path:
        return self.folder / "src"

    @property
    def program(self) -> str:
        """Its name; it lies in the folder of a finished build."""
        return "-".join((finished.PROGRAM, *self.options.go_tags))

    @property
    def old_stamp(self) -> Path:
        """As an older `tiering` left it, whose binary lies in the tree."""
        return self.folder / f"{'-'.join(('stamp', *self.options.go_tags))}.json"

    @property
    def log(self) -> Path:
        return self.folder / "build.log"

    @property
    def compiler_flags(self) -> dict[str, str]:
        """Of cgo: a person's own, or ours; asks the compilers."""
        return processor.cgo_flags(self.options.march if self.options.cpu == "native" else None)

    @property
    def cuda_arch(self) -> str | None:
        """As CMake writes it; None: upstream's list."""
        if named := self.options.cuda_arch:
            return named.replace(".", "").replace(",", ";")
        return "native" if shutil.which("nvidia-smi") else None

    @property
    def needs_cmake(self) -> bool:
        return self.options.cpu == "variants" or self.cuda is not None


def plan(options: BuildOptions, patchset: Patchset | None = None) -> BuildPlan:
    """Looks for what a GPU needs unless it is off. MissingTool where CUDA is asked for and absent;
    what a stock Ollama lacks is said when it is built.
    """
    if options.cuda.partition("=")[0] == stock.OPTION:
        return BuildPlan(options, None, options.cuda)
    cuda = tools.find_cuda() if options.cuda != "off" else None
    if options.cuda == "on" and cuda is None:
        raise MissingTool(
            "nvcc: not found",
            hint="install the CUDA toolkit, or build with --gpu stock or --gpu off",
        )
    if options.cuda == "auto" and cuda is None and (tools.nvidia_gpu_is_here() or gpus.here()):
        try:
            found = stock.usable(stock.find(stock.OPTION, Report()), Report(quiet=True))
            stock.check(found, options.tag, patchset or manifest.load())
        except TieringError as error:
            return BuildPlan(options, None, remark=f"{error.message}; {error.hint}")
        return BuildPlan(options, None, stock.OPTION)
    return BuildPlan(options, cuda)
