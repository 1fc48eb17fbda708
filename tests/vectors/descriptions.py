"""What namespaces are the digest of, in several geometries, and what the environment adds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ollama_tiering.store.block.key import LayerSpec, Namespace

MODEL = "sha256-" + "a" * 64
COMPUTED = "devices=none;cpu=AVX2,FMA;libc=2.36 fma;rows="
SALT = "a secret of ours"


def descriptions_document() -> dict[str, Any]:
    return {
        "comment": "Made by tests/vectors/make.py. A description as a runner has it, the fields "
        "that it gives in the order in which they are hashed, and their digest. Layers are in the "
        "order of the field: by child, then by number.",
        "descriptions": [_described(**entry) for entry in _descriptions()],
    }


def settings_document() -> dict[str, Any]:
    salt = hashlib.sha256(b"kvt-salt-1\0" + SALT.encode()).digest()[:16].hex()
    rounded = {"OLLAMA_KV_TIER_ENCODING": "q8_0"}
    salted = {"OLLAMA_KV_TIER_SALT": SALT}
    return {
        "comment": "Made by tests/vectors/make.py. sockets: variables that are set, of those that "
        "the place of the socket depends on, and the place; {own} stands for a directory of the "
        "reader's own. extras: settings of a runner, what they add to `extra` of a namespace, and "
        "whether a sidecar rounds its rows to q8_0.",
        "sockets": [
            {"name": name, "env": env, "socket": socket} for name, env, socket in _sockets()
        ],
        "extras": [
            {"name": name, "env": env, "extra": extra, "rounded": "kv=q8_0" in extra}
            for name, env, extra in (
                ("nothing is set", {}, ""),
                ("no encoding", {"OLLAMA_KV_TIER_ENCODING": "none"}, ""),
                ("an encoding not known", {"OLLAMA_KV_TIER_ENCODING": "zstd"}, ""),
                ("rows are rounded", rounded, ";kv=q8_0"),
                ("salt", salted, f";salt={salt}"),
                ("salt and rounded rows", salted | rounded, f";salt={salt};kv=q8_0"),
            )
        ],
    }


def _described(*, name: str, layers: Iterable[LayerSpec], **of: Any) -> dict[str, Any]:
    """One entry of descriptions.json."""
    ordered = list(layers)
    filled = {"model": MODEL, "adapters": [], "extra": COMPUTED + "h" * len(ordered), **of}
    namespace = Namespace.of(layers=ordered, **filled)
    return {
        "name": name,
        "description": filled | {"layers": [asdict(layer) for layer in ordered]},
        "fields": [{"name": field, "value": value} for field, value in namespace.fields()],
        "digest": namespace.digest().hex(),
    }


def _full(layers: Iterable[int], heads: int, dim: int, child: int = 0) -> list[LayerSpec]:
    return [LayerSpec(child, layer, heads, dim, dim) for layer in layers]


def _descriptions() -> list[dict[str, Any]]:
    go = {"engine": "ollama-go/0.16.3+0123456789abcdef", "flash_attention": True}
    cpp = {"engine": "llama.cpp/0.16.3+0123456789abcdef", "flash_attention": False}
    f16 = {"cache_dtype": "f16"}
    dense = _full(range(3), 8, 128)
    near = [LayerSpec(0, layer, 1, 256, 256, "swa", 512) for layer in (0, 1, 2, 3, 4)]
    far = _full([5], 1, 256, child=1)
    windows = COMPUTED + "hhhhhh;windows="
    unlike = [
        LayerSpec(0, 0, 4, 32, 32, "swa", 128),
        LayerSpec(0, 1, 4, 32, 32, "swa", 128),
        LayerSpec(1, 2, 2, 64, 64),
    ]
    chunked = [LayerSpec(0, layer, 8, 128, 128, "chunked", 8192) for layer in (0, 1, 2)]
    states = COMPUTED + "hhhhhhhh;states=1,0:6144,1:2097152"
    latent = [LayerSpec(0, layer, 1, 576, 512) for layer in range(2)]
    unequal = [LayerSpec(0, layer, 16, 192, 128) for layer in range(2)]
    adapters = ["sha256-" + "c" * 64, "sha256-" + "d" * 64]
    rope = COMPUTED + "hh;rope=500000:1;batch=512;v=transposed"
    return [
        {"name": "every layer alike", "layers": dense, **go, **f16},
        {"name": "one layer, one head", "layers": _full([0], 1, 64), **go, **f16},
        {"name": "flash attention off", "layers": dense, **go, **f16, "flash_attention": False},
        {"name": "latent attention", "layers": latent, **go, **f16},
        {"name": "K wider than V", "layers": unequal, **go, **f16},
        {
            "name": "windows in a child of their own",
            "layers": near + far,
            "extra": windows + "0:511:1024",
            **go,
            **f16,
        },
        {
            "name": "windows whose rows may lie anywhere",
            "layers": near + far,
            "extra": COMPUTED + "hhhhhh;attention=exact.2.avx2;windows=0:511",
            **go,
            **f16,
        },
        {"name": "layers of unlike heads", "layers": unlike, **go, **f16},
        {"name": "chunks", "layers": chunked + _full([3], 8, 128, child=1), **go, **f16},
        {
            "name": "every fourth layer, states in the others",
            "layers": _full((3, 7, 11, 15), 2, 256),
            "extra": states,
            **go,
            **f16,
        },
        {"name": "no layer", "layers": [], **go, **f16},
        {"name": "q8_0 cache", "layers": dense, **go, "cache_dtype": "q8_0"},
        {"name": "q4_0 cache", "layers": dense, **go, "cache_dtype": "q4_0"},
        {
            "name": "rows rounded to q8_0",
            "layers": dense,
            "extra": COMPUTED + "hhh;kv=q8_0",
            **go,
            **f16,
        },
        {
            "name": "llama.cpp, two adapters",
            "layers": _full(range(2), 8, 64),
            "adapters": adapters,
            "extra": rope,
            **cpp,
            **f16,
        },
    ]


def _sockets() -> list[tuple[str, dict[str, str], str]]:
    home, runtime, state = "/home/somebody", "{own}", "/var/lib/somebody"
    below = "ollama-tiering/sidecar.sock"
    in_state = "ollama-tiering/run/sidecar.sock"
    at_home = f"{home}/.local/state/{in_state}"
    all_three = {"HOME": home, "XDG_RUNTIME_DIR": runtime, "XDG_STATE_HOME": state}
    named = all_three | {"OLLAMA_KV_TIER_SOCKET": "/srv/tier.sock"}
    return [
        ("runtime directory", all_three, f"{runtime}/{below}"),
        (
            "it ends in a slash",
            all_three | {"XDG_RUNTIME_DIR": f"{runtime}/"},
            f"{runtime}/{below}",
        ),
        ("no runtime directory", {"HOME": home, "XDG_STATE_HOME": state}, f"{state}/{in_state}"),
        ("an empty one is none", all_three | {"XDG_RUNTIME_DIR": ""}, f"{state}/{in_state}"),
        ("home alone", {"HOME": home}, at_home),
        ("an empty state directory is none", {"HOME": home, "XDG_STATE_HOME": ""}, at_home),
        ("a relative one is none", {"HOME": home, "XDG_STATE_HOME": "state"}, at_home),
        ("named", named, "/srv/tier.sock"),
        ("named as gRPC does", named | {"OLLAMA_KV_TIER_SOCKET": "unix:///srv/s"}, "/srv/s"),
        ("named by scheme alone", named | {"OLLAMA_KV_TIER_SOCKET": "unix:/srv/s"}, "/srv/s"),
    ]
