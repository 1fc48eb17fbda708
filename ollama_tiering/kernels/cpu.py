"""Attention on the CPU: plans of libpaged_attn.so, its f64 reference, its state algebra."""

from __future__ import annotations

import ctypes
import weakref
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.kernels.binding import PaArgs, PaError, PaMask, PaStatus, address, check, f32
from ollama_tiering.kernels.library import load
from ollama_tiering.kernels.mask import Mask
from ollama_tiering.kernels.rows import Rows
from ollama_tiering.kernels.shape import Shape
from ollama_tiering.system.closing import Closing

F32 = NDArray[np.float32]


class State(NamedTuple):
    """Attention over some of the cells, in base 2: m, l [n_q, n_head], o [n_q, n_head, d_v]."""

    m: F32
    l: F32  # noqa: E741 - the field's name for the sum of weights
    o: F32


class CpuAttention(Closing):
    """A plan: threads and scratch memory for runs of one shape. One run at a time; close it, or
    use it as a context. `isa`: auto, avx512, avx2, neon, scalar.

    PaError for shapes, strides or pages that do not fit, MissingTool or BuildError when the
    library has to be built and cannot.
    """

    def __init__(self, shape: Shape, threads: int, isa: str = "auto") -> None:
        if not -(2**31) <= threads < 2**31:
            raise PaError(PaStatus.BAD_ARGUMENT, f"{threads} threads: 1 to 1024 are possible")
        self.shape = shape
        self._library = load()
        plan = ctypes.c_void_p()
        status = self._library.pa_cpu_plan_create(
            ctypes.byref(shape.c()), threads, isa.encode(), ctypes.byref(plan)
        )
        check(self._library, status)
        self._plan = plan
        self._finalizer = weakref.finalize(self, self._library.pa_cpu_plan_destroy, plan)

    @property
    def isa(self) -> str:
        """The instruction set that runs."""
        return bytes(self._library.pa_cpu_plan_isa(self._live())).decode()

    def run(
        self,
        q: F32,
        k: Rows,
        v: Rows,
        *,
        n_cells: int | None = None,
        mask: Mask | None = None,
        sinks: F32 | None = None,
        out: F32 | None = None,
    ) -> F32:
        """q [n_q, n_head, d_k] -> [n_q, n_head, d_v], into `out` if given.

        `n_cells`: how many of the pages' cells are in use; None: all. `sinks` [n_head].
        """
        args = _arguments(self.shape, q, k, v, n_cells, mask, sinks)
        axes = (q.shape[0], self.shape.n_head, self.shape.d_v)
        result = np.empty(axes, np.float32) if out is None else _writable(f32(out, "out", axes))
        args.out = result.ctypes.data
        check(self._library, self._library.pa_cpu_run(self._live(), ctypes.byref(args)))
        return result

    def state(
        self, q: F32, k: Rows, v: Rows, *, n_cells: int | None = None, mask: Mask | None = None
    ) -> State:
        """The state over these cells, to be merged with that over others."""
        args = _arguments(self.shape, q, k, v, n_cells, mask, None)
        n_q, n_head = q.shape[0], self.shape.n_head
        m, l = (np.empty((n_q, n_head), np.float32) for _ in range(2))  # noqa: E741
        o = np.empty((n_q, n_head, self.shape.d_v), np.float32)
        args.state_m, args.state_l, args.state_o = m.ctypes.data, l.ctypes.data, o.ctypes.data
        check(self._library, self._library.pa_cpu_run(self._live(), ctypes.byref(args)))
        return State(m, l, o)

    def close(self) -> None:
        """Ends the threads and frees the memory. May be called twice."""
        self._finalizer()

    def _live(self) -> ctypes.c_void_p:
        if not self._finalizer.alive:
            raise PaError(PaStatus.BAD_ARGUMENT, "this plan is closed")
        return self._plan


def reference(
    shape: Shape,
    q: F32,
    k: Rows,
    v: Rows,
    *,
    n_cells: int | None = None,
    mask: Mask | None = None,
    sinks: F32 | None = None,
) -> NDArray[np.float64]:
    """The same in f64, one cell after another: slow, and what everything is compared with."""
    library = load()
    args = _arguments(shape, q, k, v, n_cells, mask, sinks)
    out = np.empty((q.shape[0], shape.n_head, shape.d_v), np.float64)
    check(
        library,
        library.pa_reference(ctypes.byref(shape.c()), ctypes.byref(args), out.ctypes.data),
    )
    return out


