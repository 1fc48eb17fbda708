// An engine with two slots for tests of saving and restoring: its main loop is the one that reads its input.
//   kvt_slots SOCKET [MIB [MIB [MIB [MS]]]]   that may be read ahead, and kept; of a state, without which no slot goes on; that
//                             a prompt may wait for something new
//   answer SLOT FIRST COUNT   the slot holds the rows of tokens FIRST …; they are to be stored, and a state behind them
//   hold SLOT FIRST COUNT     it holds them, and they are not to be stored
//   prompt SLOT FIRST COUNT   it gets another prompt: what is not stored is kept, then what is stored comes back
//   begin SLOT FIRST COUNT    the same prompt, of which nothing is brought yet
//   bring SLOT [SLOT]         turns of the main loop until these slots have got all; as `prompt` answers, and if it is slow,
//                             " in S steps, longest M ms"
//   turn                      the saver gets a segment of the rows that it asks for
//   ahead                     "N MiB": that are read ahead of all slots, when it is no more
//   drop SLOT                 nobody wants it any more
//   keep SLOT FROM            it is about to lose its rows from there on: "kept in S steps, longest M ms"
//   shift SLOT FIRST          from there on its rows are others, of the same tokens
//   lose SLOT                 its rows go, and nobody said so before
//   forget SLOT FROM          they are others from there on, and there was no time to keep them
//   throws SEGMENTS           reading throws behind so many segments
//   settle BLOCKS             main loop until so many blocks are written; "N blocks in S steps, longest M ms"
//   slow MILLISECONDS         that reading a segment and writing a block take from now on
//   full ROWS                 that a slot has cells for
//   direct N                  from now on, rows can be read into where they belong, but for each Nth block; 0: for all blocks
//   reads                     "N direct": blocks that were
#include "../src/kvt_client.h"
#include "../src/kvt_loaded.h"
#include "../src/kvt_restore.h"
#include "../src/kvt_saver.h"
#include "../src/kvt_states.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iostream>
#include <map>
#include <new>
#include <sstream>
#include <utility>

namespace {

using clock_type = std::chrono::steady_clock;

const kvt::milliseconds patience { 20000 };
constexpr size_t row_bytes = 8u << 10; // of each of the four planes: a block has 2 MiB, a batch 8 blocks
constexpr size_t planes = 4;

kvt::hello make_hello(bool states) {
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
    said.states = states;
    said.files.push_back(kvt::look_at("/proc/self/exe")); // any file
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
    int direct = -1; // every so many blocks there is no place for one
    int asked = 0;
    int placed = 0; // blocks that were read into their places
    int reads_left = 1 << 30;

    bool read(int number, const std::vector<int32_t> & tokens, uint32_t first, uint32_t rows, size_t plane, char * out) override {
        std::this_thread::sleep_for(kvt::milliseconds(slow_ms));
        if (--reads_left < 0) {
            throw std::bad_alloc();
        }
        const auto & held = slots[number].tokens;
        const uint32_t turned = slots[number].turned;
        const size_t end = first + rows;
        if (end > held.size() || end > tokens.size() || !std::equal(held.begin(), held.begin() + (std::ptrdiff_t) end, tokens.begin())) {
            return false;
        }
        for (uint32_t i = first; i < end; ++i) {
            std::fill_n(out, row_bytes, (char) (mark_of(held[i], i, plane) + (i >= turned ? 1 : 0)));
            out += row_bytes;
        }
        return true;
    }
};

// A state is known by the token before it.
kvt::state make_state(const std::vector<int32_t> & tokens, size_t bytes) {
    const auto n_tokens = (uint32_t) tokens.size();
    kvt::state made = kvt::make_state({ n_tokens, 0, (int32_t) n_tokens - 1 }, bytes);
    std::fill(made.bytes.begin() + kvt::state_head_bytes, made.bytes.end(), mark_of(tokens.back(), n_tokens, 0));
    return made;
}

struct cells : kvt::row_sink {
    cells(engine & of, slot & to, const std::vector<int32_t> & tokens) : own(of), into(to), prompt(tokens) {}

