"""packaging/docker: Dockerfile, compose files, manifest and page say the same things."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ollama_tiering.config import GIB, MIB, load, parse_size
from ollama_tiering.config.environment import KNOWN
from ollama_tiering.launch import block_service, ollama
from ollama_tiering.launch.address import DEFAULT_PORT, parse_address
from scripts import containers

REPO = Path(__file__).parents[2]
HERE = REPO / "packaging/docker"
PAGE = (REPO / "docs/containers.md").read_text(encoding="utf-8")
COMPOSE = sorted(HERE.glob("compose*.yaml"))
WITH_SERVERS = ("compose.yaml", "compose.shared.yaml")
OVERLAYS = sorted({path.name for path in COMPOSE} - set(WITH_SERVERS))


def instructions(name: str) -> list[str]:
    """What follows each instruction of that name in the Dockerfile, in one line each."""
    text = re.sub(r"^#.*\n", "", (HERE / "Dockerfile").read_text(), flags=re.MULTILINE)
    text = text.replace("\\\n", " ")
    return [" ".join(rest.split()) for rest in re.findall(rf"^{name} (.*)$", text, re.MULTILINE)]


def environment() -> dict[str, str]:
    (line,) = instructions("ENV")
    return dict(word.split("=", 1) for word in line.split())


def arguments() -> set[str]:
    return {line.partition("=")[0] for line in instructions("ARG")}


def compose(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((HERE / name).read_text()))


def servers(name: str) -> list[dict[str, Any]]:
    every = compose(name)["services"].values()
    return [one for one in every if one.get("image", "ollama-tiering") == "ollama-tiering"]


def variables(service: dict[str, Any]) -> dict[str, str]:
    return dict(service.get("environment", {}))


def manifest() -> dict[str, Any]:
    every = {one["kind"]: one for one in yaml.safe_load_all((HERE / "kubernetes.yaml").read_text())}
    return dict(every["StatefulSet"]["spec"]["template"]["spec"])


def volumes() -> set[str]:
    """Of the image: folders that every user may make directories in."""
    return set(re.findall(r"/data/\S+", " ".join(instructions("RUN"))))


def test_volumes_are_those_of_the_image() -> None:
    assert volumes() == {"/data/.ollama", "/data/.local"}
    assert environment()["HOME"] == "/data"
    for name in WITH_SERVERS:
        for service in servers(name):
            places = {line.split(":")[1] for line in service["volumes"]}
            assert volumes() <= places
    (container,) = manifest()["containers"]
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    assert mounted == volumes() | {"/tmp", "/dev/shm"}


def test_ports_are_ollamas_and_published_on_loopback() -> None:
    assert instructions("EXPOSE") == [str(DEFAULT_PORT)]
    inside = parse_address(environment()["OLLAMA_HOST"])
    assert (inside.host, inside.port) == ("0.0.0.0", DEFAULT_PORT)
    for path in COMPOSE:
        for service in compose(path.name)["services"].values():
            assert all(line.startswith("127.0.0.1:") for line in service.get("ports", []))
    for name in WITH_SERVERS:
        for service in servers(name):
            assert [line.rpartition(":")[2] for line in service["ports"]] == [str(DEFAULT_PORT)]
    (container,) = manifest()["containers"]
    assert [one["containerPort"] for one in container["ports"]] == [DEFAULT_PORT]


def test_servers_write_nowhere_else_and_gain_no_rights() -> None:
    for name in WITH_SERVERS:
        for service in servers(name):
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]
            assert any(place.startswith("/tmp") for place in service["tmpfs"])
    pod = manifest()
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_there_is_time_to_store_what_models_hold() -> None:
    needed = ollama.STOP_SECONDS + block_service.STOP_SECONDS
    for name in WITH_SERVERS:
        for service in servers(name):
            assert float(service["stop_grace_period"].removesuffix("s")) >= needed
    assert manifest()["terminationGracePeriodSeconds"] >= needed
    assert instructions("STOPSIGNAL") == ["SIGTERM"]


def test_the_ram_tier_fits_into_shared_memory() -> None:
    (container,) = manifest()["containers"]
    shm = next(one["emptyDir"] for one in manifest()["volumes"] if one["name"] == "shm")
    tiers = {one["name"]: one["value"] for one in container["env"]}
    sizes = [(shm["sizeLimit"], tiers["OLLAMA_KV_TIER_RAM_GB"])]
    for name in WITH_SERVERS:
        for service in servers(name):
            size, ram = service["shm_size"], variables(service)["OLLAMA_KV_TIER_RAM_GB"]
            sizes.append((size.replace("g", "GiB"), ram))
    for size, ram_gib in sizes:
        assert 128 * MIB <= float(ram_gib) * GIB <= 0.95 * parse_size(size)


def test_the_health_check_is_the_file_that_asks_the_sidecars_port() -> None:
    (line,) = instructions("HEALTHCHECK")
    words = json.loads(line.partition("CMD ")[2])
    assert words[-1] == "/opt/ollama-tiering/packaging/docker/healthy.py"
    for name in ("config.toml", "shared.toml"):
        settings = tomllib.loads((HERE / name).read_text())["sidecar"]
        assert settings["metrics_port"] == 9434
    (container,) = manifest()["containers"]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/api/version", "port": "http"}
    assert "livenessProbe" not in container


@pytest.mark.parametrize("name", ["config.toml", "shared.toml"])
def test_settings_are_known(name: str) -> None:
    assert load(path=HERE / name).sidecar.metrics_port == 9434


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_build_arguments_and_variables_are_known(path: Path) -> None:
    for name, service in compose(path.name)["services"].items():
        assert set(service.get("build", {}).get("args", {})) <= arguments()
        ours = {n for n in variables(service) if n.startswith("OLLAMA_KV") or "TIERING" in n}
        assert ours <= KNOWN, name
        source = path.read_text()
        assert f"{name}:" in source


def test_what_the_dockerfile_sets_is_known() -> None:
    ours = {name for name in environment() if name.startswith(("OLLAMA_KV", "OLLAMA_TIERING"))}
    assert ours
    assert ours <= KNOWN


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_goes_beside_another_file_adds_to_its_service(name: str) -> None:
    assert "tiering" in compose(name)["services"]
    assert "Beside " in (HERE / name).read_text().splitlines()[0]


def test_each_setting_of_open_webui_has_a_reason() -> None:
    lines = (HERE / "compose.open-webui.yaml").read_text().splitlines()
    webui = variables(compose("compose.open-webui.yaml")["services"]["webui"])
    matter = {"ENABLE_TITLE_GENERATION", "ENABLE_TAGS_GENERATION", "ENABLE_FOLLOW_UP_GENERATION"}
    assert matter | {"RAG_SYSTEM_CONTEXT"} <= set(webui)
    server = variables(compose("compose.open-webui.yaml")["services"]["tiering"])
    for name in [*server, "ENABLE_TITLE_GENERATION", "RAG_SYSTEM_CONTEXT"]:
        number = next(n for n, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
        assert lines[number - 1].strip().startswith("# ")
    depends = compose("compose.open-webui.yaml")["services"]["webui"]["depends_on"]
    assert depends["tiering"]["condition"] == "service_started"


def test_two_servers_have_one_key_and_places_of_their_own() -> None:
    one, two = servers("compose.shared.yaml")
    for service in (one, two):
        places = [line.split(":") for line in service["volumes"]]
        there = {inside: outside for outside, inside, *_ in places}
        remote = variables(service)["OLLAMA_KV_TIER_REMOTE"]
        assert there[remote] == "shared"
        key = tomllib.loads((HERE / "shared.toml").read_text())["sidecar"]["remote_key_file"]
        assert there[str(Path(key).parent)] == "key"
        assert there[environment()["OLLAMA_TIERING_CONFIG"]] == "./shared.toml"
    own = [
        {line.split(":")[0] for line in s["volumes"] if "/data/.local" in line} for s in (one, two)
    ]
    assert own[0] != own[1]


def test_the_base_is_an_argument_and_no_secret_is_one() -> None:
    assert instructions("FROM") == ["${BASE} AS build", "${BASE}"]
    assert not [name for name in arguments() if re.search("KEY|TOKEN|SECRET|PASSWORD", name)]


def test_the_context_is_a_list_of_what_is_needed() -> None:
    lines = (REPO / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    for rule in (rule[1:] for rule in rules if rule.startswith("!")):
        assert list(REPO.glob(rule)), rule
    assert not [rule for rule in rules if re.search(r"^!(\.git|\.venv|tests|docs)", rule)]


def test_the_page_names_every_file_and_argument() -> None:
    for path in HERE.iterdir():
        if path.name.startswith("compose") or path.suffix in (".toml", ".yaml"):
            assert path.name in PAGE, path.name
    for name in arguments():
        assert re.search(rf"\b{name}\b", PAGE), name
    for place in volumes():
        assert place in PAGE


def test_the_pages_numbers_are_those_of_the_files() -> None:
    seconds = compose("compose.yaml")["services"]["tiering"]["stop_grace_period"].removesuffix("s")
    assert re.search(rf"--stop-timeout[ =]{seconds}\b", PAGE)
    assert len(PAGE.splitlines()) <= 200


@pytest.mark.parametrize("name", ["build", "tiering", "../../scripts/containers"])
def test_shell_is_sound(name: str) -> None:
    path = HERE / name
    assert path.stat().st_mode & 0o111
    checked = subprocess.run(["bash", "-n", path], check=False)
    assert checked.returncode == 0
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, "-x", path], check=True, cwd=REPO)


# --- the first stage ------------------------------------------------------------------------------


class Stage:
    """A checkout whose `tiering patch` notes how it is called, and says what it would have made."""

    def __init__(self, root: Path) -> None:
        self.checkout, self.made, self.bin = root / "checkout", root / "cache", root / "bin"
        for name in ("scripts/tiering", "scripts/extra", ".venv/bin/python"):
            self._program(self.checkout / name, f'echo "$@" >>{self.checkout}/calls')
        with (self.checkout / "scripts/tiering").open("a") as script:
            script.write(f'\n[ "$1" != patch ] || echo "{self.made}/$MADE"\n')
        place = self.checkout / "packaging/docker/build"
        place.parent.mkdir(parents=True)
        shutil.copy(HERE / "build", place)
        self.bin.mkdir()

    def _program(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def install_ollama(self, version: str, *, llama_server: bool) -> None:
        said = f"echo 'Warning: could not connect'; echo 'Warning: client version is {version}'"
        self._program(self.bin / "ollama", said)
        if llama_server:
            self._program(self.bin.parent / "lib/ollama/llama-server", "")

    def run(self, made: str, **arguments: str) -> str:
        """How `tiering patch` was called."""
        program = self.made / made
        self._program(program, "")
        program.chmod(0o700)
        (program.parent / "record").touch(0o600)
        path = f"{self.bin}:/usr/bin:/bin"
        subprocess.run(
            [self.checkout / "packaging/docker/build"],
            env={"PATH": path, "MADE": made, **arguments},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        calls = (self.checkout / "calls").read_text().splitlines()
        (patch,) = [call for call in calls if call.startswith("patch")]
        return patch


GO_BUILD, TREE = "builds/v0.16.3-native/0123/ollama", "llama-server/v0.32.15-01/bin/ollama"


def test_on_a_system_without_ollama_the_go_engine_is_built_for_every_processor(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    assert stage.run(GO_BUILD) == "patch --cpu variants --gpu off"
    built = stage.checkout / "ollama/ollama"
    assert built.stat().st_mode & 0o777 == 0o755
    assert (stage.checkout / "ollama/record").stat().st_mode & 0o777 == 0o644


def test_of_an_older_ollama_the_same_version_is_built(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.install_ollama("0.24.0", llama_server=False)
    called = stage.run(GO_BUILD, CPU="native", GPU="stock", SOURCE="/s")
    assert called == "patch --cpu native --gpu stock --tag v0.24.0 --source /s"


def test_an_argument_names_another_version(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.install_ollama("0.24.0", llama_server=False)
    assert stage.run(GO_BUILD, TAG="v0.20.0") == "patch --cpu variants --gpu off --tag v0.20.0"


def test_beside_an_ollama_with_llama_server_a_tree_is_laid(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.install_ollama("0.32.15", llama_server=True)
    called = stage.run(TREE, LLAMA_SOURCE="/l.tar.gz", CPU="native")
    assert called == "patch --ollama auto --llama-source /l.tar.gz"
    tree = stage.checkout / "cache" / Path(TREE).parents[1]
    assert (tree / "bin/ollama").is_file()
    assert not (stage.checkout / "ollama").exists()


# --- the health check -------------------------------------------------------------------------


@contextmanager
def answering(pages: dict[str, tuple[int, str]]) -> Iterator[int]:
    """A server on loopback; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, said = pages.get(self.path, (404, ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def health(tmp_path: Path, ollama_port: int, metrics: int | None) -> tuple[int, str]:
    settings = tmp_path / "config.toml"
    settings.write_text(f"[sidecar]\nmetrics_port = {metrics}\n" if metrics is not None else "")
    done = subprocess.run(
        [sys.executable, "-IS", HERE / "healthy.py"],
        env={"OLLAMA_HOST": f"0.0.0.0:{ollama_port}", "OLLAMA_TIERING_CONFIG": str(settings)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


OLLAMA = {"/api/version": (200, "{}")}


@pytest.mark.parametrize(
    ("ready", "code"), [((200, "ready\n"), 0), ((503, "not scanned yet: local\n"), 1)]
)
def test_a_sidecar_that_is_not_ready_is_told(
    tmp_path: Path, ready: tuple[int, str], code: int
) -> None:
    with answering(OLLAMA) as server, answering({"/readyz": ready}) as sidecar:
        found = health(tmp_path, server, sidecar)
    assert found == (code, f"Ollama answers; sidecar: {ready[1]}")


def test_an_ollama_without_a_sidecar_is_healthy_as_stock_is(tmp_path: Path) -> None:
    with answering(OLLAMA) as server:
        code, said = health(tmp_path, server, closed_port())
        assert code == 0
        assert "as stock" in said
        assert health(tmp_path, server, None)[0] == 0


def test_a_sidecar_alone_is_not_enough(tmp_path: Path) -> None:
    with answering({"/readyz": (200, "ready")}) as sidecar:
        code, said = health(tmp_path, closed_port(), sidecar)
    assert code == 1
    assert said.startswith("Ollama does not answer")


# --- scripts/containers ---------------------------------------------------------------------------


def test_a_case_names_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert containers.Case("x", added={"/usr/bin": gone}, mounted={"/srv": tmp_path}).missing == [
        gone
    ]
    for case in containers.CASES.values():
        assert set(case.arguments) <= arguments()


def test_what_the_trial_needs_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["containers"])
    assert containers.main() == 6
    assert "apt-get install buildah debootstrap" in capsys.readouterr().err
