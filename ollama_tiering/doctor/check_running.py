"""What runs now: the sidecar, the process that has Ollama's port, and what the runners report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from ollama_tiering import __version__
from ollama_tiering.config import SidecarConfig, count
from ollama_tiering.config.environment import ENV_PAGED
from ollama_tiering.doctor.check import Check, fail, ok, warn
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import block_service, build_watch
from ollama_tiering.launch.address import Address, Occupant, address_of, who_listens
from ollama_tiering.launch.names import first_names, models_dirs, shown
from ollama_tiering.launch.running_up import records, running
from ollama_tiering.launch.service_unit import UNIT_NAME, has_drop_in, stop_command
from ollama_tiering.launch.up import require_free
from ollama_tiering.protocol import cache_memory
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.protocol.tier_names import tier_name
from ollama_tiering.store import block_store_pb2 as pb


def checks(settings: SidecarConfig) -> Iterator[Check]:
    answer = block_service.ask(settings.socket_path, administers=True)
    yield _sidecar(settings.socket_path, answer)
    yield _port(address_of())
    for broken in build_watch.harmed():
        yield fail("build that serves", build_watch.what_it_means(broken), build_watch.CURE)
    if answer:
        yield from _tiers(answer)
        names = first_names(models_dirs())
        for report in answer.runners:
            yield from runner(report, names)


def _sidecar(socket: Path, answer: adm.StatResponse | None) -> Check:
    name = "sidecar"
    if answer is None:
        try:
            block_service.refuse_stranger(socket)
        except ServiceError as error:
            return fail(name, error.message, error.hint or "")
        if socket.exists():
            finding = f"{socket} exists, but no sidecar answers"
            return warn(name, finding, "start one (tiering up): it replaces a dead socket")
        return ok(name, f"no sidecar runs on {socket}; `tiering up` starts one")
    pid = block_service.owner(socket)
    if answer.version != __version__:
        finding = f"process {pid} is version {answer.version}, this is {__version__}"
        return warn(name, finding, start_anew(pid))
    damaged = sum(tier.quarantined_blocks for tier in answer.tiers)
    if damaged:
        finding = f"process {pid} found {count(damaged, 'damaged block')} and put them aside"
        return warn(name, finding, "check the disk; the blocks end in .bad and are not used")
    return ok(name, f"process {pid}, version {answer.version}, on {socket}")


def start_anew(pid: int | None) -> str:
    """How a sidecar is ended and started again. A `tiering up` would start one that was ended by
    itself, of the same version.
    """
    of_up = [r for r in records() if pid and r.sidecar_pid == pid and psutil.pid_exists(r.pid)]
    if of_up and of_up[0].pid:
        how = stop_command(of_up[0].pid) or f"Ctrl-C where it runs, or: kill {of_up[0].pid}"
        return f"stop `tiering up` ({how}), then start it anew: tiering up"
    unit = stop_command(pid) if pid else ""
    if unit:
        return f"start it anew: {unit.replace(' stop ', ' restart ')}"
    return f"start it anew: {f'kill {pid}' if pid else 'end it'}, then tiering up"


def _tiers(answer: adm.StatResponse) -> Iterator[Check]:
    """Tiers that rest: what they hold is a miss meanwhile."""
    for tier in answer.tiers:
        name = f"{tier_name(tier.tier)} tier in use"
        if tier.state == "resting":
            failures = ", ".join(f"{n} {error}" for error, n in sorted(tier.failures.items()))
            finding = f"{os.fsdecode(tier.directory)} failed ({failures}), tried again by itself"
            yield warn(
                name, finding, "check the mount or the disk; everything else goes on without it"
            )
        elif tier.tier == pb.TIER_REMOTE:
            shared = f"{count(tier.blocks, 'block')}, {count(tier.sidecars, 'sidecar')}"
            yield ok(name, f"{tier.state}, {shared}")


def _port(address: Address) -> Check:
    name = f"port {address.port}"
    if record := running(address):
        return ok(name, f"`tiering up` serves there (process {record.pid})")
    found = who_listens(address)
    if found.occupant is Occupant.OLLAMA and has_drop_in(found.pid):
        return ok(
            name, f"Ollama {found.detail} of {UNIT_NAME} listens there, which has our drop-in"
        )
    try:
        require_free(address)
    except ServiceError as error:
        return warn(name, error.message, error.hint or "")
    return ok(name, f"{address} is free")


def runner(report: pb.RunnerReport, names: Mapping[str, str]) -> Iterator[Check]:
    """Whether its model is tiered and, if so, whether that has any effect."""
    yield from _attention(report)
    yield from _paging(report)
    name = f"runner {report.pid}"
    model = f"{shown(report.model, names)} ({report.engine})"
    if not report.tiered:
        yield warn(name, f"{model} is not tiered: {report.reason}", "")
        return
    counts = (
        f"{model}: {count(report.requests, 'request')}, "
        f"{count(report.restored_tokens, 'token')} restored, "
        f"{report.memory_tokens:,} from memory, {report.recomputed_tokens:,} recomputed"
    )
    if report.failures:
        counts += f"; {count(report.failures, 'call to the sidecar')} failed"
        yield warn(
            name,
            counts,
            "read the sidecar's log (tiering logs sidecar, or journalctl -u ollama-tiering)",
        )
    else:
        yield ok(name, counts)


def _attention(report: pb.RunnerReport) -> Iterator[Check]:
    """Exact attention that was asked for but does not serve the model is slow and inexact, and
    nobody would notice.
    """
    name = f"attention of runner {report.pid}"
    if " but stock where " in report.cpu_attention:
        yield warn(name, report.cpu_attention, "shapes that are served: docs/operations.md")
    elif report.cpu_attention.startswith("exact"):
        yield ok(name, report.cpu_attention)


def _paging(report: pb.RunnerReport) -> Iterator[Check]:
    """Paged K/V that were asked for are to keep all layers on GPUs. Where they did not, answers
    are slow, and nothing else shows it.
    """
    name, memory = f"K/V of runner {report.pid}", report.cache_memory
    if memory.paging_asked and memory.host_layers:
        yield warn(
            name,
            f"{cache_memory.words(memory)}, although {ENV_PAGED}=1",
            "search Ollama's log for `paged attention`; without a GPU nothing is paged",
        )
    elif memory.pinned_layers:
        yield ok(name, cache_memory.words(memory))


def broken_settings(error: str, hint: str) -> Check:
    return fail("settings", error, hint)
