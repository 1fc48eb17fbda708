// An engine with two slots for tests of saving and restoring: its main loop is the one that reads its input.
//   kvt_slots SOCKET
//   answer SLOT FIRST COUNT   the slot holds the rows of tokens FIRST …; they are to be stored
//   hold SLOT FIRST COUNT     it holds them, and they are not to be stored
//   prompt SLOT FIRST COUNT   it gets another prompt: what is not stored is kept, then what is stored comes back
//   shift SLOT FIRST          from there on its rows are others, of the same tokens
//   lose SLOT                 its rows go, and nobody said so before
//   settle BLOCKS             main loop until so many blocks are written; "N blocks in S steps, longest M ms"
//   slow MILLISECONDS         that reading one block takes from now on
//   full ROWS                 that a slot has cells for
#include "../src/kvt_client.h"
#include "../src/kvt_restore.h"
#include "../src/kvt_saver.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iostream>
#include <map>
#include <sstream>

namespace {

using clock_type = std::chrono::steady_clock;

const kvt::milliseconds patience { 20000 };
constexpr size_t row_bytes = 8u << 10; // of each of the four planes: a block has 2 MiB, a batch 8 blocks
constexpr size_t planes = 4;

kvt::hello make_hello() {
    kvt::hello said;
    said.fields = { { "model", "sha256-slots" }, { "engine", "slots/1+0" }, { "flash_attention", "on" } };
    for (uint16_t i = 0; i < 2; ++i) {
        kvt::layer one;
        one.index = i;
        one.kv_heads = 1;
        one.k_head_dim = one.v_head_dim = row_bytes/2;
        one.k_row_bytes = one.v_row_bytes = row_bytes;
        said.layers.push_back(one);
    }
    said.min_tokens = 1;
    return said;
}

std::vector<int32_t> tokens_of(int32_t first, size_t count) {
    std::vector<int32_t> tokens(count);
    for (size_t i = 0; i < count; ++i) {
        tokens[i] = first + (int32_t) i;
    }
    return tokens;
}

// A row is known by its token, its position and its plane.
char mark_of(int32_t token, uint32_t position, size_t plane) { return (char) ((uint32_t) token*31 + position*7 + (uint32_t) plane*3); }

struct slot {
    std::vector<int32_t> tokens; // whose rows it holds
    bool broken = false;         // a row came back that is not the token's
    uint32_t turned = UINT32_MAX; // from there on, rows are not what the tokens give
};

struct engine : kvt::row_source {
    std::map<int, slot> slots;
    int slow_ms = 0;
    size_t cells = 1u << 20;

    bool read(int number, const std::vector<int32_t> & tokens, uint32_t first, uint32_t rows, char * out) override {
        std::this_thread::sleep_for(kvt::milliseconds(slow_ms));
        const auto & held = slots[number].tokens;
        const uint32_t turned = slots[number].turned;
        const size_t end = first + rows;
        if (end > held.size() || end > tokens.size() || !std::equal(held.begin(), held.begin() + (std::ptrdiff_t) end, tokens.begin())) {
            return false;
        }
        for (size_t plane = 0; plane < planes; ++plane) {
            for (uint32_t i = first; i < end; ++i) {
                std::fill_n(out, row_bytes, (char) (mark_of(held[i], i, plane) + (i >= turned ? 1 : 0)));
                out += row_bytes;
            }
        }
        return true;
    }
};

struct cells : kvt::row_sink {
    cells(engine & of, slot & to, const std::vector<int32_t> & tokens, uint32_t have) : own(of), into(to), prompt(tokens), keep(have) {}

    bool write(uint32_t first, uint32_t rows, const char * block, uint32_t block_rows, uint32_t skip) override {
        if (!cut) { // its other rows go with the first that come
            into.tokens.resize(keep);
            cut = true;
        }
        if (first != into.tokens.size() || first + rows > own.cells) {
            return false;
        }
        for (size_t plane = 0; plane < planes; ++plane) {
            for (uint32_t i = 0; i < rows; ++i) {
                const char * row = block + (plane*block_rows + skip + i)*(row_bytes);
                const char mark = mark_of(prompt[first + i], first + i, plane);
                into.broken = into.broken || !std::all_of(row, row + row_bytes, [mark](char byte) { return byte == mark; });
            }
        }
        into.tokens.insert(into.tokens.end(), prompt.begin() + first, prompt.begin() + first + rows);
        return true;
    }

