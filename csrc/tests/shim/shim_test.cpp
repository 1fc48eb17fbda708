// libggml-cuda-tiering.so in front of a library that records (recorder.h): what it is told, and in which order.
// SHIM_TEST_FOLDER has libggml-cuda-tiering.so and, as libggml-cuda.so, the recorder.
#include "rig.h"

namespace {

const Lines kSequential = {
    "S0: graph k0rows k0>pinned v0rows v0>pinned",
    "S0: copy k0>D0+512 1024",
    "S0: copy v0>D1+512 1024",
    "S0: graph a0<D0",
    "S0: graph k1rows k1>pinned v1rows v1>pinned",
    "S0: copy k1>D0+512 1024",
    "S0: copy v1>D1+512 1024",
    "S0: graph a1<D0",
};

} // namespace

TEST(it_is_off_unless_the_variable_is_1) {
    for (const char *value : {"0", "", "true", "11"}) {
        setenv("OLLAMA_PAGED_ATTN", value, 1);
        EXPECT(library.score() == 0, "%s", value);
    }
    unsetenv("OLLAMA_PAGED_ATTN");
    EXPECT(library.score() == 0, "unset");
    setenv("OLLAMA_PAGED_ATTN", "1", 1);
    EXPECT(library.score() == 1, "1");
}

TEST(what_is_not_ours_is_the_stock_librarys) {
    EXPECT(std::string(library.reg->iface.get_name(library.reg)) == "CUDA", "name");
    EXPECT(library.reg->iface.get_device_count(library.reg) == 2, "count");
    EXPECT(library.reg->iface.get_proc_address(library.reg, "stock_function") == library.recorder, "function");
    EXPECT(library.reg->iface.get_proc_address(library.reg, "other") == nullptr, "no function");
    EXPECT(std::string(ggml_backend_dev_name(device(1))) == "CUDA1", "device name");
    EXPECT(device()->iface.offload_op == nullptr && device()->iface.get_memory == nullptr, "members that stock lacks");
    EXPECT(!ggml_backend_dev_supports_buft(device(0), paged_type(1)), "another device's K/V");
    EXPECT(ggml_backend_dev_supports_buft(device(1), paged_type(1)), "its own K/V");
    EXPECT(ggml_backend_buft_get_device(paged_type(1)) == device(1), "device of the type");
    Backend backend = new_backend();
    EXPECT(backend->iface.graph_optimize == nullptr, "a graph that is cut must not be spread over streams");
    EXPECT(backend->iface.get_tensor_async == nullptr, "a member that stock lacks");
}

TEST(a_copy_between_devices_reaches_the_backends_inside) {
    Backend one = new_backend("1", 0), other = new_backend("1", 1);
    Model model;
    const Lines lines = recorded([&] {
        EXPECT(other->iface.cpy_tensor_async(one.get(), other.get(), model.rows, model.rows), "not known there");
    });
    EXPECT(lines.size() == 1 && lines[0].find("copy from s") != std::string::npos, "%s", join(lines).c_str());
}

TEST(a_graph_without_paged_layers_is_handed_on_whole) {
    Model model;
    for (int i = 0; i < 2; i++) model.layer(i, ggml_backend_dev_buffer_type(device()));
    Backend backend = new_backend();
    EXPECT_LINES(computed(model, backend.get()),
                 {"S0: graph k0rows k0>D0 v0rows v0>D1 a0<D0 k1rows k1>D2 v1rows v1>D3 a1<D2"});
}

TEST(sequential_copies_the_rows_that_are_seen_between_set_rows_and_attention) {
    Model model;
    for (int i = 0; i < 2; i++) model.layer(i, paged_type());
    Backend backend = new_backend("0");
    EXPECT_LINES(warm(model, backend.get()), kSequential);
}

