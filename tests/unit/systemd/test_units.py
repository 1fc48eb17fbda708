"""The units: accepted by systemd, locked in as far as they can be, fit for what they run."""

from __future__ import annotations

import configparser
import ctypes
import errno
import json
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ollama_tiering.config import GIB
from ollama_tiering.errors import UsageError
from ollama_tiering.launch.address import Address
from ollama_tiering.systemd.plan import InstallRequest, make_plan
from ollama_tiering.systemd.units import argument, quote
from tests.sidecar import SidecarProcess
from tests.unit.systemd.conftest import Machine

UNITS = Path("/etc/systemd/system")
SIDECAR, SERVER = "ollama-tiering.service", "ollama-tiered.service"


class Unit(configparser.RawConfigParser):
    """Sections and keys of a unit file; of a key that comes several times all values."""

    def __init__(self, text: str) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",))
        self.optionxform = str  # type: ignore[assignment, method-assign]
        self.read_string(text)
        self.lines = [line for line in text.splitlines() if not line.startswith("#")]

    def all(self, key: str) -> list[str]:
        return [line.partition("=")[2] for line in self.lines if line.startswith(f"{key}=")]


def unit(machine: Machine, name: str) -> Unit:
    return Unit(machine.at(UNITS / name).read_text())


def analyze(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "--no-pager", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("options", [(), ("--prefix", "/srv/k v/100%"), ("--sidecar-only",)])
def test_systemd_accepts_the_units(systemd_machine: Machine, options: tuple[str, ...]) -> None:
    systemd_machine.write(
        "/etc/ollama-tiering/config.toml", "[sidecar]\nlocal_dir = \"/mnt/50% 'fast' disk/kv\"\n"
    )
    systemd_machine.install(*options)
    names = [SIDECAR] if options == ("--sidecar-only",) else [SIDECAR, SERVER]
    done = analyze("verify", f"--root={systemd_machine.root}", *names)
    complaints = [
        line for line in (done.stdout + done.stderr).splitlines() if "ollama-tier" in line
    ]
    assert (done.returncode, complaints) == (0, [])


def test_systemd_accepts_the_units_of_a_user(
    systemd_machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    here = Machine(Path("/"), systemd_machine.build)
    here.tiering("install", "--binary", here.binary, "--user", HOME=str(home))
    units = [home / ".config/systemd/user" / name for name in (SIDECAR, SERVER)]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(home))
    done = analyze("--user", "verify", *units)
    complaints = [line for line in done.stderr.splitlines() if "ollama-tier" in line]
    assert (done.returncode, complaints) == (0, [])
    here.tiering("uninstall", "--user", HOME=str(home))
    assert list(home.rglob("*")) == []


def test_verify_would_find_a_mistake(systemd_machine: Machine) -> None:
    systemd_machine.install()
    path = systemd_machine.at(UNITS / SIDECAR)
    path.write_text(path.read_text().replace("Type=notify", "Type=notifyy"))
    done = analyze("verify", f"--root={systemd_machine.root}", SIDECAR)
    assert "notifyy" in done.stderr


def exposure(machine: Machine, name: str) -> float:
    done = analyze("security", "--offline=yes", f"--root={machine.root}", name)
    match = re.search(rf"Overall exposure level for {name}: ([\d.]+)", done.stdout)
    assert match, done
    return float(match[1])


def test_the_exposure_systemd_computes(systemd_machine: Machine) -> None:
    systemd_machine.install()
    assert exposure(systemd_machine, SIDECAR) <= 2.0
    assert exposure(systemd_machine, SERVER) < exposure(systemd_machine, "ollama.service")


def test_the_sidecar_is_watched_restarted_and_bounded(machine: Machine) -> None:
    machine.write("/etc/ollama-tiering/config.toml", '[sidecar]\nram_budget = "4GiB"\n')
    machine.install()
    service = unit(machine, SIDECAR)["Service"]
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) >= 180
    assert service["Restart"] == "on-failure"
    start, reload = service["ExecStart"], service["ExecReload"]
    assert reload == start.replace(" sidecar --socket ", " reload --socket ")
    assert reload != start
    assert int(service["MemoryHigh"].rstrip("M")) == 5 * 1024
    assert int(service["MemoryMax"].rstrip("M")) == 6 * 1024
    assert service["LimitCORE"] == "0"


