// Rows of llama.cpp's K/V cache, by public members of llama.cpp only: which cell holds which position, where it would put
// more, and the bytes. Used in the thread that decodes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct ggml_backend;
struct ggml_tensor;
struct llama_context;
class llama_kv_cache;

namespace kvt {

// K or V of one layer, in the stream of one sequence.
struct plane {
    int32_t layer = 0;
    bool is_v = false;
    bool transposed = false; // [element][cell] instead of [cell][element]
    ggml_tensor * tensor = nullptr;
    size_t offset = 0;       // of the stream in the tensor
    size_t row_bytes = 0;    // of one position
    size_t element_bytes = 0;
    size_t column_bytes = 0; // if transposed: from one element to the next
    uint32_t kv_heads = 0;
    uint32_t head_dim = 0;
};

// Whether a row's elements lie apart in a device's memory: llama.cpp copies them one by one.
bool lies_apart(const plane & of);

// Whether rows can be copied out of it and into it: where a device has V's elements apart, the device has to do it exactly.
bool can_copy(const plane & of);

// Where the plane's row of a cell lies, or nullptr if that is no memory of the host's, or it does not lie in one piece.
char * host_row(const plane & of, uint32_t cell);

// Where a model's memory is.
struct memory_parts {
    llama_kv_cache * rows = nullptr;   // keeps every row; nullptr: this code does not know the memory
    llama_kv_cache * window = nullptr; // of layers with a sliding window: keeps the last rows
    bool states = false;               // there is more than rows: a slot goes on at checkpoints only
    bool has_v = true;                 // false: K and V are one row (multi-head latent attention), and there is no tensor of V
};

// The parts if this code knows them, or why not.
memory_parts parts_of(llama_context * ctx, std::string & why);

// Whether all slots' rows lie in one stream (-kvu): a cell may be anybody's, or several slots'.
bool share_cells(llama_context * ctx, const memory_parts & parts);

// By layer, K before V; K alone where there is no V, for which llama.cpp must not be asked. Empty and why, if the tensors are not
// as expected.
std::vector<plane> planes_of(const llama_kv_cache & cache, int32_t seq, bool has_v, std::string & why);

// The cells of the rows [first, first + count) of a sequence of these tokens, in their order. Empty if one is missing, is there
// twice, or waits to be rotated.
std::vector<uint32_t> cells_of(const llama_kv_cache & cache, int32_t seq, uint32_t first, uint32_t count, const std::vector<int32_t> & tokens);

// Gives the rows [first, first + count) of these tokens cells where llama.cpp itself would. Empty if there are not so many.
std::vector<uint32_t> take_cells(llama_context * ctx, llama_kv_cache & cache, int32_t seq, uint32_t first, uint32_t count,
                                 const std::vector<int32_t> & tokens);

// Gives the rows [first, first + count), of which the cache of a sliding window is to hold no others, the cells where
// computing the whole sequence would have left them. Empty if there are not so many. Positions of one number only.
std::vector<uint32_t> window_cells(llama_context * ctx, llama_kv_cache & cache, int32_t seq, uint32_t first, uint32_t count,
                                 const std::vector<int32_t> & tokens);

// What is queued for the memory is done (rows that one stream is to get of another, rows that wait to be rotated), and no
// device computes with it any more. Before that, bytes of rows are neither read nor written: a copy of a whole stream that
// comes later would overwrite them. Throws what llama.cpp throws.
void settle(llama_context * ctx);

// The positions from this one on go. With M-RoPE an image has one.
void drop_rows(llama_kv_cache & cache, int32_t seq, int32_t position);

// Whether a row has more than one position (M-RoPE).
bool has_axes(llama_context * ctx);

// Rows of `count` cells, one after the other, out of the plane. Throws if a device could not copy them, as GGML's own copies do or
// end the process.
void read_rows(const plane & from, const uint32_t * cells, size_t count, char * out);

// Writes rows of `count` cells. A device's memory gets them in the device's own order, one copy behind the other, before whatever
// it is given to compute later: to wait for each of a block's copies takes longer than they do. The rows stay until its end, which
// waits for all. Throws as read_rows does.
class row_writer {
public:
    explicit row_writer(llama_context * ctx) : ctx_(ctx) {}
    ~row_writer();
    row_writer(const row_writer &) = delete;
    row_writer & operator=(const row_writer &) = delete;

    void write(const plane & to, const uint32_t * cells, size_t count, const char * rows);

private:
    void set(ggml_tensor * to, const void * from, size_t offset, size_t bytes);

    llama_context * const ctx_;
    std::vector<ggml_backend *> copying_;
};

} // namespace kvt
