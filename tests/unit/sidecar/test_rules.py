"""Rules in a running sidecar: what a client is told, what lies on the disk, what is shown."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from measure.store import samples
from ollama_tiering import cli
from ollama_tiering.client import BlockClient
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.key import Namespace, prefix_chain, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.sidecar import PutStream, SidecarProcess
from tests.unit.sidecar.ollama_models import blob, name_model

PRIVATE = samples.namespace(blob(1))
PUBLIC = samples.namespace(blob(2))
TOKENS = list(range(20))
FILE_BYTES = len(samples.sequence(PRIVATE, TOKENS)[0].data)
FORBID = '[models."private"]\nstore = false\n'
RULE = 'rule in config.toml: [models."private"] store = false'


class RuledSidecar(SidecarProcess):
    """Its settings are a file with rules; Ollama's models lie in `models`."""

    def __init__(self, root: Path, rules: str = "") -> None:
        super().__init__(root, env={"OLLAMA_MODELS": str(root / "models")})
        self.rules = rules
        name_model(root / "models", "private:latest", blob(1))
        name_model(root / "models", "public:latest", blob(2))

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        self.write(self.rules)
        return environment

    def write(self, rules: str) -> None:
        file = self.root / "config" / "ollama-tiering" / "config.toml"
        before = file.read_text().partition("[models.")[0]
        file.write_text(before + rules)

    def reload(self, rules: str) -> None:
        self.write(rules)
        before = self.log.count("reloaded: ")
        self.send_signal(signal.SIGHUP)
        self.wait(lambda _: self.log.count("reloaded: ") > before, "the settings are read again")

    def files(self, ns: Namespace) -> list[Path]:
        """`os.walk`, because it passes over what the sidecar removes meanwhile."""
        return [
            path
            for folder, _, names in os.walk(self.root)
            for path in (Path(folder, name) for name in names)
            if ".kvb" in path.name and ns.digest().hex() in path.parts
        ]

    def put(self, ns: Namespace) -> list[samples.SampleBlock]:
        blocks = samples.sequence(ns, TOKENS)
        with self.channel() as channel:
            stream = PutStream(rpc.BlockStoreStub(channel), ns)
            assert all(result.stored for result in stream.put(blocks))
            stream.close()
        return blocks

    def rows(self, ns: Namespace) -> int:
        data = tokens_to_bytes(TOKENS)
        keys = prefix_chain(ns.digest(), data, int(ns.block_tokens))
        request = pb.HasRequest(namespace=ns.digest(), keys=keys, tokens=data, block_tokens=4)
        with self.channel() as channel:
            answer = rpc.BlockStoreStub(channel).Has(request, timeout=10)
        return int(answer.matched_tokens)

    def got(self, ns: Namespace, blocks: list[samples.SampleBlock]) -> list[Any]:
        request = pb.GetRequest(namespace=ns.digest(), keys=[block.key for block in blocks])
        with self.channel() as channel:
            answers = list(rpc.BlockStoreStub(channel).Get(request, timeout=10))
        return [answer for answer in answers if answer.found]


def test_a_forbidden_model_is_refused_with_the_rule_and_leaves_nothing_on_the_disk(
    tmp_path: Path,
) -> None:
    with RuledSidecar(tmp_path, FORBID) as daemon:
        blocks = samples.sequence(PRIVATE, TOKENS)
        with daemon.channel() as channel:
            stream = PutStream(rpc.BlockStoreStub(channel), PRIVATE)
            for answer in stream.reserve(blocks):
                assert answer.outcome == pb.Reservation.OUTCOME_REFUSED
                assert (answer.reason, answer.path) == (RULE, b"")
            stream.close()
        with BlockClient(daemon.socket) as client:
            result = client.put(PRIVATE, TOKENS, lambda _: rows_of(PRIVATE))
            assert (result.rows, result.reason) == (0, RULE)
            assert client.failures == {}
        with BlockClient(daemon.socket, inline=True) as client:
            assert client.put(PRIVATE, TOKENS, lambda _: rows_of(PRIVATE)).stored_blocks == 0
        assert daemon.rows(PRIVATE) == 0
        assert daemon.files(PRIVATE) == []
        daemon.put(PUBLIC)
        assert daemon.rows(PUBLIC) == len(TOKENS)


def rows_of(ns: Namespace) -> dict[tuple[int, str], bytes]:
    return {(layer, kind): bytes(4 * 8 * 2) for layer in range(2) for kind in ("k", "v")}


def test_a_rule_that_is_new_removes_what_is_stored_without_a_restart(tmp_path: Path) -> None:
    with RuledSidecar(tmp_path) as daemon:
        blocks = daemon.put(PRIVATE)
        others = daemon.put(PUBLIC)
        daemon.wait_written()
        assert len(daemon.files(PRIVATE)) == 2 * len(blocks)
        daemon.reload(FORBID)
        assert daemon.rows(PRIVATE) == 0
        assert daemon.got(PRIVATE, blocks) == []
        daemon.wait(lambda _: not daemon.files(PRIVATE), "every file of the model is removed")
        assert daemon.said("changed=model_rules needs_restart=none")
        said = "removed by a rule: model=private:latest blocks=5"
        daemon.wait(lambda _: said in daemon.log, "it is said")
        assert len(daemon.got(PUBLIC, others)) == len(others)
        daemon.reload("")
        daemon.put(PRIVATE)
        assert daemon.rows(PRIVATE) == len(TOKENS)


