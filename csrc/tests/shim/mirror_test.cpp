// Mirrors of the first cells of paged K/V: what crosses the bus with them, and when they are not right any more.
// Buffers are numbered as they first come, as everywhere: of all mirrors D0, and D2 where staging comes before it. A row
// has 32 bytes, a tensor 64 cells; V's mirror begins 1024 bytes behind K's.
#include "rig.h"
#include "shim/mirror.h"

#include <cstring>

namespace {

constexpr size_t kAll = kCells * kRowBytes;

// One layer of a model whose backend has mirrors of so many cells.
struct Mirrored {
    explicit Mirrored(const char *cells, const char *prefetch = "1", int layers = 1) {
        setenv("OLLAMA_PAGED_MIRROR", cells, 1);
        void *function = library.reg->iface.get_proc_address(library.reg, "kvpaged_mirror_bytes");
        reinterpret_cast<void (*)(ggml_backend_dev_t, size_t)>(function)(device(), room);
        backend = new_backend(prefetch);
        for (int i = 0; i < layers; i++) {
            const std::string n = std::to_string(i);
            k.push_back(model.cache("k" + n, paged_type()));
            v.push_back(model.cache("v" + n, paged_type()));
            model.write(k[i], "k" + n);
            model.write(v[i], "v" + n);
            model.attention(k[i], v[i], "a" + n);
        }
        backend->iface.graph_reserve(backend.get(), model.graph, true);
    }
    ~Mirrored() { unsetenv("OLLAMA_PAGED_MIRROR"); }

    // A graph of its own that writes these cells and attends to [first, first + count).
    struct Step {
        int lowest = 0, highest = 0;
        int64_t first = 0, count = 32;
        bool tagged = true;
        bool turned = false; // K is turned between its write and the attention
    };
    Lines step(const Step &s) {
        return graph([&] {
            number++;
            for (size_t i = 0; i < k.size(); i++) {
                for (ggml_tensor *rows : {k[i], v[i]}) {
                    model.write(rows, rows->name);
                    if (s.tagged) tag(last(), s.lowest, s.highest);
                    if (s.turned && rows == k[i]) model.add(ggml_cpy(model.context, model.view(rows), model.view(rows)), "turn");
                }
                attend("a" + std::to_string(i), s.first, s.count, i);
            }
        });
    }
    template <typename Makes> Lines graph(Makes makes) {
        ggml_cgraph *made = ggml_new_graph(model.context);
        std::swap(model.graph, made);
        makes();
        const Lines lines = computed(model, backend.get());
        std::swap(model.graph, made);
        return lines;
    }
    void write_tagged(int lowest, int highest) {
        number++;
        for (ggml_tensor *rows : {k[0], v[0]}) {
            model.write(rows, rows->name);
            tag(last(), lowest, highest);
        }
    }
    void attend(const std::string &name, int64_t first, int64_t count, size_t i = 0) {
        model.add(ggml_flash_attn_ext(model.context, model.query, model.view(k[i], first, count),
                                      model.view(v[i], first, count), nullptr, 1.0f, 0, 0), name);
    }
    ggml_tensor *last() const { return model.graph->nodes[model.graph->n_nodes - 1]; }
    void tag(ggml_tensor *node, int lowest, int highest) const {
        const shim::Tag tag = {shim::kTagMagic, number, lowest, highest};
        std::memcpy(node->op_params, &tag, sizeof tag);
    }

    static size_t room;
    Model model;
    Backend backend;
    std::vector<ggml_tensor *> k, v;
    uint32_t number = 0;
};
size_t Mirrored::room = 1 << 20;

bool crosses(const Lines &lines) { // anything of K/V over the bus, beside what is written
    return std::any_of(lines.begin(), lines.end(), [](const std::string &line) { return line.find(": copy") != std::string::npos; });
}

const Lines kOverMirror = {"S0: graph k0rows", "S0: graph k0>pinned k0>D0", "S0: graph v0rows", "S0: graph v0>pinned v0>D0", "S0: graph a0<D0"};

} // namespace

