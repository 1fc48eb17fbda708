"""One arena for all threads, as glibc itself reports it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT_ARENAS = """
import ctypes, threading, sys
from ollama_tiering.sidecar.memory import share_one_arena

if sys.argv[1] == "one":
    share_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.open_memstream.restype = ctypes.c_void_p
everyone = threading.Barrier(8)
def allocate():
    everyone.wait()
    libc.malloc(ctypes.c_size_t(1000))
    everyone.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
text, length = ctypes.c_char_p(), ctypes.c_size_t()
stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(length)))
libc.malloc_info(0, stream)
libc.fclose(stream)
print(text.value.decode().count("<heap nr="))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
@pytest.mark.parametrize("arenas", ["one", "many"])
def test_threads_share_one_arena(arenas: str) -> None:
    command = [sys.executable, "-c", COUNT_ARENAS, arenas]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (int(done.stdout) == 1) == (arenas == "one"), done.stdout
