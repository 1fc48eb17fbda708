// What the fake GPU promises, checked without Ollama: `check LIBRARY CASE`, the library beside one of GGML's CPU libraries.
// One line a case; exit code 1 and a line that says FAILED where one does not hold. Settings are the environment's: the
// test that runs this (tests/engine/attention/test_fake_gpu_library.py) says which case wants which.
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

constexpr size_t kMib = 1 << 20;
int failures = 0;

#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::printf("FAILED %s:%d: %s\n", __FILE__, __LINE__, #condition);                                         \
            failures++;                                                                                                \
        }                                                                                                              \
    } while (false)

ggml_backend_reg_t registry;

ggml_backend_dev_t device(size_t index = 0) { return registry->iface.get_device(registry, index); }

// One tensor, in a buffer of its own.
struct Value {
    explicit Value(ggml_backend_buffer_type_t type, int64_t n = 64, int64_t rows = 1, ggml_type element = GGML_TYPE_F32) {
        context = ggml_init({4 * ggml_tensor_overhead(), nullptr, true});
        tensor = ggml_new_tensor_2d(context, element, n, rows);
        buffer = ggml_backend_buft_alloc_buffer(type, ggml_backend_buft_get_alloc_size(type, tensor));
        if (buffer) ggml_backend_tensor_alloc(buffer, tensor, ggml_backend_buffer_get_base(buffer));
    }
    ~Value() {
        free_buffer();
        ggml_free(context);
    }
    Value(const Value &) = delete;
    Value &operator=(const Value &) = delete;
    void free_buffer() {
        ggml_backend_buffer_free(buffer);
        buffer = nullptr;
    }
    void set(float value) {
        const std::vector<float> all(static_cast<size_t>(ggml_nelements(tensor)), value);
        ggml_backend_tensor_set(tensor, all.data(), 0, ggml_nbytes(tensor));
    }
    float get() const {
        float value = 0;
        ggml_backend_tensor_get(tensor, &value, 0, sizeof value);
        return value;
    }

    ggml_context *context;
    ggml_tensor *tensor;
    ggml_backend_buffer_t buffer;
};