TEST(what_a_mirror_has_does_not_cross_the_bus) {
    for (const char *prefetch : {"1", "0"}) {
        Mirrored m("32", prefetch);
        EXPECT_LINES(m.step({0, 31}),
                     {"S0: graph k0rows", "S0: graph k0>pinned k0>D0", "S0: graph v0rows", "S0: graph v0>pinned v0>D0",
                      "S0: copy >D0+0 1024", "S0: copy >D0+1024 1024", "S0: graph a0<D0"}); // for the first time
        EXPECT_LINES(m.step({3, 5}), kOverMirror);
        EXPECT_LINES(m.step({31, 31}), kOverMirror);
    }
}

TEST(a_mirror_grows_with_what_is_seen) {
    Mirrored m("64");
    m.step({0, 7, 0, 8});
    EXPECT_LINES(m.step({8, 8, 0, 16}),
                 {"S0: graph k0rows", "S0: graph k0>pinned k0>D0", "S0: graph v0rows", "S0: graph v0>pinned v0>D0",
                  "S0: copy >D0+256 256", "S0: copy >D0+2304 256", "S0: graph a0<D0"});
}

TEST(of_a_longer_view_only_the_rest_crosses_the_bus) {
    Mirrored m("32");
    m.step({0, 31});
    EXPECT_LINES(m.step({32, 32, 0, 64}),
                 {"S0: record E0", "S1: wait E0", "S1: move D0+0>D1+0 1024", "S1: copy k0>D1+1024 1024",
                  "S1: move D0+1024>D2+0 1024", "S1: copy v0>D2+1024 1024", "S1: record E1", "S0: graph k0rows",
                  "S0: wait E1", "S0: graph k0>pinned k0>D1", "S0: graph v0rows", "S0: graph v0>pinned v0>D2",
                  "S0: graph a0<D1", "S0: record E2"});
    EXPECT_LINES(m.step({5, 5}), kOverMirror); // it is as right as before
}

TEST(of_a_longer_view_only_the_rest_crosses_the_bus_in_turn) {
    Mirrored m("32", "0");
    m.step({0, 31});
    EXPECT_LINES(m.step({32, 32, 0, 64}),
                 {"S0: graph k0rows k0>pinned v0rows v0>pinned", "S0: move D0+0>D1+0 1024", "S0: copy k0>D1+1024 1024",
                  "S0: move D0+1024>D2+0 1024", "S0: copy v0>D2+1024 1024", "S0: graph a0<D1"});
}

TEST(rows_below_the_mirrors_end_reach_it_out_of_staging_where_others_are_written_above) {
    Mirrored m("32");
    m.step({0, 31});
    const Lines lines = m.step({20, 40, 0, 64});
    const Lines last(lines.end() - 4, lines.end());
    EXPECT_LINES(last, {"S0: graph a0<D1", "S0: move D1+640>D0+640 384", "S0: move D2+640>D0+1664 384", "S0: record E2"});
    EXPECT_LINES(m.step({6, 6}), kOverMirror);
}

TEST(in_turn_what_was_written_comes_over_the_bus_once_more) {
    Mirrored m("32", "0");
    m.step({0, 31});
    EXPECT_LINES(m.step({20, 40, 0, 64}),
                 {"S0: graph k0rows k0>pinned v0rows v0>pinned", "S0: move D0+0>D1+0 640", "S0: copy k0>D1+640 1408",
                  "S0: move D0+1024>D2+0 640", "S0: copy v0>D2+640 1408", "S0: graph a0<D1",
                  "S0: move D1+640>D0+640 384", "S0: move D2+640>D0+1664 384"});
}

TEST(cells_before_the_view_reach_the_mirror_over_the_bus) {
    Mirrored m("32");
    const Lines lines = m.step({40, 40, 16, 48});
    const Lines last(lines.end() - 6, lines.end());
    EXPECT_LINES(last, {"S0: graph a0<D0", "S0: copy >D2+0 512", "S0: move D0+512>D2+512 512", "S0: copy >D2+1024 512",
                        "S0: move D1+512>D2+1536 512", "S0: record E2"});
    EXPECT_LINES(m.step({6, 6}), kOverMirror);
}

