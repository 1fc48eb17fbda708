// Memory that runs out: the n-th allocation of the library fails. What a test itself allocates in its main loop is not counted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace allocations {

inline std::atomic<long> left { -1 }; // until one fails; below 0: none does
inline thread_local bool counted = true; // threads of the library begin so

// In the main loop: what is allocated while it lives is the library's.
struct of_library {
    of_library() { counted = true; }
    ~of_library() { counted = false; }
};

inline void count() {
    if (counted && left.load() >= 0 && left.fetch_sub(1) == 0) {
        throw std::bad_alloc();
    }
}

inline void * take(size_t bytes, size_t alignment) {
    count();
    void * at = alignment > alignof(std::max_align_t) ? std::aligned_alloc(alignment, (bytes + alignment - 1)/alignment*alignment)
                                                      : std::malloc(bytes > 0 ? bytes : 1);
    if (at == nullptr) {
        throw std::bad_alloc();
    }
    return at;
}

} // namespace allocations

#pragma GCC diagnostic ignored "-Wmismatched-new-delete" // both are here, and inlined one by one

void * operator new(size_t bytes) { return allocations::take(bytes, 0); }
void * operator new[](size_t bytes) { return allocations::take(bytes, 0); }
void * operator new(size_t bytes, std::align_val_t alignment) { return allocations::take(bytes, (size_t) alignment); }
void operator delete(void * at) noexcept { std::free(at); }
void operator delete[](void * at) noexcept { std::free(at); }
void operator delete(void * at, size_t) noexcept { std::free(at); }
void operator delete[](void * at, size_t) noexcept { std::free(at); }
void operator delete(void * at, std::align_val_t) noexcept { std::free(at); }
void operator delete(void * at, size_t, std::align_val_t) noexcept { std::free(at); }
