"""The committed protobuf code is what the generator makes of the contract."""

from __future__ import annotations

import re
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


def test_numbers_of_c_plus_plus_are_those_of_the_proto() -> None:
    script = ROOT / "scripts" / "gen_cpp_numbers.py"
    finished = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_no_number_of_the_proto_is_written_by_hand() -> None:
    """In C++ and Go, that is: a shortfall's is in generated code alone."""
    by_hand = re.compile(
        r"\bshortfall_\w+\s*=\s*\d|Shortfall\(\d|SHORTFALL_\w+(?:\s+Shortfall)?\s*=\s*\d"
    )
    sources = [
        path
        for folder in ("llama_server", "patches/overlay")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in {".cpp", ".h", ".go"}
    ]
    assert len(sources) > 100
    generated = {"kvt_numbers.h", "block_store.pb.go"}
    found = [path.name for path in sources if by_hand.search(path.read_text())]
    assert set(found) == generated


def test_messages_do_not_import_grpc() -> None:
    code = "import sys, ollama_tiering.store.tiered; assert 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
