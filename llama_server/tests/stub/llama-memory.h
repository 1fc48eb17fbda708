// Of llama.cpp's header of this name, what kvt_complete uses.
#pragma once

#include "llama-io.h"
#include "llama.h"

struct llama_memory_i {
    virtual ~llama_memory_i() = default;
    virtual void state_write(llama_io_write_i & io, int32_t seq, llama_state_seq_flags flags) const = 0;
};
