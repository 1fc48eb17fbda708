// csrc's attention kernels for the fake GPU: the device code itself, run by csrc's emulation over the fake's memory.
#pragma once
#include "cuda/problem.h"

#include <functional>
#include <map>
#include <string>

namespace fakegpu {

struct Grid {
    unsigned x, y, z, threads, shared_bytes;
};

struct Kernel {
    // Takes the arguments as they are at the call, as a launch does; what is returned runs the threads.
    std::function<std::function<void()>(void **parameters)> take;
};

struct Image {
    paged_attn::gpu::ImageInfo info;
    std::map<std::string, Kernel> kernels;
};

constexpr int kArch = 89; // as device.cpp says of the devices

// The image whose file has this content: one line, as in "emulated 64x64-f16-f16-rows2-align16". nullptr: there is none.
Image *find_image(const std::string &content);

// All threads of a grid, over what the device may touch. What the emulation finds wrong is a fault.
void run_kernel(int device, const Grid &grid, const std::function<void()> &threads);

} // namespace fakegpu
