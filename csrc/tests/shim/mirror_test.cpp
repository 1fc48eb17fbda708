// Mirrors of the first cells of paged K/V: what crosses the bus with them, and when they are not right any more.
// Buffers are numbered as they first come, as everywhere: of all mirrors D0, and D2 where staging comes before it. A row
// has 32 bytes, a tensor 64 cells; V's mirror begins 1024 bytes behind K's.
#include "mirrored.h"

namespace {

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

TEST(a_graph_that_fails_leaves_no_mirror_that_is_trusted) {
    Mirrored m("32");
    m.step({0, 31});
    library.recorder->broken = true;
    m.step({5, 5});
    library.recorder->broken = false;
    EXPECT(crosses(m.step({31, 31})), "filled again");
}
