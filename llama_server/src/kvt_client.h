// An engine's connection to the sidecar. No call takes longer than its timeout, and none throws: what cannot be done for lack
// of memory is `broken`.
//
// A call that fails closes the connection: what was leased and reserved over it is given back by the sidecar. From then
// on every call fails at once, until a thread of the client has connected again. So a sidecar that is dead or hangs
// costs one timeout in all, as with the Go client of the same project.
//
// Calls of one client wait for each other. An engine that looks up in one thread and stores in another has two clients.
#pragma once

#include "kvt_fingerprint.h"
#include "kvt_messages.h"
#include "kvt_wire.h"
#include "kvt_worker.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace kvt {

using milliseconds = std::chrono::milliseconds;

constexpr milliseconds lookup_timeout { 80 }; // what a silent sidecar may add to one request

enum class status {
    ok,
    down,    // known not to answer: no time was lost
    late,    // no answer in time
    broken,  // the connection ended, or the answer made no sense
    refused, // the sidecar said why: last_error()
};

class connection {
public:
    connection(std::string path, hello said); // open() begins to connect
    ~connection();
    connection(const connection &) = delete;
    connection & operator=(const connection &) = delete;

    static std::shared_ptr<connection> open(std::string path, hello said);
    void end(); // no call is made any more; waits for its thread, if nothing hangs

    bool up() const { return line_.load() == line::up; }

    // Up, or about to be, at first or after hang_up(): what is to be stored may wait for it.
    bool stands() const { return line_.load() != line::down; }

    // Waits until the first try to connect has ended, at most so long.
    void wait_first(milliseconds timeout);

    // Closes the connection, so that all that it reserved and leased is given back, and makes another.
    void hang_up();

    welcome greeting() const;       // of the last connection
    std::string last_error() const; // in words, for a log
    uint32_t failures() const { return failures_.load(); }

    // `have` rows are in the slot already, with these fingerprints of its first blocks.
    status match(const int32_t * tokens, size_t count, uint32_t have, const std::vector<extra> & extras,
                 const std::vector<fingerprint> & fingerprints, milliseconds timeout, matched & answer);
    status wait(uint64_t lease_id, milliseconds timeout, matched & answer);
    status renew(uint64_t lease_id, milliseconds timeout); // of files that were named: ok while it lasts
    status release(uint64_t lease_id, milliseconds timeout);
    status plan(const int32_t * tokens, size_t count, uint32_t most_files, const std::vector<extra> & extras,
                const std::vector<state_offer> & states, const std::vector<uint32_t> & windows, const std::vector<fingerprint> & fingerprints,
                milliseconds timeout, planned & answer);
    // One text per file: empty, or why it is not stored.
    status commit(const std::vector<filled> & files, milliseconds timeout, std::vector<std::string> & reasons);
    status damaged(uint64_t lease_id, uint32_t number, milliseconds timeout);
    status finish(const finished & request, milliseconds timeout);

private:
    using clock = std::chrono::steady_clock;
    enum class line : uint8_t { down, again, up }; // again: at first and after hang_up(), until it was tried once

    template <typename Call> status safely(const Call & call);
    void lose_if_over();
    status ask(frame_kind request, const writer & body, milliseconds timeout, frame_kind wanted, std::string & answer);
    status ask_matched(frame_kind request, const writer & body, milliseconds timeout, matched & answer);
    status garbled(); // an answer that is none
    status exchange(int fd, frame_kind request, const std::string & body, clock::time_point until, frame_kind wanted,
                    std::string & answer);
    status exchange_once(int fd, frame_kind request, const std::string & body, clock::time_point until, frame_kind wanted,
                         std::string & answer);
    void lose(line left = line::down); // the connection; io_ is held
    void keep_connected();
    bool connect_once();
    void say(const std::string & error);

    const std::string path_;
    const hello said_;

    std::mutex io_; // held for the whole of a call
    int fd_ = -1;   // under io_

    std::atomic<line> line_ { line::again };
    std::atomic<uint32_t> failures_ { 0 };

    mutable std::mutex state_; // of all below
    std::condition_variable changed_;
    welcome greeting_;
    std::string error_;
    bool tried_ = false;
    bool told_ = false; // the sidecar knows why the model is not tiered
    std::atomic<bool> ending_ { false };
    worker prober_;
};

// Who opened the connection ends it. Threads that are left behind may still hold it: their calls fail.
class client {
public:
    client(std::string path, hello said) : shared_(connection::open(std::move(path), std::move(said))) {}
    ~client() { shared_->end(); }
    client(const client &) = delete;
    client & operator=(const client &) = delete;

    connection * operator->() const { return shared_.get(); }
    const std::shared_ptr<connection> & shared() const { return shared_; }

private:
    const std::shared_ptr<connection> shared_;
};

} // namespace kvt