TEST(hot_layers_are_computed_with_what_comes_before_a_paged_one) {
    Model model;
    model.layer(0, ggml_backend_dev_buffer_type(device()));
    model.layer(1, paged_type());
    model.layer(2, ggml_backend_dev_buffer_type(device()));
    Backend backend = new_backend("0");
    EXPECT_LINES(warm(model, backend.get()),
                 {"S0: graph k0rows k0>D0 v0rows v0>D1 a0<D0 k1rows k1>pinned v1rows v1>pinned",
                  "S0: copy k1>D2+512 1024", "S0: copy v1>D3+512 1024", "S0: graph a1<D2",
                  "S0: graph k2rows k2>D4 v2rows v2>D5 a2<D4"});
}

TEST(prefetching_orders_copies_writes_and_attention_by_events) {
    Model model;
    for (int i = 0; i < 3; i++) model.layer(i, paged_type());
    Backend backend = new_backend();
    EXPECT_LINES(warm(model, backend.get()),
                 {
                     "S0: record E0", "S1: wait E0", // after all that was computed before
                     "S1: copy k0>D0+512 1024", "S1: copy v0>D1+512 1024", "S1: record E1",
                     "S1: copy k1>D2+512 1024", "S1: copy v1>D3+512 1024", "S1: record E2",
                     "S0: graph k0rows", "S0: wait E1", "S0: graph k0>pinned k0>D0",
                     "S0: graph v0rows", "S0: graph v0>pinned v0>D1", "S0: graph a0<D0", "S0: record E3",
                     "S1: wait E3", "S1: copy k2>D0+512 1024", "S1: copy v2>D1+512 1024", "S1: record E1",
                     "S0: graph k1rows", "S0: wait E2", "S0: graph k1>pinned k1>D2",
                     "S0: graph v1rows", "S0: graph v1>pinned v1>D3", "S0: graph a1<D2", "S0: record E4",
                     "S0: graph k2rows", "S0: wait E1", "S0: graph k2>pinned k2>D0",
                     "S0: graph v2rows", "S0: graph v2>pinned v2>D1", "S0: graph a2<D0", "S0: record E3",
                 });
}

TEST(one_layer_is_copied_ahead_too) {
    Model model;
    model.layer(0, paged_type());
    Backend backend = new_backend();
    const Lines lines = warm(model, backend.get());
    EXPECT(lines.size() > 3 && lines[2] == "S1: copy k0>D0+512 1024", "%s", join(lines).c_str());
}

TEST(without_events_it_is_sequential) {
    Model model;
    for (int i = 0; i < 2; i++) model.layer(i, paged_type());
    library.recorder->events = false;
    Backend backend = new_backend();
    EXPECT_LINES(warm(model, backend.get()), kSequential);
    library.recorder->events = true;
}

TEST(where_the_plan_has_no_room_for_copies_ahead_it_is_sequential) {
    Model model;
    for (int i = 0; i < 2; i++) model.layer(i, paged_type());
    paged_type(0, false, false);
    Backend backend = new_backend();
    EXPECT_LINES(warm(model, backend.get()), kSequential);
    EXPECT(backend->iface.buffer_size(backend.get()) == 1000 + 2 * kCells * kRowBytes, "one layer and stock's own");
    paged_type(0, false, true);
}

TEST(rows_are_copied_in_chunks_of_the_size_that_is_set) {
    Model model;
    model.layer(0, paged_type()); // 32 cells are seen
    setenv("OLLAMA_PAGED_CHUNK_SIZE", "10", 1);
    Backend backend = new_backend("0");
    EXPECT_LINES(warm(model, backend.get()),
                 {"S0: graph k0rows k0>pinned v0rows v0>pinned", "S0: copy k0>D0+512 320", "S0: copy k0>D0+832 320",
                  "S0: copy k0>D0+1152 320", "S0: copy k0>D0+1472 64", "S0: copy v0>D1+512 320",
                  "S0: copy v0>D1+832 320", "S0: copy v0>D1+1152 320", "S0: copy v0>D1+1472 64", "S0: graph a0<D0"});
    for (const char *no_number : {"-1", "0", "10x", "many"}) {
        said.clear();
        setenv("OLLAMA_PAGED_CHUNK_SIZE", no_number, 1);
        Backend other = new_backend("0");
        EXPECT(said.find(no_number) != std::string::npos, "%s", said.c_str());
        const Lines lines = warm(model, other.get());
        EXPECT(lines.size() == 4 && lines[1] == "S0: copy k0>D0+512 1024", "%s", join(lines).c_str());
    }
    unsetenv("OLLAMA_PAGED_CHUNK_SIZE");
}

