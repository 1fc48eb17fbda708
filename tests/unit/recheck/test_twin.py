"""A second llama-server is started with what decides bits, and with nothing that is the first's."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ollama_tiering.config.environment import ENV_ENGINE_SOCKET
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch.address import free_address
from ollama_tiering.recheck import twin as twins
from ollama_tiering.recheck.twin import Twin, give_way, running, twin_of, without_own

SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.say({"status": "ok"})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.say({"asked": asked["prompt"]})
    def say(self, what):
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@contextlib.contextmanager
def sleeping(folder: Path, name: str, env: dict[str, str]) -> Iterator[tuple[int, Path]]:
    """A program of this name that sleeps."""
    program = folder / name
    shutil.copy2(shutil.which("sleep") or "/bin/sleep", program)
    process = subprocess.Popen([program, "60"], env={**os.environ, **env}, cwd=folder)
    try:
        while not _is(process.pid, program, env):
            time.sleep(0.01)
        yield process.pid, program
    finally:
        process.kill()
        process.wait()


def _is(pid: int, program: Path, env: dict[str, str]) -> bool:
    """Whether it is that program by now, with its variables."""
    process = psutil.Process(pid)
    return Path(process.exe()) == program and env.items() <= process.environ().items()


def made(code: str, **options: object) -> Twin:
    given = {"private_bytes": 1 << 20, "env": dict(os.environ), "folder": Path.cwd(), **options}
    return Twin(Path(sys.executable), ("-c", code), **given)  # type: ignore[arg-type]


def test_who_listens_where_is_left_out_and_all_else_stays() -> None:
    command = "-m a.gguf --port 1 -c 8192 --host=0.0.0.0 --api-key x --flash-attn on --log-file l"
    kept = ["-m", "a.gguf", "-c", "8192", "--flash-attn", "on"]
    assert without_own(command.split()) == tuple(kept)


def test_the_other_process_says_what_it_was_started_with(tmp_path: Path) -> None:
    env = {"LLAMA_API_KEY": "secret", "LLAMA_SERVER_ROUTER_PORT": "1", "GGML_SOMETHING": "1"}
    with sleeping(tmp_path, "llama-server", {ENV_ENGINE_SOCKET: "s", **env}) as (pid, program):
        found = twin_of(pid)
    assert found.arguments == ("60",)
    assert (found.program, found.folder) == (program, tmp_path)
    assert found.env[twins.GATE] == "recompute"
    assert found.env["GGML_SOMETHING"] == "1"
    assert not found.env.keys() & {"LLAMA_API_KEY", "LLAMA_SERVER_ROUTER_PORT"}


@pytest.mark.parametrize(
    ("name", "env", "said"),
    [
        ("sleep", {ENV_ENGINE_SOCKET: "s"}, "is no llama-server"),
        ("llama-server", {}, "is no llama-server"),
        ("llama-server", {ENV_ENGINE_SOCKET: "s"}, "was replaced"),
    ],
)
def test_nothing_else_is_ever_started_again(
    tmp_path: Path, name: str, env: dict[str, str], said: str
) -> None:
    with sleeping(tmp_path, name, env) as (pid, program):
        if said == "was replaced":
            program.unlink()
        with pytest.raises(ServiceError, match=said):
            twin_of(pid)


def test_tokens_go_to_nobody_else_who_took_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = free_address()
    monkeypatch.setattr(twins, "free_address", lambda: address)
    stranger = subprocess.Popen([sys.executable, "-c", SERVER, "--port", str(address.port)])
    try:
        with (
            running(made("import time; time.sleep(60)"), tmp_path / "log") as served,
            pytest.raises(ServiceError),
        ):
            served.wait_ready(2)
    finally:
        stranger.kill()
        stranger.wait()


def test_one_that_is_gone_is_an_error_with_a_cure() -> None:
    other = subprocess.Popen([sys.executable, "-c", ""])
    other.wait()
    with pytest.raises(ServiceError) as caught:
        twin_of(other.pid)
    assert "root" in (caught.value.hint or "")


def test_it_serves_and_ends_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # would refuse
    with running(made(SERVER), tmp_path / "logs" / "log") as served:
        served.wait_ready(30)
        served.compute([1, 2, 3], 30)
        assert served.process.poll() is None
    assert served.process.poll() is not None


def test_one_that_ends_at_once_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(ServiceError) as caught,
        running(made("import sys; sys.exit('no such model')"), log) as served,
    ):
        served.wait_ready(30)
    assert str(log) in (caught.value.hint or "")
    assert "no such model" in log.read_text()


def test_one_that_needs_more_memory_than_there_is_is_not_started(tmp_path: Path) -> None:
    with (
        pytest.raises(ServiceError, match="MiB"),
        running(made(SERVER, private_bytes=1 << 60), tmp_path / "log"),
    ):
        pass
    assert not (tmp_path / "log").exists()


def test_it_takes_only_what_nobody_else_wants() -> None:
    code = (
        "from ollama_tiering.recheck.twin import give_way; import os; give_way();"
        "print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE)"
    )
    assert give_way is not None
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.split() == ["19", "True"]