def test_what_was_stored_before_a_restart_is_neither_served_nor_kept(tmp_path: Path) -> None:
    daemon = RuledSidecar(tmp_path)
    with daemon:
        blocks = daemon.put(PRIVATE)
        daemon.wait_written()
    daemon.rules = FORBID
    with daemon:
        assert daemon.rows(PRIVATE) == 0
        assert daemon.got(PRIVATE, blocks) == []
        daemon.wait(lambda _: not daemon.files(PRIVATE), "every file of the model is removed")


def test_a_second_name_for_a_model_brings_its_rule_with_it(tmp_path: Path) -> None:
    with RuledSidecar(tmp_path, '[models."secret*"]\nstore = false\n') as daemon:
        daemon.put(PRIVATE)
        name_model(daemon.root / "models", "secret:v1", blob(1))
        daemon.wait(lambda _: not daemon.files(PRIVATE), "the new name is seen")
        assert daemon.rows(PRIVATE) == 0


def test_a_model_without_a_name_is_not_stored_beside_a_rule_that_forbids(tmp_path: Path) -> None:
    unknown = samples.namespace(blob(3))
    with RuledSidecar(tmp_path, FORBID) as daemon, daemon.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), unknown)
        (answer, *_) = stream.reserve(samples.sequence(unknown, TOKENS))
        assert "its name is not known" in answer.reason
        stream.close()


def test_what_a_runner_reports_is_enough_to_know_its_model(tmp_path: Path) -> None:
    """As where the blocks lie in a shared directory only: there is no description on this host."""
    rules = FORBID + '[models."*"]\nttl_days = 1\n'
    with RuledSidecar(tmp_path, rules) as daemon, daemon.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        for pid, ns in ((1, PRIVATE), (2, PUBLIC)):
            report = pb.RunnerReport(pid=pid, model=ns.model, namespace=ns.digest(), tiered=True)
            stub.ReportRunner(report, timeout=10)
        (told,) = daemon.stat().model_terms
        assert (told.name, told.refusal) == ("private:latest", RULE)


def test_status_says_of_a_model_why_nothing_of_it_is_stored_and_what_the_others_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = FORBID + '[models."public"]\nbudget = "1MB"\nttl_days = 7\n'
    with RuledSidecar(tmp_path, rules) as daemon:
        daemon.put(PUBLIC)
        daemon.wait_written()
        with daemon.channel() as channel:
            report = pb.RunnerReport(
                pid=1, model=PRIVATE.model, namespace=PRIVATE.digest(), tiered=True
            )
            rpc.BlockStoreStub(channel).ReportRunner(report, timeout=10)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        with pytest.raises(SystemExit):
            cli.main(["status", "--socket", str(daemon.socket)])
        said = capsys.readouterr().out.splitlines()
        assert f"  not stored: {RULE}" in said
        assert f"model private:latest: not stored: {RULE}" in said
        (line,) = [line for line in said if line.startswith("model public:latest: local ")]
        assert line.endswith(" KiB of 1.0 MB, dropped when unused for 7 days")
        with pytest.raises(SystemExit):
            cli.main(["status", "--json", "--socket", str(daemon.socket)])
        found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["models"]}
        assert found["private:latest"]["refusal"] == RULE
        assert found["public:latest"]["budget_bytes"] == 10**6


def test_a_model_holds_its_budget_on_the_disk_while_a_client_stores(tmp_path: Path) -> None:
    budget = 4 * FILE_BYTES
    rules = f'[models."private"]\nbudget = {budget}\n'
    with RuledSidecar(tmp_path, rules) as daemon:
        daemon.put(PUBLIC)
        for start in range(0, 400, 20):
            blocks = samples.sequence(PRIVATE, range(start, start + 8))
            with daemon.channel() as channel:
                stream = PutStream(rpc.BlockStoreStub(channel), PRIVATE)
                assert all(result.stored for result in stream.put(blocks))
                stream.close()
            assert sum(told.local_bytes for told in daemon.stat().model_terms) <= budget
        daemon.wait_written()
        local = [p for p in daemon.files(PRIVATE) if daemon.local_dir in p.parents]
        assert 0 < sum(path.stat().st_blocks * 512 for path in local) <= budget
        (told,) = daemon.stat().model_terms
        assert 0 < told.local_bytes <= told.budget_bytes == budget
        assert daemon.rows(PUBLIC) == len(TOKENS)


def test_a_rule_with_a_mistake_leaves_the_rules_as_they_were(tmp_path: Path) -> None:
    with RuledSidecar(tmp_path, FORBID) as daemon:
        daemon.write('[models."private"]\nstore = maybe\n')
        daemon.send_signal(signal.SIGHUP)
        daemon.wait(lambda _: "reload refused" in daemon.log, "the mistake is said")
        with daemon.channel() as channel:
            stream = PutStream(rpc.BlockStoreStub(channel), PRIVATE)
            (answer, *_) = stream.reserve(samples.sequence(PRIVATE, TOKENS))
            assert answer.outcome == pb.Reservation.OUTCOME_REFUSED
            stream.close()


def test_no_rule_costs_no_look_at_the_models(tmp_path: Path) -> None:
    daemon = RuledSidecar(tmp_path)
    (tmp_path / "models" / "manifests" / "broken").write_text("{")
    with daemon:
        daemon.put(PRIVATE)
        assert list(daemon.stat().model_terms) == []
    assert "names of models" not in daemon.log


def test_an_import_of_a_forbidden_model_says_why_it_stores_nothing(tmp_path: Path) -> None:
    with RuledSidecar(tmp_path, FORBID) as daemon, daemon.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), PRIVATE)
        (block, *_) = samples.sequence(PRIVATE, TOKENS)
        with pytest.raises(grpc.RpcError) as caught:
            stream.call(inline=pb.PutInline(key=block.key, part=block.data, last=True))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        assert RULE in caught.value.details()  # type: ignore[attr-defined]
