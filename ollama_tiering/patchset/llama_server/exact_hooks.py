"""Where GGML's CPU backend calls our exact attention, and what that uses of it.

`llama_server/cpu` has what is called, docs/exact.md the reasons. Data only, as hooks.py.
"""

from __future__ import annotations

from typing import Final

from ollama_tiering.patchset.llama_server.anchors import Anchored, NeededText, Spot

BACKEND: Final = "ggml/src/ggml-cpu"
GRAPH: Final = f"{BACKEND}/ggml-cpu.c"
_REGISTRY: Final = f"{BACKEND}/ggml-cpu.cpp"
_PRODUCTS: Final = f"{BACKEND}/llamafile/sgemm.cpp"
_REPACKED: Final = f"{BACKEND}/repack.cpp"
_INCLUDE: Final = '#include "exactattn.h"'

_QUANTISE: Final = r"""
\g<indent>if (i11_processed < ne11) { // a four, too: exactattn_repack.h
\g<indent>    if (ith == i12 % nth) {
\g<indent>        exactattn::quantise_last(
\g<indent>            ggml_quantize_mat_t<INTER_SIZE, PARAM_TYPE>, data_ptr + i11_processed * nb11,
\g<indent>            nb11, ne11 - i11_processed, ne10,
\g<indent>            wdata + exactattn::last_offset(nbw1, ne11, ne12, i12));
\g<indent>    }
\g<indent>    continue;
\g<indent>}"""
_MULTIPLY: Final = r"""
\g<indent>if (nrows % 4) { // a four, too: exactattn_repack.h
\g<indent>    const auto last = exactattn::last_offset(src1_col_stride, ne11, ne12, i12);
\g<indent>    exactattn::multiply_last(
\g<indent>        gemm<BLOC_TYPE, INTER_SIZE, NB_COLS, PARAM_TYPE>, ne00,
\g<indent>        src0_ptr + src0_start * nb01, (const char *) params->wdata + last, ncols,
\g<indent>        dst_ptr + (nrows - nrows % 4) * nb1 + src0_start * nb0, nb1, nrows % 4);
\g<indent>    return;
\g<indent>}"""

HOOKS: Final = (
    Anchored(GRAPH, "the include in the graph", r'#include "ops\.h"', Spot.AFTER, _INCLUDE),
    Anchored(
        *(GRAPH, "the attention"),
        r"(?P<indent> *)ggml_compute_forward_flash_attn_ext\(params, tensor\);",
        Spot.BEFORE,
        r"\g<indent>if (exactattn_compute(params, tensor)) { break; }",
    ),
    Anchored(
        *(GRAPH, "its work memory"),
        r"(?P<indent> *)cur \+= MAX\(prefill, decode\);",
        Spot.AFTER,
        r"\g<indent>cur = MAX(cur, exactattn_work_size(node, n_tasks));",
    ),
    Anchored(_REGISTRY, "the include by the names", r'#include "traits\.h"', Spot.AFTER, _INCLUDE),
    Anchored(
        *(_REGISTRY, "its state"),
        r'(?P<indent> *)if \(strcmp\(name, "ggml_backend_get_features"\) == 0\) \{',
        Spot.BEFORE,
        r'\g<indent>if (strcmp(name, "exactattn_state") == 0) { return (void *) exactattn_state; }',
    ),
    Anchored(
        _PRODUCTS, "the include by the products", r'#include "sgemm\.h"', Spot.AFTER, _INCLUDE
    ),
    Anchored(
        *(_PRODUCTS, "one column"),
        r"(?P<indent> *)if \(n < 2\)\n +return false;",
        Spot.BEFORE,
        r"\g<indent>if (n != 1 || !exactattn_multiplies_one_column(Atype))",
    ),
    Anchored(
        *(_REPACKED, "the include by the repacked weights"),
        r'#include "repack\.h"',
        Spot.AFTER,
        '#include "exactattn_repack.h"',
    ),
    Anchored(
        *(_REPACKED, "work memory of the last columns"),
        r"(?P<indent> *)case GGML_OP_MUL_MAT:\n *\{\n"
        r" *size = ggml_row_size\(PARAM_TYPE, ggml_nelements\(op->src\[1\]\)\);",
        Spot.AFTER,
        r"\g<indent>        size += exactattn::last_bytes("
        r"ggml_row_size(PARAM_TYPE, op->src[1]->ne[0]), op->src[1]->ne[2]);",
    ),
    Anchored(
        *(_REPACKED, "quantised last columns"),
        r"(?P<indent> *)const int64_t i11_processed = ne11 - ne11 % 4;",
        Spot.AFTER,
        _QUANTISE.removeprefix("\n"),
    ),
    Anchored(
        *(_REPACKED, "products with the last columns"),
        r"(?P<indent> *)for \(int iter = nrows - \(nrows % 4\); iter < nrows; iter\+\+\) \{",
        Spot.BEFORE,
        _MULTIPLY.removeprefix("\n"),
    ),
)

NEEDED: Final = (
    NeededText(f"{BACKEND}/ggml-cpu-impl.h", "ggml_compute_params::use_ref", r"^ *bool use_ref;"),
    NeededText(_REPACKED, "whole planes of columns", r"^ *int64_t src1_start = ith1 \* ne11;"),
    NeededText(_REPACKED, "planes of work memory", r"^ *const size_t nbw2 *= nbw1 \* ne11;"),
    NeededText(
        _REPACKED, "the same planes in products", r"wdata \+ \(i11 \+ i12 \* ne11\) \* src1_col_str"
    ),
)