def test_the_server_starts_when_the_sidecar_does_not(machine: Machine) -> None:
    """It comes after the sidecar's start, however that ends, and not much later."""
    machine.install()
    head = unit(machine, SERVER)["Unit"]
    assert SIDECAR in head["Wants"]
    assert SIDECAR in head["After"]
    assert not {"Requires", "Requisite", "BindsTo", "PartOf", "Upholds"} & set(head)
    sidecar = unit(machine, SIDECAR)
    assert int(sidecar["Service"]["TimeoutStartSec"]) <= 90
    assert int(sidecar["Unit"]["StartLimitBurst"]) <= 5  # then it is left alone
    assert int(sidecar["Unit"]["StartLimitIntervalSec"]) >= 5 * 90


def test_the_default_memory_limit_leaves_room_for_the_default_ram_tier(machine: Machine) -> None:
    machine.install()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget_mib = min(8 * GIB, total // 4) >> 20
    assert int(unit(machine, SIDECAR)["Service"]["MemoryHigh"].rstrip("M")) == budget_mib + 1024


@pytest.mark.parametrize("attention", ["exact", "stock"])
def test_the_server_has_the_attention_that_the_settings_name(
    machine: Machine, attention: str
) -> None:
    if attention == "stock":
        machine.write("/etc/ollama-tiering/config.toml", '[server]\ncpu_attention = "stock"\n')
    machine.install()
    assert f'"OLLAMA_CPU_ATTENTION={attention}"' in unit(machine, SERVER).all("Environment")


def test_both_services_meet_at_the_socket_as_one_user(machine: Machine) -> None:
    machine.install("--run-as", "somebody")
    sidecar, server = unit(machine, SIDECAR), unit(machine, SERVER)
    assert sidecar["Service"]["User"] == server["Service"]["User"] == "somebody"
    socket = "/run/ollama-tiering/sidecar.sock"
    assert f"--socket {socket}" in sidecar["Service"]["ExecStart"]
    assert f'"OLLAMA_KV_TIER_SOCKET={socket}"' in server.all("Environment")
    assert '"OLLAMA_KV_TIERING=1"' in server.all("Environment")
    assert sidecar["Service"]["RuntimeDirectory"] == "ollama-tiering"
    assert sidecar["Service"]["StateDirectory"] == server["Service"]["StateDirectory"]
    assert SIDECAR in server.all("After")
    assert SIDECAR in server.all("Wants")  # not Requires: it serves without one
    assert server["Service"]["KillMode"] == "mixed"


def test_beside_a_stock_unit_another_port_is_taken(machine: Machine) -> None:
    text = machine.install()
    assert "http://127.0.0.1:11435" in text
    assert '"OLLAMA_HOST=127.0.0.1:11435"' in unit(machine, SERVER).all("Environment")
    machine.at(UNITS / "ollama.service").unlink()
    machine.at(UNITS / "ollama.service.d/override.conf").unlink()
    machine.tiering("uninstall")
    machine.install()
    assert '"OLLAMA_HOST=127.0.0.1:11434"' in unit(machine, SERVER).all("Environment")
    machine.install("--host", "0.0.0.0:8000")
    assert '"OLLAMA_HOST=0.0.0.0:8000"' in unit(machine, SERVER).all("Environment")


def enable(machine: Machine, host: str = "") -> None:
    wants = machine.at(UNITS / "multi-user.target.wants")
    wants.mkdir(exist_ok=True)
    (wants / "ollama.service").symlink_to(UNITS / "ollama.service")
    setting = f'Environment="OLLAMA_HOST={host}"\n' if host else ""
    machine.write("/etc/systemd/system/ollama.service.d/override.conf", f"[Service]\n{setting}")


CURE = "sudo systemctl disable --now ollama"


def test_an_ollama_service_that_would_take_the_port_is_named(machine: Machine) -> None:
    """Each update of Ollama enables it again."""
    there = ("install", "--binary", machine.binary, "--host", "127.0.0.1:11434")
    assert CURE not in machine.tiering(*there)
    assert CURE not in machine.tiering("status")
    enable(machine)
    for text in (machine.tiering(*there), machine.tiering("status")):
        assert "beware       ollama.service is enabled for the same port 11434" in text
        assert CURE in text
    assert CURE in machine.document("status")["rival"]
    assert CURE in machine.document(*there)["rival"]
    assert CURE in machine.install()  # which keeps the port
    assert CURE not in machine.install("--host", "127.0.0.1:11435")  # beside it
    assert CURE not in machine.tiering("status")


def test_the_port_of_an_ollama_service_is_what_its_drop_in_says(machine: Machine) -> None:
    enable(machine, "0.0.0.0:11435")
    assert CURE in machine.install()
    assert CURE not in machine.install("--host", "127.0.0.1:11434")


def test_tiers_in_places_of_a_persons_choice_are_writable(machine: Machine) -> None:
    machine.write(
        "/etc/ollama-tiering/config.toml",
        '[sidecar]\nlocal_dir = "/mnt/fast disk/kv"\nram_dir = "/dev/shm/mine"\n',
    )
    machine.install()
    for name in (SIDECAR, SERVER):
        assert '-"/mnt/fast disk/kv"' in unit(machine, name).all("ReadWritePaths")
        assert not any("/dev/shm" in path for path in unit(machine, name).all("ReadWritePaths"))


def test_variables_of_whoever_installs_do_not_reach_the_unit(machine: Machine) -> None:
    machine.tiering(
        "install", "--sidecar-only", OLLAMA_KV_TIER_LOCAL="/elsewhere", OLLAMA_KV_TIER_RAM_GB="1"
    )
    machine.tiering("install", "--sidecar-only")
    text = machine.at(UNITS / SIDECAR).read_text()
    assert "/elsewhere" not in text


def test_the_server_is_not_kept_from_its_devices(machine: Machine) -> None:
    machine.install("--models", "/srv/models")
    text = machine.at(UNITS / SERVER).read_text()
    # Each of these implies NoNewPrivileges for a service with User=, or a closed device policy.
    for setting in (
        *("NoNewPrivileges=", "SystemCall", "RestrictAddress", "RestrictNamespaces"),
        *("RestrictSUIDSGID", "MemoryDenyWriteExecute", "LockPersonality", "PrivateDevices"),
        *("ProtectClock", "ProtectKernel", "RestrictRealtime", "ProtectHostname", "DevicePolicy"),
    ):
        assert not re.search(rf"^{setting}", text, re.MULTILINE), setting
    assert '"OLLAMA_MODELS=/srv/models"' in text


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ((), True),
        (("--models", "/srv/models", "--run-as", "somebody"), True),
        (("--run-as", "somebody"), False),
        (("--host", "127.0.0.1:11434"), False),
        (("--host", "127.0.0.1:11500"), True),
    ],
)
def test_old_weights_are_kept_only_where_another_server_has_the_same_models(
    machine: Machine, options: tuple[str, ...], shares: bool
) -> None:
    """That one may be fetching: a start would remove what it has so far."""
    machine.install(*options)
    assert ("OLLAMA_NOPRUNE" in machine.at(UNITS / SERVER).read_text()) is shares
    for path in ("ollama.service", "ollama.service.d/override.conf"):
        machine.at(UNITS / path).unlink()
    machine.install(*options)
    assert "OLLAMA_NOPRUNE" not in machine.at(UNITS / SERVER).read_text()


