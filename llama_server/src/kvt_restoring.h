// What the restorer and its threads share. A thread keeps it, and its own job: nothing goes under a read that hangs.
#pragma once

#include "kvt_lease.h"
#include "kvt_restore.h"
#include "kvt_worker.h"

#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace kvt {

constexpr size_t most_retired = 16;               // prompts that nobody wants any more, and whose threads still read
constexpr milliseconds stall_beside_one { 1000 }; // without anything new, where another prompt's read hangs already

class restoring : public std::enable_shared_from_this<restoring> {
public:
    restoring(std::shared_ptr<connection> look_up, std::shared_ptr<connection> waiting, hello said, size_t most_bytes, milliseconds stall);

    // As those of the restorer.
    void read_into(std::shared_ptr<block_memory> memory);
    void begin(int slot, std::vector<int32_t> tokens, uint32_t have, uint32_t held, std::vector<fingerprint> fingerprints, bool direct);
    bool busy(int slot) const { return find(slot) != jobs_.end(); }
    uint32_t start(int slot) const;
    bool step(int slot, row_sink & sink, steady_clock::time_point until, finished & report, std::vector<fingerprint> & fingerprints);
    void drop(int slot) noexcept;
    size_t ahead() const;
    void wait(milliseconds most);
    void end();

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
        int slot = 0;
        std::vector<int32_t> tokens;
        matched found;           // the answer; pieces point to its files
        std::vector<fingerprint> fingerprints; // of the slot's first blocks, then of what has come, too
        uint32_t have = 0;
        uint32_t asked = 0; // no more than `have`: of which the sidecar is told
        uint32_t held = 0;
        uint32_t start = UINT32_MAX; // what comes begins at this row
        uint32_t end = 0;        // rows that are there when all is written
        uint32_t written = 0;
        bool came = false; // any of them
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
        milliseconds slack { 0 };  // that it may take longer until then: a state comes as a whole
        finished report;
        bool stalled = false;      // nothing new had come for too long
        worker thread;
    };
    using jobs = std::list<std::shared_ptr<job>>;

    struct turn { // of a prompt whose files have to be fetched, until they are read
        turn(restoring & its, job & one, steady_clock::time_point latest);
        ~turn();
        turn(const turn &) = delete;
        turn & operator=(const turn &) = delete;
        restoring & of;
        bool has = false; // not, if it came too late or nobody wants the rows any more
    };

    static status match(const job & one, connection & from, matched & found);
    void run(job & one) noexcept;
    void read(job & one);
    void read_named(job & one, const std::shared_ptr<connection> & from);
    void fetched(job & one, steady_clock::time_point began);
    void answered(job & one, matched found, status got, steady_clock::time_point began);
    void give_up(job & one);
    bool dropped(const job & one) const;
    bool reserve(job & one, lease & held);
    bool read_end(job & one, lease & held);
    bool begins_well(job & one);
    uint32_t read_beside(const job & one, const file & named, lease & held, std::vector<char> & state, std::vector<window> & windows) const;
    void read_files(job & one, lease & held);
    void read_some(job & one, lease & held) noexcept;
    bool wants_more(job & one) const;
    bool offer(job & one);
    void lend(job & one, lease & held);
    bool read_round(job & one, row_sink & sink, steady_clock::time_point until, std::unique_lock<std::mutex> & lock);
    uint32_t read_into(row_sink & sink, const std::vector<piece> & round, size_t & had) const;
    bool read_piece(job & one, lease & held, double & seconds);
    uint32_t read_checked(const job & one, size_t file, lease & held, char * block) const;
    static std::vector<fingerprint> fingerprints_of(const job & one);
    static bool has_next(const job & one) { return one.shown < one.last && one.ready.count(one.shown) > 0; }
    void resume(job & one, row_sink & sink);
    bool get_buffer(job & one, lease & held, buffer & to);
    jobs::const_iterator find(int slot) const;
    void retire(jobs::const_iterator found) noexcept;
    void reap();
    bool hanging();

    const std::shared_ptr<connection> look_up_;
    const std::shared_ptr<connection> waiting_;
    const hello said_;
    const size_t buffer_bytes_;
    const size_t most_bytes_;
    const milliseconds most_stall_;

    mutable std::mutex mutex_; // of the next four, and of the fields of jobs
    std::condition_variable changed_;
    std::shared_ptr<block_memory> memory_;
    size_t ahead_ = 0;
    size_t besides_ = 0;    // prompts of which a state or windows are ahead
    bool fetching_ = false; // for one prompt files are fetched
    jobs jobs_;    // one for each slot; only the main loop uses the two lists
    jobs retired_; // whose threads may not have ended yet
};

} // namespace kvt
