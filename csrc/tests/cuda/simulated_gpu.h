// A GPU that exists only as queues: streams, events, copies and kernels as a discrete simulation behind the driver's
// table of functions.
//
// Host calls append to queues. Between any two calls a random number of steps runs: the head of some stream whose turn
// has come starts or ends. A copy overwrites its target with poison when it starts and with the data when it ends; a
// kernel looks at what it reads when it starts and when it ends. So whatever the ring fails to order shows up in some
// random order as a kernel that reads poison or the wrong piece. Beside it runs a clock: every operation takes its
// time, streams and the two engines (copies, kernels) one after another, which gives the time of the whole token.
#pragma once
#include "cuda/host/driver.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace paged_attn::gpu::test {

// What the simulated driver does wrong on purpose, as if the ring had called it so.
enum class Wrong {
    nothing,
    copy_does_not_wait,
    compute_does_not_wait,
    filled_before_copy,
    filled_after_next_copy,
    drained_before_kernel,
};

class SimulatedGpu {
public:
    static inline SimulatedGpu *current = nullptr;
    explicit SimulatedGpu(unsigned seed = 1, Wrong wrong_ = Wrong::nothing)
        : wrong(wrong_), random_(seed), most_steps_(seed % 5) {
        current = this;
    }

    Wrong wrong;
    double copy_s_per_byte = 0.0, kernel_s = 0.0;
    int major = 8, minor = 0, version = 12000, n_gpus = 1;
    int n_multiprocessors = 4, blocks_per_multiprocessor = 2;
    size_t memory_left = 1u << 30;
    std::string fail_at;            // this call ...
    int fail_after = 0;             // ... this number of good ones, answers 719 (a failed launch)
    std::vector<std::string> calls; // what was queued, in words
    std::vector<std::string> violations;
    int n_events = 0, n_streams = 0, n_allocations = 0, n_contexts = 0, n_modules = 0, n_pushed = 0;
    std::map<std::string, std::function<void(void **)>> kernels; // of the image: name -> what a launch does at once
    std::vector<char> image_info;                                // the image's variable pa_image
    std::vector<std::string> launches;

    using Stream = std::string *; // a handle points to the stream's name
    CuStream stream(const std::string &name) {
        names_.push_back(std::make_unique<std::string>(name));
        return names_.back().get();
    }

    // A kernel that reads `bytes` at `at` and must find `expected` there for as long as it runs.
    void read_kernel(CuStream stream, CuAddress at, const char *expected, size_t bytes) {
        const Operation op{Operation::kernel, stream, 0, at, expected, bytes, false};
        if (wrong == Wrong::drained_before_kernel) held_kernel_.push_back(op);
        else append(op);
    }
    void finish() {
        while (step()) {}
        for (const auto &[stream, queue] : queues_)
            if (!queue.empty()) violations.push_back("a stream waits for ever");
    }
    bool idle(const std::string &stream) const { // nothing of that name is left to do
        for (const auto &[of, queue] : queues_)
            if (name(of) == stream && !queue.empty()) return false;
        return true;
    }
    double seconds() const { return end_; }
    double copy_seconds() const { return copy_total_; }
    double kernel_seconds() const { return kernel_total_; }

    Driver driver();

