"""The symbols that our part takes from the installed libraries, looked for before anything is
compiled.

The list is for a quick answer. The linker's is exact, because it is told to leave nothing
undefined; what it misses is said in the same words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ollama_tiering.errors import UnsupportedUpstream
from ollama_tiering.patchset import elf

# Of libllama.so; mangled, as in the files. None of it is in llama.h. What our part can do without,
# as `llama_kv_cache::get_cells`, is not among them.
NEEDED: Final = {
    "_ZNK13llama_context11get_cparamsEv": "llama_context::get_cparams",
    "_ZNK13llama_context9get_schedEv": "llama_context::get_sched",
    "_ZN13llama_context13memory_updateEb": "llama_context::memory_update",
    "_ZNK14llama_kv_cache13get_layer_idsEv": "llama_kv_cache::get_layer_ids",
    "_ZNK14llama_kv_cache5get_kEP12ggml_contextijRKNS_9slot_infoE": "llama_kv_cache::get_k",
    "_ZNK14llama_kv_cache5get_vEP12ggml_contextijRKNS_9slot_infoE": "llama_kv_cache::get_v",
    "_ZNK14llama_kv_cache9find_slotERK12llama_ubatchb": "llama_kv_cache::find_slot",
    "_ZN14llama_kv_cache12apply_ubatchERKNS_9slot_infoERK12llama_ubatch": (
        "llama_kv_cache::apply_ubatch"
    ),
    "_ZNK14llama_kv_cache13get_has_shiftEv": "llama_kv_cache::get_has_shift",
    "_ZNK14llama_kv_cache12get_n_streamEv": "llama_kv_cache::get_n_stream",
    "_ZNK14llama_kv_cache8get_sizeEv": "llama_kv_cache::get_size",
    "_ZN18llama_batch_allocr14ubatch_reserveEjj": "llama_batch_allocr::ubatch_reserve",
    "_ZNK11llama_model9dev_layerEi": "llama_model::dev_layer",
    "_ZTI14llama_kv_cache": "the type of llama_kv_cache",
    "_ZTI19llama_memory_hybrid": "the type of llama_memory_hybrid",
}
_UNDEFINED: Final = re.compile(r"undefined reference to [`'](.+?)'")


def require(library: Path) -> None:
    """UnsupportedUpstream names all that `library` lacks."""
    defined = symbols(library)
    if lacking := [name for symbol, name in NEEDED.items() if symbol not in defined]:
        raise not_exported(library, lacking)


def symbols(library: Path) -> frozenset[str]:
    """What it defines. UnsupportedUpstream where it is none, or is stripped of its headers."""
    try:
        return elf.read(library).defined
    except (ValueError, OSError) as error:
        raise UnsupportedUpstream(f"{library}: {error}", hint="install Ollama again") from None


def not_exported(library: Path, names: Iterable[str]) -> UnsupportedUpstream:
    """The error that says so."""
    return UnsupportedUpstream(
        f"{library} does not export what the tiering uses: {', '.join(names)}",
        hint="this Ollama cannot be patched; docs/llama-server.md names those that can",
    )


def undefined_in(lines: Iterable[str]) -> list[str]:
    """What a linker says that it did not find, each once."""
    return list(dict.fromkeys(name for line in lines for name in _UNDEFINED.findall(line)))