TEST(without_copies_within_the_device_all_comes_over_the_bus) {
    Mirrored m("32");
    library.recorder->moves = false;
    m.step({0, 31});
    const Lines lines = m.step({20, 40, 0, 64});
    library.recorder->moves = true;
    EXPECT(lines.size() > 4 && lines[2] == "S1: copy k0>D0+0 2048", "%s", join(lines).c_str());
    const Lines last(lines.end() - 4, lines.end());
    EXPECT_LINES(last, {"S0: graph a0<D0", "S0: copy >D2+640 384", "S0: copy >D2+1664 384", "S0: record E2"});
}

TEST(a_write_outside_of_what_is_seen_is_not_in_the_mirror) {
    Mirrored m("48");
    m.step({0, 40, 0, 48});
    m.step({40, 50}); // [0, 32) is seen; it reaches beyond the mirror
    EXPECT(crosses(m.step({3, 3, 0, 48})), "cells 40 to 47 are not in the mirror");
    EXPECT(!crosses(m.step({3, 3, 0, 48})), "now they are");
}

TEST(a_write_that_nobody_saw_makes_the_mirror_begin_anew) {
    for (const char *prefetch : {"1", "0"}) {
        Mirrored m("32", prefetch);
        m.step({0, 31});
        m.number++; // a shift, a restore, a write by the CPU
        EXPECT(crosses(m.step({31, 31})), "it is filled again");
        EXPECT(!crosses(m.step({31, 31})), "once");
        m.number++;
        const Lines lines = m.step({40, 40, 0, 64});
        const auto all = [](const std::string &line) { return line.find("copy k0>D0+0 2048") != std::string::npos; };
        EXPECT(std::any_of(lines.begin(), lines.end(), all), "%s", join(lines).c_str());
    }
}

TEST(a_write_without_a_tag_is_not_trusted) {
    Mirrored m("32");
    m.step({0, 31});
    m.number--; // it does not count
    const Lines lines = m.step({5, 5, 0, 32, false});
    EXPECT(lines[0] == "S0: record E0", "it is staged, ahead:\n%s", join(lines).c_str());
    EXPECT(crosses(m.step({31, 31})), "filled again");
    EXPECT(!crosses(m.step({31, 31})), "once");
}

TEST(an_attention_whose_write_was_not_seen_does_not_use_the_mirror) {
    Mirrored m("32");
    m.step({0, 31});
    for (ggml_tensor *seen : {m.k[0], m.v[0]}) { // the other one's write is the CPU's
        const Lines lines = m.graph([&] {
            m.number++;
            m.model.write(seen, seen->name);
            m.tag(m.last(), 3, 3);
            m.attend("a0", 0, 32);
        });
        EXPECT(lines[0] == "S0: record E0", "it is staged, ahead:\n%s", join(lines).c_str());
    }
    EXPECT(crosses(m.step({31, 31})), "filled again");
}

TEST(what_turns_rows_in_the_same_graph_makes_the_mirror_begin_anew) {
    Mirrored m("32");
    m.step({0, 31});
    Mirrored::Step turned{5, 5};
    turned.turned = true;
    EXPECT(crosses(m.step(turned)), "staged");
    EXPECT(crosses(m.step({31, 31})), "filled again");
}

TEST(what_is_written_behind_the_attention_makes_the_mirror_begin_anew) {
    Mirrored m("32");
    m.step({0, 31});
    m.graph([&] {
        m.write_tagged(5, 5);
        m.attend("a0", 0, 32);
        m.model.add(ggml_cpy(m.model.context, m.model.view(m.v[0]), m.model.view(m.v[0])), "turn"); // and nobody counts it
    });
    EXPECT(crosses(m.step({31, 31})), "filled again");
    EXPECT(!crosses(m.step({31, 31})), "once");
}