    // ---- behind the table
    CuResult enter(const char *call) {
        if (fail_at == call && fail_after-- == 0) {
            fail_at.clear();
            return 719;
        }
        return kCuSuccess;
    }
    void copy(CuAddress to, const void *from, size_t bytes, CuStream stream) {
        const Operation op{Operation::copy, stream, 0, to, static_cast<const char *>(from), bytes, false};
        if (wrong == Wrong::filled_before_copy && is_copy_stream(stream)) held_copy_.push_back(op);
        else append(op);
        if (!held_records_.empty()) { // the ancestor's mistake: recorded only after the next copy
            const CuEvent late = held_records_.front();
            held_records_.clear();
            record_now(late, stream);
        }
    }
    void record(CuEvent event, CuStream stream) {
        if (wrong == Wrong::filled_after_next_copy && is_copy_stream(stream)) {
            held_records_.push_back(event);
            return;
        }
        record_now(event, stream);
        for (const Operation &op : held_copy_) append(op);
        held_copy_.clear();
        if (!is_copy_stream(stream)) {
            for (const Operation &op : held_kernel_) append(op);
            held_kernel_.clear();
        }
    }
    void wait(CuStream stream, CuEvent event) {
        if (wrong == (is_copy_stream(stream) ? Wrong::copy_does_not_wait : Wrong::compute_does_not_wait)) return;
        const int recorded = events_[event].recorded; // as of now: 0, never recorded, waits for nothing
        calls.push_back(name(stream) + " waits " + event_name(event) + "#" + std::to_string(recorded));
        append({Operation::wait, stream, event, 0, nullptr, static_cast<size_t>(recorded), false});
    }
    void synchronize(CuStream stream) {
        while (!queues_[stream].empty() && step()) {}
        if (!queues_[stream].empty()) violations.push_back("a stream waits for ever");
    }
    CuEvent new_event() {
        n_events++;
        const auto made = reinterpret_cast<CuEvent>(static_cast<uintptr_t>(++last_event_));
        return made;
    }
    void forget_event(CuEvent event) {
        n_events--;
        for (const auto &[stream, queue] : queues_)
            for (const Operation &op : queue)
                if (op.event == event) violations.push_back("an event destroyed while a stream needs it");
    }
    void forget_memory(CuAddress address) {
        n_allocations--;
        for (const auto &[stream, queue] : queues_)
            for (const Operation &op : queue)
                if (op.kind != Operation::wait && op.kind != Operation::record)
                    violations.push_back("memory freed while in use");
        delete[] reinterpret_cast<char *>(address);
    }
    void some_steps() {
        for (unsigned n = most_steps_ == 0 ? 0 : random_() % most_steps_; n > 0 && step(); n--) {}
    }

private:
    struct Operation {
        enum Kind { copy, record, wait, kernel } kind;
        CuStream stream;
        CuEvent event;
        CuAddress at;
        const char *data;
        size_t size; // bytes; of a record or wait: which record of the event
        bool started;
    };
    struct Event {
        int recorded = 0, done = 0;
        std::map<int, double> at; // when each record is reached, by the clock
    };

    static std::string name(CuStream stream) { return *static_cast<std::string *>(stream); }
    static bool is_copy_stream(CuStream stream) { return name(stream) == "copy"; }
    static std::string event_name(CuEvent event) { // made in pairs, slot by slot
        const auto n = reinterpret_cast<uintptr_t>(event) - 1;
        return (n % 2 ? "drained" : "filled") + std::to_string(n / 2);
    }
    void record_now(CuEvent event, CuStream stream) {
        Event &e = events_[event];
        calls.push_back(name(stream) + " records " + event_name(event));
        append({Operation::record, stream, event, 0, nullptr, static_cast<size_t>(++e.recorded), false});
    }
    void append(const Operation &op) {
        if (op.kind == Operation::copy) calls.push_back(name(op.stream) + " copies");
        if (op.kind == Operation::kernel) calls.push_back(name(op.stream) + " runs");
        keep_time(op);
        queues_[op.stream].push_back(op);
        some_steps();
    }
    void keep_time(const Operation &op) {
        double &now = clocks_[op.stream];
        Event &event = events_[op.event];
        if (op.kind == Operation::wait && op.size > 0) now = std::max(now, event.at[static_cast<int>(op.size)]);
        if (op.kind == Operation::record) event.at[static_cast<int>(op.size)] = now;
        if (op.kind == Operation::copy || op.kind == Operation::kernel) {
            const bool is_copy = op.kind == Operation::copy;
            const double takes = is_copy ? copy_s_per_byte * static_cast<double>(op.size) : kernel_s;
            double &engine = is_copy ? copy_engine_ : kernel_engine_;
            now = engine = std::max(now, engine) + takes;
            (is_copy ? copy_total_ : kernel_total_) += takes;
        }
        end_ = std::max(end_, now);
    }
    bool can_go(const Operation &op) {
        return op.kind != Operation::wait || events_[op.event].done >= static_cast<int>(op.size);
    }
    bool step() {
        std::vector<std::deque<Operation> *> ready;
        for (auto &[stream, queue] : queues_)
            if (!queue.empty() && can_go(queue.front())) ready.push_back(&queue);
        if (ready.empty()) return false;
        std::deque<Operation> &queue = *ready[random_() % ready.size()];
        Operation &op = queue.front();
        char *target = reinterpret_cast<char *>(op.at);
        const bool whole = op.kind == Operation::wait || op.kind == Operation::record;
        if (op.kind == Operation::record)
            events_[op.event].done = std::max(events_[op.event].done, static_cast<int>(op.size));
        if (op.kind == Operation::copy && !op.started) std::memset(target, 0xEE, op.size);
        if (op.kind == Operation::copy && op.started) std::memcpy(target, op.data, op.size);
        if (op.kind == Operation::kernel && std::memcmp(target, op.data, op.size) != 0)
            violations.push_back(op.started ? "a kernel's data changed under it"
                                            : "a kernel read what was not there yet");
        if (whole || op.started) queue.pop_front();
        else op.started = true;
        return true;
    }

