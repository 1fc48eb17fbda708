// An engine with two slots for tests of saving and restoring: its main loop is the one that reads its input.
//   kvt_slots SOCKET [MIB [MIB [MIB [MS]]]]   that may be read ahead, and kept; of a state, without which no slot goes on; that
//                             a prompt may wait for something new; with KVT_EAGER in the environment it does not wait until
//                             it is connected
//   answer SLOT FIRST COUNT   the slot holds the rows of tokens FIRST …; they are to be stored, and a state behind them
//   compute SLOT FIRST COUNT FROM [MS]   the slot holds them, and computes more: whole blocks from FROM on are to be stored meanwhile,
//                             within a time; "handed N" rows of them are, and " more" if there was no time for the others
//   written BLOCKS            without the main loop until so many are written; "N blocks"
//   done                      the same until nothing waits to be stored
//   hold SLOT FIRST COUNT     it holds them, and they are not to be stored
//   prompt SLOT FIRST COUNT   it gets another prompt: what is not stored is kept, then what is stored comes back
//   begin SLOT FIRST COUNT    the same prompt, of which nothing is brought yet
//   bring SLOT [SLOT]         turns of the main loop until these slots have got all; as `prompt` answers, and if it is slow,
//                             " in S steps, longest M ms"
//   asleep SLOT FIRST COUNT   as `answer`, and the server sleeps: its saver ends while the main loop holds what a wake waits for
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
//   computes MILLISECONDS     that a device goes on computing from now on, before rows may be written
//   full ROWS                 that a slot has cells for
//   direct N                  from now on, rows can be read into where they belong, but for each Nth block; 0: for all blocks
//   reads                     "N direct": blocks that were
//   pinned N                  from now on blocks are read into memory that a device has beside its own, as long as no more than N
//                             of them are there
//   memory                    "N taken, M out": how often it was used, and is now
//   hang CALL                 from now on, threads of the library wait in this call of the kernel's; "go on": they do
//   has SLOT FIRST COUNT FROM "yes" or "no": the slot's last answer has a state behind COUNT tokens, of which those from FROM on
//                             are other ones
//   heal SLOT                 that its rows were wrong is forgotten
//   room                      a turn of the main loop, then "N MiB": that may still be kept
//   threads                   "N threads": of this process
#include "../src/kvt_client.h"
#include "../src/kvt_restore.h"
#include "../src/kvt_saver.h"
#include "../src/kvt_states.h"
#include "kvt_engine.h"
#include "kvt_hangs.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>

namespace {

using namespace made_up;

struct server {
    engine rows;
    std::shared_ptr<pinned> memory = std::make_shared<pinned>(0);
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
          saver(storing, said, [this] { woken.store(true); }, kept, stall) {
        if (std::getenv("KVT_EAGER") == nullptr) {
            look_up->wait_first(patience);
            storing->wait_first(patience);
        }
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
        saver.add(number, tokens, std::move(states));
    }

    std::string compute(int number, const std::vector<int32_t> & tokens, uint32_t from, kvt::milliseconds most) {
        rows.slots[number].tokens = tokens;
        const auto got = saver.add_ahead(number, tokens, from, rows, clock_type::now() + most);
        return "handed " + std::to_string(got.handed) + (got.more ? " more" : "");
    }

    // Without the main loop.
    std::string written(uint64_t blocks) const {
        const auto until = clock_type::now() + patience;
        while (saver.written_blocks() < blocks && clock_type::now() < until) {
            std::this_thread::sleep_for(kvt::milliseconds(1));
        }
        return std::to_string(saver.written_blocks()) + " blocks";
    }

