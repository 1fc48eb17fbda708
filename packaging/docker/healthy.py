"""The image's health check: whether Ollama answers, and then what the sidecar's `/readyz` says.

A container without a sidecar serves as stock, which is no reason to end it. Exit code 1: Ollama
does not answer, or there is a sidecar that is not ready. One line says which.
"""

from __future__ import annotations

import http.client
import os
import sys
import tomllib
import urllib.error
import urllib.request

_SECONDS = 4.0
_OLLAMA_PORT = "11434"
_NO_ANSWER = (OSError, http.client.HTTPException)


def asked(port: str, path: str) -> tuple[int, str]:
    """Status and text. One of _NO_ANSWER where nobody answers in HTTP."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=_SECONDS) as answer:
            return answer.status, answer.read(200).decode(errors="replace").strip()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read(200).decode(errors="replace").strip()


def metrics_port() -> str:
    """Empty where the settings name none or cannot be read."""
    try:
        with open(os.environ["OLLAMA_TIERING_CONFIG"], "rb") as file:  # noqa: PTH123
            return str(tomllib.load(file)["sidecar"]["metrics_port"] or "")
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def main() -> int:
    """Prints one line for `docker inspect`; returns the exit code."""
    port = os.environ.get("OLLAMA_HOST", "").rstrip("/").rpartition(":")[2]
    try:
        asked(port if port.isdecimal() else _OLLAMA_PORT, "/api/version")
    except _NO_ANSWER as error:
        print(f"Ollama does not answer: {error}")
        return 1
    if not (of_sidecar := metrics_port()):
        print("Ollama answers; sidecar: not asked, for metrics_port is not set")
        return 0
    try:
        status, said = asked(of_sidecar, "/readyz")
    except _NO_ANSWER:
        print("Ollama answers, as stock: there is no sidecar (the container's log says why)")
        return 0
    print(f"Ollama answers; sidecar: {said}")
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