def merge(a: State, b: State) -> State:
    """The state over the cells of both states, which must have none in common."""
    library = load()
    d_v = _check_state(a, "state a", a.o.shape)
    _check_state(b, "state b", a.o.shape)
    merged = State(*(part.copy(order="C") for part in a))
    others = [np.ascontiguousarray(part) for part in b]
    check(
        library,
        library.pa_state_merge(
            a.m.size, d_v, *(x.ctypes.data for x in merged), *(x.ctypes.data for x in others)
        ),
    )
    return merged


def finish(state: State, sinks: F32 | None = None) -> F32:
    """o / l, and 0 if nothing was seen. `sinks` [n_head] join first."""
    library = load()
    _check_state(state, "the state", state.o.shape)
    m, l, o = (np.ascontiguousarray(part) for part in state)  # noqa: E741
    spread = None
    if sinks is not None:
        spread = np.ascontiguousarray(np.broadcast_to(f32(sinks, "sinks", m.shape[-1:]), m.shape))
    out = np.empty_like(o)
    check(
        library,
        library.pa_state_finish(
            m.size,
            o.shape[-1],
            m.ctypes.data,
            l.ctypes.data,
            o.ctypes.data,
            address(spread),
            out.ctypes.data,
        ),
    )
    return out


def _arguments(
    shape: Shape,
    q: F32,
    k: Rows,
    v: Rows,
    n_cells: int | None,
    mask: Mask | None,
    sinks: F32 | None,
) -> PaArgs:
    """What C cannot see is checked here: the sizes and kinds of the arrays."""
    f32(q, "q", (q.shape[0] if q.ndim else 0, shape.n_head, shape.d_k))
    if q.size and q.strides[2] != 4:
        raise PaError(PaStatus.BAD_ARGUMENT, "the values of a query's head are not contiguous")
    n_cells = k.n_cells if n_cells is None else n_cells
    _check_rows(k, "K", shape.k_type, (shape.n_kv_head, shape.k_type.row_bytes(shape.d_k)))
    _check_rows(v, "V", shape.v_type, (shape.n_kv_head, shape.v_type.row_bytes(shape.d_v)))
    if mask is not None:
        mask.check(q.shape[0], n_cells)
    if sinks is not None and not f32(sinks, "sinks", (shape.n_head,)).flags.c_contiguous:
        raise PaError(PaStatus.BAD_ARGUMENT, "the sinks are not contiguous")
    return PaArgs(
        n_q=q.shape[0],
        n_cells=n_cells,
        q=address(q),
        q_stride=q.strides[0],
        q_head_stride=q.strides[1],
        k=k.c(),
        v=v.c(),
        mask=PaMask() if mask is None else mask.c(),
        sinks=address(sinks),
    )


def _check_rows(rows: Rows, name: str, dtype: object, axes: tuple[int, int]) -> None:
    if rows.dtype is not dtype:
        raise PaError(PaStatus.BAD_ARGUMENT, f"{name} is {rows.dtype!r}, the plan is for {dtype!r}")
    if rows.data.shape[2:] != axes:
        raise PaError(
            PaStatus.BAD_ARGUMENT,
            f"a cell of {name} is {list(rows.data.shape[2:])} heads and bytes, not {list(axes)}",
        )


def _writable(values: F32) -> F32:
    if not (values.flags.c_contiguous and values.flags.writeable):
        raise PaError(PaStatus.BAD_ARGUMENT, "out is not contiguous and writable")
    return values


def _check_state(state: State, name: str, axes: tuple[int, ...]) -> int:
    """Returns d_v. PaError unless o has these axes, and m and l have all but the last of them."""
    if not axes:
        raise PaError(PaStatus.BAD_ARGUMENT, f"o of {name} has no axes")
    for part, values, its_axes in (
        ("o", state.o, axes),
        ("m", state.m, axes[:-1]),
        ("l", state.l, axes[:-1]),
    ):
        f32(values, f"{part} of {name}", its_axes)
    return axes[-1]