TEST(without_memory_for_a_second_layer_it_is_sequential_and_says_so_once) {
    Model model;
    for (int i = 0; i < 2; i++) model.layer(i, paged_type());
    Backend backend = new_backend();
    said.clear();
    library.recorder->failing = library.recorder->allocations + 2; // K and V of the first slot come before
    EXPECT_LINES(warm(model, backend.get()), kSequential);
    computed(model, backend.get());
    EXPECT(backend->iface.buffer_size(backend.get()) == 1000 + 2 * kCells * kRowBytes, "one slot and stock's own");
    const size_t first = said.find("no memory on CUDA0");
    EXPECT(first != std::string::npos && said.find("no memory on", first + 1) == std::string::npos, "%s", said.c_str());
}

TEST(without_memory_for_one_layer_the_graph_fails) {
    Model model;
    model.layer(0, paged_type());
    Backend backend = new_backend();
    library.recorder->failing = library.recorder->allocations + 1;
    EXPECT(backend->iface.graph_compute(backend.get(), model.graph, 7) == GGML_STATUS_ALLOC_FAILED, "it does not");
}

TEST(rows_that_something_else_writes_too_are_not_copied_ahead) {
    Model model;
    ggml_tensor *k = model.cache("k0", paged_type()), *v = model.cache("v0", paged_type());
    model.write(k, "k0");
    ggml_tensor *turned = ggml_new_tensor_3d(model.context, GGML_TYPE_F16, kDim, kHeads, kCells);
    model.add(ggml_cpy(model.context, turned, k), "turn");
    model.attention(k, v, "a0");
    Backend backend = new_backend();
    EXPECT_LINES(warm(model, backend.get()), {"S0: graph k0rows k0>pinned turn", "S0: copy k0>D0+512 1024",
                                              "S0: copy v0>D1+512 1024", "S0: graph a0<D0"});
}

TEST(rows_that_two_layers_share_are_not_copied_ahead) {
    Model model;
    ggml_tensor *k = model.cache("k0", paged_type()), *v = model.cache("v0", paged_type());
    model.write(k, "k0");
    model.attention(k, v, "a0");
    model.attention(k, v, "a1"); // the rows of this batch were written before a0
    Backend backend = new_backend();
    EXPECT_LINES(warm(model, backend.get()),
                 {"S0: graph k0rows k0>pinned", "S0: copy k0>D0+512 1024", "S0: copy v0>D1+512 1024", "S0: graph a0<D0",
                  "S0: copy k0>D0+512 1024", "S0: copy v0>D1+512 1024", "S0: graph a1<D0"});
}

TEST(operations_on_paged_rows_are_those_that_are_known) {
    Model model;
    ggml_context *c = model.context;
    ggml_tensor *k = model.cache("k", paged_type()), *v = model.cache("v", paged_type());
    ggml_tensor *hot = model.cache("hot", ggml_backend_dev_buffer_type(device()));
    const auto serves = [](const ggml_tensor *op) { return device()->iface.supports_op(device(), op); };
    const auto attends = [&](ggml_tensor *keys, ggml_tensor *values) {
        ggml_tensor *op = ggml_flash_attn_ext(c, model.query, keys, values, model.mask, 1.0f, 0, 0);
        ggml_flash_attn_ext_add_sinks(op, ggml_new_tensor_1d(c, GGML_TYPE_F32, kHeads));
        return serves(op);
    };
    EXPECT(attends(model.view(k), model.view(v)), "K/V in tensors of their own, with a mask and sinks");
    EXPECT(!attends(model.view(k), model.view(k)), "V inside of K");
    EXPECT(!attends(model.view(k), model.view(hot)), "V on the device");
    EXPECT(!attends(model.view(hot), model.view(v)), "K on the device");
    EXPECT(attends(model.view(hot), model.view(hot)), "nothing paged");
    ggml_tensor *one_head = ggml_permute(c, ggml_view_3d(c, k, kDim, 1, 32, k->nb[1], k->nb[2], 0), 0, 2, 1, 3);
    EXPECT(!attends(one_head, model.view(v)), "rows with gaps");

    ggml_tensor *flat = ggml_reshape_2d(c, k, kDim * kHeads, kCells);
    ggml_tensor *one = ggml_new_tensor_2d(c, GGML_TYPE_F32, kDim * kHeads, 1);
    EXPECT(serves(ggml_set_rows(c, flat, one, model.positions)), "new rows");
    EXPECT(serves(flat) && serves(model.view(k)) && serves(k), "views");
    EXPECT(serves(ggml_rope(c, k, ggml_new_tensor_1d(c, GGML_TYPE_I32, kCells), kDim, 0)), "a shift reads");
    EXPECT(serves(ggml_cpy(c, ggml_dup_tensor(c, k), k)), "a shift writes");
    EXPECT(!serves(ggml_mul_mat(c, flat, one)), "attention without the fused operation");
    EXPECT(!serves(ggml_get_rows(c, flat, model.positions)), "rows");
    EXPECT(!serves(ggml_add(c, k, k)), "anything else");
    EXPECT(serves(ggml_add(c, hot, hot)), "anything, on the device");
}