    std::string done() const {
        const auto until = clock_type::now() + patience;
        while (saver.jobs() > 0 && clock_type::now() < until) {
            std::this_thread::sleep_for(kvt::milliseconds(1));
        }
        return saver.jobs() > 0 ? "not done" : written(0);
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
                std::vector<kvt::fingerprint> fingerprints;
                cells into(rows, one, prompts[number]);
                if (restorer.busy(number) && restorer.start(number) < have[number]) {
                    saver.keep(number, restorer.start(number), rows);
                }
                const bool done = restorer.busy(number) && restorer.step(number, into, began + kvt::saving_step, report, fingerprints);
                one.broken = one.broken || !into.taken.empty(); // places that neither got rows nor were given back
                if (!done) {
                    continue;
                }
                --left;
                saver.restored(number, prompts[number], std::move(fingerprints));
                report.prompt_tokens = (uint32_t) prompts[number].size();
                report.memory_tokens = have[number];
                report.failures = look_up->failures();
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
        restorer.begin(number, tokens, have[number], have[number], saver.fingerprints(number, tokens), rows.direct >= 0);
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

    void asleep(int number, const std::vector<int32_t> & tokens) {
        rows.slots[number].tokens = tokens;
        std::mutex tasks;
        std::atomic<bool> waking { false };
        std::atomic<bool> over { false };
        const auto wake = [&] {
            waking.store(true);
            tasks.lock();
            tasks.unlock();
            over.store(true);
        };
        const auto wait = [](const std::atomic<bool> & until) {
            while (!until.load()) {
                std::this_thread::sleep_for(kvt::milliseconds(1));
            }
        };
        {
            const std::lock_guard<std::mutex> lock(tasks);
            kvt::saver other(storing, said, wake);
            other.add(number, tokens);
            wait(waking);
        }
        wait(over);
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
    std::cout << (one.look_up->up() && one.storing->up() ? "up" : "not up") << std::endl;
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
        } else if (what == "compute") {
            uint32_t from = 0;
            int most = 0;
            in >> from;
            answer = one.compute(number, tokens_of(first, count), from, in >> most ? kvt::milliseconds(most) : patience);
        } else if (what == "written") {
            answer = one.written((uint64_t) number);
        } else if (what == "done") {
            answer = one.done();
        } else if (what == "hold") {
            one.rows.slots[number].tokens = tokens_of(first, count);
        } else if (what == "prompt") {
            answer = one.prompt(number, tokens_of(first, count));
        } else if (what == "begin") {
            one.begin(number, tokens_of(first, count));
        } else if (what == "bring") {
            answer = one.bring(first == 0 ? std::vector<int> { number } : std::vector<int> { number, first });
        } else if (what == "asleep") {
            one.asleep(number, tokens_of(first, count));
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
        } else if (what == "computes") {
            one.rows.computes_ms = number;
        } else if (what == "slow") {
            one.rows.slow_ms = number;
        } else if (what == "direct") {
            one.rows.direct = number;
        } else if (what == "reads") {
            answer = std::to_string(std::exchange(one.rows.placed, 0)) + " direct";
        } else if (what == "pinned") {
            one.memory = std::make_shared<pinned>((size_t) number);
            one.restorer.read_into(one.memory);
        } else if (what == "memory") {
            answer = one.memory->said();
        } else if (what == "hang") {
            std::istringstream words(line);
            words >> what >> what;
            hangs::in(what);
        } else if (what == "go") {
            hangs::in("");
        } else if (what == "heal") {
            one.rows.slots[number].broken = false;
        } else if (what == "has") {
            auto tokens = tokens_of(first, count);
            size_t from = tokens.size();
            in >> from;
            for (; from < tokens.size(); ++from) {
                tokens[from] += 1 << 20;
            }
            answer = one.saver.has_state(number, tokens, (uint32_t) count) ? "yes" : "no";
        } else if (what == "room") {
            if (one.woken.exchange(false)) {
                one.saver.step(one.rows, clock_type::now() + kvt::saving_step);
            }
            answer = std::to_string(one.saver.room() >> 20) + " MiB";
        } else if (what == "threads") {
            const auto all = std::filesystem::directory_iterator("/proc/self/task");
            answer = std::to_string(std::distance(begin(all), end(all))) + " threads";
        } else if (what == "full") {
            one.rows.cells = (size_t) number;
        } else {
            answer = "what?";
        }
        std::cout << answer << std::endl;
    }
    return 0;
}
