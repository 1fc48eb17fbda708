// Stores rows of answers that have ended. A thread asks the sidecar which blocks it lacks, and writes them; the engine's
// main loop hands it rows, a few milliseconds at a time.
//
// The rows may be lost meanwhile: the slot gets another prompt. Before that, keep() copies what is not stored yet. What
// was lost without it, or is more than `most_kept`, is not stored; that costs computing it again, and no more.
#pragma once

#include "kvt_client.h"
#include "kvt_rows.h"
#include "kvt_states.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace kvt {

constexpr milliseconds saving_step { 20 }; // the main loop's part, at a time; it ends with a segment of a block
constexpr size_t most_kept_bytes = 512u << 20;

class saver {
public:
    // `wake` makes the main loop call step() soon. It is called in any thread, and not after the destructor.
    // Requests are reported over `look_up`, whose connection knows what their files were expected to take.
    saver(client & store, client & look_up, hello said, std::function<void()> wake, size_t most_kept = most_kept_bytes);
    ~saver();
    saver(const saver &) = delete;
    saver & operator=(const saver &) = delete;

    // The slot holds the rows of these tokens, of which the first `stored` come from the store. States are stored behind
    // them, unless more than `most_kept` bytes wait already, and windows from `windows` on, as far as the slot still has them
    // when they are read.
    void add(int slot, std::vector<int32_t> tokens, uint32_t stored, std::vector<state> states = {}, uint32_t windows = UINT32_MAX);

    // Bytes that may still wait here.
    size_t room() const;

    // Whether the slot's last job has stored a state after so many of these tokens.
    bool has_state(int slot, const std::vector<int32_t> & tokens, uint32_t n_tokens) const;

    // Hands over rows that were asked for, until `until`, and at least one segment.
    void step(row_source & rows, steady_clock::time_point until);

    // Rows from `from` on are about to be lost: copies those that may have to be stored. False at `until` if there are
    // more; then it is called again, and nothing may be lost before it has returned true, or lose() was called.
    bool keep(int slot, uint32_t from, row_source & rows, steady_clock::time_point until = steady_clock::time_point::max());

    // Rows from `from` on are lost: what is not copied by now is not stored.
    void lose(int slot, uint32_t from);

    void report(const finished & request); // to the sidecar, without waiting for it

    uint64_t written_blocks() const;

private:
    struct job {
        int slot = 0;
        std::vector<int32_t> tokens;
        uint32_t done = 0;     // rows that are stored
        uint32_t resident = 0; // rows before it may be read from the slot
        std::map<uint32_t, buffer> kept; // by their first position
        std::map<uint32_t, std::vector<char>> states; // by n_tokens
        uint32_t windows = UINT32_MAX; // rows from here on have windows
        std::set<uint32_t> stored_states;
    };
    struct past { // of a slot: its last job
        std::vector<int32_t> tokens;
        uint32_t done = 0;
        std::set<uint32_t> states; // that are stored
    };
    struct want { // a block that the thread waits for
        uint32_t first = 0;
        uint32_t rows = 0;
        bool window = false; // that of the block
        bool served = false;
        size_t segments = 0; // of the block, that are read
        size_t bytes = 0;
        buffer block; // stays empty where the rows are gone
    };

    void run();
    void store(const std::shared_ptr<job> & one);
    bool connected();
    bool later(int & naps);
    std::vector<want> fetch(const std::shared_ptr<job> & one, const std::vector<reserved> & files);
    std::vector<state_offer> offers_of(const job & one, bool windows) const;
    void note_present(job & one, const std::vector<state_offer> & offers, const planned & plan);
    std::vector<filled> fill_all(const std::shared_ptr<job> & one, const planned & plan);
    static uint32_t lasting(const past & before, const std::vector<int32_t> & tokens);
    static bool fill_state(const job & one, const reserved & named, filled & done);
    bool fill(const reserved & named, const buffer & block, filled & done) const;
    bool serve(want & one, row_source & rows, steady_clock::time_point until);
    bool read(want & one, row_source & rows, steady_clock::time_point until);
    bool keep_of(job & one, uint32_t from, row_source & rows, steady_clock::time_point until);
    buffer copied(const job & one, uint32_t first, uint32_t count, row_source & rows) const;
    uint32_t known(int slot, const std::vector<int32_t> & tokens) const;
    void forget(const job & one);

    client & store_;
    client & look_up_;
    const hello said_;
    const std::function<void()> wake_;
    const size_t most_kept_;

    mutable std::mutex mutex_; // of all below
    std::condition_variable changed_;
    std::deque<std::shared_ptr<job>> jobs_; // the first is the one that is being stored
    std::deque<finished> reports_;
    std::vector<want> wants_; // of the first job
    std::map<int, past> last_;
    size_t kept_bytes_ = 0;
    uint64_t written_ = 0;
    bool ending_ = false;
    std::thread thread_; // last: it uses all of the above
};

} // namespace kvt