def test_the_sidecar_knows_where_the_names_of_models_are(machine: Machine) -> None:
    machine.install("--models", "/srv/models")
    text = machine.at(UNITS / SIDECAR).read_text()
    assert '"OLLAMA_MODELS=/srv/models"' in text
    assert "/srv/models" not in " ".join(unit(machine, SIDECAR).all("ReadWritePaths"))
    machine.install("--models", "/home/somebody/models")
    assert unit(machine, SIDECAR).all("ProtectHome") == ["read-only"]


def test_the_sidecar_may_read_the_models_in_the_home_of_the_server(machine: Machine) -> None:
    """It compares what is in their files with their names."""
    machine.install("--run-as", "somebody")
    assert unit(machine, SIDECAR).all("ProtectHome") == ["read-only"]


def test_the_server_may_write_where_it_keeps_its_key(machine: Machine) -> None:
    machine.install()
    assert unit(machine, SERVER).all("ReadWritePaths") == ["-/usr/share/ollama"]
    machine.at("/usr/share/ollama/.ollama").mkdir(parents=True)
    machine.install("--models", "/srv/models")
    places = ["-/usr/share/ollama/.ollama", "-/srv/models"]
    assert unit(machine, SERVER).all("ReadWritePaths") == places
    machine.install("--run-as", "somebody")
    assert unit(machine, SERVER).all("ReadWritePaths") == ["-/home/somebody", "-/srv/models"]