    bool write(uint32_t first, uint32_t rows, const char * block, uint32_t block_rows, uint32_t skip) override {
        std::this_thread::sleep_for(kvt::milliseconds(own.slow_ms));
        if (!cut) { // its other rows go with the first that come
            into.tokens.resize(first);
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

    std::vector<char *> places(uint32_t first, uint32_t rows) override {
        if ((own.direct > 0 && ++own.asked % own.direct == 0) || first + rows > own.cells) {
            return {};
        }
        auto & block = taken[first];
        block.resize(rows*row_bytes*planes);
        std::vector<char *> found;
        for (size_t plane = 0; plane < planes; ++plane) {
            found.push_back(block.data() + plane*rows*row_bytes);
        }
        return found;
    }

    void put(uint32_t first, uint32_t rows) override {
        const auto found = taken.find(first);
        into.broken = into.broken || found == taken.end() || !write(first, rows, found->second.data(), rows, 0);
        taken.erase(first);
        ++own.placed;
    }

    void spoiled(uint32_t first) override { taken.erase(taken.lower_bound(first), taken.end()); }

    bool resume(uint32_t n_tokens, const std::vector<char> & state, const std::vector<kvt::window> &) override {
        const std::vector<int32_t> before(prompt.begin(), prompt.begin() + n_tokens);
        into.broken = into.broken || state != make_state(before, state.size() - kvt::state_head_bytes).bytes;
        return into.tokens == before;
    }

    engine & own;
    slot & into;
    const std::vector<int32_t> & prompt;
    bool cut = false;
    std::map<uint32_t, std::vector<char>> taken;
};

long long since(clock_type::time_point began) {
    return std::chrono::duration_cast<kvt::milliseconds>(clock_type::now() - began).count();
}

struct server {
    engine rows;
    std::atomic<bool> woken { false };
    const size_t state_bytes;
    const kvt::hello said = make_hello(state_bytes > 0);
    kvt::client look_up;
    kvt::client waiting;
    kvt::client storing;
    kvt::restorer restorer;
    kvt::saver saver;
    std::map<int, std::vector<int32_t>> prompts; // that wait for their rows

    server(const char * path, size_t read_ahead, size_t kept, size_t state, kvt::milliseconds stall)
        : state_bytes(state), look_up(path, said), waiting(path, said), storing(path, said), restorer(look_up, waiting, said, read_ahead, stall),
          saver(storing, look_up, said, [this] { woken.store(true); }, kept) {
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
            saver.step(rows, began + kvt::saving_step);
            longest = std::max(longest, since(began));
            ++steps;
        }
        std::ostringstream out;
        out << saver.written_blocks() << " blocks in " << steps << " steps, longest " << longest << " ms";
        return out.str();
    }

    void answer(int number, const std::vector<int32_t> & tokens) {
        rows.slots[number].tokens = tokens;
        std::vector<kvt::state> states;
        if (state_bytes > 0) {
            states.push_back(make_state(tokens, state_bytes));
        }
        saver.add(number, tokens, 0, std::move(states));
    }

    // Every turn is one of the main loop: the slots in it go on one after the other.
    std::string bring(const std::vector<int> & numbers) {
        std::ostringstream out;
        int steps = 0;
        long long longest = 0;
        for (size_t left = numbers.size(); left > 0;) {
            restorer.wait(kvt::milliseconds(10));
            const auto began = clock_type::now();
            for (const int number : numbers) {
                slot & one = rows.slots[number];
                kvt::finished report;
                cells into(rows, one, prompts[number]);
                const bool done = restorer.busy(number) && restorer.step(number, into, began + kvt::saving_step, report);
                one.broken = one.broken || !into.taken.empty(); // places that neither got rows nor were given back
                if (!done) {
                    continue;
                }
                --left;
                report.prompt_tokens = (uint32_t) prompts[number].size();
                report.memory_tokens = have[number];
                saver.report(report);
                one.tokens.resize(std::min<size_t>(one.tokens.size(), have[number] + report.restored_tokens));
                out << (out.tellp() > 0 ? "; " : "") << "have " << have[number] << " restored " << report.restored_tokens << " reason "
                    << report.reason << (one.broken ? " BROKEN" : "");
            }
            longest = std::max(longest, since(began));
            ++steps;
        }
        if (rows.slow_ms > 0) {
            out << " in " << steps << " steps, longest " << longest << " ms";
        }
        return out.str();
    }

    void begin(int number, const std::vector<int32_t> & tokens) {
        const slot & one = rows.slots[number];
        const auto most = (std::ptrdiff_t) std::min(one.tokens.size(), tokens.size());
        have[number] = (uint32_t) (std::mismatch(tokens.begin(), tokens.begin() + most, one.tokens.begin()).first - tokens.begin());
        prompts[number] = tokens;
        restorer.begin(number, tokens, have[number], have[number], rows.direct >= 0);
    }

    std::string prompt(int number, const std::vector<int32_t> & tokens) {
        begin(number, tokens);
        saver.keep(number, have[number], rows);
        return bring({ number });
    }

    // Of the main loop, when the saver asks for rows.
    void turn() {
        while (!woken.exchange(false)) {
            std::this_thread::sleep_for(kvt::milliseconds(1));
        }
        saver.step(rows, clock_type::now());
    }

    // When no more is read ahead.
    std::string ahead() const {
        size_t bytes = restorer.ahead();
        for (size_t before = 0; bytes == 0 || bytes != before;) {
            std::this_thread::sleep_for(kvt::milliseconds(300));
            before = std::exchange(bytes, restorer.ahead());
        }
        return std::to_string(bytes >> 20) + " MiB";
    }

    // What the slot is about to lose, a little at a time.
    std::string keep(int number, uint32_t from) {
        int steps = 0;
        long long longest = 0;
        for (bool all = false; !all; ++steps) {
            const auto began = clock_type::now();
            all = saver.keep(number, from, rows, began + kvt::saving_step);
            if (woken.exchange(false)) {
                saver.step(rows, began); // a segment
            }
            longest = std::max(longest, since(began));
        }
        std::ostringstream out;
        out << "kept in " << steps << " steps, longest " << longest << " ms";
        return out.str();
    }

    std::map<int, uint32_t> have;
};

} // namespace

int main(int argc, char ** argv) {
    if (argc < 2) {
        std::cout << "kvt_slots SOCKET [MIB [MIB [MIB [MS]]]]" << std::endl;
        return 1;
    }
    const auto bytes = [&](int i, size_t usual) { return argc > i ? std::stoul(argv[i]) << 20 : usual; };
    const kvt::milliseconds stall = argc > 5 ? kvt::milliseconds(std::stol(argv[5])) : kvt::most_stall;
    server one(argv[1], bytes(2, kvt::most_read_ahead), bytes(3, kvt::most_kept_bytes), bytes(4, 0), stall);
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
            one.answer(number, tokens_of(first, count));
        } else if (what == "hold") {
            one.rows.slots[number].tokens = tokens_of(first, count);
        } else if (what == "prompt") {
            answer = one.prompt(number, tokens_of(first, count));
        } else if (what == "begin") {
            one.begin(number, tokens_of(first, count));
        } else if (what == "bring") {
            answer = one.bring(first == 0 ? std::vector<int> { number } : std::vector<int> { number, first });
        } else if (what == "turn") {
            one.turn();
        } else if (what == "ahead") {
            answer = one.ahead();
        } else if (what == "drop") {
            one.restorer.drop(number);
        } else if (what == "keep") {
            answer = one.keep(number, (uint32_t) first);
        } else if (what == "shift") {
            one.saver.keep(number, (uint32_t) first, one.rows);
            one.rows.slots[number].turned = (uint32_t) first;
        } else if (what == "lose") {
            one.rows.slots[number].tokens.clear();
        } else if (what == "forget") {
            one.saver.lose(number, (uint32_t) first);
            one.rows.slots[number].turned = (uint32_t) first;
        } else if (what == "throws") {
            one.rows.reads_left = number;
        } else if (what == "settle") {
            answer = one.settle((uint64_t) number);
        } else if (what == "slow") {
            one.rows.slow_ms = number;
        } else if (what == "direct") {
            one.rows.direct = number;
        } else if (what == "reads") {
            answer = std::to_string(std::exchange(one.rows.placed, 0)) + " direct";
        } else if (what == "full") {
            one.rows.cells = (size_t) number;
        } else {
            answer = "what?";
        }
        std::cout << answer << std::endl;
    }
    return 0;
}
