#include "kvt_pinned.h"

#include "kvt_cache.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

namespace kvt {

namespace {

class pinned : public block_memory {
public:
    explicit pinned(ggml_backend_buffer_type_t type) : type_(type) {}

    char * take(size_t bytes) noexcept override {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto found = std::find_if(free_.begin(), free_.end(), [bytes](ggml_backend_buffer_t one) { return ggml_backend_buffer_get_size(one) >= bytes; });
        ggml_backend_buffer_t one = nullptr;
        if (found != free_.end()) {
            one = *found;
            free_.erase(found);
        } else if (bytes_ + bytes <= most_pinned_bytes && (one = ggml_backend_buft_alloc_buffer(type_, bytes)) != nullptr) {
            bytes_ += bytes;
        }
        if (one == nullptr) {
            return nullptr;
        }
        try {
            lent_.push_back(one);
            return static_cast<char *>(ggml_backend_buffer_get_base(one));
        } catch (const std::exception &) { // there is no memory for the list
            ggml_backend_buffer_free(one);
            return nullptr;
        }
    }

    void give(char * at) noexcept override {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto one = std::find_if(lent_.begin(), lent_.end(), [at](ggml_backend_buffer_t each) { return ggml_backend_buffer_get_base(each) == at; });
        ggml_backend_buffer_t back = *one;
        lent_.erase(one);
        try {
            free_.push_back(back);
        } catch (const std::exception &) {
            ggml_backend_buffer_free(back);
        }
    }

private:
    const ggml_backend_buffer_type_t type_;
    std::mutex mutex_;
    std::vector<ggml_backend_buffer_t> free_;
    std::vector<ggml_backend_buffer_t> lent_;
    size_t bytes_ = 0;
};

} // namespace

std::shared_ptr<block_memory> pinned_memory(llama_context * ctx) {
    std::string why;
    const auto parts = parts_of(ctx, why);
    if (parts.rows == nullptr) {
        return nullptr;
    }
    for (const auto & plane : planes_of(*parts.rows, 0, parts.has_v, why)) {
        ggml_backend_buffer_t rows = plane.tensor->buffer;
        if (rows == nullptr || ggml_backend_buffer_is_host(rows)) {
            continue;
        }
        ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(rows));
        ggml_backend_buffer_type_t type = device != nullptr ? ggml_backend_dev_host_buffer_type(device) : nullptr;
        return type != nullptr ? std::make_shared<pinned>(type) : nullptr;
    }
    return nullptr;
}

} // namespace kvt
