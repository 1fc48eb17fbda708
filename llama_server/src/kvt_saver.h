// Stores rows of answers that have ended. A thread asks the sidecar which blocks it lacks, and writes them; the engine's
// main loop hands it rows, a few milliseconds at a time.
//
// The rows may be lost meanwhile: the slot gets another prompt. Before that, keep() copies what is not stored yet. What
// was lost without it, or is more than `most_kept_bytes`, is not stored; that costs computing it again, and no more.
#pragma once

#include "kvt_client.h"
#include "kvt_rows.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvt {

constexpr milliseconds saving_step { 20 }; // the main loop's part in saving, at a time
constexpr size_t most_kept_bytes = 512u << 20;

class saver {
public:
    // `wake` makes the main loop call step() soon. It is called in any thread, and not after the destructor.
    // Requests are reported over `look_up`, whose connection knows what their files were expected to take.
    saver(client & store, client & look_up, hello said, std::function<void()> wake);
    ~saver();
    saver(const saver &) = delete;
    saver & operator=(const saver &) = delete;

    // The slot holds the rows of these tokens, of which the first `stored` come from the store.
    void add(int slot, std::vector<int32_t> tokens, uint32_t stored);

    // Hands over rows that were asked for, for about `most`.
    void step(row_source & rows, milliseconds most);

    // Rows from `from` on are about to be lost: copies those that may have to be stored.
    void keep(int slot, uint32_t from, row_source & rows);

    void report(const finished & request); // to the sidecar, without waiting for it

    uint64_t written_blocks() const;

private:
    struct job {
        int slot = 0;
        std::vector<int32_t> tokens;
        uint32_t done = 0;     // rows that are stored
        uint32_t resident = 0; // rows before it may be read from the slot
        std::map<uint32_t, std::vector<char>> kept; // by their first position
    };
    struct want { // a block that the thread waits for
        uint32_t first = 0;
        uint32_t rows = 0;
        bool served = false;
        std::vector<char> block; // stays empty where the rows are gone
    };

    void run();
    void store(const std::shared_ptr<job> & one);
    bool connected();
    std::vector<want> fetch(const std::shared_ptr<job> & one, const std::vector<reserved> & files);
    bool fill(const reserved & named, const std::vector<char> & block, filled & done) const;
    void serve(want & one, row_source & rows);
    void keep_of(job & one, uint32_t from, row_source & rows);
    uint32_t known(int slot, const std::vector<int32_t> & tokens) const;
    void forget(const job & one);

    client & store_;
    client & look_up_;
    const hello said_;
    const std::function<void()> wake_;

    mutable std::mutex mutex_; // of all below
    std::condition_variable changed_;
    std::deque<std::shared_ptr<job>> jobs_; // the first is the one that is being stored
    std::deque<finished> reports_;
    std::vector<want> wants_; // of the first job
    std::map<int, std::pair<std::vector<int32_t>, uint32_t>> last_; // of each slot: tokens, and how many are stored
    size_t kept_bytes_ = 0;
    uint64_t written_ = 0;
    bool ending_ = false;
    std::thread thread_; // last: it uses all of the above
};

} // namespace kvt
