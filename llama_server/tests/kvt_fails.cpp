// An engine of which each allocation fails once: it stores an answer, and gets it back, again and again, while the first, the
// second, the third … allocation fails. Nothing may come of that but rows that are computed.
//   kvt_fails SOCKET KIND [STEP [FROM]]   KIND: copied, direct or states; every STEP-th allocation, from a number on
// Says "N allocations failed, M restored", when one round needs no more.
#include "../src/kvt_links.h"
#include "kvt_allocations.h"
#include "kvt_engine.h"

#include <atomic>
#include <exception>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace made_up;
using allocations::of_library;

constexpr uint32_t count = 64*9 + 1; // tokens: blocks for more than one reader, and one that is not whole
const kvt::milliseconds patience { 300 }; // for what a failed connection will not bring any more

struct server {
    std::string path;
    bool direct;
    bool states;
    engine rows;
    std::atomic<bool> woken { false };
    kvt::links links;

    // As llama-server's main loop does: whatever is thrown costs the slot its rows.
    template <typename Work> bool safely(int slot, const Work & work) {
        try {
            const of_library its;
            work();
            return true;
        } catch (const std::exception &) {
            if (links.restorer != nullptr) {
                links.restorer->drop(slot);
            }
            rows.slots[slot].tokens.clear();
            return false;
        }
    }

    bool connect() {
        const auto said = make_hello(states);
        const bool opened = safely(0, [&] { links.open(path, said, true, [this] { woken.store(true); }); });
        if (opened) {
            (*links.look_up)->wait_first(patience);
            (*links.storing)->wait_first(patience);
        }
        return opened;
    }

    void store(const std::vector<int32_t> & tokens) {
        rows.slots[0].tokens = tokens;
        std::vector<kvt::state> all;
        if (states) {
            all.push_back(made_up::make_state(tokens, 1000));
        }
        const auto until = clock_type::now() + patience;
        safely(0, [&] { links.saver->add_ahead(0, { tokens.begin(), tokens.begin() + 64*4 }, 0, rows, until); });
        safely(0, [&] { links.saver->add(0, tokens, std::move(all)); });
        const uint64_t blocks = (tokens.size() + 63)/64 + (states ? 1 : 0);
        while (links.saver->written_blocks() < blocks && clock_type::now() < until) {
            if (woken.exchange(false)) {
                safely(0, [&] { links.saver->step(rows, clock_type::now() + kvt::saving_step); });
            }
            std::this_thread::sleep_for(kvt::milliseconds(1));
        }
        safely(0, [&] { links.saver->keep(0, 64, rows); });
    }

    uint32_t restore(const std::vector<int32_t> & tokens) {
        kvt::finished report;
        std::vector<kvt::fingerprint> fingerprints;
        bool done = !safely(1, [&] { links.restorer->begin(1, tokens, 0, 0, links.saver->fingerprints(1, tokens), direct); });
        while (!done && links.restorer->busy(1)) {
            links.restorer->wait(kvt::milliseconds(10));
            cells into(rows, rows.slots[1], tokens);
            if (!safely(1, [&] { done = links.restorer->step(1, into, clock_type::now() + kvt::saving_step, report, fingerprints); })) {
                report = {};
                done = true;
            }
            rows.slots[1].broken = rows.slots[1].broken || !into.taken.empty();
        }
        auto & held = rows.slots[1].tokens;
        rows.slots[1].broken = rows.slots[1].broken || report.restored_tokens > tokens.size() || held.size() < report.restored_tokens;
        safely(1, [&] { links.saver->restored(1, tokens, std::move(fingerprints)); });
        safely(1, [&] { links.saver->report(report); }); // if it throws the slot loses its rows
        return report.restored_tokens;
    }
};

} // namespace

int main(int argc, char ** argv) {
    allocations::counted = false;
    if (argc < 3) {
        std::cout << "kvt_fails SOCKET KIND [STEP [FROM]]" << std::endl;
        return 1;
    }
    const std::string kind = argv[2];
    const long step = argc > 3 ? std::stol(argv[3]) : 1;
    int32_t first = (int32_t) (clock_type::now().time_since_epoch().count() % (1 << 29)); // of tokens that nobody has stored
    uint64_t restored = 0;
    long failed = argc > 4 ? std::stol(argv[4]) : 0;
    for (;; failed += step, first += 10000) {
        server one { argv[1], kind == "direct", kind == "states", {}, { false }, {} };
        const auto tokens = tokens_of(first, count);
        allocations::left.store(failed);
        if (one.connect()) {
            one.store(tokens);
            restored += one.restore(tokens_of(first, count + 1));
        }
        const bool all = allocations::left.exchange(-1) >= 0;
        if (one.rows.slots[1].broken) {
            std::cout << "BROKEN rows after allocation " << failed << std::endl;
            return 1;
        }
        if (all) {
            break;
        }
    }
    std::cout << failed << " allocations failed, " << restored << " restored" << std::endl;
    return 0;
}
