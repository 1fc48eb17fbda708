// The memory of mirrors: how much they take, and when they do without.
#include "mirrored.h"

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

TEST(all_parts_of_a_models_graph_have_mirrors) {
    Mirrored m("32", "1", 2);
    const size_t all = m.backend->iface.buffer_size(m.backend.get());
    m.backend->iface.reset(m.backend.get());
    const auto reserve_layer = [&](size_t i) {
        ggml_cgraph *part = ggml_new_graph(m.model.context);
        std::swap(m.model.graph, part);
        m.attend("a", 0, 32, i);
        m.backend->iface.graph_reserve(m.backend.get(), m.model.graph, true);
        std::swap(m.model.graph, part);
    };
    reserve_layer(0);
    EXPECT(m.backend->iface.buffer_size(m.backend.get()) == all - kAll, "K and V of one layer, 32 cells");
    m.step({0, 31});
    reserve_layer(1);
    EXPECT(m.backend->iface.buffer_size(m.backend.get()) == all, "of both");
    EXPECT(crosses(m.step({5, 5})), "it begins anew, in other memory");
    EXPECT(!crosses(m.step({5, 5})), "the first has them still, the second as well");
    Mirrored::room = 3 * kAll / 2; // not enough for 32 cells of both
    Mirrored less("", "1", 2);
    EXPECT(less.backend->iface.buffer_size(less.backend.get()) == 1000 + 4 * kAll, "what is left is for all of them");
    Mirrored::room = 1 << 20;
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

TEST(what_is_needed_has_the_memory_of_mirrors) {
    said.clear();
    Mirrored m("32");
    library.recorder->unreserved = 1;
    EXPECT(m.backend->iface.graph_reserve(m.backend.get(), m.model.graph, true) == GGML_STATUS_SUCCESS, "without mirrors it fits");
    EXPECT(said.find("no memory on CUDA0 for mirrors") != std::string::npos, "%s", said.c_str());
    EXPECT(m.backend->iface.buffer_size(m.backend.get()) == 1000 + 4 * kAll, "not counted");
    EXPECT(crosses(m.step({0, 31})) && crosses(m.step({31, 31})), "as without");
}

TEST(a_graph_larger_than_what_was_reserved_has_the_memory_of_mirrors) {
    Mirrored m("32");
    m.step({0, 31});
    said.clear();
    m.k.push_back(m.model.cache("k1", paged_type(), 2 * kCells)); // staging has to grow
    m.v.push_back(m.model.cache("v1", paged_type(), 2 * kCells));
    library.recorder->failing = library.recorder->allocations;
    const Lines lines = m.step({5, 5});
    EXPECT(said.find("no memory on CUDA0 for mirrors") != std::string::npos, "%s", said.c_str());
    EXPECT(std::count(lines.begin(), lines.end(), "S0: synchronize") > 0, "what is given back may be in use: %s", join(lines).c_str());
    const auto attends = [](const std::string &line) { return line.find(": graph a1<") != std::string::npos; };
    EXPECT(std::any_of(lines.begin(), lines.end(), attends), "it is computed: %s", join(lines).c_str());
    EXPECT(crosses(m.step({5, 5})) && crosses(m.step({5, 5})), "without mirrors");
    library.recorder->failing = library.recorder->allocations;
    Model larger;
    ggml_tensor *kv[] = {larger.cache("k0", paged_type(), 4 * kCells), larger.cache("v0", paged_type(), 4 * kCells)};
    larger.attention(kv[0], kv[1], "a0");
    EXPECT(m.backend->iface.graph_compute(m.backend.get(), larger.graph, 7) == GGML_STATUS_ALLOC_FAILED, "nothing to give back");
}

TEST(mirrors_are_not_taken_when_they_are_measured) {
    Mirrored m("32");
    m.backend->iface.reset(m.backend.get());
    const int live = library.recorder->live;
    m.backend->iface.graph_reserve(m.backend.get(), m.model.graph, false);
    EXPECT(library.recorder->live == live, "memory was taken");
    EXPECT(m.backend->iface.buffer_size(m.backend.get()) == 1000 + 4 * kAll + kAll, "and counted");
}

TEST(where_there_is_less_memory_than_planned_fewer_cells_have_a_mirror) {
    const size_t staging = 1000 + 4 * 1024 * kRowBytes, all = 8 * 2 * 1024 * kRowBytes; // K and V of 1024 cells
    for (size_t part : {1, 2, 4, 8}) {
        said.clear();
        library.recorder->largest = all / part;
        Mirrored m("", "1", 8, 1024);
        const size_t taken = m.backend->iface.buffer_size(m.backend.get()) - staging;
        EXPECT(taken == (part < 8 ? all / part : 0), "1/%zu: %zu bytes of %zu", part, taken, all);
        EXPECT((said.find("no memory") != std::string::npos) == (part == 8), "1/%zu: %s", part, said.c_str());
        m.step({0, 200, 0, 256});
        EXPECT(crosses(m.step({201, 201, 0, 256})) == (part == 8), "1/%zu: 256 cells have it", part);
        if (part == 2) {
            m.step({300, 511, 0, 512});
            EXPECT(!crosses(m.step({511, 511, 0, 512})), "512 cells");
            const Lines lines = m.step({600, 600, 0, 768}); // K, and V behind it, out of their mirrors
            const auto behind = [](const std::string &line) { return line.find("move D0+16384>") != std::string::npos; };
            EXPECT(std::any_of(lines.begin(), lines.end(), behind), "%s", join(lines).c_str());
        }
        const int allocations = library.recorder->allocations;
        m.backend->iface.graph_reserve(m.backend.get(), m.model.graph, true);
        EXPECT(library.recorder->allocations == allocations, "1/%zu: it is the same plan", part);
        library.recorder->largest = SIZE_MAX;
    }
}
