#include "kvt_cells.h"

#include "llama-io.h"
#include "llama-kv-cache.h"

#include <cstring>
#include <type_traits>

namespace kvt {

namespace {

// llama.cpp shows its cells since August 2026. KVT_CELLS_BY_STATE: as if it did not, for tests.
template <typename C, typename = void> struct shows_cells : std::false_type {};
#ifndef KVT_CELLS_BY_STATE
template <typename C> struct shows_cells<C, std::void_t<decltype(std::declval<const C &>().get_cells(0))>> : std::true_type {};
#endif

template <typename C> std::vector<cell> shown_cells(const C & cache, int32_t seq) {
    std::vector<cell> found;
    const auto & cells = cache.get_cells(seq);
    for (uint32_t i = 0, end = cells.used_max_p1(); i < end; ++i) {
        if (!cells.is_empty(i) && cells.seq_has(i, seq)) {
            const auto & other = cells.ext_get(i);
            found.push_back({ i, cells.pos_get(i), other.y, other.x });
        }
    }
    return found;
}

// Before, what it writes of a sequence tells them: for each stream the number of cells; then for each cell its position,
// the number of its sequences, with more than one dimension the other positions, and each sequence; then whether V is
// transposed, the number of layers, type and row bytes of the first K, and its rows as bytes of a tensor, which are not
// read here.
class state_listener : public llama_io_write_i {
public:
    void write(const void * src, size_t size) override {
        bytes_ += size;
        if (at_ == part::streams) {
            at_ = part::count;
        } else if (at_ == part::count) {
            cells_.resize(number<uint32_t>(src, size));
            at_ = cells_.empty() ? part::count : part::position;
        } else if (at_ == part::position) {
            cells_[seen_++].position = number<int32_t>(src, size);
            at_ = part::sequences;
        } else if (at_ == part::sequences) {
            skip_ = number<uint32_t>(src, size);
            at_ = part::skipped;
        } else if (at_ == part::skipped && size == sizeof(llama_seq_id)) {
            --skip_;
        } else if (at_ == part::skipped && size >= sizeof(llama_kv_cell_ext)) {
            const auto other = number<llama_kv_cell_ext>(src, size);
            cells_[seen_ - 1].y = other.y;
            cells_[seen_ - 1].x = other.x;
        } else if (at_ == part::head && ++heads_ == 4) {
            row_bytes_ = number<uint64_t>(src, size);
            at_ = part::rows;
        }
        if (at_ == part::skipped && skip_ == 0) {
            at_ = seen_ < cells_.size() ? part::position : part::head;
        }
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        bytes_ += size;
        if (at_ != part::rows || row_bytes_ == 0 || (first_ != nullptr && tensor != first_)) {
            at_ = at_ == part::rows ? part::end : at_;
            return;
        }
        first_ = tensor;
        for (size_t row = offset/row_bytes_, end = (offset + size)/row_bytes_; row < end && placed_ < cells_.size(); ++row) {
            cells_[placed_++].index = (uint32_t) row;
        }
    }

    size_t n_bytes() override { return bytes_; }

    std::vector<cell> cells() const { return placed_ == seen_ && placed_ == cells_.size() ? cells_ : std::vector<cell>(); }

private:
    enum class part { streams, count, position, sequences, skipped, head, rows, end };

    template <typename T> static T number(const void * src, size_t size) {
        T value {};
        if (size == sizeof value) {
            std::memcpy(&value, src, size);
        }
        return value;
    }

    part at_ = part::streams;
    uint32_t skip_ = 0;
    uint32_t heads_ = 0;
    size_t seen_ = 0;   // positions
    size_t placed_ = 0; // indices
    size_t bytes_ = 0;
    uint64_t row_bytes_ = 0;
    const ggml_tensor * first_ = nullptr;
    std::vector<cell> cells_;
};

template <typename C> std::vector<cell> cells_in(const C & cache, int32_t seq) {
    if constexpr (shows_cells<C>::value) {
        return shown_cells(cache, seq);
    } else {
        state_listener listener;
        cache.state_write(listener, seq);
        return listener.cells();
    }
}

// A stream that does not show its cells has one sequence alone here, or slots are refused.
template <typename C> bool is_free(const C & cache, int32_t seq, uint32_t index) {
    if constexpr (shows_cells<C>::value) {
        return cache.get_cells(seq).is_empty(index);
    } else {
        for (const auto & one : cells_in(cache, seq)) {
            if (one.index == index) {
                return false;
            }
        }
        return true;
    }
}

} // namespace

std::vector<cell> held_cells(const llama_kv_cache & cache, int32_t seq) { return cells_in(cache, seq); }

bool cell_is_free(const llama_kv_cache & cache, int32_t seq, uint32_t index) { return is_free(cache, seq, index); }

} // namespace kvt