    engine & own;
    slot & into;
    const std::vector<int32_t> & prompt;
    const uint32_t keep;
    bool cut = false;
};

struct server {
    engine rows;
    std::atomic<bool> woken { false };
    const kvt::hello said = make_hello();
    kvt::client look_up;
    kvt::client storing;
    kvt::saver saver;

    explicit server(const char * path)
        : look_up(path, said), storing(path, said), saver(storing, look_up, said, [this] { woken.store(true); }) {
        look_up.wait_first(patience);
        storing.wait_first(patience);
    }

    std::string settle(uint64_t blocks) {
        const auto until = clock_type::now() + patience;
        int steps = 0;
        long long longest = 0;
        while (saver.written_blocks() < blocks && clock_type::now() < until) {
            if (!woken.exchange(false)) {
                std::this_thread::sleep_for(kvt::milliseconds(1));
                continue;
            }
            const auto began = clock_type::now();
            saver.step(rows, kvt::saving_step);
            longest = std::max<long long>(longest, std::chrono::duration_cast<kvt::milliseconds>(clock_type::now() - began).count());
            ++steps;
        }
        std::ostringstream out;
        out << saver.written_blocks() << " blocks in " << steps << " steps, longest " << longest << " ms";
        return out.str();
    }

    std::string prompt(int number, const std::vector<int32_t> & tokens) {
        slot & one = rows.slots[number];
        const auto most = (std::ptrdiff_t) std::min(one.tokens.size(), tokens.size());
        const auto have = (uint32_t) (std::mismatch(tokens.begin(), tokens.begin() + most, one.tokens.begin()).first - tokens.begin());
        saver.keep(number, have, rows);
        kvt::finished report;
        cells into(rows, one, tokens, have);
        kvt::restore(look_up, said, tokens, have, into, report);
        one.tokens.resize(std::min<size_t>(one.tokens.size(), have + report.restored_tokens));
        report.prompt_tokens = (uint32_t) tokens.size();
        report.memory_tokens = have;
        saver.report(report);
        std::ostringstream out;
        out << "have " << have << " restored " << report.restored_tokens << " reason " << report.reason << (one.broken ? " BROKEN" : "");
        return out.str();
    }
};

} // namespace

int main(int argc, char ** argv) {
    if (argc != 2) {
        std::cout << "kvt_slots SOCKET" << std::endl;
        return 1;
    }
    server one(argv[1]);
    std::cout << (one.look_up.up() && one.storing.up() ? "up" : "not up") << std::endl;
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream in(line);
        std::string what;
        int number = 0;
        int32_t first = 0;
        size_t count = 0;
        in >> what >> number >> first >> count;
        std::string answer = "done";
        if (what == "answer") {
            one.rows.slots[number].tokens = tokens_of(first, count);
            one.saver.add(number, tokens_of(first, count), 0);
        } else if (what == "hold") {
            one.rows.slots[number].tokens = tokens_of(first, count);
        } else if (what == "prompt") {
            answer = one.prompt(number, tokens_of(first, count));
        } else if (what == "shift") {
            one.saver.keep(number, (uint32_t) first, one.rows);
            one.rows.slots[number].turned = (uint32_t) first;
        } else if (what == "lose") {
            one.rows.slots[number].tokens.clear();
        } else if (what == "settle") {
            answer = one.settle((uint64_t) number);
        } else if (what == "slow") {
            one.rows.slow_ms = number;
        } else if (what == "full") {
            one.rows.cells = (size_t) number;
        } else {
            answer = "what?";
        }
        std::cout << answer << std::endl;
    }
    return 0;
}