def test_a_user_that_the_other_root_does_not_have_is_refused(machine: Machine) -> None:
    arguments = ("install", "--sidecar-only", "--run-as", "nobody-there")
    assert "no user nobody-there" in machine.tiering(*arguments, code=2)


def test_words_of_a_unit_file_are_quoted_as_systemd_reads_them() -> None:
    assert quote(Path("/a/b")) == "/a/b"
    assert quote(Path("/a b/c")) == '"/a b/c"'
    assert quote(Path("/50%/$HOME")) == '"/50%%/$HOME"'
    assert argument(Path("/50%/$HOME")) == '"/50%%/$$HOME"'
    assert argument("$HOME") == "$$HOME"
    assert quote(Path('/a"\\b')) == '"/a\\"\\\\b"'
    assert quote(Path("%t/s")) == "%t/s"
    with pytest.raises(UsageError):
        quote(Path("/a\nExecStart=/bin/sh"))


def test_a_user_that_does_not_exist_is_refused_with_a_way_out() -> None:
    with pytest.raises(UsageError, match="no user nobody-by-that-name") as caught:
        make_plan(InstallRequest(run_as="nobody-by-that-name"))
    assert "--user" in str(caught.value.hint)


def test_python_that_the_services_user_cannot_reach_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = pwd.getpwnam("nobody")
    if nobody.pw_uid == os.getuid():
        pytest.skip("this runs as nobody")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    python = locked / "python"
    python.write_text("")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UsageError, match="user nobody may not read /") as caught:
        make_plan(InstallRequest(run_as="nobody"))
    for cure in ("Debian package", "/opt", "--user"):  # of uv and pipx a home is closed
        assert cure in str(caught.value.hint)
    assert make_plan(InstallRequest(user_mode=True)).service.python == python


def test_run_as_and_user_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="--run-as"):
        make_plan(InstallRequest(user_mode=True, run_as="me", address=Address()))


PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1


class LockedSidecar(SidecarProcess):
    """Under the kernel's own rule against memory that is both writable and executable."""

    def command(self) -> list[str]:
        code = (
            "import ctypes, mmap, os, sys\n"
            f"ctypes.CDLL(None).prctl({PR_SET_MDWE}, {PR_MDWE_REFUSE_EXEC_GAIN}, 0, 0, 0)\n"
            "try: mmap.mmap(-1, 4096, prot=7)\n"
            "except PermissionError: pass\n"
            "else: sys.exit('the rule does not hold')\n"
            "os.execv(sys.argv[1], sys.argv[1:])\n"
        )
        return [sys.executable, "-c", code, *super().command()]


def test_the_sidecar_needs_no_memory_that_is_writable_and_executable(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_MDWE + 1, 0, 0, 0, 0) < 0 and ctypes.get_errno() == errno.EINVAL:
        pytest.skip("the kernel has no PR_SET_MDWE (Linux 6.3)")
    with LockedSidecar(tmp_path) as daemon:
        assert daemon.process is not None
        assert daemon.stat().tiers
        assert daemon.stop() == 0


def test_install_says_what_to_do_next(machine: Machine) -> None:
    text = machine.install()
    assert "systemctl enable --now ollama-tiering.service ollama-tiered.service" in text
    assert "tiering status --socket /run/ollama-tiering/sidecar.sock" in text
    document = json.loads(machine.install("--json"))
    assert document["socket"] == "/run/ollama-tiering/sidecar.sock"
