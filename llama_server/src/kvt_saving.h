// What the saver and its thread share. The thread keeps it: nothing goes under a write that hangs.
#pragma once

#include "kvt_saver.h"
#include "kvt_worker.h"

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

namespace kvt {

class saving : public std::enable_shared_from_this<saving> {
public:
    saving(std::shared_ptr<connection> store, hello said, std::function<void()> wake, size_t most_kept, milliseconds stall);

    // As those of the saver.
    void start();
    void add(int slot, std::vector<int32_t> tokens, std::vector<state> states, uint32_t windows);
    ahead add_ahead(int slot, std::vector<int32_t> tokens, uint32_t first, row_source & rows, steady_clock::time_point until);
    std::vector<fingerprint> fingerprints(int slot, const std::vector<int32_t> & tokens) const;
    void restored(int slot, const std::vector<int32_t> & tokens, std::vector<fingerprint> fingerprints);
    size_t room() const;
    bool has_state(int slot, const std::vector<int32_t> & tokens, uint32_t n_tokens) const;
    void step(row_source & rows, steady_clock::time_point until);
    bool keep(int slot, uint32_t from, row_source & rows, steady_clock::time_point until);
    void lose(int slot, uint32_t from);
    void report(const finished & request);
    uint64_t written_blocks() const;
    size_t jobs() const;
    void end();

private:
    struct job {
        int slot = 0;
        std::vector<int32_t> tokens;
        std::vector<fingerprint> fingerprints; // of the first blocks, which are stored or were read to be
        std::map<uint32_t, buffer> read; // of these, those that the sidecar has not been asked for yet, by their first position
        uint64_t turn = 0;
        uint32_t resident = 0; // rows before it may be read from the slot
        std::map<uint32_t, buffer> kept; // by their first position
        std::map<uint32_t, std::vector<char>> states; // by n_tokens
        uint32_t windows = UINT32_MAX; // rows from here on have windows
        std::set<uint32_t> stored_states;
    };
    struct past { // what is known of the rows that a slot holds
        std::vector<int32_t> tokens;
        std::vector<fingerprint> fingerprints; // of the first blocks
        std::set<uint32_t> states;     // that are stored
        uint64_t turn = 0;             // how often rows were restored
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

    struct write { // of a file
        explicit write(saving & its);
        ~write();
        write(const write &) = delete;
        write & operator=(const write &) = delete;
        saving & of;
    };

    void run();
    bool hangs();
    void store(const std::shared_ptr<job> & one);
    bool connected();
    bool later(steady_clock::time_point latest);
    std::shared_ptr<job> job_of(int slot, std::vector<int32_t> tokens) const;
    bool take_kept(job & of, want & one) noexcept;
    std::vector<want> fetch(std::vector<want> wants);
    bool read_more(const std::shared_ptr<job> & one, uint32_t most);
    void know(const job & one);
    std::vector<state_offer> offers_of(const job & one, bool windows) const;
    void note_present(job & one, const std::vector<state_offer> & offers, const planned & plan);
    std::vector<filled> fill_all(const std::shared_ptr<job> & one, const planned & plan);
    std::vector<want> missing(const job & one, const std::vector<reserved> & files) const;
    static uint32_t lasting(const past & before, const std::vector<int32_t> & tokens);
    static bool fill_state(const job & one, const reserved & named, filled & done);
    bool fill(const job & one, const reserved & named, const buffer & block, filled & done) const;
    bool serve(want & one, row_source & rows, steady_clock::time_point until);
    bool read(want & one, row_source & rows, steady_clock::time_point until);
    bool keep_of(job & one, uint32_t from, row_source & rows, steady_clock::time_point until);
    buffer copied(const job & one, uint32_t first, uint32_t count, row_source & rows) const;
    std::vector<fingerprint> known(int slot, const std::vector<int32_t> & tokens) const;
    void forget_rows(int slot, uint32_t from) noexcept;
    void forget(const job & one) noexcept;
    void give_back(job & one, bool states) noexcept;

    const std::shared_ptr<connection> store_;
    const hello said_;
    const std::function<void()> wake_;
    const size_t most_kept_;
    const milliseconds most_stall_;
    bool patient_ = true; // of the thread: it waits while the model's file is being checked

    mutable std::mutex mutex_; // of all below
    std::condition_variable changed_;
    std::list<std::shared_ptr<job>> jobs_; // the first is the one that is being stored
    std::list<finished> reports_;
    std::vector<want> wants_; // of the first job
    std::map<int, past> last_;
    size_t kept_bytes_ = 0;
    uint64_t written_ = 0;
    std::optional<steady_clock::time_point> writing_; // a file, since then
    bool ending_ = false;
    worker thread_;
};

} // namespace kvt
