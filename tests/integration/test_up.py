"""`tiering up` as a person runs it: real command, real sidecar, a program that acts as Ollama."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ollama_tiering.launch import block_service
from ollama_tiering.launch.address import Address, free_address
from ollama_tiering.patchset import finished
from tests.places import short_directory
from tests.sidecar import SidecarProcess
from tests.strangers import NOBODY, all_heard, listening_as
from tests.unit.sidecar.ollama_models import blob, name_model

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
FAKE = REPOSITORY / "tests" / "unit" / "launch" / "fake_ollama.py"


class Place:
    """Private directories, and `tiering up` in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address: Address = free_address()
        self.fake = root / "fake"
        self.fake.mkdir(parents=True)
        self.binary = self.fake / "ollama"
        self.binary.write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
        self.binary.chmod(0o755)
        (root / "run").mkdir(mode=0o700)
        own = {n: v for n, v in os.environ.items() if not n.startswith(("OLLAMA_", "XDG_"))}
        self.env = own | {
            "HOME": str(root),
            "XDG_RUNTIME_DIR": str(root / "run"),
            "XDG_STATE_HOME": str(root / "state"),
            "XDG_DATA_HOME": str(root / "data"),
            "XDG_CACHE_HOME": str(root / "cache"),
            "XDG_CONFIG_HOME": str(root / "config"),
            "OLLAMA_KV_TIER_RAM": str(root / "ram"),
            "OLLAMA_TIERING_BINARY": str(self.binary),
            "OLLAMA_NUM_PARALLEL": "3",
            "PYTHONPATH": str(REPOSITORY),
        }
        self.started: list[subprocess.Popen[str]] = []

    @property
    def socket(self) -> Path:
        return self.root / "run" / "ollama-tiering" / "sidecar.sock"

    @property
    def record(self) -> dict[str, Any]:
        path = self.socket.with_name(f"up-{self.address.port}.json")
        return dict(json.loads(path.read_text()))

    @property
    def events(self) -> list[str]:
        file = self.fake / "events"
        return file.read_text().splitlines() if file.exists() else []

    def behave(self, **behaviour: Any) -> None:
        (self.fake / "behaviour.json").write_text(json.dumps(behaviour))

    def up(self, *options: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "ollama_tiering", "up", "--host", str(self.address)]
        process = subprocess.Popen(
            self.entering(*command, *options),
            env=self.env,
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def entering(self, *command: str) -> list[str]:
        """How the command is run."""
        return [*command]

    def up_and_ready(self, *options: str) -> "Running":
        return Running(self.up(*options))

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()
        if pid := block_service.owner(self.socket) if block_service.ask(self.socket) else None:
            os.kill(pid, signal.SIGTERM)
            wait_for(lambda: not self.socket.exists())


class Running:
    """One that got ready; `lines` are what it has said so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self.read_until("ready: ")
        self.read_until("  stop  ")

    def read_until(self, beginning: str) -> str:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith(beginning):
                return line
        raise AssertionError(f"it ended without {beginning!r}:\n" + "\n".join(self.lines))

    def end(self, number: signal.Signals = signal.SIGINT) -> list[str]:
        """What it says from now on."""
        before = len(self.lines)
        self.process.send_signal(number)
        return self.rest()[before:]

    def rest(self) -> list[str]:
        assert self.process.stdout
        self.lines += [line.rstrip() for line in self.process.stdout]
        self.process.wait(30)
        return self.lines


class OwnSidecar(SidecarProcess):
    """Started by hand, by the settings of the place, where `tiering up` would start its own."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.root)
        self.place = place
        self.socket = place.socket

    def command(self) -> list[str]:
        return [sys.executable, "-m", "ollama_tiering", "sidecar"]

    def environment(self) -> dict[str, str]:
        return self.place.env


def wait_for(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def place() -> Iterator[Place]:
    with short_directory() as root:
        made = Place(root)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_then_stops_the_server_before_the_sidecar(
    place: Place, number: signal.Signals
) -> None:
    running = place.up_and_ready()
    assert block_service.ask(place.socket)
    said = running.end(number)
    assert running.process.returncode == 0
    assert place.events == ["serve started", "SIGTERM", "ended"]
    assert said[0].startswith("stopping: ")
    assert said[1] == "Ollama stopped; 0 blocks (0 B) were stored"
    assert said[2] == "sidecar stopped: everything is on disk"
    assert not place.socket.exists()


def test_the_server_sees_the_persons_variables_and_ours(place: Place) -> None:
    place.up_and_ready("--models", "models").end()
    seen = json.loads((place.fake / "environment.json").read_text())
    assert seen["OLLAMA_NUM_PARALLEL"] == "3"
    assert seen["OLLAMA_KV_TIERING"] == "1"
    assert seen["OLLAMA_KV_TIER_SOCKET"] == str(place.socket)
    assert seen["OLLAMA_MODELS"] == str(place.root / "models")


@pytest.mark.parametrize(
    ("file", "variable", "flag", "chosen"),
    [
        (None, None, None, "exact"),
        ("stock", None, None, "stock"),
        ("stock", "exact", None, "exact"),
        ("exact", "exact", "stock", "stock"),
    ],
)
def test_models_on_the_cpu_get_exact_attention_and_that_is_said(
    place: Place, file: str | None, variable: str | None, flag: str | None, chosen: str
) -> None:
    """Flag before variable before file; exact where none says anything."""
    if file:
        folder = place.root / "config/ollama-tiering"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(f'[server]\ncpu_attention = "{file}"\n')
    if variable:
        place.env["OLLAMA_CPU_ATTENTION"] = variable
    running = place.up_and_ready(*(["--cpu-attention", flag] if flag else []))
    running.end()
    seen = json.loads((place.fake / "environment.json").read_text())
    assert seen["OLLAMA_CPU_ATTENTION"] == chosen
    said = [line for line in running.lines if "exact attention" in line]
    assert len(said) == (chosen == "exact")


def test_a_second_one_speaks_of_the_first_and_names_files_that_are_there(place: Place) -> None:
    place.up_and_ready("--models", "models")
    first = place.record
    for options in ((), ("--models", str(place.root / "models"))):
        second = place.up(*options)
        out, _ = second.communicate(timeout=30)
        assert second.returncode == 0
        head, *rest = out.splitlines()
        assert re.fullmatch(
            rf"already up: {place.address.url} since \d\d:\d\d:\d\d \(process {first['pid']}\)",
            head,
        )
        said = {line.split()[0]: line.split()[1:] for line in rest}
        assert said["models"] == [str(place.root / "models")]
        assert len(said["logs"]) == 2
        assert all(Path(log).is_file() for log in said["logs"])
        assert said["stop"][-4:] == ["tiering", "stop", "--host", str(place.address)]
        assert said["other"][-1] == f"127.0.0.1:{place.address.port + 1}"
    assert place.events == ["serve started"]


def test_a_second_one_for_other_models_is_refused(place: Place) -> None:
    place.up_and_ready("--models", "models")
    second = place.up("--models", "others")
    out, _ = second.communicate(timeout=30)
    assert second.returncode == 9
    assert f"(process {place.record['pid']}): {place.root / 'models'}\n" in out
    assert f"or run beside it: tiering up --host 127.0.0.1:{place.address.port + 1}" in out
    assert f"--models {place.root / 'others'}\n" in out
    assert place.events == ["serve started"]


def test_one_on_another_port_uses_the_sidecar_and_names_the_log_of_that(place: Place) -> None:
    place.up_and_ready()
    first = place.record
    place.address = free_address()
    running = place.up_and_ready()
    (line,) = [line for line in running.lines if line.startswith("  logs  ")]
    logs = line.split()[1:]
    assert logs == [place.record["server_log"], first["sidecar_log"]]
    assert all(Path(log).is_file() for log in logs)
    assert running.end()[-1] == "the sidecar ran before and stays"


def test_its_own_model_is_the_example(place: Place) -> None:
    name_model(place.root / "models", "mine:1b", blob(1))
    running = place.up_and_ready("--models", "models")
    assert any(" run mine:1b " in line for line in running.lines)


def test_a_second_signal_does_not_wait_for_a_deaf_server(place: Place) -> None:
    place.behave(deaf=True)
    running = place.up_and_ready()
    running.process.send_signal(signal.SIGINT)
    wait_for(lambda: "SIGTERM" in place.events)
    said = running.end()
    assert running.process.returncode == 0
    assert any("was killed" in line for line in said)
    assert said[-1] == "sidecar stopped: everything is on disk"


def test_a_server_that_dies_ends_it_with_the_last_lines_of_its_log(place: Place) -> None:
    place.behave(die_after_seconds=1)
    running = place.up_and_ready()
    text = "\n".join(running.rest())
    assert running.process.returncode == 9
    assert "ollama serve ended with exit code 3" in text
    assert "listening" in text  # the log
    assert not place.socket.exists()


def test_a_server_that_cannot_start_leaves_no_sidecar(place: Place) -> None:
    place.behave(die=5)
    process = place.up()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 9
    assert "something is wrong with me" in out
    assert not place.socket.exists()


def test_a_sidecar_that_is_killed_comes_back_while_the_server_goes_on(place: Place) -> None:
    running = place.up_and_ready()
    os.kill(place.record["sidecar_pid"], signal.SIGKILL)
    running.read_until("serving goes on without it")
    running.read_until("the sidecar runs again")
    assert block_service.ask(place.socket)
    assert place.events == ["serve started"]
    assert running.end()[-1] == "sidecar stopped: everything is on disk"


def test_a_socket_that_somebody_removed_is_said_and_made_again(place: Place) -> None:
    running = place.up_and_ready()
    pid = place.record["sidecar_pid"]
    shutil.rmtree(place.socket.parent)  # as a logout does
    running.read_until("nobody can reach the sidecar")
    running.read_until("the sidecar runs again")
    assert block_service.ask(place.socket)
    assert block_service.owner(place.socket) == pid  # it was not started anew
    assert place.events == ["serve started"]
    rest = running.end()
    assert rest[-1] == "sidecar stopped: everything is on disk"
    assert not [line for line in rest if "nobody can reach" in line]  # said once


def test_another_users_sidecar_is_not_used_and_ollama_serves_as_stock(place: Place) -> None:
    folder = place.root / "theirs"
    folder.mkdir()
    place.root.chmod(0o755)
    with listening_as(NOBODY, folder / "s") as heard:
        running = place.up_and_ready("--socket", str(folder / "s"))
        warned = [line for line in running.lines if line.startswith("warning: ")]
        assert len(warned) == 1
        assert warned[0].startswith("warning: no sidecar, so Ollama serves as stock")
        assert f"a process of user {NOBODY} listens on {folder}/s" in warned[0]
        running.end()
        assert all_heard(folder / "s", heard) == b""


def test_a_sidecar_that_runs_already_is_used_and_left(place: Place) -> None:
    with OwnSidecar(place) as own:
        assert own.process is not None
        running = place.up_and_ready()
        assert any("runs on" in line and str(own.process.pid) in line for line in running.lines)
        assert running.end()[-1] == "the sidecar ran before and stays"
        assert own.running


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_what_a_killed_one_left_is_cleared_away(place: Place) -> None:
    running = place.up_and_ready()
    record = place.record
    running.process.kill()
    running.process.wait()
    wait_for(lambda: not psutil.pid_exists(record["server_pid"]))
    assert place.events[-2:] == ["SIGTERM", "ended"]  # not killed: it could store its K/V
    assert psutil.pid_exists(record["sidecar_pid"])
    again = place.up_and_ready()
    assert any("a killed `tiering up` left" in line for line in again.lines)
    assert place.record["sidecar_pid"] != record["sidecar_pid"]


def test_a_port_that_another_ollama_has_is_refused_before_anything_is_built(place: Place) -> None:
    other = Place(place.root / "other")
    other.address = place.address
    other.up_and_ready()
    try:
        place.env["OLLAMA_TIERING_BINARY"] = "/no/such/program"
        process = place.up()
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 9
        assert f"another Ollama 0.16.3 listens on {place.address} already" in out
        assert "hint: stop it" in out
    finally:
        other.close()


def test_without_ollamas_source_it_says_how_to_get_it(place: Place) -> None:
    del place.env["OLLAMA_TIERING_BINARY"]
    process = place.up("--source", str(place.root / "nothing"))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "nothing: no such directory" in out
    assert "hint: --source takes a URL or the path of a clone" in out


# --- a sidecar that cannot start is no reason not to serve ---------------------------------------


def _not_ours(place: Place) -> None:
    (place.root / "ram").mkdir()
    (place.root / "ram").chmod(0o777)


def _socket_cannot_be_made(place: Place) -> None:
    """A file lies where the socket's directory belongs."""
    (place.root / "file").touch()
    place.env["OLLAMA_KV_TIER_SOCKET"] = str(place.root / "file" / "s")


def _socket_is_a_file(place: Place) -> None:
    place.socket.parent.mkdir(mode=0o700)
    place.socket.touch()


def _settings_are_broken(place: Place) -> None:
    folder = place.root / "config/ollama-tiering"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[sidecar]\nlocal_budget = "many"\n')


def _variable_is_broken(place: Place) -> None:
    place.env["OLLAMA_KV_TIER_RAM_GB"] = "much"


def _exception(place: Place) -> None:
    """A bug in what only the sidecar imports."""
    library = place.root / "broken"
    (library / "prometheus_client").mkdir(parents=True)
    (library / "prometheus_client" / "__init__.py").write_text(
        "raise ZeroDivisionError('by a bug')\n"
    )
    place.env["PYTHONPATH"] = f"{library}:{REPOSITORY}"


def _local_directory_is_a_link(place: Place) -> None:
    (place.root / "elsewhere").mkdir()
    place.env["OLLAMA_KV_TIER_LOCAL"] = str(place.root / "link")
    (place.root / "link").symlink_to(place.root / "elsewhere")


def _killed(place: Place) -> None:
    library = place.root / "broken"
    library.mkdir()
    (library / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'sidecar' in open('/proc/self/cmdline').read().split('\\0'): os.kill(os.getpid(), 9)\n"
    )
    place.env["PYTHONPATH"] = f"{library}:{REPOSITORY}"


@pytest.mark.parametrize(
    ("break_it", "cause", "cure"),
    [
        (_not_ours, "ram is writable by others", "chmod 700"),
        (_socket_cannot_be_made, "file: File exists", "name a directory of your own"),
        (_socket_is_a_file, "exists and is not a socket", "remove it"),
        (_settings_are_broken, "config.toml:2: local_budget: 'many' is not a size", "correct that"),
        (_variable_is_broken, "environment variable OLLAMA_KV_TIER_RAM_GB", "unset"),
        (_exception, "unexpected ZeroDivisionError", "report what it prints"),
        (_local_directory_is_a_link, "link is a link", "name the directory itself"),
        (_killed, "was ended by SIGKILL", "log: "),
    ],
)
def test_whatever_keeps_the_sidecar_from_starting_is_said_once_and_ollama_serves_as_stock(
    place: Place, break_it: Callable[[Place], None], cause: str, cure: str
) -> None:
    break_it(place)
    running = place.up_and_ready()
    time.sleep(3)  # longer than the first pause before a restart, and than the first look
    said = [*running.lines, *running.end()]
    warned = [line for line in said if "sidecar" in line and "starting the sidecar" not in line]
    assert len([line for line in warned if "logs  " not in line]) == 1, said
    assert warned[0].startswith("warning: no sidecar, so Ollama serves as stock")
    assert cause in warned[0]
    assert cure in warned[0]
    assert running.process.returncode == 0
    assert place.events == ["serve started", "SIGTERM", "ended"]
    seen = json.loads((place.fake / "environment.json").read_text())
    assert "OLLAMA_KV_TIERING" not in seen
    assert "OLLAMA_KV_TIER_SOCKET" not in seen


@pytest.mark.parametrize("runtime", ["file/run", "open"])
def test_a_runtime_directory_that_is_not_ours_alone_is_left_out(place: Place, runtime: str) -> None:
    """As that of another user is, after `su`."""
    (place.root / "file").touch()
    (place.root / "open").mkdir()
    (place.root / "open").chmod(0o777)
    place.env["XDG_RUNTIME_DIR"] = str(place.root / runtime)
    running = place.up_and_ready()
    seen = json.loads((place.fake / "environment.json").read_text())
    socket = Path(seen["OLLAMA_KV_TIER_SOCKET"])
    assert socket == place.root / "state/ollama-tiering/run/sidecar.sock"
    assert block_service.ask(socket)
    assert list((place.root / "open").iterdir()) == []
    assert running.end()[-1] == "sidecar stopped: everything is on disk"


def test_settings_that_cannot_be_read_build_nothing(place: Place) -> None:
    _settings_are_broken(place)
    del place.env["OLLAMA_TIERING_BINARY"]
    process = place.up()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 10
    assert "config.toml:2" in out


def _build(place: Place, kind: str) -> Path:
    """A finished build, as `tiering patch` leaves one, of the program that acts as Ollama."""
    target = place.root / "cache/ollama-tiering/builds" / kind / "0"
    with finished.filling(target, "ollama", "0" * 16) as fresh:
        shutil.copy2(place.binary, fresh / "ollama")
        (fresh / finished.LIBRARIES / "libggml-cpu-x.so").write_text("x")
    return target / "ollama"


@pytest.mark.parametrize("break_it", [_settings_are_broken, _variable_is_broken])
def test_a_typo_does_not_change_which_version_is_served(
    place: Place, break_it: Callable[[Place], None]
) -> None:
    del place.env["OLLAMA_TIERING_BINARY"]
    asked, other = _build(place, "v0.16.3-native"), _build(place, "v0.24.0-native")
    break_it(place)
    for options in (("--tag", "v0.17.1"), ("--cpu", "variants"), ("--cuda", "on")):
        process = place.up(*options)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 10, out
    assert not (other.parent / "events").exists()
    running = place.up_and_ready("--tag", "v0.16.3")
    assert place.record["binary"] == str(asked)
    running.end()
    assert running.process.returncode == 0


def test_it_says_that_its_build_is_not_whole_any_more(place: Place) -> None:
    binary = _build(place, "v0.16.3-native")
    place.env["OLLAMA_TIERING_BINARY"] = str(binary)
    running = place.up_and_ready()
    library = binary.parent / finished.LIBRARIES / "libggml-cpu-x.so"
    library.unlink()
    said = running.read_until("warning: ")
    assert f"{library} is gone or was changed" in said
    assert "other, slower code" in said
    for command in ("status", "doctor"):
        done = subprocess.run(
            [sys.executable, "-m", "ollama_tiering", command],
            env=place.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"{library} is gone or was changed" in done.stdout, done
        assert str(running.process.pid) in done.stdout
    assert "build that serves" in done.stdout
    running.end()


def test_an_installed_ollama_serves_as_stock_where_nothing_can_be_built(place: Place) -> None:
    del place.env["OLLAMA_TIERING_BINARY"]
    place.env["PATH"] = f"{place.fake}:{place.env['PATH']}"
    nothing = ("--source", str(place.root / "nothing"))
    running = place.up_and_ready(*nothing)
    said = [line for line in running.lines if "could be built" in line]
    assert len(said) == 1
    assert said[0].startswith("warning: no sidecar, so Ollama serves as stock, without its cache:")
    assert f"{place.binary} is served" in said[0]
    assert "nothing: no such directory" in said[0]
    assert not any("exact attention" in line for line in running.lines)
    running.end()
    assert place.events[:1] == ["serve started"]


def test_a_flag_that_makes_no_sense_is_an_error(place: Place) -> None:
    process = place.up("--socket", "/" + "long/" * 40)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 10
    assert "flag --socket" in out


def test_a_sidecar_that_dies_again_and_again_is_said_once(place: Place) -> None:
    """It was up; then somebody makes its directory unusable and kills it."""
    running = place.up_and_ready()
    (place.root / "ram").chmod(0o777)
    os.kill(place.record["sidecar_pid"], signal.SIGKILL)
    running.read_until("the sidecar ended with exit code 9")
    log = place.root / "state/ollama-tiering/logs" / f"sidecar-{place.address.port}.log"
    # Two more attempts at least; the pauses before them grow to 4 s.
    wait_for(lambda: log.read_text().count("ram is writable by others") >= 3, 60)
    running.end()
    said = running.lines
    assert len([line for line in said if "was ended by SIGKILL" in line]) == 1
    assert len([line for line in said if "ended with exit code 9" in line]) == 1
    assert running.process.returncode == 0


def test_the_sidecar_is_told_of_the_servers_models_directory(place: Place) -> None:
    """Rules go by the names of models, which are there."""
    running = Running(place.up("--models", str(place.root / "models")))
    pid = place.record["sidecar_pid"]
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert f"OLLAMA_MODELS={place.root / 'models'}".encode() in environment
    running.end()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")
def test_the_ram_tier_has_a_place_that_nobody_else_could_have_made(place: Place) -> None:
    """Another user, or root for one, has the name that earlier versions used."""
    del place.env["OLLAMA_KV_TIER_RAM"]
    place.env["OLLAMA_KV_TIER_RAM_GB"] = "0.05"
    old = Path("/dev/shm") / f"ollama-tiering-{os.getuid()}"
    squatted = not os.path.lexists(old)
    if squatted:
        old.touch()  # no directory of ours can be made there
    made = None
    try:
        for _ in range(2):
            running = place.up_and_ready()
            answer = block_service.ask(place.socket)
            assert answer is not None, running.lines
            (found,) = [
                tier.directory for tier in answer.tiers if tier.directory.startswith(b"/dev/shm")
            ]
            assert made in (None, Path(os.fsdecode(found)))  # the second start finds it again
            made = Path(os.fsdecode(found))
            assert made != old
            assert made.lstat().st_mode & 0o777 == 0o700
            assert running.end()[-1] == "sidecar stopped: everything is on disk"
    finally:
        if squatted:
            old.unlink()
        if made is not None:
            shutil.rmtree(made)
