// Memory that the devices of a process have, and pinned memory of the host.
//
// The address that GGML gets for device memory is one that nobody may touch (PROT_NONE): a host that reads or writes it
// is killed, at any time. Kernels and copies reach the bytes at another address (`bytes_at`). Memory that nobody has
// written yet is NaN in every type; memory that was freed faults, on host and device, and its addresses are never used
// again.
#pragma once
#include <cstddef>
#include <vector>

namespace fakegpu {

constexpr int kPinned = -1; // the owner of pinned memory, which every device may access

// One device's memory, of a fixed size. Any thread may call.
class DeviceMemory {
public:
    DeviceMemory(int device, size_t total_bytes) : device_(device), total_(total_bytes) {}

    // nullptr: no room, or this allocation is to fail. Rounded up to whole pages of 4 KiB.
    void *allocate(size_t bytes);
    // Nothing on the device may still use it.
    void release(void *address);
    size_t total() const { return total_; }
    size_t used() const;

private:
    const int device_;
    const size_t total_;
    size_t used_ = 0;
};

// Pinned memory of the host; nullptr: there is none.
void *pin(size_t bytes);
void unpin(void *address);

// Where a range of addresses that GGML knows lies.
struct Place {
    int owner;   // a device's number, or kPinned
    char *bytes; // what kernels and copies read and write
};

// False: it is not, or not as a whole, in memory of a device or pinned.
bool find(const void *address, size_t bytes, Place *place);

// A range of addresses that a device may touch, and where its bytes lie.
struct Reachable {
    const char *address, *memory;
    size_t bytes;
};

// Memory of the device, and pinned memory, as it is now.
std::vector<Reachable> reachable_by(int device);

// `find`, where anything else is a fault; `what` is for its message.
char *bytes_at(const void *address, size_t bytes, const char *what);

} // namespace fakegpu
