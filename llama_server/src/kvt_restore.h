// What of a prompt can be had from files. A thread for each prompt looks up, and with a few others it reads and checks; the
// engine's main loop copies what is ready into the slot, a few milliseconds at a time, and serves other slots meanwhile.
//
// A block is read and checked whole before the main loop sees it. One that lies in memory the main loop may read into its
// cells itself, with threads beside it: that takes no longer than copying, and nothing is copied twice. What cannot be had ends
// the restored prefix there.
//
// A disk may hang. A thread that reads from it then cannot be ended: it is left behind with all that it uses. Until it comes
// back nothing is looked up, so that a disk that hangs costs one prompt `most_stall` once, and a few threads.
#pragma once

#include "kvt_client.h"
#include "kvt_rows.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvt {

constexpr size_t most_read_ahead = 128u << 20; // bytes that were read and are not in a slot yet, of all prompts
constexpr size_t first_round_bytes = 8u << 20;
constexpr unsigned most_readers = 4;           // threads that read files of one prompt
constexpr uint32_t most_wait_ms = 5000;        // for files that have to be copied up first, and for room
constexpr milliseconds most_stall { 15000 };   // without anything new, however long a disk hangs

inline double seconds_since(steady_clock::time_point began) { return std::chrono::duration<double>(steady_clock::now() - began).count(); }

class restoring;

// All of its functions are called in the main loop.
class restorer {
public:
    // `look_up` is asked first. Where files have to be fetched first, `waiting` asks again, for one prompt after the other:
    // others' look-ups do not wait for that, and an answer that comes too late costs no other prompt its lease.
    restorer(const client & look_up, const client & waiting, hello said, size_t most_bytes = most_read_ahead,
             milliseconds stall = most_stall);
    ~restorer(); // waits for its threads, unless one of them hangs
    restorer(const restorer &) = delete;
    restorer & operator=(const restorer &) = delete;

    // What blocks are read into from now on, if there is some left.
    void read_into(std::shared_ptr<block_memory> memory);

    // The slot holds the first `held` rows of the prompt, and goes on after the first `have` of them by itself: with states
    // these may be fewer. `fingerprints`: of its first blocks, as far as they are known. What it was to get before is dropped.
    // `direct`: row_sink has places to read into.
    void begin(int slot, std::vector<int32_t> tokens, uint32_t have, uint32_t held, std::vector<fingerprint> fingerprints, bool direct = false);

    bool busy(int slot) const;

    // What comes takes the place of the slot's rows from this one on; UINT32_MAX until that is known.
    uint32_t start(int slot) const;

    // Writes what is ready, until `until`, and at least one block if one is. True if that was all: `report` then has what
    // was restored (tokens, bytes, times, reason and place), and the slot is not busy any more. It is all, too, if nothing new
    // has come for `most_stall`. Of a model with states all that is named is restored, or nothing. What the sink throws is
    // thrown: then nothing is known of the slot's rows. `fingerprints`: of the blocks that the slot then holds.
    bool step(int slot, row_sink & sink, steady_clock::time_point until, finished & report, std::vector<fingerprint> & fingerprints);

    void drop(int slot) noexcept; // nothing more is wanted for it

    size_t ahead() const; // bytes of memory for blocks, states and windows, of all prompts

    // Until something is ready for any slot, at most so long.
    void wait(milliseconds most);

private:
    const std::shared_ptr<restoring> own_;
};

} // namespace kvt