    std::mt19937 random_;
    unsigned most_steps_; // 0: the GPU stands still until somebody waits for it
    std::vector<std::unique_ptr<std::string>> names_;
    std::map<CuStream, std::deque<Operation>> queues_;
    std::map<CuEvent, Event> events_;
    std::map<CuStream, double> clocks_;
    std::vector<Operation> held_copy_, held_kernel_;
    std::vector<CuEvent> held_records_;
    int last_event_ = 0;
    double copy_engine_ = 0.0, kernel_engine_ = 0.0, copy_total_ = 0.0, kernel_total_ = 0.0, end_ = 0.0;
};

inline Driver SimulatedGpu::driver() {
    using Gpu = SimulatedGpu;
    Driver d;
#define PA_ENTER(call)                                                                                                 \
    if (const CuResult error = Gpu::current->enter(#call); error != kCuSuccess) return error
    d.cuInit = [](unsigned) -> CuResult {
        PA_ENTER(cuInit);
        return Gpu::current->n_gpus > 0 ? kCuSuccess : kCuNoDevice;
    };
    d.cuDriverGetVersion = [](int *v) -> CuResult { return *v = Gpu::current->version, kCuSuccess; };
    d.cuGetErrorString = [](CuResult, const char **text) -> CuResult { return *text = "simulated error", kCuSuccess; };
    d.cuDeviceGetCount = [](int *n) -> CuResult { return *n = Gpu::current->n_gpus, kCuSuccess; };
    d.cuDeviceGet = [](CuDevice *device, int ordinal) -> CuResult { return *device = ordinal, kCuSuccess; };
    d.cuDeviceGetAttribute = [](int *value, int which, CuDevice) -> CuResult {
        *value = which == kCuAttributeMajor   ? Gpu::current->major
                 : which == kCuAttributeMinor ? Gpu::current->minor
                                              : Gpu::current->n_multiprocessors;
        return kCuSuccess;
    };
    d.cuDevicePrimaryCtxRetain = [](CuContext *c, CuDevice) -> CuResult {
        PA_ENTER(cuDevicePrimaryCtxRetain);
        Gpu::current->n_contexts++;
        return *c = Gpu::current, kCuSuccess;
    };
    d.cuDevicePrimaryCtxRelease_v2 = [](CuDevice) -> CuResult { return Gpu::current->n_contexts--, kCuSuccess; };
    d.cuCtxPushCurrent_v2 = [](CuContext) -> CuResult {
        PA_ENTER(cuCtxPushCurrent_v2);
        return Gpu::current->n_pushed++, kCuSuccess;
    };
    d.cuCtxPopCurrent_v2 = [](CuContext *) -> CuResult { return Gpu::current->n_pushed--, kCuSuccess; };
    d.cuModuleLoadData = [](CuModule *module, const void *image) -> CuResult {
        PA_ENTER(cuModuleLoadData);
        if (std::strcmp(static_cast<const char *>(image), "for another GPU") == 0) return kCuNoBinaryForGpu;
        Gpu::current->n_modules++;
        return *module = Gpu::current, kCuSuccess;
    };
    d.cuModuleUnload = [](CuModule) -> CuResult { return Gpu::current->n_modules--, kCuSuccess; };
    d.cuModuleGetFunction = [](CuFunction *function, CuModule, const char *name) -> CuResult {
        PA_ENTER(cuModuleGetFunction);
        const auto found = Gpu::current->kernels.find(name);
        if (found == Gpu::current->kernels.end()) return kCuNotFound;
        return *function = const_cast<std::string *>(&found->first), kCuSuccess;
    };
    d.cuModuleGetGlobal_v2 = [](CuAddress *at, size_t *bytes, CuModule, const char *) -> CuResult {
        *at = reinterpret_cast<CuAddress>(Gpu::current->image_info.data());
        *bytes = Gpu::current->image_info.size();
        return *bytes ? kCuSuccess : kCuNotFound;
    };
    d.cuFuncSetAttribute = [](CuFunction, int, int) -> CuResult {
        PA_ENTER(cuFuncSetAttribute);
        return kCuSuccess;
    };
    d.cuOccupancyMaxActiveBlocksPerMultiprocessor = [](int *n, CuFunction, int, size_t) -> CuResult {
        return *n = Gpu::current->blocks_per_multiprocessor, kCuSuccess;
    };
    d.cuMemAlloc_v2 = [](CuAddress *at, size_t bytes) -> CuResult {
        PA_ENTER(cuMemAlloc_v2);
        if (bytes > Gpu::current->memory_left) return kCuOutOfMemory;
        Gpu::current->n_allocations++;
        char *memory = new char[bytes];
        std::memset(memory, 0xFF, bytes);
        return *at = reinterpret_cast<CuAddress>(memory), kCuSuccess;
    };
    d.cuMemFree_v2 = [](CuAddress at) -> CuResult { return Gpu::current->forget_memory(at), kCuSuccess; };
    d.cuMemcpyDtoH_v2 = [](void *to, CuAddress from, size_t bytes) -> CuResult {
        return std::memcpy(to, reinterpret_cast<const void *>(from), bytes), kCuSuccess;
    };
    d.cuMemcpyHtoDAsync_v2 = [](CuAddress to, const void *from, size_t bytes, CuStream stream) -> CuResult {
        PA_ENTER(cuMemcpyHtoDAsync_v2);
        return Gpu::current->copy(to, from, bytes, stream), kCuSuccess;
    };
    d.cuLaunchKernel = [](CuFunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                          unsigned shared, CuStream stream, void **parameters, void **) -> CuResult {
        PA_ENTER(cuLaunchKernel);
        Gpu &gpu = *Gpu::current;
        gpu.synchronize(stream);
        const auto &name = *static_cast<const std::string *>(function);
        gpu.launches.push_back(name + " " + std::to_string(x) + "x" + std::to_string(y) + "x" + std::to_string(z) +
                               " of " + std::to_string(threads) + ", " + std::to_string(shared) + " bytes");
        return gpu.kernels[name](parameters), kCuSuccess;
    };
    d.cuStreamCreate = [](CuStream *stream, unsigned flags) -> CuResult {
        PA_ENTER(cuStreamCreate);
        if (flags != kCuStreamNonBlocking) Gpu::current->violations.push_back("a stream that blocks others");
        Gpu::current->n_streams++;
        return *stream = Gpu::current->stream("copy"), kCuSuccess;
    };
    d.cuStreamDestroy_v2 = [](CuStream) -> CuResult { return Gpu::current->n_streams--, kCuSuccess; };
    d.cuStreamSynchronize = [](CuStream stream) -> CuResult { return Gpu::current->synchronize(stream), kCuSuccess; };
    d.cuStreamWaitEvent = [](CuStream stream, CuEvent event, unsigned) -> CuResult {
        PA_ENTER(cuStreamWaitEvent);
        return Gpu::current->wait(stream, event), kCuSuccess;
    };
    d.cuEventCreate = [](CuEvent *event, unsigned flags) -> CuResult {
        PA_ENTER(cuEventCreate);
        if (flags != kCuEventDisableTiming) Gpu::current->violations.push_back("an event that keeps time");
        return *event = Gpu::current->new_event(), kCuSuccess;
    };
    d.cuEventRecord = [](CuEvent event, CuStream stream) -> CuResult {
        PA_ENTER(cuEventRecord);
        return Gpu::current->record(event, stream), kCuSuccess;
    };
    d.cuEventSynchronize = [](CuEvent) -> CuResult { return Gpu::current->finish(), kCuSuccess; };
    d.cuEventDestroy_v2 = [](CuEvent event) -> CuResult { return Gpu::current->forget_event(event), kCuSuccess; };
#undef PA_ENTER
    return d;
}

} // namespace paged_attn::gpu::test
