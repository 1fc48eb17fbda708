// What of a prompt can be had from files. A thread for each prompt looks up, and with a few others it reads and checks; the
// engine's main loop copies what is ready into the slot, a few milliseconds at a time, and serves other slots meanwhile.
//
// A block is read and checked whole before the main loop sees it. One that lies in memory the main loop may read into its
// cells itself, with threads beside it: that takes no longer than copying, and nothing is copied twice. What cannot be had ends
// the restored prefix there.
#pragma once

#include "kvt_client.h"
#include "kvt_lease.h"
#include "kvt_rows.h"

#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvt {

constexpr size_t most_read_ahead = 128u << 20; // bytes that were read and are not in a slot yet, of all prompts
constexpr size_t first_round_bytes = 8u << 20;
constexpr unsigned most_readers = 4;           // threads that read files of one prompt
constexpr uint32_t most_wait_ms = 5000;        // for files that have to be copied up first, and for room
constexpr milliseconds most_stall { 15000 };   // without anything new, however long a disk hangs

// Numbers of `Shortfall` in block_store.proto: why there is not more.
enum shortfall : uint32_t {
    shortfall_none = 0,
    shortfall_too_short = 4,
    shortfall_sidecar_away = 7,
    shortfall_sidecar_late = 8,
    shortfall_sidecar_error = 9,
    shortfall_no_memory = 10,
    shortfall_damaged = 11,
    shortfall_unreadable = 12,
    shortfall_no_cells = 16,
    shortfall_not_looked_up = 19,
    shortfall_not_text = 20,
};

inline double seconds_since(steady_clock::time_point began) { return std::chrono::duration<double>(steady_clock::now() - began).count(); }

// All of its functions are called in the main loop.
class restorer {
public:
    // `look_up` is asked first. Where files have to be fetched first, `waiting` asks again, for one prompt after the other:
    // others' look-ups do not wait for that, and an answer that comes too late costs no other prompt its lease.
    restorer(client & look_up, client & waiting, hello said, size_t most_bytes = most_read_ahead, milliseconds stall = most_stall);
    ~restorer(); // waits for its threads, at most for a look-up
    restorer(const restorer &) = delete;
    restorer & operator=(const restorer &) = delete;

    // The slot holds the first `held` rows of the prompt, and goes on after the first `have` of them by itself: with states
    // these may be fewer. What it was to get before is dropped. `direct`: row_sink has places to read into.
    void begin(int slot, std::vector<int32_t> tokens, uint32_t have, uint32_t held, bool direct = false);

    bool busy(int slot) const { return jobs_.count(slot) > 0; }

    // Writes what is ready, until `until`, and at least one block if one is. True if that was all: `report` then has what
    // was restored (tokens, bytes, times, reason and place), and the slot is not busy any more. It is all, too, if nothing new
    // has come for `most_stall`. Of a model with states all that is named is restored, or nothing.
    bool step(int slot, row_sink & sink, steady_clock::time_point until, finished & report);

    void drop(int slot); // nothing more is wanted for it

    size_t ahead() const; // bytes of memory for blocks, states and windows, of all prompts

    // Until something is ready for any slot, at most so long.
    void wait(milliseconds most);

private:
    struct piece { // a block, as row_sink gets it
        uint32_t first = 0;
        uint32_t rows = 0;
        uint32_t skip = 0;
        uint32_t block_rows = 0;
        buffer block;
        const file * direct = nullptr; // is not read yet: the main loop does
        uint32_t number = 0;           // of that file in the answer
    };
    struct job {
        std::vector<int32_t> tokens;
        uint32_t have = 0;
        uint32_t held = 0;
        uint32_t end = 0;        // rows that are there when all is written
        uint32_t written = 0;
        std::vector<char> state; // of a model with states: what goes in behind the rows, this or windows
        std::vector<window> windows;
        size_t blocks = 0;       // files that hold rows
        size_t file = 0;         // that is to be read next
        uint32_t next = 0;       // row that it is to have
        uint32_t taken = 0;      // so many pieces were begun, in their order
        uint32_t last = UINT32_MAX; // the piece that cannot be had: what comes after it is of no use
        uint32_t shown = 0;      // pieces that the main loop has had
        size_t lent = 0;         // of them it reads so many just now
        double bytes_per_second = 0; // of what it read last
        uint32_t damaged = UINT32_MAX;          // the file that it found to be
        bool direct = false;
        std::map<uint32_t, piece> ready; // by number; one that is not the next waits for those before it
        double slowest = 0;      // seconds that one of the readers took for all that it read
        std::vector<buffer> spare; // that the main loop has done with
        size_t buffers = 0;        // of this job, wherever they are
        size_t ahead = 0;          // their bytes, and those of state or windows
        bool beside = false;       // it has room for state or windows
        bool read = false;         // the thread adds no more
        bool dropped = false;
        bool ended = false;        // so has the thread
        steady_clock::time_point moved = steady_clock::now(); // when something new had come
        finished report;
        std::thread thread;
    };

    struct turn { // of a prompt whose files have to be fetched, until they are read
        turn(restorer & its, job & one, steady_clock::time_point latest);
        ~turn();
        turn(const turn &) = delete;
        turn & operator=(const turn &) = delete;
        restorer & of;
        bool has = false; // not, if it came too late or nobody wants the rows any more
    };

    void run(job & one) noexcept;
    void read(job & one);
    void read_named(job & one, client & from, const matched & found);
    void fetched(job & one, steady_clock::time_point began);
    void answered(job & one, status got, const matched & found, steady_clock::time_point began);
    bool dropped(const job & one) const;
    bool reserve(job & one, lease & held, const matched & found);
    bool read_end(job & one, lease & held, const matched & found);
    uint32_t read_beside(const job & one, const file & named, lease & held, std::vector<char> & state, std::vector<window> & windows) const;
    void read_files(job & one, lease & held, const matched & found);
    void read_some(job & one, lease & held, const matched & found) noexcept;
    bool wants_more(job & one, const matched & found) const;
    bool offer(job & one, const matched & found);
    void lend(job & one, lease & held);
    bool read_round(job & one, row_sink & sink, steady_clock::time_point until, std::unique_lock<std::mutex> & lock);
    bool read_piece(job & one, lease & held, const matched & found, double & seconds);
    uint32_t read_checked(const matched & found, size_t file, lease & held, char * block) const;
    static bool has_next(const job & one) { return one.shown < one.last && one.ready.count(one.shown) > 0; }
    void resume(job & one, row_sink & sink);
    bool get_buffer(job & one, lease & held, buffer & to);
    void retire(int slot, bool dropped);
    void reap();

    client & look_up_;
    client & waiting_;
    const hello said_;
    const size_t buffer_bytes_;
    const size_t most_bytes_;
    const milliseconds most_stall_;

    mutable std::mutex mutex_; // of the next three, and of the fields of jobs
    std::condition_variable changed_;
    size_t ahead_ = 0;
    size_t besides_ = 0;    // prompts of which a state or windows are ahead
    bool fetching_ = false; // for one prompt files are fetched
    std::map<int, std::unique_ptr<job>> jobs_;  // only the main loop uses the map and the list
    std::list<std::unique_ptr<job>> retired_;   // whose threads may not have ended yet
};

} // namespace kvt
