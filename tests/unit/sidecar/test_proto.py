"""The committed protobuf code is what the generator makes of the contract."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_generated_code_is_up_to_date() -> None:
    if find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    finished = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gen_proto.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_messages_do_not_import_grpc() -> None:
    code = "import sys, ollama_tiering.store.tiered; assert 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
