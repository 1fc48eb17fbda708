"""`tiering status`: what the sidecar has stored and found, and which runners use it."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ollama_tiering import config
from ollama_tiering.cli import (
    NamedPath,
    builds,
    status_partings,
    status_rules,
    status_shortfalls,
    status_use,
    status_wear,
)
from ollama_tiering.cli.reach import memory_of, require_there
from ollama_tiering.config import MemoryLimit, agreeing, count, format_size
from ollama_tiering.errors import ServiceError
from ollama_tiering.protocol import cache_memory, runner_settings
from ollama_tiering.protocol.plain_text import path_of
from ollama_tiering.protocol.seconds_saved import Saved

if TYPE_CHECKING:
    from ollama_tiering.protocol.pb import administration_pb2 as adm
    from ollama_tiering.store import block_store_pb2 as pb


_ASK_SECONDS = 5.0


@click.command()
@click.option("--socket", type=NamedPath(path_type=Path), help="Unix socket of the sidecar.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--watch",
    type=click.FloatRange(0.2, 3600),
    is_flag=False,
    flag_value=2.0,
    metavar="[SECONDS]",
    help="Show it again every 2 seconds, or as often as said; Ctrl-C ends it.",
)
def status(socket: Path | None, as_json: bool, watch: float | None) -> None:
    """Show what the running sidecar knows: tiers, hits, loaded models, and what each model saved.

    Exit code 9 if no sidecar runs, 10 if the settings are not valid; what runs is shown before
    that is said.
    """
    if watch is not None and as_json:
        raise click.UsageError("--watch shows a screen; --json is read by programs")
    if watch is None:
        return _show(socket, as_json)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            _show(socket, as_json, clear=True)
            time.sleep(watch)


def _show(socket: Path | None, as_json: bool, *, clear: bool = False) -> None:
    settings, broken = config.readable({"sidecar.socket": socket})
    path = settings.sidecar.socket_path
    try:
        answer = ask(path)
    except ServiceError as error:
        if broken:
            raise broken from None
        if as_json:
            away = {"running": False, "socket": str(path), "error": error.message}
            click.echo(json.dumps(away, indent=1))
        raise
    if as_json:
        click.echo(json.dumps(document(path, answer, memory_of(path)), indent=1))
    else:
        text = "\n".join(_wrapped(lines(path, answer, memory_of(path))))
        if clear:
            click.clear()
        click.echo(text)
    if broken:
        raise broken


def _wrapped(whole: Iterable[str]) -> Iterator[str]:
    """Breaks lines that are wider than the terminal at a word. What a program reads stays whole."""
    if not sys.stdout.isatty():
        yield from whole
        return
    from rich.console import Console

    columns = max(Console().width, 40)
    for line in whole:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        yield from textwrap.wrap(
            line,
            columns,
            subsequent_indent=indent,
            drop_whitespace=True,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [line]


def ask(path: Path) -> adm.StatResponse:
    """ServiceError, with its cure, if no sidecar answers."""
    require_there(path)
    from ollama_tiering.client.admin_client import SidecarAdministration  # slow to import
    from ollama_tiering.system.listener import Stranger

    with SidecarAdministration(path) as admin:
        try:
            return admin.stat(timeout_seconds=_ASK_SECONDS)
        except Stranger:
            raise
        except ServiceError as error:
            raise ServiceError(
                f"no sidecar answers on {path} ({error.message})",
                hint="start Ollama with it: tiering up (or the service alone: tiering sidecar)",
            ) from None


def document(
    path: Path, answer: adm.StatResponse, memory: MemoryLimit | None = None
) -> dict[str, Any]:
    """What `--json` prints."""
    names = status_use.names(answer)
    return {
        "running": True,
        "socket": str(path),
        "version": answer.version,
        "started_unix_seconds": answer.started_unix_seconds,
        "memory_limit_bytes": memory.limit_bytes if memory else None,
        "memory_group": str(memory.group) if memory else None,
        "tiers": [
            {
                "tier": _tier_name(tier),
                "directory": path_of(tier.directory),
                "budget_bytes": tier.budget_bytes,
                "used_bytes": tier.used_bytes,
                "reserved_bytes": tier.reserved_bytes,
                "blocks": tier.blocks,
                "evicted_blocks": tier.evicted_blocks,
                "demoted_blocks": tier.demoted_blocks,
                "quarantined_blocks": tier.quarantined_blocks,
                "read_bytes_per_second": tier.read_bytes_per_second,
                "write_bytes_per_second": tier.write_bytes_per_second,
                "written_today_bytes": tier.written_today_bytes,
                "daily_write_bytes": tier.daily_write_bytes,
                "disk_full": tier.disk_full,
                "surveyed": tier.surveyed,
                "expired_blocks": tier.expired_blocks,
                "state": tier.state,
                "resting_seconds": tier.resting_seconds,
                "sidecars": tier.sidecars,
                "failures": dict(tier.failures),
                "encoding": tier.encoding,
                "encoding_ratio": tier.encoding_ratio,
                "decode_bytes_per_second": tier.decode_bytes_per_second,
            }
            for tier in answer.tiers
        ],
        "has_calls": answer.has_calls,
        "asked_tokens": answer.asked_tokens,
        "matched_tokens": answer.matched_tokens,
        "put_blocks": answer.put_blocks,
        "put_bytes": answer.put_bytes,
        "get_blocks": answer.get_blocks,
        "get_bytes": answer.get_bytes,
        "misses": dict(answer.misses),
        "open_leases": answer.open_leases,
        "queued_demotions": answer.queued_demotions,
        "queued_bytes": answer.queued_bytes,
        "not_written": dict(answer.not_written),
        "other_builds_blocks": _other_builds_blocks(answer),
        "broken_builds": _broken_builds(),
        "q8_0_namespaces": [namespace.hex() for namespace in answer.q8_0_namespaces],
        "models": status_rules.documents(answer),
        "rechecked": status_use.rechecks(answer),
        "builds": builds.documents(answer.builds),
        "model_uses": status_use.documents(answer, names),
        "partings": status_partings.document(answer),
        "wear": status_wear.document(answer),
        "saved_seconds": Saved.of(answer.model_uses).seconds,
        "runners": [
            {
                "pid": runner.pid,
                "engine": runner.engine,
                "tree_of_links": _engine_of(runner.pid),
                "model": runner.model,
                "name": names.get(runner.model, ""),
                "router_name": _router_name(runner.pid),
                "tiered": runner.tiered,
                "reason": runner.reason,
                "namespace": runner.namespace.hex(),
                "requests": runner.requests,
                "prompt_tokens": runner.prompt_tokens,
                "memory_tokens": runner.memory_tokens,
                "restored_tokens": runner.restored_tokens,
                "recomputed_tokens": runner.recomputed_tokens,
                "prefill_tokens_per_second": runner.prefill_tokens_per_second,
                "snapshot_blocks": runner.snapshot_blocks,
                "skipped_by_gate": runner.skipped_by_gate,
                "memory_short_tokens": runner.memory_short_tokens,
                "failures": runner.failures,
                "cpu_attention": runner.cpu_attention,
                "caches": runner.caches,
                "cache_memory": cache_memory.document(runner),
                "settings": runner_settings.document(runner),
                "min_tokens": runner.min_tokens,
                "to_store": runner.to_store,
                "shortfalls": status_shortfalls.documents(runner.shortfalls),
                "last_request": status_shortfalls.last_document(runner),
            }
            for runner in answer.runners
        ],
    }


def lines(path: Path, answer: adm.StatResponse, memory: MemoryLimit | None = None) -> Iterator[str]:
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(answer.started_unix_seconds))
    yield f"sidecar {answer.version} on {path}, since {since}"
    yield from status_use.all_models(answer)
    for tier in answer.tiers:
        share = 100 * tier.used_bytes / tier.budget_bytes if tier.budget_bytes else 0
        yield (
            f"  {_tier_name(tier):<7}{format_size(tier.used_bytes):>10} of "
            f"{format_size(tier.budget_bytes)} ({share:.0f} %), {count(tier.blocks, 'block')}"
            f"{_damaged(tier)}, read {_speed(tier.read_bytes_per_second)}"
            f"{_encoding(tier)}, {path_of(tier.directory)}{_state(tier)}"
        )
        yield from _disk_lines(tier)
    yield from status_wear.lines(answer)
    if memory:
        yield f"  memory at most {format_size(memory.limit_bytes)} ({memory.group})"
    if answer.queued_demotions:
        yield (
            f"  {count(answer.queued_demotions, 'block')} ({format_size(answer.queued_bytes)}) "
            f"{agreeing(answer.queued_demotions, 'is')} still to be written to disk"
        )
    if answer.not_written:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(answer.not_written.items()))
        yield f"  kept off the disk: {reasons}"
    yield (
        f"lookups {answer.has_calls:,}: {answer.matched_tokens:,} of "
        f"{count(answer.asked_tokens, 'prompt token', 'was')} in the store"
    )
    if answer.misses:
        misses = ", ".join(f"{n:,} {reason}" for reason, n in sorted(answer.misses.items()))
        yield f"misses: {misses}"
    if others := _other_builds_blocks(answer):
        yield (
            f"{count(others, 'block', 'was')} stored by builds that are not on this machine any "
            "more: nothing here finds what they stored; `tiering gc` removes it (not from a "
            "shared directory)"
        )
    for broken in _broken_builds():
        yield f"{broken}; end it and start `tiering up` again"
    yield from status_rules.lines(answer)
    names = status_use.names(answer)
    yield from status_use.lines(answer, names)
    for again in answer.rechecked:
        yield status_use.rechecked(again, names)
    for pair in answer.builds:
        yield f"builds: {builds.line(pair, status_use.shown(pair.model, names))}"
    yield from status_partings.lines(answer)
    if not answer.runners:
        yield "runners: no model is loaded" if answer.model_uses else "runners: none has reported"
    for runner in answer.runners:
        yield from _runner_lines(runner, names)
        if engine := _engine_of(runner.pid):
            yield f"  {engine}"
        if refused := status_rules.refusal(answer, runner.namespace):
            yield f"  not stored: {refused}"
        if runner.namespace in answer.q8_0_namespaces:
            yield "  lossy: its rows are rounded to q8_0 when they are stored"


def _engine_of(pid: int) -> str:
    from ollama_tiering.launch.runner_tree import engine_of

    return engine_of(pid)


def _router_name(pid: int) -> str:
    from ollama_tiering.launch.router_models import name_of

    return name_of(pid)


def _broken_builds() -> list[str]:
    from ollama_tiering.launch.build_watch import harmed

    return harmed()


def _other_builds_blocks(answer: adm.StatResponse) -> int:
    """Blocks that neither a build on this machine nor a living runner can find; 0 if there is no
    build of ours to compare with.
    """
    from ollama_tiering.doctor.builds import builds_here
    from ollama_tiering.store.tools.listing import build_of, of_other_build

    here = builds_here()
    if not here:
        return 0
    known = here | {build for runner in answer.runners if (build := build_of(runner.engine))}
    return sum(use.blocks for use in answer.namespaces if of_other_build(use.engine, known))


def _disk_lines(tier: adm.TierStat) -> Iterator[str]:
    if tier.written_today_bytes or tier.daily_write_bytes:
        limit = f" of {format_size(tier.daily_write_bytes)}" if tier.daily_write_bytes else ""
        yield f"         written today (UTC) {format_size(tier.written_today_bytes)}{limit}"
    if tier.disk_full:
        yield "         the disk is too full: nothing is written until others make room"
    if not tier.surveyed:
        yield "         its files are still being counted: nothing is written before"


def _runner_lines(runner: pb.RunnerReport, names: Mapping[str, str]) -> Iterator[str]:
    model, engine = status_use.shown(runner.model, names), runner.engine.partition("+")[0]
    if not runner.tiered:
        yield f"runner {runner.pid} {model}: not tiered: {runner.reason or 'no reason given'}"
        if engine:
            yield f"  engine: {engine}"
        yield from _properties(runner)
        return
    yield f"runner {runner.pid} {model}: tiered, {engine}"
    yield from _properties(runner)
    yield (
        f"  {count(runner.requests, 'request')}, {count(runner.prompt_tokens, 'prompt token')} = "
        f"{runner.memory_tokens:,} in memory + {runner.restored_tokens:,} restored + "
        f"{runner.recomputed_tokens:,} recomputed"
    )
    if runner.memory_short_tokens:
        yield (
            f"  {runner.memory_short_tokens:,} of the recomputed tokens were stored: too little "
            "memory was available to read them"
        )
    yield from status_shortfalls.lines(runner)
    if runner.failures:
        yield f"  {count(runner.failures, 'call to the sidecar')} failed"


def _properties(runner: pb.RunnerReport) -> Iterator[str]:
    if name := _router_name(runner.pid):
        yield f"  a router's model: {name}"
    if runner.caches:
        yield f"  caches: {runner.caches}"
    if where := cache_memory.words(runner.cache_memory):
        yield f"  K/V: {where}"
    if settings := runner_settings.words(runner):
        yield f"  settings: {settings}"
    if runner.cpu_attention:
        yield f"  attention on the CPU: {runner.cpu_attention}"


def _tier_name(tier: adm.TierStat) -> str:
    from ollama_tiering.protocol.tier_names import tier_name

    return tier_name(tier.tier)


def _damaged(tier: adm.TierStat) -> str:
    return f", {tier.quarantined_blocks:,} damaged" if tier.quarantined_blocks else ""


def _state(tier: adm.TierStat) -> str:
    """Empty for a tier that works and is not shared."""
    said = []
    if tier.state == "resting":
        failures = ", ".join(f"{n:,} {name}" for name, n in sorted(tier.failures.items()))
        said.append(f"resting after failures ({failures}), again in {tier.resting_seconds:.0f} s")
    elif tier.state not in ("", "ok"):
        said.append(tier.state)
    if tier.sidecars > 1:
        said.append(count(tier.sidecars, "sidecar"))
    return "".join(f", {part}" for part in said)


def _encoding(tier: adm.TierStat) -> str:
    """Empty unless blocks are stored encoded, or will be."""
    encoded = tier.encoding_ratio > 1.02
    if tier.encoding in ("", "none") and not encoded:
        return ""
    ratio = f" {tier.encoding_ratio:.2f}:1" if tier.blocks else ""
    return f", {tier.encoding}{ratio}, decodes {_speed(tier.decode_bytes_per_second)}"


def _speed(bytes_per_second: float) -> str:
    return f"{format_size(int(bytes_per_second))}/s" if bytes_per_second else "not measured"
