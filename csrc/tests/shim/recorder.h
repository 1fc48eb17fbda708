// A backend library of GGML in the place of libggml-cuda.so that computes nothing and records what it is told to do.
//   s0: graph a b c        stream 0 is given a graph of these nodes; views are left out
//   s0: graph k1>pinned    SET_ROWS, and where it writes
//   s0: graph a1<device2   FLASH_ATTN_EXT, and where its K lies: the third buffer of device memory that there was
//   s1: copy k1>device0+64 9   a copy of 9 bytes from the host, and where to
//   s0: move device1+0>device0+64 9   a copy of 9 bytes within the device
//   s1: record e0, s0: wait e0, s0: reserve ..., device 1: reset
#pragma once
#include "ggml-backend-impl.h"

#include <cstdint>
#include <string>
#include <vector>

struct Recorder {
    std::vector<std::string> lines;
    bool events = true;  // false: event_new returns nullptr
    bool pinned = true;  // false: "pinned" memory is the CPU's
    bool moves = true;   // false: nothing is copied within a device
    int unreserved = 0;  // how many graphs cannot be reserved
    bool broken = false; // true: no graph can be computed
    size_t largest = SIZE_MAX; // what is larger is no allocation of device memory
    int failing = -1;    // this allocation of device memory fails, counted from 0
    int allocations = 0; // of device memory, since the program began
    int live = 0;        // buffers of device memory

    // What csrc's kernels use, as libcuda.so.1 (driver.cpp).
    int driver = 13000;              // CUDA's version, as the driver tells it
    std::string refused;             // this call fails
    std::vector<std::string> loaded; // images, as they were given
    std::vector<std::string> calls;  // those that take or give back something
    int contexts = 0;                // that are held
};

// Exported by the library as `recorder`.
typedef Recorder *(*recorder_t)(void);