TEST(memory_that_cannot_be_pinned_stays_the_cpus_and_that_is_said_once) {
    said.clear();
    library.recorder->pinned = false;
    for (int i = 0; i < 2; i++) {
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(paged_type(), 4096);
        EXPECT(buffer && buffer->buft != paged_type(), "it is not pinned");
        EXPECT(buffer && !device()->iface.supports_buft(device(), buffer->buft), "no kernel may write there");
        ggml_backend_buffer_free(buffer);
    }
    library.recorder->pinned = true;
    const size_t first = said.find("could not be pinned");
    EXPECT(first != std::string::npos && said.find("could not be", first + 1) == std::string::npos, "%s", said.c_str());
}

TEST(a_device_is_not_reset_while_there_are_pinned_buffers_of_any) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(paged_type(1), 4096);
    EXPECT_LINES(recorded([] { device(0)->iface.reset(device(0)); }), {});
    ggml_backend_buffer_free(buffer);
    EXPECT_LINES(recorded([] { device(0)->iface.reset(device(0)); }), {"device 0: reset"});
}

TEST(staging_is_measured_before_it_is_taken_and_given_back_at_a_reset) {
    const size_t layer = 2 * kCells * kRowBytes;
    Model measured;
    for (int i = 0; i < 2; i++) measured.layer(i, paged_type(0, true));
    paged_type(0, false);
    Backend backend = new_backend();
    const int live = library.recorder->live;
    EXPECT_LINES(recorded([&] { backend->iface.graph_reserve(backend.get(), measured.graph, false); }),
                 {"S0: measure k0rows k0>pinned v0rows v0>pinned a0<measured"
                  " k1rows k1>pinned v1rows v1>pinned a1<measured"});
    EXPECT(library.recorder->live == live, "memory was taken");
    EXPECT(backend->iface.buffer_size(backend.get()) == 1000 + 2 * layer, "two layers and stock's own");

    Model model;
    for (int i = 0; i < 2; i++) model.layer(i, paged_type());
    backend->iface.graph_reserve(backend.get(), model.graph, true);
    EXPECT(library.recorder->live == live + 4, "K and V of two layers");
    const Lines lines = computed(model, backend.get());
    EXPECT(!lines.empty() && lines[0] == "S0: record E0", "taken again:\n%s", join(lines).c_str());
    backend->iface.reset(backend.get());
    EXPECT(library.recorder->live == live, "not given back");
    EXPECT(backend->iface.buffer_size(backend.get()) == 1000, "still counted");
}

TEST(synchronizing_waits_for_both_streams) {
    Model model;
    model.layer(0, paged_type());
    Backend backend = new_backend();
    computed(model, backend.get());
    EXPECT_LINES(recorded([&] { backend->iface.synchronize(backend.get()); }), {"S0: synchronize", "S1: synchronize"});
}
