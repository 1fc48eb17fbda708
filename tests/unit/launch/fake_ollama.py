"""Pretends to be `ollama serve`: answers /api/version, notes its environment and its signals.

`behaviour.json` beside the program says how: `die` (exit code, at once), `deaf` (ignores SIGTERM),
`die_after_seconds`.
"""

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PLACE = Path(__file__).parent


def note(event: str) -> None:
    with (PLACE / "events").open("a") as file:
        file.write(f"{event}\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"version": "0.16.3"}).encode()
        self.send_response(200 if self.path == "/api/version" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


def main() -> None:
    settings = PLACE / "behaviour.json"
    behaviour = json.loads(settings.read_text()) if settings.exists() else {}
    (PLACE / "environment.json").write_text(json.dumps(dict(os.environ)))
    note(f"{' '.join(sys.argv[1:])} started")
    print("listening", flush=True)
    if "die" in behaviour:
        print("Error: something is wrong with me")
        sys.exit(behaviour["die"])
    host, _, port = os.environ["OLLAMA_HOST"].rpartition(":")
    server = ThreadingHTTPServer((host, int(port)), Handler)

    def end(number: int, _frame: object) -> None:
        note(signal.Signals(number).name)
        if not behaviour.get("deaf"):
            threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    if seconds := behaviour.get("die_after_seconds"):
        threading.Timer(seconds, lambda: os._exit(3)).start()
    server.serve_forever(poll_interval=0.02)
    note("ended")


main()
