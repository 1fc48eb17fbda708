"""The doctor names what is wrong and the cure, and changes nothing."""

import json
import os
import shutil
import socket
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ollama_tiering.cli.doctor import doctor
from ollama_tiering.config import GIB, MIB, SidecarConfig
from ollama_tiering.doctor import check_build, check_running, check_storage
from ollama_tiering.doctor.check import Check, CheckState, guarded
from ollama_tiering.errors import MissingTool
from ollama_tiering.launch.address import free_address, parse_address
from ollama_tiering.launch.running_up import RunningUp, hold
from ollama_tiering.patchset import gpu_libraries, gpus, stock, tools
from ollama_tiering.patchset.report import Report
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.tiers import stores_seen
from tests.contract.lacking import LackingFileSystem
from tests.unit.patchset import fake_stock


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [n for n in os.environ if n.startswith("OLLAMA_")]:
        monkeypatch.delenv(name)
    for kind in ("STATE", "DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("OLLAMA_KV_TIER_RAM", str(tmp_path / "ram"))
    monkeypatch.setenv("OLLAMA_HOST", str(free_address()))
    return tmp_path


def settings(place: Path, *, ram: int = MIB, local: int = MIB) -> SidecarConfig:
    return SidecarConfig(place / "run" / "s.sock", place / "ram", ram, place / "local", local)


def storage(place: Path, **budgets: int) -> dict[str, Check]:
    return {check.name: check for check in check_storage.checks(settings(place, **budgets))}


def test_a_bare_machine_is_looked_at_and_left_as_it_was(place: Path) -> None:
    result = CliRunner().invoke(doctor, ["--json"], standalone_mode=False)
    assert result.exception is None
    found = {check["name"]: check for check in json.loads(result.output)}
    assert found["source cache"]["cure"] == "tiering fetch"
    assert found["binary"]["cure"] == "tiering patch"
    assert not list(place.rglob("ollama-tiering*"))


def test_the_exit_code_is_1_when_any_check_fails(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "ram").mkdir()
    (place / "ram").chmod(0o777)
    result = CliRunner().invoke(doctor, standalone_mode=False)
    assert result.return_value == 1
    assert f"-> chmod 700 {place / 'ram'}" in result.output
    assert result.output.splitlines()[-1].endswith("1 fail")


def test_an_invalid_setting_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_KV_TIER_RAM_GB", "lots")
    result = CliRunner().invoke(doctor, standalone_mode=False)
    assert result.return_value == 1
    assert "fail  settings: environment variable OLLAMA_KV_TIER_RAM_GB" in result.output


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_local_tier_on_a_network_is_warned_of(
    place: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(check_storage, "file_system", lambda _directory: kind)
    check = storage(place)["local tier"]
    assert check.state is CheckState.WARN
    assert "OLLAMA_KV_TIER_LOCAL" in check.cure


def test_a_local_tier_in_memory_is_warned_of(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_storage, "file_system", lambda _directory: "tmpfs")
    assert "gone after a reboot" in storage(place)["local tier"].finding


def test_a_ram_tier_on_a_disk_is_warned_of(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_storage, "file_system", lambda _directory: "ext4")
    assert storage(place)["RAM tier"].state is CheckState.WARN


def test_a_budget_larger_than_the_disk_is_warned_of(place: Path) -> None:
    check = storage(place, local=1 << 60)["local tier budget"]
    assert check.state is CheckState.WARN
    assert "OLLAMA_KV_TIER_LOCAL_GB" in check.cure


def test_what_a_tier_holds_already_counts_as_room(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(GIB, GIB, 0))
    (place / "local/v1").mkdir(parents=True)
    (place / "local/of-others").write_bytes(os.urandom(2 * MIB))
    assert storage(place)["local tier budget"].state is CheckState.WARN
    (place / "local/v1/block").write_bytes(os.urandom(2 * MIB))
    assert storage(place)["local tier budget"].state is CheckState.OK
    assert storage(place, local=64 * MIB)["local tier budget"].state is CheckState.WARN


def test_a_tier_that_is_off_is_not_looked_at(place: Path) -> None:
    assert "RAM tier directory" not in storage(place, ram=0)


def test_a_directory_that_is_a_link_is_refused(place: Path) -> None:
    (place / "ram").symlink_to(place)
    assert storage(place)["RAM tier directory"].state is CheckState.FAIL


def test_the_file_system_is_that_of_the_deepest_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    mount = namedtuple("mount", "mountpoint fstype")
    mounts = [mount("/", "ext4"), mount("/data", "xfs"), mount("/data/net", "nfs4")]
    mounts.append(mount("/data", "btrfs"))  # mounted over
    monkeypatch.setattr(check_storage.psutil, "disk_partitions", lambda all: mounts)
    monkeypatch.setattr(check_storage, "_existing", lambda path: path)
    assert check_storage.file_system(Path("/data/net/blocks")) == "nfs4"
    assert check_storage.file_system(Path("/data/blocks")) == "btrfs"
    assert check_storage.file_system(Path("/database")) == "ext4"


def test_a_missing_compiler_fails_only_while_nothing_is_built(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise MissingTool("C compiler: not found", hint="install one")

    monkeypatch.setattr(tools, "require_compiler", none)
    found = {check.name: check for check in check_build.checks()}
    assert found["compiler"] == Check(
        "compiler", CheckState.FAIL, "C compiler: not found", "install one"
    )
    binary = place / "ollama"
    binary.touch(mode=0o755)
    monkeypatch.setenv("OLLAMA_TIERING_BINARY", str(binary))
    found = {check.name: check for check in check_build.checks()}
    assert found["compiler"].state is CheckState.WARN


@pytest.fixture
def gpu(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU and no toolkit; where its Ollama would be."""
    monkeypatch.setattr(tools, "find_cuda", lambda: None)
    monkeypatch.setattr(tools, "NVIDIA_DEVICE", place)
    monkeypatch.setattr(gpus, "ROOT", place / "none")
    monkeypatch.setattr(stock, "USUAL", (place / "usual",))
    monkeypatch.setattr(shutil, "which", lambda _name, **_: None)
    return place / "usual"


def test_a_gpu_without_cuda_compiler_is_warned_of(gpu: Path) -> None:
    found = {c.name: c for c in check_build.checks()}["nvcc"]
    assert found.state is CheckState.WARN
    assert "no Ollama with libggml-cuda.so" in found.finding
    assert "--gpu stock=PLACE" in found.cure


def test_a_gpu_without_compiler_is_well_where_an_ollama_is_installed_that_fits(gpu: Path) -> None:
    fake_stock.ollama(gpu, version="0.24.0")  # its headers are those of the default version
    found = {c.name: c for c in check_build.checks()}["nvcc"]
    assert found.state is CheckState.OK
    assert f"libggml-cuda.so of Ollama 0.24.0 at {gpu} fits v0.16.3" in found.finding
    fake_stock.program(gpu / "bin/ollama", "0.99.0")
    found = {c.name: c for c in check_build.checks()}["nvcc"]
    assert found.state is CheckState.WARN
    assert "is Ollama 0.99.0, whose GGML is not known to fit v0.16.3" in found.finding
    assert "stock=FILE" in found.cure


def _library_checks(program: Path, monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    monkeypatch.setenv("OLLAMA_TIERING_BINARY", str(program))
    return [check for check in check_build.checks() if check.name == "GPU library"]


def test_the_library_that_the_patched_ollama_loads_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fake_stock.ollama(place / "installed", folders=["cuda_v13"])
    folder = root / "lib/ollama/cuda_v13"
    (check,) = _library_checks(root / "bin/ollama", monkeypatch)
    assert check == Check("GPU library", CheckState.OK, str(folder / "libggml-cuda.so"))
    monkeypatch.setenv("OLLAMA_PAGED_ATTN", "1")
    (check,) = _library_checks(root / "bin/ollama", monkeypatch)
    assert check.state is CheckState.WARN
    assert "libggml-cuda-tiering.so is not beside it" in check.finding
    (folder / "libggml-cuda-tiering.so").touch()
    (check,) = _library_checks(root / "bin/ollama", monkeypatch)
    assert check == Check("GPU library", CheckState.OK, str(folder / "libggml-cuda-tiering.so"))


def test_a_library_whose_links_lead_nowhere_is_warned_of(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fake_stock.ollama(place / "installed", folders=["cuda_v13"])
    (root / "lib/ollama/cuda_v13/libcublas.so.13.8.4").unlink()
    (check,) = _library_checks(root / "bin/ollama", monkeypatch)
    assert check.state is CheckState.WARN
    assert "libcublas.so.13 leads nowhere" in check.finding
    assert check.cure == "build again: tiering patch --gpu stock"


def test_a_stock_ollama_that_changed_since_the_build_is_warned_of(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fake_stock.ollama(place / "stock")
    found = stock.at(root)
    assert found is not None
    tree = place / "tree/src"
    fake_stock.program(tree / "ollama", "0.16.0")
    gpu_libraries.put(found, tree.parent, tree, Report(quiet=True))
    states = [check.state for check in _library_checks(tree / "ollama", monkeypatch)]
    assert states == [CheckState.OK, CheckState.OK]
    library = root / "lib/ollama/cuda_v12/libggml-cuda.so"
    os.utime(library, (0, 0))
    *_, check = _library_checks(tree / "ollama", monkeypatch)
    assert check.state is CheckState.WARN
    assert check.finding.startswith(f"{library} is not what it was")


def test_a_port_of_another_process_is_warned_of_with_the_cure(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.listen(0)
        port = other.getsockname()[1]
        monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{port}")
        monkeypatch.setattr("ollama_tiering.launch.address._PROBE_SECONDS", 0.1)
        found = {c.name: c for c in check_running.checks(settings(place))}
    assert found[f"port {port}"].state is CheckState.WARN
    assert "--host" in found[f"port {port}"].cure


def test_our_own_server_on_the_port_is_well(place: Path) -> None:
    address = parse_address(os.environ["OLLAMA_HOST"])
    with hold(address) as held:
        held.write(RunningUp(pid=os.getpid(), url=address.url))
        found = {c.name: c for c in check_running.checks(settings(place))}
    assert "`tiering up` serves there" in found[f"port {address.port}"].finding


def test_a_model_that_is_not_tiered_is_told_with_the_reason() -> None:
    report = pb.RunnerReport(pid=7, model="sha256-abc", reason="embedding model")
    (check,) = check_running.runner(report, {})
    assert check.state is CheckState.WARN
    assert "embedding model" in check.finding


def test_a_model_is_told_by_its_name() -> None:
    report = pb.RunnerReport(pid=7, model="sha256-" + "ab" * 32, tiered=True)
    names = {report.model: "qwen3:0.6b"}
    assert next(iter(check_running.runner(report, names))).finding.startswith("qwen3:0.6b (")
    assert next(iter(check_running.runner(report, {}))).finding.startswith("abababababab (")


def test_a_tiered_model_is_told_with_its_counts() -> None:
    report = pb.RunnerReport(pid=7, model="m", tiered=True, requests=2, restored_tokens=64)
    (check,) = check_running.runner(report, {})
    assert check.state is CheckState.OK
    assert "64 tokens restored" in check.finding
    report.failures = 1
    (check,) = check_running.runner(report, {})
    assert check.state is CheckState.WARN


@pytest.mark.parametrize(
    ("attention", "states"),
    [
        ("", [CheckState.OK]),
        ("stock", [CheckState.OK]),
        ("exact (avx2)", [CheckState.OK, CheckState.OK]),
        ("exact (avx2), but stock where rows are not dense", [CheckState.WARN, CheckState.OK]),
    ],
)
def test_attention_that_was_asked_for_and_not_served_is_a_warning(
    attention: str, states: list[CheckState]
) -> None:
    report = pb.RunnerReport(pid=7, model="m", tiered=True, cpu_attention=attention)
    checks = list(check_running.runner(report, {}))
    assert [check.state for check in checks] == states
    assert not states[1:] or checks[0].finding == attention


@pytest.mark.parametrize(
    ("memory", "states"),
    [
        ({}, []),
        ({"device_layers": 8, "paging_asked": True}, []),
        ({"host_layers": 8}, []),
        ({"device_layers": 1, "pinned_layers": 7, "paging_asked": True}, [CheckState.OK]),
        ({"device_layers": 2, "host_layers": 6, "paging_asked": True}, [CheckState.WARN]),
    ],
    ids=str,
)
def test_k_and_v_that_are_not_paged_although_that_was_asked_for_are_a_warning(
    memory: dict[str, int], states: list[CheckState]
) -> None:
    said = pb.CacheMemory(**memory)  # type: ignore[arg-type]
    for tiered in (True, False):
        report = pb.RunnerReport(pid=7, model="m", tiered=tiered, cache_memory=said)
        checks = [check for check in check_running.runner(report, {}) if "K/V" in check.name]
        assert [check.state for check in checks] == states
        for check in checks:
            layers = said.pinned_layers or said.host_layers
            assert f"{layers} layers (" in check.finding
            assert ("OLLAMA_PAGED_ATTN=1" in check.finding) == (check.state is CheckState.WARN)


def test_a_check_that_cannot_be_made_is_a_failed_one() -> None:
    def look() -> list[Check]:
        raise PermissionError(13, "Permission denied", "/x")

    (check,) = guarded("storage", look)
    assert check.state is CheckState.FAIL


def test_the_remote_tier_is_off_unless_named(place: Path) -> None:
    assert storage(place)["remote tier"].finding.startswith("off")


def test_the_remote_tier_is_looked_at(place: Path) -> None:
    named = replace(settings(place), remote_dir=place / "remote", remote_budget_bytes=1 << 60)
    (check,) = check_storage._remote(named)
    assert check.state is CheckState.FAIL
    assert f"mkdir -m 700 {place / 'remote'}" in check.cure
    (place / "remote").mkdir(mode=0o700)
    found = {check.name: check for check in check_storage.checks(named)}
    assert str(place / "remote") in found["remote tier"].finding
    assert found["remote tier directory"].state is CheckState.OK
    assert found["remote tier budget"].state is CheckState.WARN
    assert "OLLAMA_KV_TIER_REMOTE_GB" in found["remote tier budget"].cure


def test_a_tier_that_rests_is_warned_of() -> None:
    tiers = [
        adm.TierStat(tier=pb.TIER_RAM, state="ok"),
        adm.TierStat(tier=pb.TIER_REMOTE, directory=b"/nfs", state="resting", failures={"EIO": 3}),
    ]
    (check,) = check_running._tiers(adm.StatResponse(tiers=tiers))
    assert check.state is CheckState.WARN
    assert "/nfs failed (3 EIO)" in check.finding


def test_a_disk_that_is_not_mounted_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_seen, "in_memory", lambda path: False)
    missing = replace(settings(place), local_dir=place / "mnt" / "usb" / "blocks")
    found = {check.name: check for check in check_storage.checks(missing)}
    assert found["local tier directory"].state is CheckState.FAIL
    assert "is its disk mounted?" in found["local tier directory"].cure
    assert not (place / "mnt").exists()


@pytest.mark.parametrize(
    ("what", "state"), [("directory_sync", CheckState.WARN), ("modes", CheckState.FAIL)]
)
def test_what_a_file_system_lacks_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch, what: str, state: CheckState
) -> None:
    (place / "local").mkdir(mode=0o700)
    assert "local tier file system" not in storage(place)
    LackingFileSystem(place / "local", monkeypatch).lack(what)
    check = storage(place)["local tier file system"]
    assert check.state is state
    assert str(place / "local") in check.finding
    assert "another" in check.cure
    assert list((place / "local").iterdir()) == []