TEST(a_write_that_does_not_count_from_the_first_cell_is_not_trusted) {
    Mirrored m("32");
    m.step({0, 31});
    const Lines lines = m.graph([&] {
        m.number++;
        for (ggml_tensor *rows : {m.k[0], m.v[0]}) {
            ggml_context *c = m.model.context;
            ggml_tensor *behind = ggml_view_2d(c, rows, kDim * kHeads, 20, kRowBytes, 20 * kRowBytes);
            ggml_tensor *cell = ggml_new_tensor_2d(c, GGML_TYPE_F32, kDim * kHeads, 1);
            m.tag(m.model.add(ggml_set_rows(c, behind, cell, m.model.positions), rows->name), 15, 15); // it is cell 35
        }
        m.attend("a0", 0, 32);
    });
    EXPECT(lines[0] == "S0: record E0", "it is staged, ahead:\n%s", join(lines).c_str());
    EXPECT(crosses(m.step({31, 31})), "filled again");
}

TEST(a_shift_makes_the_mirror_begin_anew) {
    Mirrored m("32");
    m.step({0, 31});
    Model shift; // without attention, and not counted
    shift.add(ggml_cpy(shift.context, ggml_dup_tensor(shift.context, m.k[0]), m.k[0]), "turn");
    computed(shift, m.backend.get());
    const Lines lines = m.step({31, 31});
    EXPECT(crosses(lines), "%s", join(lines).c_str());
}

TEST(the_second_of_two_layers_that_share_rows_does_not_use_the_mirror) {
    Mirrored m("32");
    m.step({0, 31});
    const Lines lines = m.graph([&] {
        m.write_tagged(3, 3);
        m.attend("a0", 0, 32);
        m.attend("a1", 0, 32);
    });
    EXPECT_LINES(lines, {"S0: graph k0rows", "S0: graph k0>pinned k0>D0", "S0: graph v0rows", "S0: graph v0>pinned v0>D0",
                         "S0: graph a0<D0", "S0: copy k0>D1+0 1024", "S0: copy v0>D2+0 1024", "S0: graph a1<D1"});
    EXPECT_LINES(m.step({31, 31}), kOverMirror);
}

TEST(a_write_of_rows_that_are_not_cells_is_not_trusted) {
    Mirrored m("32");
    m.step({0, 31});
    const Lines lines = m.graph([&] { // heads in the place of cells
        m.number++;
        for (ggml_tensor *rows : {m.k[0], m.v[0]}) {
            ggml_context *c = m.model.context;
            ggml_tensor *head = ggml_new_tensor_2d(c, GGML_TYPE_F32, kDim, 1);
            ggml_tensor *write = ggml_set_rows(c, ggml_reshape_2d(c, rows, kDim, kHeads * kCells), head, m.model.positions);
            m.tag(m.model.add(write, rows->name), 3, 3);
        }
        m.attend("a0", 0, 32);
    });
    EXPECT(lines[0] == "S0: record E0", "it is staged, ahead:\n%s", join(lines).c_str());
    EXPECT(crosses(m.step({31, 31})), "filled again");
}

TEST(layers_beyond_their_mirrors_take_turns_in_staging) {
    Mirrored m("32", "1", 3);
    m.step({0, 31});
    Lines lines = m.step({5, 5});
    EXPECT(!crosses(lines) && lines.size() == 15, "%s", join(lines).c_str());
    lines = m.step({40, 40, 0, 64});
    const auto moves = std::count_if(lines.begin(), lines.end(), [](const std::string &line) { return line.find("S1: move") == 0; });
    EXPECT(moves == 6, "%s", join(lines).c_str());
}

