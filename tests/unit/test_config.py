from __future__ import annotations

import os
import pwd
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ollama_tiering import config
from ollama_tiering.config import GIB, format_size, load, parse_size, places
from ollama_tiering.errors import ConfigError
from tests.places import short_directory


@pytest.fixture(autouse=True)
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(("OLLAMA_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "conf"))
    return tmp_path


@pytest.fixture
def file(own_world: Path) -> Path:
    path = own_world / "conf/ollama-tiering/config.toml"
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 << 30),
        ("500MB", 500_000_000),
        ("1.5g", 1_500_000_000),
        (" 2 KiB ", 2048),
        ("1Ti", 1 << 40),
        ("7", 7),
        (0, 0),
        ("0", 0),
    ],
)
def test_sizes_are_read_into_bytes(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "8 gigs", "-1", -1, "1e9", "0x10", "٣GB", True])
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 62))
def test_a_number_of_bytes_is_exact_also_as_text(size_bytes: int) -> None:
    assert parse_size(str(size_bytes)) == size_bytes
    assert format_size(size_bytes)


def test_defaults_without_any_setting(own_world: Path) -> None:
    sidecar = load().sidecar
    assert sidecar.socket_path == own_world / ".local/state/ollama-tiering/run/sidecar.sock"
    assert sidecar.local_dir == own_world / ".local/share/ollama-tiering/blocks"
    assert sidecar.low_watermark < sidecar.high_watermark
    assert sidecar.ram_dir is None  # the sidecar chooses when it starts


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$XDG_RUNTIME_DIR, where logind makes it for this user."""
    directory = tmp_path / "user" / str(os.geteuid())
    directory.mkdir(parents=True, mode=0o700)
    (tmp_path / "linger").mkdir()
    monkeypatch.setattr(places, "_LOGIND", tmp_path / "user")
    monkeypatch.setattr(places, "_LINGERING", tmp_path / "linger")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return directory


def _linger(root: Path) -> None:
    (root / "linger" / pwd.getpwuid(os.geteuid()).pw_name).touch()


def test_the_runtime_directory_of_who_lingers_holds_the_socket(
    runtime: Path, tmp_path: Path
) -> None:
    _linger(tmp_path)
    assert load().sidecar.socket_path == runtime / "ollama-tiering/sidecar.sock"


def test_a_runtime_directory_that_goes_with_the_session_does_not(
    runtime: Path, own_world: Path
) -> None:
    in_state = own_world / ".local/state/ollama-tiering/run/sidecar.sock"
    assert load().sidecar.socket_path == in_state


def test_a_runtime_directory_that_is_not_logind_s_stays(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_LOGIND", tmp_path / "elsewhere")
    assert load().sidecar.socket_path == runtime / "ollama-tiering/sidecar.sock"


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o720])
def test_a_runtime_directory_that_others_may_write_to_is_not_used(
    runtime: Path, tmp_path: Path, own_world: Path, mode: int
) -> None:
    _linger(tmp_path)
    runtime.chmod(mode)
    assert load().sidecar.socket_path.is_relative_to(own_world / ".local/state")


def test_another_users_runtime_directory_is_not_used(
    runtime: Path, tmp_path: Path, own_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _linger(tmp_path)
    monkeypatch.setattr(places, "_LOGIND", tmp_path / "elsewhere")
    assert config.runtime_dir() == runtime
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert config.runtime_dir() is None
    assert load().sidecar.socket_path.is_relative_to(own_world / ".local/state")


@pytest.mark.parametrize("name", ["", "user", "/nowhere/at/all"])
def test_a_runtime_directory_that_is_none_is_not_used(
    own_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "user").mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", name)
    assert load().sidecar.socket_path.is_relative_to(own_world / ".local/state")


def test_a_sidecar_that_listens_in_the_other_place_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the one of a user's service, whose manager puts it into the runtime directory."""
    with short_directory() as short:
        runtime = short / str(os.geteuid())
        (runtime / "ollama-tiering").mkdir(parents=True, mode=0o700)
        monkeypatch.setattr(places, "_LOGIND", short)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        path = runtime / "ollama-tiering/sidecar.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            assert load().sidecar.socket_path != path  # a dead one
            listener.listen()
            assert load().sidecar.socket_path == path