// The graph target = source + source, without Ollama's scheduler.
struct Doubling {
    Doubling(ggml_tensor *source, ggml_tensor *target) {
        context = ggml_init({8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
        node = ggml_add(context, source, source);
        node->data = target->data;
        node->buffer = target->buffer;
        graph = ggml_new_graph(context);
        ggml_build_forward_expand(graph, node);
    }
    ~Doubling() { ggml_free(context); }
    Doubling(const Doubling &) = delete;
    Doubling &operator=(const Doubling &) = delete;
    void launch(ggml_backend_t stream) { stream->iface.graph_compute(stream, graph, -1); }

    ggml_context *context;
    ggml_tensor *node;
    ggml_cgraph *graph;
};

ggml_backend_t new_stream(size_t index = 0) { return ggml_backend_dev_init(device(index), nullptr); }

ggml_backend_buffer_type_t device_memory(size_t index = 0) { return ggml_backend_dev_buffer_type(device(index)); }

// The signal that ends a child which does this; 0: none.
int signal_of(const std::function<void()> &does) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (!std::freopen("/dev/null", "w", stderr)) _exit(1);
        does();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

size_t free_bytes() {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(device(), &free, &total);
    return free;
}

// ---- FAKEGPU_VRAM_MB=64

void memory() {
    EXPECT(free_bytes() == 64 * kMib);
    {
        Value half(device_memory(), 8 * kMib); // 32 MiB
        EXPECT(half.buffer && free_bytes() == 32 * kMib);
        EXPECT(std::isnan(half.get())); // never written
        half.set(2.0f);
        EXPECT(half.get() == 2.0f);
        EXPECT(!Value(device_memory(), 8 * kMib + 1).buffer);
        auto *bytes = static_cast<volatile char *>(half.tensor->data);
        EXPECT(signal_of([&] { (void) *bytes; }) == SIGSEGV);
        EXPECT(signal_of([&] { *bytes = 1; }) == SIGSEGV);
        void *stale = half.tensor->data;
        half.free_buffer();
        EXPECT(signal_of([&] { (void) *bytes; }) == SIGSEGV);
        Value next(device_memory(), 8 * kMib);
        EXPECT(next.tensor->data != stale);
    }
    EXPECT(free_bytes() == 64 * kMib);
    Value quantised(device_memory(), 32, 1, GGML_TYPE_Q8_0); // padded to 512 elements, with zeros
    char padding = 1;
    const size_t bytes = ggml_nbytes(quantised.tensor);
    quantised.buffer->iface.get_tensor(quantised.buffer, quantised.tensor, &padding, bytes, 1);
    EXPECT(padding == 0);
}

// What a kernel may not touch is a fault when it is launched.
void faults() {
    Value ours(device_memory()), target(device_memory()), host(ggml_backend_cpu_buffer_type()), other(device_memory(1));
    Value pinned(ggml_backend_dev_host_buffer_type(device()));
    const auto doubled = [&](Value &source, Value &into) {
        return signal_of([&] { // no thread survives a fork: a stream of its own
            Doubling(source.tensor, into.tensor).launch(new_stream());
        });
    };
    EXPECT(doubled(ours, target) == 0);
    EXPECT(doubled(pinned, target) == 0);
    EXPECT(doubled(host, target) == SIGABRT);
    EXPECT(doubled(ours, host) == SIGABRT);
    EXPECT(doubled(other, target) == SIGABRT);
    EXPECT(signal_of([&] {
               Doubling graph(ours.tensor, target.tensor);
               ours.free_buffer();
               graph.launch(new_stream());
           }) == SIGABRT);
    EXPECT(signal_of([&] { ggml_backend_dev_reset(device()); }) == SIGABRT);
}

// ---- FAKEGPU_VRAM_MB=64 FAKEGPU_FAIL_ALLOC=2,4

void failing() {
    std::vector<bool> there;
    for (int i = 0; i < 5; i++) there.push_back(Value(device_memory()).buffer != nullptr);
    EXPECT((there == std::vector<bool>{true, false, true, false, true}));
}

// ---- FAKEGPU_DELAY_US=200000,0: the first stream is late, by chance as FAKEGPU_SEED has it; the second is not

void streams() {
    ggml_backend_t late = new_stream(), prompt = new_stream();
    Value one(device_memory()), two(device_memory()), four(device_memory());
    one.set(1.0f);
    two.set(0.0f);
    four.set(0.0f);
    Doubling first(one.tensor, two.tensor), second(two.tensor, four.tensor);
    first.launch(late);
    EXPECT(two.get() == 0.0f); // neither launching nor reading waits
    second.launch(prompt);
    ggml_backend_synchronize(prompt);
    EXPECT(four.get() == 0.0f); // nobody said that it should wait
    ggml_backend_synchronize(late);
    EXPECT(two.get() == 2.0f);

    two.set(0.0f);
    ggml_backend_event_t event = ggml_backend_event_new(device());
    ggml_backend_event_wait(prompt, event); // never recorded: for nothing
    ggml_backend_synchronize(prompt);
    first.launch(late);
    ggml_backend_event_record(event, late);
    ggml_backend_event_wait(prompt, event);
    second.launch(prompt);
    ggml_backend_synchronize(prompt);
    EXPECT(four.get() == 4.0f);
    ggml_backend_event_free(event);

    // What was launched keeps its arguments; bytes of pageable memory were read when the copy was called, pinned ones are
    // read when it runs.
    Value pinned(ggml_backend_dev_host_buffer_type(device()));
    std::vector<float> pageable(64, 5.0f);
    auto *rows = static_cast<float *>(pinned.tensor->data);
    std::fill(rows, rows + 64, 6.0f);
    ggml_backend_tensor_set_async(late, one.tensor, pageable.data(), 0, ggml_nbytes(one.tensor));
    first.launch(late);
    ggml_backend_tensor_set_async(late, four.tensor, rows, 0, ggml_nbytes(four.tensor));
    std::fill(pageable.begin(), pageable.end(), 7.0f);
    std::fill(rows, rows + 64, 8.0f);
    first.node->data = four.tensor->data;
    ggml_backend_synchronize(late);
    EXPECT(one.get() == 5.0f && two.get() == 10.0f && four.get() == 8.0f);

    // Freeing waits for the streams, as cudaFree does.
    Doubling last(one.tensor, four.tensor);
    last.launch(late);
    one.free_buffer();
    EXPECT(four.get() == 10.0f);
    ggml_backend_free(prompt);
    ggml_backend_free(late);
}

// A copy between two devices is behind what computes its source, and before what reads its target.
void two_devices() {
    ggml_backend_t from = new_stream(0), to = new_stream(1);
    Value one(device_memory(0)), two(device_memory(0)), there(device_memory(1)), four(device_memory(1));
    one.set(1.0f);
    two.set(0.0f);
    there.set(0.0f);
    Doubling first(one.tensor, two.tensor), second(there.tensor, four.tensor);
    first.launch(from);
    EXPECT(to->iface.cpy_tensor_async(from, to, two.tensor, there.tensor));
    second.launch(to);
    ggml_backend_synchronize(to);
    EXPECT(four.get() == 4.0f);
    ggml_backend_free(from);
    ggml_backend_free(to);
}

} // namespace

int main(int argc, char **argv) {
    const std::map<std::string, void (*)()> cases = {
        {"memory", memory}, {"faults", faults}, {"failing", failing}, {"streams", streams}, {"two_devices", two_devices},
    };
    if (argc != 3 || !cases.count(argv[2])) {
        std::printf("usage: check LIBRARY CASE\n");
        return 2;
    }
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    const auto init = library ? reinterpret_cast<ggml_backend_init_t>(dlsym(library, "ggml_backend_init")) : nullptr;
    if (!init) {
        std::printf("FAILED: %s\n", dlerror());
        return 1;
    }
    registry = init();
    cases.at(argv[2])();
    std::printf("%s: %s\n", argv[2], failures ? "FAILED" : "ok");
    std::fflush(stdout);
    _exit(failures != 0); // streams of children's copies have no threads to join
}
