// Of llama.cpp's header of this name, what kvt_complete uses.
#pragma once

#include <cstddef>

struct ggml_tensor;

class llama_io_write_i {
public:
    virtual ~llama_io_write_i() = default;
    virtual void write(const void * bytes, size_t size) = 0;
    virtual void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) = 0;
    virtual size_t n_bytes() = 0;
};
