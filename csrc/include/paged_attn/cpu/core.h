// Exact attention on a CPU: what a host program includes. Header-only, C++17, no allocation, no threads of its own.
//
// The instruction set is the one this translation unit is compiled for (isa.h); everything lies in a namespace of that
// name, so that one program may hold several. The host brings threads (a Team) and scratch memory:
//
//     if (const char *why = kernel::unsupported(shape)) ...           // fall back, say why
//     size_t bytes = kernel::scratch_bytes(shape, n_threads);
//     kernel::run(shape, args, scratch, team);                        // called by every thread of the team
#pragma once
#include "paged_attn/cpu/isa.h"
#include "paged_attn/cpu/team.h"
#include "paged_attn/paged_attn.h"

namespace paged_attn::cpu::PA_ISA {

// Null, or the reason in words why no kernel here serves the shape.
inline const char *unsupported(const pa_shape &shape);

// Scratch memory that `run` needs, 64-byte aligned. Per cell it is 27 bytes, and 3 for each group of queries (a prefill
// panel, or one of few queries) and tile; the rest follows from max_q, head sizes and threads.
inline size_t scratch_bytes(const pa_shape &shape, int n_threads);

// Called by all `team.size` threads with the same arguments; returns in each when the output is complete.
// Arguments have been checked by the caller. The bits of the result depend on the arguments only.
inline void run(const pa_shape &shape, const pa_args &args, void *scratch, const Team &team);

} // namespace paged_attn::cpu::PA_ISA

namespace paged_attn::cpu {
namespace kernel = PA_ISA;
}

#include "paged_attn/cpu/run.h"
