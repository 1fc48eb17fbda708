"""With tiering off the patched binary is stock: same answers, no socket, no file."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from tests.engine.harness import Result, Server, assert_same, text


def _session(server: Server) -> list[Result]:
    prompt = text(300, "off")
    answers = [
        server.generate("g2", prompt),  # cold
        server.generate("g2", prompt),  # in memory
        server.generate("g2", prompt[:200] + text(90, "other")),  # in part
        server.generate("g5", prompt),
    ]
    server.unload("g2")
    return [*answers, server.generate("g2", prompt)]


def _open_paths(server: Server) -> set[str]:
    """What the server and its runners have open, but for what stock needs: models, logs, pipes."""
    found = set()
    for pid in [server.pid, *server.runners()]:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = str(fd.readlink())
            if not target.startswith(("pipe:", "socket:", "anon_inode:", "/dev/null", "/sys/")):
                found.add(target)
    return found


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("flash_attention", [0, 1])
def test_patched_with_tiering_off_gives_the_logprobs_of_stock(
    binary: Path, stock_binary: Path, models: Path, tmp_path: Path, flash_attention: int
) -> None:
    env = {"OLLAMA_FLASH_ATTENTION": str(flash_attention)}
    with Server(stock_binary, tmp_path / "stock", models, env=env) as stock:
        expected = _session(stock)
    for setting in (None, "", "0", "false"):
        off = env if setting is None else env | {"OLLAMA_KV_TIERING": setting}
        off |= {"OLLAMA_CPU_ATTENTION": "stock"} if setting == "0" else {}
        with Server(binary, tmp_path / f"patched-{setting}", models, env=off) as patched:
            answers = _session(patched)
        for step, (answer, reference) in enumerate(zip(answers, expected, strict=True)):
            assert_same(answer, reference, f"OLLAMA_KV_TIERING={setting!r}, request {step}")


def test_patched_with_tiering_off_opens_no_socket_and_touches_no_file(
    binary: Path, stock_binary: Path, models: Path, tmp_path: Path, fast: Path
) -> None:
    before = _files(models)
    seen = {}
    path = fast / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(0)
        for name, program in (("stock", stock_binary), ("patched", binary)):
            folder = tmp_path / name
            env = {
                "OLLAMA_KV_TIER_SOCKET": str(path),
                "OLLAMA_KV_TIER_LOCAL": str(folder / "local"),
                "OLLAMA_KV_TIER_RAM": str(folder / "ram"),
                "XDG_RUNTIME_DIR": str(folder / "runtime"),
            }
            with Server(program, folder, models, env=env) as server:
                _session(server)
                pids = [server.pid, *server.runners()]
                sockets = [c for pid in pids for c in psutil.Process(pid).net_connections("unix")]
                opened = {one.replace(str(folder), "") for one in _open_paths(server)}
                server.unload("g2")
                assert "kv tier" not in server.log_text()
            assert sockets == []
            seen[name] = (opened, _files(folder))
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert seen["patched"] == seen["stock"]
    assert _files(models) == before
    assert list(fast.iterdir()) == [path]
