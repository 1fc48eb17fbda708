#include "kvt_cache.h"
#include "kvt_columns.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "llama-context.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace kvt {

namespace {

// The backend that computes with what lies in this buffer, in its own order; nullptr if that is the host.
ggml_backend_t queue_of(llama_context * ctx, ggml_backend_buffer_t buffer) {
    ggml_backend_sched_t sched = ctx->get_sched();
    for (int i = 0; buffer != nullptr && !ggml_backend_buffer_is_host(buffer) && i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t queue = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_get_default_buffer_type(queue) == ggml_backend_buffer_get_type(buffer)) {
            return queue;
        }
    }
    return nullptr;
}

// Calls each(first, count, cell) for runs of cells that follow each other.
template <typename F> void each_run(const uint32_t * cells, size_t count, F && each) {
    for (size_t i = 0; i < count;) {
        size_t end = i + 1;
        while (end < count && cells[end] == cells[end - 1] + 1) {
            ++end;
        }
        each(i, end - i, (size_t) cells[i]);
        i = end;
    }
}

// Where the first element of a cell lies that is stored transposed; nullptr if that is no memory of the host's.
char * host_column(const plane & of, size_t cell) {
    const bool host = of.tensor->buffer != nullptr && ggml_backend_buffer_is_host(of.tensor->buffer);
    return host ? static_cast<char *>(of.tensor->data) + of.offset + cell*of.element_bytes : nullptr;
}

kvt_columns columns_of(const plane & of) { return { of.column_bytes, of.row_bytes/of.element_bytes }; }

std::vector<kvt_run> runs_of(const plane & of, const uint32_t * cells, size_t count) {
    std::vector<kvt_run> runs;
    each_run(cells, count, [&](size_t, size_t n, size_t cell) { runs.push_back({ of.offset + cell*of.element_bytes, n }); });
    return runs;
}

// Element j of line i becomes element i of line j, in squares that a cache holds.
template <typename T> void transpose_as(const char * from, size_t from_bytes, size_t lines, size_t length, char * to, size_t to_bytes) {
    constexpr size_t side = 32;
    for (size_t i = 0; i < lines; i += side) {
        for (size_t j = 0; j < length; j += side) {
            for (size_t l = i; l < std::min(lines, i + side); ++l) {
                for (size_t e = j; e < std::min(length, j + side); ++e) {
                    std::memcpy(to + e*to_bytes + l*sizeof(T), from + l*from_bytes + e*sizeof(T), sizeof(T));
                }
            }
        }
    }
}

// Lines of elements of `size` bytes.
void transpose(const char * from, size_t from_bytes, size_t lines, size_t length, char * to, size_t to_bytes, size_t size) {
    size == 2 ? transpose_as<uint16_t>(from, from_bytes, lines, length, to, to_bytes) : transpose_as<uint32_t>(from, from_bytes, lines, length, to, to_bytes);
}

} // namespace

void read_rows(const plane & from, const uint32_t * cells, size_t count, char * out) {
    const size_t size = from.element_bytes;
    std::vector<char> columns;
    if (lies_apart(from)) {
        const auto runs = runs_of(from, cells, count);
        columns.resize(count*from.row_bytes);
        if (!kvt_get_columns(from.tensor, columns_of(from), runs.data(), runs.size(), columns.data())) {
            throw std::runtime_error("the device could not copy rows out of its memory");
        }
    }
    each_run(cells, count, [&](size_t i, size_t n, size_t cell) {
        char * rows = out + i*from.row_bytes;
        if (!from.transposed) {
            ggml_backend_tensor_get(from.tensor, rows, from.offset + cell*from.row_bytes, n*from.row_bytes);
        } else if (columns.empty()) {
            transpose(host_column(from, cell), from.column_bytes, from.row_bytes/size, n, rows, from.row_bytes, size);
        } else {
            transpose(columns.data() + i*from.row_bytes, n*size, from.row_bytes/size, n, rows, from.row_bytes, size);
        }
    });
}

bool lies_apart(const plane & of) { return of.transposed && host_column(of, 0) == nullptr; }

bool can_copy(const plane & of) { return !lies_apart(of) || kvt_device_of_columns(of.tensor) != nullptr; }

char * host_row(const plane & of, uint32_t cell) {
    const bool host = !of.transposed && of.tensor->buffer != nullptr && ggml_backend_buffer_is_host(of.tensor->buffer);
    return host ? static_cast<char *>(of.tensor->data) + of.offset + cell*of.row_bytes : nullptr;
}

void row_writer::write(const plane & to, const uint32_t * cells, size_t count, const char * rows) {
    const size_t size = to.element_bytes;
    std::vector<char> columns;
    if (lies_apart(to)) {
        columns.resize(count*to.row_bytes);
    }
    each_run(cells, count, [&](size_t i, size_t n, size_t cell) {
        const char * run = rows + i*to.row_bytes;
        if (!to.transposed) {
            set(to.tensor, run, to.offset + cell*to.row_bytes, n*to.row_bytes);
        } else if (columns.empty()) {
            transpose(run, to.row_bytes, n, to.row_bytes/size, host_column(to, cell), to.column_bytes, size);
        } else {
            transpose(run, to.row_bytes, n, to.row_bytes/size, columns.data() + i*to.row_bytes, n*size, size);
        }
    });
    if (!columns.empty()) {
        const auto runs = runs_of(to, cells, count);
        if (!kvt_set_columns(to.tensor, columns_of(to), runs.data(), runs.size(), columns.data())) {
            throw std::runtime_error("the device could not copy rows into its memory");
        }
    }
}

void row_writer::set(ggml_tensor * to, const void * from, size_t offset, size_t bytes) {
    ggml_backend_t queue = queue_of(ctx_, to->buffer);
    if (queue == nullptr) {
        ggml_backend_tensor_set(to, from, offset, bytes);
        return;
    }
    if (std::find(copying_.begin(), copying_.end(), queue) == copying_.end()) {
        copying_.push_back(queue);
    }
    ggml_backend_tensor_set_async(queue, to, from, offset, bytes);
}

row_writer::~row_writer() {
    for (ggml_backend_t queue : copying_) {
        ggml_backend_synchronize(queue);
    }
}

} // namespace kvt
