"""What each setting means and its default, in words: for documentation and the help of flags."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from ollama_tiering.config.load import _sidecar_defaults
from ollama_tiering.config.settings import (
    SETTINGS,
    PatchConfig,
    ServerConfig,
    Setting,
    SidecarConfig,
)
from ollama_tiering.config.sizes import GIB, MIB

_OF_KEY: Final = {setting.key: setting for setting in SETTINGS}
_SECTIONS: Final[dict[str, type[Any]]] = {
    "sidecar": SidecarConfig,
    "server": ServerConfig,
    "patch": PatchConfig,
}

# Defaults that depend on the machine or the user.
_DEFAULTS: Final = {
    "sidecar.socket": "sidecar.sock in the runtime directory",
    "sidecar.engine_socket": "the sidecar's socket with `.engine` after its name",
    "sidecar.ram_dir": "a place nobody else can take, on a memory file system",
    "sidecar.ram_budget": "a quarter of the memory, at most 8 GiB",
    "sidecar.local_dir": "blocks in the data directory",
    "sidecar.remote_dir": "none",
    "sidecar.remote_key_file": "remote.key in the state directory",
    "sidecar.models_dir": "Ollama's own: ~/.ollama/models, else /usr/share/ollama/.ollama/models",
}

MEANINGS: Final = {
    "sidecar.socket": "the sidecar's Unix socket; the patched server reads the variable",
    "sidecar.engine_socket": "a second Unix socket, for engines that speak no gRPC "
    "(docs/engine-protocol.md)",
    "sidecar.ram_dir": "directory of the RAM tier, on tmpfs",
    "sidecar.ram_budget": "budget of the RAM tier, in physical bytes; 0: no RAM tier",
    "sidecar.local_dir": "directory of the local tier",
    "sidecar.local_budget": "budget of the local tier, in physical bytes; 0: no local tier",
    "sidecar.remote_dir": "directory of the remote tier, typically on NFS, shared with other "
    "sidecars; it must exist, 0700, the same user on every host. None: no remote tier",
    "sidecar.remote_budget": "budget of the whole remote directory, whoever wrote it; the same for "
    "all its sidecars",
    "sidecar.remote_deadline_seconds": "deadline of every operation on the remote tier, and of the "
    "wait for a block that has to be staged, from it or decoded",
    "sidecar.remote_rescan_seconds": "how often the remote directory is looked at for what other "
    "sidecars did",
    "sidecar.remote_mac": "every file of the remote tier carries a MAC of the deployment's key, "
    "and one without it is a miss; `false`: whoever can write there can forge blocks",
    "sidecar.remote_key_file": "that key, 64 hex digits, 0600, made at first use; the same file "
    "on every machine of a remote directory",
    "sidecar.high_watermark": "a tier fuller than this share of its budget is emptied …",
    "sidecar.low_watermark": "… down to this share, into the tier below it",
    "sidecar.lease_seconds": "how long what a client reads is kept, should it go away",
    "sidecar.reserve_seconds": "the same for what a client writes",
    "sidecar.pin_share": "share of the local tier's budget that `tiering pin` may take",
    "sidecar.min_tokens": "a chain of fewer tokens is not written down; the patched server reads "
    "the variable, and neither stores nor restores fewer",
    "sidecar.admission": "when a block goes from RAM to the disk: `eager` as soon as the queue "
    "allows, `second-touch` when it is asked for a second time, `pressure` when RAM must evict it",
    "sidecar.daily_write": "bytes written to the local tier per UTC day; beyond it blocks stay in "
    "RAM only. 0: no limit. The count survives restarts",
    "sidecar.min_free_percent": "share of the local tier's file system that the cache leaves free, "
    "whatever its budget",
    "sidecar.write_queue": "what may wait to be written down, never more than half of the RAM "
    "tier; beyond it the least valuable blocks stay in RAM only. 0: no limit",
    "sidecar.write_queue_seconds": "the same in seconds of the disk's measured speed",
    "sidecar.tail_seconds": "a partly filled block waits so long before it is written down: often "
    "a longer one replaces it",
    "sidecar.ttl_days": "a block nobody used for so long is dropped from every tier; 0: never. "
    "Rules for models may say another time",
    "sidecar.models_dir": "Ollama's models directory, where the names of models are that rules go "
    "by; `--models` of `tiering up` and of the service sets it, too",
    "sidecar.local_encoding": "`zstd`: blocks are written to the local tier compressed, without "
    "loss; one that would save less than 5 % stays raw. Needs a RAM tier, where they are decoded",
    "sidecar.remote_encoding": "the same for the remote tier, whatever its other sidecars write",
    "sidecar.zstd_level": "level of both",
    "sidecar.metrics_port": "Prometheus metrics at `http://127.0.0.1:PORT/metrics`, also "
    "`/healthz` and `/readyz`; loopback only. 0: none",
    "sidecar.log_level": "`debug`, `info`, `warning`, `error`",
    "sidecar.log_format": "`text`, or `json`: one object per line with `time`, `level`, `logger`, "
    "`message` and every `name=value` as a field",
    "server.cpu_attention": "`exact`: attention on the CPU by the kernels of `csrc/`, with flash "
    "attention for every model that runs there; `stock`: by GGML's. The binary alone, without "
    "`tiering up` or the service, reads the variable only, and does without: `stock`",
    "patch.source": "where Ollama's source is fetched from: URL or local clone",
    "patch.tag": "version of Ollama",
    "patch.cpu": "`native`: for this machine's processor; `variants`: for every one",
    "patch.cuda": "GPU code of the build: `auto` where there is a toolkit, `on`, `off`",
}


def default_in_words(key: str) -> str:
    """KeyError where there is no such setting."""
    setting = _OF_KEY[key]
    return _DEFAULTS.get(key) or _value_in_words(_default(setting))


def flag_note(key: str) -> str:
    """What ends the help of a flag that overrides a setting: `  [env NAME; default: VALUE]`."""
    setting = _OF_KEY[key]
    variable = f"env {setting.env}; " if setting.env else ""
    return f"  [{variable}default: {default_in_words(key)}]"


def _default(setting: Setting) -> Any:
    section = setting.key.partition(".")[0]
    made = _sidecar_defaults() if section == "sidecar" else {}
    of_class = {field.name: field.default for field in fields(_SECTIONS[section])}
    value = made.get(setting.field, of_class[setting.field])
    return _size(value) if setting.field.endswith("_bytes") else value


def _value_in_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _size(size_bytes: int) -> str:
    """Exactly, unlike format_size."""
    for unit, factor in (("GiB", GIB), ("GB", 10**9), ("MiB", MIB)):
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"
