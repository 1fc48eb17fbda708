#include "memory.h"
#include "settings.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>

namespace fakegpu {
namespace {

constexpr size_t kPage = 4096;
constexpr int kPoison = 0xff; // NaN as f16, bf16 and f32, and as the scale of quantised types

struct Range {
    size_t bytes;
    char *memory;
    int owner;
};

std::mutex mutex; // of everything here
std::map<uintptr_t, Range> ranges; // by address
long allocations = 0;

size_t pages(size_t bytes) { return std::max(kPage, (bytes + kPage - 1) / kPage * kPage); }

char *map(size_t bytes, int protection, void *at = nullptr) {
    const int fixed = at ? MAP_FIXED : 0;
    void *address = mmap(at, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
    return address == MAP_FAILED ? nullptr : static_cast<char *>(address);
}

// Address of new, poisoned memory; the mutex is held. `hidden`: the host may not touch it.
void *add(size_t bytes, int owner, bool hidden) {
    char *memory = map(bytes, PROT_READ | PROT_WRITE);
    char *address = memory && hidden ? map(bytes, PROT_NONE) : memory;
    if (!address) {
        if (memory) munmap(memory, bytes);
        return nullptr;
    }
    std::memset(memory, kPoison, bytes);
    ranges[reinterpret_cast<uintptr_t>(address)] = {bytes, memory, owner};
    return address;
}

// Returns how many bytes are gone; the mutex is held. Their addresses stay taken.
size_t remove(void *address, int owner) {
    const auto found = ranges.find(reinterpret_cast<uintptr_t>(address));
    if (found == ranges.end() || found->second.owner != owner) fault("%p is freed and was not allocated", address);
    const Range range = found->second;
    ranges.erase(found);
    map(range.bytes, PROT_NONE, address);
    if (range.memory != address) munmap(range.memory, range.bytes);
    return range.bytes;
}

} // namespace

void *DeviceMemory::allocate(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    const size_t rounded = pages(bytes);
    const std::vector<long> &failing = settings().failing_allocations;
    const bool fails = std::find(failing.begin(), failing.end(), ++allocations) != failing.end();
    void *address = fails || used_ + rounded > total_ ? nullptr : add(rounded, device_, !settings().host_visible);
    if (address) used_ += rounded;
    say("device %d: allocation %ld of %zu bytes%s, %zu of %zu used", device_, allocations, bytes,
        address ? "" : fails ? " fails" : " does not fit", used_, total_);
    return address;
}

void DeviceMemory::release(void *address) {
    std::lock_guard<std::mutex> lock(mutex);
    used_ -= remove(address, device_);
}

size_t DeviceMemory::used() const {
    std::lock_guard<std::mutex> lock(mutex);
    return used_;
}

void *pin(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    void *address = add(pages(bytes), kPinned, false);
    say("pinned: %zu bytes%s", bytes, address ? "" : " do not fit");
    return address;
}

void unpin(void *address) {
    std::lock_guard<std::mutex> lock(mutex);
    remove(address, kPinned);
}

bool find(const void *address, size_t bytes, Place *place) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto at = reinterpret_cast<uintptr_t>(address);
    auto range = ranges.upper_bound(at);
    if (range == ranges.begin()) return false;
    --range;
    const size_t offset = at - range->first;
    if (offset > range->second.bytes || bytes > range->second.bytes - offset) return false;
    *place = {range->second.owner, range->second.memory + offset};
    return true;
}

std::vector<Reachable> reachable_by(int device) {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<Reachable> found;
    for (const auto &[address, range] : ranges)
        if (range.owner == device || range.owner == kPinned)
            found.push_back({reinterpret_cast<const char *>(address), range.memory, range.bytes});
    return found;
}

char *bytes_at(const void *address, size_t bytes, const char *what) {
    Place place;
    if (!find(address, bytes, &place)) fault("%s: %zu bytes at %p are no memory of a device", what, bytes, address);
    return place.bytes;
}

} // namespace fakegpu
