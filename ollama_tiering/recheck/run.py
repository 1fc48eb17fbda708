"""One recheck: texts are chosen, a second llama-server computes them, the sidecar compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ollama_tiering.errors import ServiceError
from ollama_tiering.recheck.chosen import StoredText, gives_one_answer, latest, sampled, text_of
from ollama_tiering.recheck.twin import running, twin_of
from ollama_tiering.store import DEFAULT_BLOCK_TOKENS

if TYPE_CHECKING:
    from ollama_tiering.client.admin_client import SidecarAdministration
    from ollama_tiering.store import block_store_pb2 as pb
    from ollama_tiering.store.values import ChainLine

_LLAMA_SERVER: Final = "llama-server/"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The `last` conversations of a model, or `sample` of them at random if that is not 0; the
    first `most_tokens` of each.
    """

    last: int
    most_tokens: int
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Rechecked:
    """Of one model. `blocks` were the same, `different` were not; `asked`: so many were to be
    computed.
    """

    model: str
    asked: int
    blocks: int
    different: int


@dataclass(frozen=True, slots=True)
class NotRechecked:
    model: str
    reason: str


def recheck(
    admin: SidecarAdministration,
    wanted: Callable[[str], bool],
    log: Path,
    choice: Chosen,
    say: Callable[[str], None],
) -> Iterator[Rechecked | NotRechecked]:
    """Of each loaded model whose file name is `wanted`. ServiceError without a sidecar."""
    for runner in admin.stat().runners:
        if runner.tiered and wanted(runner.model):
            yield _one(admin, runner, log, choice, say)


def _one(
    admin: SidecarAdministration,
    runner: pb.RunnerReport,
    log: Path,
    choice: Chosen,
    say: Callable[[str], None],
) -> Rechecked | NotRechecked:
    model = runner.model
    if not runner.engine.startswith(_LLAMA_SERVER):
        return NotRechecked(model, "only llama-server computes tokens that it is told")
    listing = admin.listing()
    chains = latest(listing, runner.namespace, choice.last)
    if not chains:
        return NotRechecked(model, "nothing of it is stored")
    if not gives_one_answer(listing, runner.namespace):
        return NotRechecked(
            model, "its bits depend on more than tokens (a GPU, or attention that is not exact)"
        )
    texts = _texts(admin, sampled(chains, choice.sample), choice.most_tokens)
    if not texts:
        return NotRechecked(model, "nothing of it is a whole block of plain tokens")
    before, asked, failure = _sums(admin, model), 0, ""
    try:
        with running(twin_of(runner.pid), log) as twin:
            twin.wait_ready()
            most = twin.most_tokens() // DEFAULT_BLOCK_TOKENS * DEFAULT_BLOCK_TOKENS
            for text in texts:
                tokens = text.tokens[: most or None]
                say(f"{model}: {len(tokens):,} tokens of {text.chain.key.hex()[:12]}")
                twin.compute(tokens)
                asked += len(tokens) // DEFAULT_BLOCK_TOKENS
    except ServiceError as error:  # what was compared before counts
        failure = f"{error.message} ({error.hint})"
    blocks, different = (now - then for now, then in zip(_sums(admin, model), before, strict=True))
    if blocks or different:
        return Rechecked(model, asked, blocks, different)
    return NotRechecked(
        model,
        failure
        or "nothing was compared: the second llama-server has another name for what it computes, "
        f"or the sidecar was away (what it said: {log})",
    )


def _texts(admin: SidecarAdministration, chains: list[ChainLine], most: int) -> list[StoredText]:
    found = (text_of(admin, chain, DEFAULT_BLOCK_TOKENS, most) for chain in chains)
    return [text for text in found if text is not None]


def _sums(admin: SidecarAdministration, model: str) -> tuple[int, int]:
    for one in admin.stat().rechecked:
        if one.model == model:
            return one.blocks, one.different
    return 0, 0
