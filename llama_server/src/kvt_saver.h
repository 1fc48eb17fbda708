// Stores rows of answers that have ended, and of long ones on the way. A thread asks the sidecar which blocks it lacks, and writes them; the engine's
// main loop hands it rows, a few milliseconds at a time.
//
// The rows may be lost meanwhile: the slot gets another prompt. Before that, keep() copies what is not stored yet. What
// was lost without it, or is more than `most_kept`, is not stored; that costs computing it again, and no more.
//
// A disk may hang: then nothing more is taken or kept until it goes on, and at the end the thread is left behind.
#pragma once

#include "kvt_client.h"
#include "kvt_rows.h"
#include "kvt_states.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace kvt {

constexpr milliseconds saving_step { 20 }; // the main loop's part, at a time; it ends with a segment of a block
constexpr size_t most_kept_bytes = 512u << 20;
constexpr milliseconds most_write_stall { 15000 }; // for one file; who writes for longer is taken to hang

class saving;

struct ahead {
    uint32_t handed = 0; // rows before it are stored, or about to be
    bool more = false;   // there was no time for all of them
};

class saver {
public:
    // `wake` makes the main loop call step() soon. It is called in any thread, and not after the destructor.
    saver(const client & store, hello said, std::function<void()> wake, size_t most_kept = most_kept_bytes,
          milliseconds stall = most_write_stall);
    ~saver(); // waits for its thread, unless it hangs
    saver(const saver &) = delete;
    saver & operator=(const saver &) = delete;

    // The slot holds the rows of these tokens. States are stored behind them, unless more than `most_kept` bytes wait already,
    // and windows from `windows` on, as far as the slot still has them when they are read.
    void add(int slot, std::vector<int32_t> tokens, std::vector<state> states = {}, uint32_t windows = UINT32_MAX);

    // The slot still computes, and holds the rows of these tokens. Whole blocks from `first` on are copied aside until `until`, one
    // at least, while they take no more than half of `most_kept`, and stored without the main loop.
    ahead add_ahead(int slot, std::vector<int32_t> tokens, uint32_t first, row_source & rows, steady_clock::time_point until);

    // Of the first blocks that the slot holds, of these tokens, as far as they are known: they were read to be stored, or restored.
    std::vector<fingerprint> fingerprints(int slot, const std::vector<int32_t> & tokens) const;

    // Rows of these tokens were restored: the slot holds blocks with these fingerprints.
    void restored(int slot, const std::vector<int32_t> & tokens, std::vector<fingerprint> fingerprints);

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

    size_t jobs() const; // that are not done

private:
    const std::shared_ptr<saving> own_;
};

} // namespace kvt