def test_flag_beats_variable_beats_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('[sidecar]\nram_budget = "1GiB"\nlocal_budget = 5\n')
    assert load().sidecar.ram_budget_bytes == GIB
    monkeypatch.setenv(config.ENV_RAM_GB, "2")
    assert load().sidecar.ram_budget_bytes == 2 * GIB
    assert load({"sidecar.ram_budget": "3GiB"}).sidecar.ram_budget_bytes == 3 * GIB
    assert load({"sidecar.ram_budget": None}).sidecar.ram_budget_bytes == 2 * GIB
    assert load().sidecar.local_budget_bytes == 5


@pytest.mark.parametrize(
    ("value", "size_bytes"), [("0.5", GIB // 2), ("500MB", 500_000_000), ("2", 2 * GIB)]
)
def test_a_bare_number_in_a_gb_variable_counts_gib(
    monkeypatch: pytest.MonkeyPatch, value: str, size_bytes: int
) -> None:
    monkeypatch.setenv(config.ENV_LOCAL_GB, value)
    assert load().sidecar.local_budget_bytes == size_bytes


def test_the_cache_directory_can_be_moved(monkeypatch: pytest.MonkeyPatch, own_world: Path) -> None:
    assert config.cache_dir() == own_world / ".cache/ollama-tiering"
    monkeypatch.setenv(config.ENV_CACHE, "~/elsewhere")
    assert config.cache_dir() == own_world / "elsewhere"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[sidecar]\nram_budget = 'lots'\n", ":2: ram_budget: 'lots' is not a size"),
        ("\n\n[sidecar\n", ":3: "),
        ("[sidecar]\n# x\nnonsense = 1\n", ":3: no such key in [sidecar]: nonsense"),
        ("\n[nonsense]\n", ":2: no such section: nonsense"),
        ("[sidecar]\nram_bugdet = 1\n", "ram_bugdet; did you mean 'ram_budget'"),
        ("[sidcar]\n", "no such section: sidcar; did you mean 'sidecar'?"),
        ("[sidecar]\nmetrics_port = 70000\n", ":2: metrics_port: 70000 is not a whole number"),
        ("[sidecar]\nhigh_watermark = 7\n", ":2: high_watermark: 7 is not between"),
        ("[patch]\ncpu = 'fast'\n", ":2: cpu: 'fast' is not one of variants, native"),
        ("sidecar = 3\n", ":1: no such section"),
        ("[sidecar]\nram_dir = 3\n", ":2: ram_dir: 3 is not a path"),
        ('[sidecar]\nram_dir = "a\\u0000b"\n', r":2: ram_dir: 'a\x00b' is not a path"),
        ("[sidecar]\nram_dir = '~nobody-at-all/x'\n", ":2: ram_dir: '~nobody-at-all/x': "),
        (f"[sidecar]\nram_budget = '{10**300}b'\n", ":2: ram_budget: '1000"),
        (f"[sidecar]\nram_budget = {'9' * 5000}\n", ":2: Exceeds the limit"),
        ("a = " + "[" * 3000, ":1: nested too deeply"),
        ('"\\u001b[31m" = 1\n', r":1: no such section: \x1b[31m"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load()
    assert caught.value.exit_code == 10
    assert caught.value.message.startswith(f"{file}:")
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_a_file_that_is_not_text_is_named_with_its_line(file: Path) -> None:
    file.write_bytes(b"[sidecar]\n\xff\n")
    with pytest.raises(ConfigError, match=r"config\.toml:2: not UTF-8"):
        load()


def test_an_unreadable_file_is_a_config_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"config\.toml: Permission denied"):
        load()


def test_a_directory_in_place_of_the_file_is_a_config_error(file: Path) -> None:
    file.mkdir()
    with pytest.raises(ConfigError, match=r"config\.toml: "):
        load()


def test_a_file_asked_for_must_be_there(own_world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(path=own_world / "nowhere.toml")
    monkeypatch.setenv(config.ENV_CONFIG, str(own_world / "nowhere.toml"))
    with pytest.raises(ConfigError, match="no such file"):
        load()


def test_a_wrong_variable_and_a_wrong_flag_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="flag --ram-gb"):
        load({"sidecar.ram_budget": "x"})
    monkeypatch.setenv(config.ENV_MIN_TOKENS, "-3")
    with pytest.raises(ConfigError, match=config.ENV_MIN_TOKENS):
        load()


def test_watermarks_must_be_in_order(file: Path) -> None:
    file.write_text("[sidecar]\nlow_watermark = 0.9\nhigh_watermark = 0.8\n")
    with pytest.raises(ConfigError, match="low watermark"):
        load()


def test_a_socket_path_that_the_kernel_would_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="107 bytes"):
        load({"sidecar.socket": "/" + "x" * 120})
    assert load({"sidecar.socket": "unix:///a/b.sock"}).sidecar.socket_path == Path("/a/b.sock")


TCP = (
    "tcp://127.0.0.1:50051",
    "TCP:127.0.0.1:50051",
    "http://localhost:50051",
    "https://kv.example:443",
    "dns:///kv.example:50051",
    "ipv4:127.0.0.1:50051",
    "ipv6:[::1]:50051",
    "vsock:3:50051",
    "unix-abstract:name",
    "127.0.0.1:50051",
    "localhost:50051",
    "[::]:50051",
    ":50051",
)


@pytest.mark.parametrize("address", TCP)
def test_the_sidecar_listens_on_no_tcp_port(
    file: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    said = "there is no TLS, so TCP is refused"
    with pytest.raises(ConfigError, match=f"flag --socket: .*{said}"):
        load({"sidecar.socket": address})
    with pytest.raises(ConfigError, match=said):
        load({"sidecar.socket": Path(address)})  # as --socket gives it
    monkeypatch.setenv(config.ENV_SOCKET, address)
    with pytest.raises(ConfigError, match=f"{config.ENV_SOCKET}: .*{said}"):
        load()
    monkeypatch.delenv(config.ENV_SOCKET)
    file.write_text(f'[sidecar]\nsocket = "{address}"\n')
    with pytest.raises(ConfigError, match=rf"config\.toml:2: socket: .*{said}"):
        load()


def test_a_port_number_is_no_socket(file: Path) -> None:
    file.write_text("[sidecar]\nsocket = 50051\n")
    with pytest.raises(ConfigError, match="not a path"):
        load()


@pytest.mark.parametrize(
    "text", ["/run/a:1", "/run/a:50051", "./a:1", "run:1/s", "unix:a", "~/s:9"]
)
def test_a_path_with_a_colon_is_a_socket(text: str) -> None:
    assert load({"sidecar.socket": text}).sidecar.socket_path.is_absolute()


def test_attention_on_the_cpu_is_exact_or_stock_and_nothing_else(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load().server.cpu_attention == "exact"
    file.write_text('[server]\ncpu_attention = "stock"\n')
    assert load().server.cpu_attention == "stock"
    monkeypatch.setenv(config.ENV_CPU_ATTENTION, "exact")
    assert load().server.cpu_attention == "exact"
    monkeypatch.setenv(config.ENV_CPU_ATTENTION, "fast")
    with pytest.raises(
        ConfigError, match=r"OLLAMA_CPU_ATTENTION: 'fast' is not one of exact, stock"
    ):
        load()
