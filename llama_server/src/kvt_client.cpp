#include "kvt_client.h"

#include "kvt_answers.h"
#include "kvt_images.h"
#include "kvt_socket.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

namespace kvt {

namespace {

constexpr milliseconds probe_timeout { 1000 };
constexpr milliseconds probe_least { 200 };
constexpr milliseconds probe_most { 5000 };

writer packed(const hello & said) {
    writer out;
    out.raw(socket_magic, sizeof socket_magic);
    out.u32(protocol_version);
    out.u8((uint8_t) said.gate);
    out.u8(said.states ? 1 : 0);
    out.u32(said.min_tokens);
    out.text(said.unsupported);
    out.text(said.k_dtype);
    out.text(said.v_dtype);
    out.u32((uint32_t) said.fields.size());
    for (const auto & field : said.fields) {
        out.text(field.first);
        out.text(field.second);
    }
    out.u32((uint32_t) said.layers.size());
    for (const auto & one : said.layers) {
        out.u16(one.child);
        out.u16(one.index);
        out.u8(one.kind);
        for (uint32_t value : { one.window, one.kv_heads, one.k_head_dim, one.v_head_dim, one.k_row_bytes, one.v_row_bytes }) {
            out.u32(value);
        }
    }
    for (uint32_t value : { said.window_row_bytes, said.window_least, said.window_most }) {
        out.u32(value);
    }
    out.u32((uint32_t) said.files.size());
    for (const auto & file : said.files) {
        out.text(file.path);
        for (uint64_t value : { file.device, file.inode, file.size, (uint64_t) file.mtime_ns, (uint64_t) file.ctime_ns }) {
            out.u64(value);
        }
    }
    return out;
}

void pack_fingerprints(writer & out, const std::vector<fingerprint> & fingerprints) {
    out.u32((uint32_t) fingerprints.size());
    for (const fingerprint one : fingerprints) {
        out.u64(one);
    }
}

void pack_tokens(writer & out, const int32_t * tokens, size_t count) {
    out.u32((uint32_t) count);
    for (size_t i = 0; i < count; ++i) {
        out.u32((uint32_t) as_stored(tokens[i]));
    }
}

void pack_extras(writer & out, const std::vector<extra> & extras) {
    out.u32((uint32_t) extras.size());
    for (const auto & one : extras) {
        out.u32(one.position);
        out.raw(one.digest.data(), one.digest.size());
    }
}

} // namespace

connection::connection(std::string path, hello said) : path_(std::move(path)), said_(std::move(said)) {}

std::shared_ptr<connection> connection::open(std::string path, hello said) {
    auto made = std::make_shared<connection>(std::move(path), std::move(said));
    made->prober_.start([made] { made->keep_connected(); });
    return made;
}

connection::~connection() { close_socket(fd_); }

void connection::end() {
    {
        std::lock_guard<std::mutex> lock(state_);
        ending_.store(true);
    }
    changed_.notify_all();
    prober_.leave(); // it may be on the way to a socket on a disk that hangs
    lose_if_over();
}

// What was leased and reserved is given back at once, unless a call is under way: then that call does it.
void connection::lose_if_over() {
    if (ending_.load()) {
        std::unique_lock<std::mutex> lock(io_, std::try_to_lock);
        if (lock.owns_lock()) {
            lose();
        }
    }
}

// Without memory nobody knows how far the call has come.
template <typename Call> status connection::safely(const Call & call) {
    status got = status::broken;
    try {
        got = call();
    } catch (const std::exception &) {
        failures_.fetch_add(1);
        std::lock_guard<std::mutex> lock(io_);
        lose();
    }
    lose_if_over();
    return got;
}

void connection::wait_first(milliseconds timeout) {
    std::unique_lock<std::mutex> lock(state_);
    changed_.wait_for(lock, timeout, [this] { return tried_; });
}

void connection::hang_up() {
    std::lock_guard<std::mutex> lock(io_);
    lose(up() ? line::again : line::down);
}

welcome connection::greeting() const {
    std::lock_guard<std::mutex> lock(state_);
    return greeting_;
}

std::string connection::last_error() const {
    std::lock_guard<std::mutex> lock(state_);
    return error_;
}

status connection::match(const int32_t * tokens, size_t count, uint32_t have, const std::vector<extra> & extras,
                         const std::vector<fingerprint> & fingerprints, milliseconds timeout, matched & answer) {
    return safely([&] {
        writer out;
        out.u32(have);
        pack_tokens(out, tokens, count);
        pack_extras(out, extras);
        pack_fingerprints(out, fingerprints);
        return ask_matched(frame_kind::match, out, timeout, answer);
    });
}

status connection::wait(uint64_t lease_id, milliseconds timeout, matched & answer) {
    return safely([&] {
        writer out;
        out.u64(lease_id);
        return ask_matched(frame_kind::wait, out, timeout, answer);
    });
}

status connection::renew(uint64_t lease_id, milliseconds timeout) {
    return safely([&] {
        writer out;
        out.u64(lease_id);
        std::string body;
        uint64_t lasts = 0;
        const status got = ask(frame_kind::wait, out, timeout, frame_kind::matched, body);
        if (got != status::ok) {
            return got;
        }
        return !unpack_lease(body, lasts) ? garbled() : lasts == lease_id ? status::ok : status::refused;
    });
}

status connection::release(uint64_t lease_id, milliseconds timeout) {
    return safely([&] {
        writer out;
        out.u64(lease_id);
        std::string answer;
        return ask(frame_kind::release, out, timeout, frame_kind::done, answer);
    });
}

status connection::plan(const int32_t * tokens, size_t count, uint32_t most_files, const std::vector<extra> & extras,
                        const std::vector<state_offer> & states, const std::vector<uint32_t> & windows,
                        const std::vector<fingerprint> & fingerprints, milliseconds timeout, planned & answer) {
    return safely([&] {
        writer out;
        out.u32(most_files);
        pack_tokens(out, tokens, count);
        pack_extras(out, extras);
        out.u32((uint32_t) states.size());
        for (const auto & one : states) {
            out.u32(one.n_tokens);
            out.u64(one.bytes);
        }
        out.u32((uint32_t) windows.size());
        for (uint32_t first : windows) {
            out.u32(first);
        }
        pack_fingerprints(out, fingerprints);
        std::string body;
        const status got = ask(frame_kind::plan, out, timeout, frame_kind::planned, body);
        return got == status::ok && !unpack(body, answer) ? garbled() : got;
    });
}

status connection::commit(const std::vector<filled> & files, milliseconds timeout, std::vector<std::string> & reasons) {
    return safely([&] {
        writer out;
        out.u32((uint32_t) files.size());
        for (const auto & one : files) {
            out.u64(one.id);
            out.u32((uint32_t) one.crcs.size());
            for (uint32_t crc : one.crcs) {
                out.u32(crc);
            }
        }
        std::string body;
        const status got = ask(frame_kind::commit, out, timeout, frame_kind::committed, body);
        if (got != status::ok) {
            return got;
        }
        return unpack(body, reasons) && reasons.size() == files.size() ? status::ok : garbled();
    });
}

status connection::damaged(uint64_t lease_id, uint32_t number, milliseconds timeout) {
    return safely([&] {
        writer out;
        out.u64(lease_id);
        out.u32(number);
        std::string answer;
        return ask(frame_kind::damaged, out, timeout, frame_kind::done, answer);
    });
}

status connection::finish(const finished & request, milliseconds timeout) {
    return safely([&] {
        writer out;
        for (uint32_t count : { request.prompt_tokens, request.memory_tokens, request.restored_tokens, request.reason, request.at,
                                request.beside_tokens, request.failures + failures() }) {
            out.u32(count);
        }
        out.u64(request.restored_bytes);
        for (double seconds : { request.prefill_seconds, request.lookup_seconds, request.fetch_seconds, request.copy_seconds }) {
            out.f64(seconds);
        }
        out.u32(request.expected_ms);
        std::string answer;
        return ask(frame_kind::finished, out, timeout, frame_kind::done, answer);
    });
}

status connection::ask_matched(frame_kind request, const writer & body, milliseconds timeout, matched & answer) {
    std::string got_body;
    const status got = ask(request, body, timeout, frame_kind::matched, got_body);
    return got == status::ok && !unpack(got_body, answer) ? garbled() : got;
}

status connection::ask(frame_kind request, const writer & body, milliseconds timeout, frame_kind wanted, std::string & answer) {
    if (!up()) {
        return status::down;
    }
    std::lock_guard<std::mutex> lock(io_);
    if (fd_ < 0) {
        return status::down; // another call has just found out
    }
    const auto until = clock::now() + timeout; // waiting for another call is not the sidecar's fault
    const status got = exchange(fd_, request, body.body(), until, wanted, answer);
    if (got != status::ok) {
        failures_.fetch_add(1);
    }
    if (got == status::late || got == status::broken) {
        lose();
    }
    return got;
}

status connection::garbled() {
    std::lock_guard<std::mutex> lock(io_);
    say("an answer of the sidecar makes no sense");
    failures_.fetch_add(1);
    lose();
    return status::broken;
}

// broken also where the sidecar refuses and closes the connection, and where there is no memory for its answer: then nobody
// knows what comes next.
status connection::exchange(int fd, frame_kind request, const std::string & body, clock::time_point until, frame_kind wanted,
                        std::string & answer) {
    try {
        return exchange_once(fd, request, body, until, wanted, answer);
    } catch (const std::exception &) {
        return status::broken;
    }
}

status connection::exchange_once(int fd, frame_kind request, const std::string & body, clock::time_point until, frame_kind wanted,
                             std::string & answer) {
    uint16_t got = 0;
    const transfer result = send_and_receive(fd, (uint16_t) request, body, until, got, answer);
    if (result != transfer::done) {
        say(result == transfer::late ? "the sidecar did not answer in time" : "the connection to the sidecar broke");
        return result == transfer::late ? status::late : status::broken;
    }
    if (got == (uint16_t) wanted) {
        return status::ok;
    }
    reader in(answer.data(), answer.size());
    const uint16_t code = in.u16();
    const std::string message = in.text();
    if (got != (uint16_t) frame_kind::failed || !in.whole()) {
        say("the sidecar gave an answer to something else");
        return status::broken;
    }
    say(message);
    return std::find(std::begin(keep_connection), std::end(keep_connection), code) != std::end(keep_connection) ? status::refused : status::broken;
}

void connection::lose(line left) {
    close_socket(fd_);
    fd_ = -1;
    line_.store(left);
    {
        std::lock_guard<std::mutex> lock(state_); // or the prober could miss it between looking and waiting
    }
    changed_.notify_all();
}

void connection::keep_connected() {
    milliseconds pause = probe_least;
    for (;;) {
        bool connected = false;
        try {
            connected = connect_once();
        } catch (const std::exception &) { // there is no memory: later, perhaps
        }
        std::unique_lock<std::mutex> lock(state_);
        tried_ = true;
        changed_.notify_all();
        if (connected) {
            pause = probe_least;
            changed_.wait(lock, [this] { return ending_.load() || !up(); });
        } else {
            line_.store(line::down);
        }
        if (ending_.load() || told_) {
            return;
        }
        if (connected && stands()) {
            continue; // nothing is wrong with the sidecar
        }
        changed_.wait_for(lock, pause, [this] { return ending_.load(); });
        if (ending_.load()) {
            return;
        }
        pause = std::min(2*pause, probe_most);
    }
}

bool connection::connect_once() {
    const std::string own = packed(said_).body();
    std::string why;
    const int fd = connect_socket(path_, why);
    if (fd < 0) {
        say(why);
        return false;
    }
    const frame_kind wanted = said_.unsupported.empty() ? frame_kind::welcome : frame_kind::done;
    std::string answer;
    welcome greeted;
    const status got = exchange(fd, frame_kind::hello, own, clock::now() + probe_timeout, wanted, answer);
    if (got != status::ok || wanted == frame_kind::done || !unpack(answer, greeted)) {
        close_socket(fd);
        std::lock_guard<std::mutex> lock(state_);
        told_ = got == status::ok && wanted == frame_kind::done;
        return false;
    }
    {
        std::lock_guard<std::mutex> lock(state_);
        greeting_ = greeted;
    }
    std::lock_guard<std::mutex> lock(io_);
    fd_ = fd;
    line_.store(line::up);
    return true;
}

void connection::say(const std::string & error) {
    std::lock_guard<std::mutex> lock(state_);
    error_ = error;
}

} // namespace kvt
