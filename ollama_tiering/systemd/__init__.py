"""The sidecar and the patched server as services of systemd, beside an untouched stock Ollama."""