TEST(mirrors_are_counted_and_take_what_the_plan_has_left) {
    const size_t staging = 1000 + 4 * kAll;
    Mirrored::room = kAll + 3 * kRowBytes * 16; // K and V of 64 cells need more, and there are steps of 256
    EXPECT(Mirrored("64").backend->iface.buffer_size(Mirrored("64").backend.get()) == 1000 + 4 * kAll, "none fits");
    Mirrored::room = 2 * kAll;
    Mirrored m("64");
    EXPECT(m.backend->iface.buffer_size(m.backend.get()) == staging + 2 * kAll, "all cells");
    m.backend->iface.reset(m.backend.get());
    EXPECT(m.backend->iface.buffer_size(m.backend.get()) == 1000, "given back");
    Mirrored::room = 1 << 20;
    Mirrored none("0");
    EXPECT(none.backend->iface.buffer_size(none.backend.get()) == staging, "they are not wanted");
    EXPECT(crosses(none.step({0, 31})) && crosses(none.step({31, 31})), "as without");
}

TEST(what_mirrors_have_taken_is_told_and_nothing_else) {
    const auto told = [] {
        void *function = library.reg->iface.get_proc_address(library.reg, "kvpaged_mirrored_bytes");
        return reinterpret_cast<size_t (*)(ggml_backend_dev_t)>(function)(device());
    };
    {
        Mirrored m("32"), other("64");
        EXPECT(told() == 3 * kAll, "of both backends: %zu", told());
        m.backend->iface.graph_reserve(m.backend.get(), m.model.graph, true);
        EXPECT(told() == 3 * kAll, "it has them already: %zu", told());
        other.backend->iface.reset(other.backend.get());
        EXPECT(told() == kAll, "given back: %zu", told());
        other.backend->iface.graph_reserve(other.backend.get(), other.model.graph, false);
        EXPECT(told() == kAll, "only measured: %zu", told());
        library.recorder->unreserved = 1;
        m.backend->iface.graph_reserve(m.backend.get(), m.model.graph, true);
        EXPECT(told() == 0, "it was needed for something else: %zu", told());
        other.backend->iface.graph_reserve(other.backend.get(), other.model.graph, true);
        EXPECT(told() == 2 * kAll, "%zu", told());
    }
    EXPECT(told() == 0, "the backends are gone: %zu", told());
    library.recorder->failing = library.recorder->allocations + 4; // after K and V of two slots
    Mirrored m("32");
    EXPECT(told() == 0, "there was no memory: %zu", told());
}

TEST(without_memory_for_mirrors_all_goes_on_without) {
    said.clear();
    library.recorder->failing = library.recorder->allocations + 4; // after K and V of two slots
    Mirrored m("32");
    EXPECT(said.find("no memory on CUDA0 for mirrors") != std::string::npos, "%s", said.c_str());
    EXPECT(m.backend->iface.buffer_size(m.backend.get()) == 1000 + 4 * kAll, "not counted");
    EXPECT(crosses(m.step({0, 31})) && crosses(m.step({31, 31})), "as without");
}

TEST(a_graph_that_fails_leaves_no_mirror_that_is_trusted) {
    Mirrored m("32");
    m.step({0, 31});
    library.recorder->broken = true;
    m.step({5, 5});
    library.recorder->broken = false;
    EXPECT(crosses(m.step({31, 31})), "filled again");
}

TEST(what_is_needed_has_the_memory_of_mirrors) {
    said.clear();
    Mirrored m("32");
    library.recorder->unreserved = 1;
    EXPECT(m.backend->iface.graph_reserve(m.backend.get(), m.model.graph, true) == GGML_STATUS_SUCCESS, "without mirrors it fits");
    EXPECT(said.find("no memory on CUDA0 for mirrors") != std::string::npos, "%s", said.c_str());
    EXPECT(m.backend->iface.buffer_size(m.backend.get()) == 1000 + 4 * kAll, "not counted");
    EXPECT(crosses(m.step({0, 31})) && crosses(m.step({31, 31})), "as without");
}

TEST(mirrors_are_not_taken_when_they_are_measured) {
    Mirrored m("32");
    m.backend->iface.reset(m.backend.get());
    const int live = library.recorder->live;
    m.backend->iface.graph_reserve(m.backend.get(), m.model.graph, false);
    EXPECT(library.recorder->live == live, "memory was taken");
    EXPECT(m.backend->iface.buffer_size(m.backend.get()) == 1000 + 4 * kAll + kAll, "and counted");
}
