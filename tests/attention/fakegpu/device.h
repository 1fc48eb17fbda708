// A device as GGML sees it, what it is made of, and GGML's CPU backend, which does its work.
#pragma once
#include "memory.h"
#include "stream.h"

#include "ggml-backend-impl.h"

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace fakegpu {

struct Device {
    // `number` counts all devices, visible or not; `name` is CUDA0 for the first visible one.
    Device(int number, std::string name, size_t vram_bytes, ggml_backend_reg_t registry);

    // Until nothing is left to do on any of its streams.
    void synchronize();

    const int number;
    const std::string name, id, pci;
    DeviceMemory memory;
    ggml_backend_device ggml{};
    ggml_backend_buffer_type buffer_type{};

    std::mutex mutex; // of what follows
    std::set<Stream *> streams;
    size_t streams_made = 0;
};

// Those that are visible, for as long as the process lives.
std::vector<std::unique_ptr<Device>> &devices();

inline Device &device_of(ggml_backend_dev_t device) { return *static_cast<Device *>(device->context); }

// buffers.cpp
ggml_backend_buffer_type buffer_type_of(Device &device);
ggml_backend_buffer_type_t pinned_buffer_type();
bool is_device_buffer_type(ggml_backend_buffer_type_t type);

// backend.cpp: a stream of a device, as GGML sees it
ggml_backend_t new_backend(ggml_backend_dev_t device);
Event &event_of(ggml_backend_event_t event);

// cpu.cpp: the best of GGML's CPU libraries beside this library, or in the folder above. nullptr: there is none.
ggml_backend_dev_t cpu_device();

} // namespace fakegpu
