// What a test chooses, from the environment of the process that loads the library. Lists are comma-separated.
//
//   FAKEGPU_VRAM_MB       memory of each device, MiB; as many devices as numbers (1024: one device)
//   FAKEGPU_DELAY_US      of each stream of a device, in the order in which they are made: a job begins up to so many
//                         microseconds after it could; the last number is that of all further streams (0)
//   FAKEGPU_SEED          of those delays (1)
//   FAKEGPU_FAIL_ALLOC    these allocations of device memory fail, counted from 1 over the process (none)
//   FAKEGPU_FAIL_LAUNCH   these launches of csrc's kernels fail, counted from 1 over the process (none)
//   FAKEGPU_MULTIPROCESSORS  of each device, each of which holds two blocks of csrc's kernels (3)
//   FAKEGPU_HOST_VISIBLE  1: the host may access device memory, as that of an integrated GPU, or pinned memory (0)
//   FAKEGPU_LOG           file that gets a line for every allocation, graph, fault and copy out of pinned memory, and for
//                         every source of attention that no device reads (none)
//   CUDA_VISIBLE_DEVICES  numbers or ids of the devices that there are, as with CUDA (all)
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace fakegpu {

struct Settings {
    std::vector<long> vram_mib;
    std::vector<long> delay_us;
    unsigned seed;
    std::vector<long> failing_allocations, failing_launches;
    long multiprocessors;
    bool host_visible;
    std::optional<std::vector<std::string>> visible; // none: all devices are
};

// Read once, at the first call.
const Settings &settings();

// A line of the log.
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

// What a real GPU answers with a fault, or with garbage: said in the log and on stderr, then the process is aborted.
[[noreturn]] void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

} // namespace fakegpu
