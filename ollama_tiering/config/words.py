"""What each setting means, and its default in words: for documentation and the help of flags."""

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
    "sidecar.ram_dir": "a directory on tmpfs that no other user can take first",
    "sidecar.ram_budget": "a quarter of the memory, at most 8 GiB",
    "sidecar.local_dir": "blocks in the data directory",
    "sidecar.remote_dir": "none",
    "sidecar.remote_key_file": "remote.key in the state directory",
    "sidecar.models_dir": "Ollama's own: ~/.ollama/models, else /usr/share/ollama/.ollama/models",
}

MEANINGS: Final = {
    "sidecar.socket": "Unix socket of the sidecar. The patched server reads the variable",
    "sidecar.engine_socket": "a second Unix socket, for engines that speak no gRPC "
    "(docs/engine-protocol.md)",
    "sidecar.ram_dir": "directory of the RAM tier, on tmpfs",
    "sidecar.ram_budget": "budget of the RAM tier, in physical bytes; 0: no RAM tier",
    "sidecar.local_dir": "directory of the local tier",
    "sidecar.local_budget": "budget of the local tier, in physical bytes; 0: no local tier",
    "sidecar.remote_dir": "directory of the remote tier, typically on NFS, which several machines "
    "may share. It must exist with mode 0700, and the sidecars of all machines must run as the "
    "same user. None: no remote tier",
    "sidecar.remote_budget": "budget of the remote directory, for all machines together. Give all "
    "of them the same value",
    "sidecar.remote_deadline_seconds": "longest time for an operation on the remote tier, and for "
    "staging a block",
    "sidecar.remote_rescan_seconds": "how often the remote directory is scanned for what other "
    "sidecars stored and removed",
    "sidecar.remote_mac": "every file of the remote tier carries a MAC (a checksum that needs a "
    "key), and a file without a valid one is a miss. `false`: no MACs, so whoever can write to the "
    "directory can forge blocks",
    "sidecar.remote_key_file": "file with the key of the MACs: 64 hex digits, mode 0600, made at "
    "first use. All machines that share the remote directory need the same file",
    "sidecar.high_watermark": "a tier that is fuller than this share of its budget moves blocks to "
    "the tier below it (the remote tier evicts them), until it is down to `low_watermark`",
    "sidecar.low_watermark": "share of its budget at which a tier stops moving blocks down",
    "sidecar.lease_seconds": "longest time for which blocks are kept for a client that reads them. "
    "llama-server asks for as long again while it reads",
    "sidecar.reserve_seconds": "longest time for which room is kept for a client that writes "
    "blocks",
    "sidecar.pin_share": "share of the local tier's budget that `tiering pin` may take",
    "sidecar.adopt": "what llama-server stored before an update is read after it, once both builds "
    "have computed enough of the same texts with the same bits. That is so with exact attention on "
    "a CPU alone. `false`: after an update nothing stored before is found",
    "sidecar.min_tokens": "chains with fewer tokens are not written down. The patched server "
    "reads the variable; it neither stores nor restores fewer",
    "sidecar.admission": "when a block is written from RAM to the disk: `eager`: as soon as the "
    "queue allows; `second-touch`: when it is asked for a second time; `pressure`: when RAM must "
    "evict it",
    "sidecar.daily_write": "most bytes to write to the local tier per UTC day; after that, new "
    "blocks stay in RAM only. 0: no limit. The count survives restarts",
    "sidecar.min_free_percent": "percentage of the local tier's file system that is left free, "
    "whatever the budget says",
    "sidecar.write_queue": "most bytes that may wait to be written down, but never more than half "
    "of the RAM tier; beyond it the least valuable blocks stay in RAM only. 0: no limit",
    "sidecar.write_queue_seconds": "the same limit in seconds, at the disk's measured speed",
    "sidecar.tail_seconds": "how long a block that is not full waits before it is written down, "
    "because a longer one often replaces it",
    "sidecar.ttl_days": "a block that nobody used for this time is removed from every tier. 0: "
    "never. A rule for a model may set another time",
    "sidecar.models_dir": "Ollama's models directory. The sidecar reads there which names a model "
    "has, because rules go by names. `--models` of `tiering up` and of the service sets it, too",
    "sidecar.local_encoding": "`zstd`: blocks are compressed, without loss, when they are written "
    "to the local tier; a block that would save less than 5 % stays raw. This needs a RAM tier, "
    "because blocks are decoded there",
    "sidecar.remote_encoding": "the same for blocks that this sidecar writes to the remote tier",
    "sidecar.zstd_level": "zstd's level of compression, for both tiers",
    "sidecar.metrics_port": "port of `http://127.0.0.1:PORT/metrics` (Prometheus), `/healthz` and "
    "`/readyz`, on loopback only. 0: none",
    "sidecar.log_level": "`debug`, `info`, `warning`, `error`",
    "sidecar.log_format": "`text`, or `json`: one object per line with `time`, `level`, `logger`, "
    "`message` and every `name=value` as a field",
    "server.recheck_hours": "`tiering up` computes a stored conversation again as often as this, "
    "when nobody asks for anything, and compares every bit (`tiering recheck`). 0: never",
    "server.idle_minutes": "how long nobody must have asked for anything before that",
    "server.cpu_attention": "how attention is computed on the CPU. `exact`: by the project's own "
    "kernels, with flash attention for every model that runs on the CPU; `stock`: by GGML's. A "
    "patched binary that is started by hand reads only the variable, and its default is `stock`",
    "patch.source": "where to fetch Ollama's source from: a URL or a local clone",
    "patch.tag": "version of Ollama",
    "patch.cpu": "`native`: for this machine's processor; `variants`: for every one",
    "patch.cuda": "GPU code of the build: `on` compiles it with nvcc; `stock` takes that of the "
    "Ollama that is installed, `stock=PLACE` that of a folder or a release archive; `off`; `auto`: "
    "with a toolkit as `on`, else with a GPU and an installed Ollama that fits as `stock`",
}


def default_in_words(key: str) -> str:
    """KeyError if there is no such setting."""
    setting = _OF_KEY[key]
    return _DEFAULTS.get(key) or _value_in_words(_default(setting))


def flag_note(key: str) -> str:
    """The end of the help of a flag that overrides a setting: `  [env NAME; default: VALUE]`."""
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
    """The exact size, unlike format_size."""
    for unit, factor in (("GiB", GIB), ("GB", 10**9), ("MiB", MIB)):
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"
