"""The only module that runs other programs. No shell. Every command is shown as `+ cmd`, and its
output goes to a log file.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering.errors import MissingTool, TieringError
from ollama_tiering.patchset.report import Report

KEPT_LINES = 200
_END_SECONDS = 3.0  # a process that waits for a driver that hangs is not even ended by a kill

# Set by git for its hooks, or by a person; they would make git look at another repository than the
# one we name.
_GIT_LOCAL = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
    "GIT_CONFIG",
    "GIT_CONFIG_COUNT",
    "GIT_CONFIG_PARAMETERS",
    "GIT_SHALLOW_FILE",
    "GIT_GRAFT_FILE",
    "GIT_CEILING_DIRECTORIES",
)


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended. `tail` has the last lines of stdout and stderr together."""

    returncode: int
    stdout: str
    tail: tuple[str, ...]

    @property
    def disk_was_full(self) -> bool:
        return any(
            "No space left on device" in line or "Disk quota exceeded" in line for line in self.tail
        )


def forget_git_environment() -> None:
    """Removes variables that bind git to another repository, for this process and its children."""
    for name in _GIT_LOCAL:
        os.environ.pop(name, None)


def run(
    *args: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    stdin: bytes = b"",
    report: Report | None = None,
    seconds: float | None = None,
    paths: bool = False,
) -> Finished:
    """Runs a short command to its end and keeps its output. `env` is added to our own environment;
    None removes a variable. TieringError if it takes longer than `seconds`. `paths`: what it prints
    has paths that are used, in any bytes.
    """
    command = [str(arg) for arg in args]
    if report:
        report.command(shlex.join(command))
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=_merged(env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except FileNotFoundError as error:
        raise _not_there(command[0], error) from None
    try:
        out, err = process.communicate(stdin, timeout=seconds)
    except subprocess.TimeoutExpired:
        _abandon(process)
        raise TieringError(
            f"{shlex.join(command)} did not end within {seconds:.0f} s",
            hint="run it by hand: where it hangs there too, look at dmesg for what a driver says",
        ) from None
    except BaseException:
        _abandon(process)
        raise
    stdout, stderr = (
        os.fsdecode(text) if paths else text.decode(errors="replace") for text in (out, err)
    )
    return Finished(process.returncode, stdout, tuple((stdout + stderr).splitlines()[-KEPT_LINES:]))


def _merged(env: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**os.environ, **env}
    return {name: value for name, value in merged.items() if value is not None}


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Kills it, and does not wait for ever."""
    process.kill()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with contextlib.suppress(OSError):  # of what stdin still holds
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_SECONDS)


def stream(
    *args: str | Path,
    log: Path,
    cwd: Path,
    env: Mapping[str, str | None],
    report: Report,
    on_line: Callable[[str], None] = lambda _line: None,
) -> Finished:
    """Runs a long command whose output goes to `log`, line by line. An interrupt ends the command
    first.
    """
    command = [str(arg) for arg in args]
    report.command(shlex.join(command))
    tail: deque[str] = deque(maxlen=KEPT_LINES)
    with log.open("a", encoding="utf-8", errors="replace", buffering=1) as sink:
        sink.write(f"+ {shlex.join(command)}\n")
        sink.flush()
        try:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=_merged(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except FileNotFoundError as error:
            raise _not_there(command[0], error) from None
        try:
            assert process.stdout is not None
            for raw in process.stdout:
                line = raw.decode(errors="replace").rstrip("\n")
                tail.append(line)
                sink.write(line + "\n")
                on_line(line)
            process.stdout.close()
            process.wait()
        except BaseException:
            _end(process)
            raise
    return Finished(process.returncode, "", tuple(tail))


def _end(process: subprocess.Popen[bytes]) -> None:
    """An interrupt on a terminal also reaches the child; this gives it a moment
    before it insists.
    """
    if process.stdout:
        process.stdout.close()
    try:
        process.wait(timeout=3)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _not_there(program: str, error: FileNotFoundError) -> TieringError:
    if error.filename and str(error.filename) != program:
        return TieringError(
            f"{error.filename}: no such directory, {program} cannot run there",
            hint="somebody removed it meanwhile: run the command again",
        )
    return MissingTool(f"{program}: not found", hint=f"install {program} and put it on PATH")
