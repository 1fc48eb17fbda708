// An engine for tests: says hello to a sidecar and does what the lines of its input say, one line of output for each.
//   kvt_talk SOCKET [unsupported REASON]
//   store FIRST COUNT [STATE_AT STATE_BYTES]   tokens FIRST … FIRST + COUNT - 1, as far as they are not stored
//   restore FIRST COUNT [HAVE]                 reads, checks and compares; "rows N reason R state S"
//   hold FIRST COUNT                           plans, and neither fills nor commits
//   match FIRST COUNT                          a look-up with the usual timeout; "STATUS in N ms"
//   report FIRST COUNT                         restores, and reports the first file as damaged
//   finish                                     reports a request
//   up MILLISECONDS                            waits at most so long for a connection
//   payload BYTES PATH                         reads a file past the page cache
#include "../src/kvt_blocks.h"
#include "../src/kvt_client.h"
#include "../src/kvt_crc.h"
#include "../src/kvt_file.h"
#include "../src/kvt_loaded.h"
#include "../src/kvt_restore.h"
#include "../src/kvt_states.h"

#include <iostream>
#include <sstream>

#include <unistd.h>

namespace {

using kvt::status;

const kvt::milliseconds patience { 20000 };

kvt::hello make_hello() {
    kvt::hello said;
    said.fields = { { "model", "sha256-fake" }, { "engine", "talk/1+0" }, { "flash_attention", "on" } };
    for (uint16_t i = 0; i < 3; ++i) {
        kvt::layer one;
        one.index = i;
        one.kv_heads = 1;
        one.k_head_dim = one.v_head_dim = 8;
        one.k_row_bytes = 16;
        one.v_row_bytes = 16 + 16u*i; // sizes differ, so that a mistake in offsets shows
        said.layers.push_back(one);
    }
    said.min_tokens = 1;
    said.files.push_back(kvt::look_at("/proc/self/exe")); // any file
    return said;
}

std::vector<int32_t> tokens_of(int32_t first, size_t count) {
    std::vector<int32_t> tokens(count);
    for (size_t i = 0; i < count; ++i) {
        tokens[i] = first + (int32_t) i;
    }
    return tokens;
}

// Byte i of a segment. Rows depend on their token, place and plane, a state on where it is.
char byte_of(bool state, const std::vector<int32_t> & tokens, uint32_t first, size_t segment, size_t bytes, uint32_t rows, size_t i) {
    if (state) {
        return (char) (first*7 + segment*3 + i*11);
    }
    const size_t row = i/(bytes/rows);
    return (char) ((uint32_t) tokens[first + row]*31 + segment*7 + i*13);
}

std::string filled_segment(bool state, const std::vector<int32_t> & tokens, uint32_t first, size_t segment, size_t bytes, uint32_t rows) {
    std::string data(bytes, '\0');
    for (size_t i = 0; i < bytes; ++i) {
        data[i] = byte_of(state, tokens, first, segment, bytes, rows, i);
    }
    return data;
}

const char * name_of(status what) {
    const char * names[] = { "ok", "down", "late", "broken", "refused" };
    return names[(int) what];
}

struct talker {
    kvt::hello said;
    kvt::client & client;

    std::string fill(const kvt::reserved & one, const std::vector<int32_t> & tokens, uint64_t state_bytes, kvt::filled & done) const {
        std::string why;
        const bool state = one.rows == 0;
        const auto sizes = state ? kvt::state_segments(state_bytes) : kvt::segment_bytes(said, one.rows);
        const int fd = kvt::open_for_writing(one, sizes, why);
        if (fd < 0) {
            return why;
        }
        done.id = one.id;
        uint64_t offset = one.payload_offset;
        for (size_t segment = 0; segment < sizes.size() && why.empty(); ++segment) {
            const auto data = filled_segment(state, tokens, one.first_position, segment, sizes[segment], one.rows);
            done.crcs.push_back(0);
            kvt::write_segment(fd, offset, data.data(), data.size(), done.crcs.back(), why);
            offset += kvt::page_aligned(sizes[segment]);
        }
        close(fd);
        return why;
    }

    std::vector<kvt::fingerprint> fingerprints_of(const std::vector<int32_t> & tokens) const {
        std::vector<kvt::fingerprint> all;
        for (uint32_t first = 0; first < tokens.size(); first += kvt::block_tokens) {
            const uint32_t rows = kvt::block_end(first, tokens.size()) - first;
            const auto sizes = kvt::segment_bytes(said, rows);
            std::string block;
            for (size_t segment = 0; segment < sizes.size(); ++segment) {
                block += filled_segment(false, tokens, first, segment, sizes[segment], rows);
            }
            all.push_back(kvt::fingerprint_of(block.data(), sizes));
        }
        return all;
    }

    std::string store(int32_t first, size_t count, uint32_t state_at, uint64_t state_bytes) const {
        const auto tokens = tokens_of(first, count);
        std::vector<kvt::state_offer> states;
        if (state_at > 0) {
            states.push_back({ state_at, state_bytes });
        }
        size_t stored = 0;
        for (;;) {
            kvt::planned planned;
            status got = client->plan(tokens.data(), tokens.size(), 2, {}, states, {}, fingerprints_of(tokens), patience, planned);
            if (got != status::ok) {
                return std::string(name_of(got)) + " " + client->last_error();
            }
            std::vector<kvt::filled> files(planned.files.size());
            for (size_t i = 0; i < files.size(); ++i) {
                const std::string why = fill(planned.files[i], tokens, state_bytes, files[i]);
                if (!why.empty()) {
                    return why;
                }
            }
            std::vector<std::string> reasons;
            got = client->commit(files, patience, reasons);
            if (got != status::ok) {
                return std::string(name_of(got)) + " " + client->last_error();
            }
            for (const auto & reason : reasons) {
                if (!reason.empty()) {
                    return reason;
                }
            }
            stored += files.size();
            if (planned.outcome != kvt::plan_outcome::more) {
                return "stored " + std::to_string(stored) + " outcome " + std::to_string((int) planned.outcome);
            }
        }
    }

    std::string read(const kvt::file & one, const std::vector<int32_t> & tokens) const {
        std::string why;
        const int fd = kvt::open_for_reading(one, why);
        if (fd < 0) {
            return why;
        }
        const bool state = one.rows == 0;
        const auto sizes = state ? kvt::state_segments(one.used) : kvt::segment_bytes(said, one.rows);
        if (one.crcs.size() != sizes.size()) {
            why = "another number of segments";
        }
        uint64_t offset = one.payload_offset;
        for (size_t segment = 0; segment < sizes.size() && why.empty(); ++segment) {
            std::string data(sizes[segment], '\0');
            if (kvt::read_segment(fd, offset, &data[0], data.size(), one.crcs[segment], why)) {
                const size_t known = state ? data.size() : data.size()/one.rows*(size_t) one.used;
                for (size_t i = 0; i < known && why.empty(); ++i) {
                    if (data[i] != byte_of(state, tokens, one.first_position, segment, data.size(), one.rows, i)) {
                        why = "other bytes than were stored";
                    }
                }
            }
            offset += kvt::page_aligned(sizes[segment]);
        }
        close(fd);
        return state ? why : as_a_block(one, tokens, why);
    }

    // The same by what reads blocks, from memory and as if on a disk; `why` is what was found so far.
    std::string as_a_block(kvt::file one, const std::vector<int32_t> & tokens, const std::string & why) const {
        kvt::lease held(client.shared(), 0);
        for (const uint8_t tier : { kvt::memory_tier, (uint8_t) 2 }) {
            one.tier = tier;
            kvt::buffer block(kvt::room_bytes(said, one.rows));
            const uint32_t lacking = kvt::read_block(said, one, held, block.data());
            if (lacking != (why.empty() ? kvt::shortfall_none : kvt::shortfall_damaged)) {
                return "as a block: " + std::to_string(lacking) + " " + why;
            }
            const char * at = block.data();
            const auto sizes = kvt::segment_bytes(said, one.rows);
            for (size_t segment = 0; segment < sizes.size() && why.empty(); ++segment) {
                const size_t known = sizes[segment]/one.rows*(size_t) one.used;
                for (size_t i = 0; i < known; ++i) {
                    if (at[i] != byte_of(false, tokens, one.first_position, segment, sizes[segment], one.rows, i)) {
                        return "as a block: other bytes than were stored";
                    }
                }
                at += sizes[segment];
            }
        }
        return why;
    }

    // All that is behind the first page of a file, "a" to "z" over and over.
    static std::string payload(const std::string & path, size_t bytes) {
        kvt::file one;
        one.path = path;
        one.file_bytes = bytes + kvt::page_bytes;
        one.payload_offset = kvt::page_bytes;
        kvt::buffer data(bytes);
        std::string why;
        if (!kvt::read_payload(one, data.data(), bytes, why)) {
            return why;
        }
        size_t same = 0;
        while (same < bytes && data.data()[same] == (char) ('a' + same%26)) {
            ++same;
        }
        return std::to_string(same) + " bytes";
    }

    std::string restore(int32_t first, size_t count, uint32_t have, bool report) const {
        const auto tokens = tokens_of(first, count);
        auto known = fingerprints_of(tokens);
        known.resize(std::min<size_t>(known.size(), have/kvt::block_tokens));
        kvt::matched found;
        status got = client->match(tokens.data(), tokens.size(), have, {}, known, patience, found);
        if (got == status::ok && found.pending) {
            got = client->wait(found.lease_id, patience, found);
        }
        if (got != status::ok) {
            return std::string(name_of(got)) + " " + client->last_error();
        }
        uint64_t state = 0;
        for (const auto & one : found.files) {
            const std::string why = read(one, tokens);
            if (!why.empty()) {
                return why;
            }
            state = one.rows == 0 ? one.used : state;
        }
        if (report && !found.files.empty()) {
            got = client->damaged(found.lease_id, 0, patience);
        }
        if (got == status::ok && found.lease_id != 0) {
            got = client->release(found.lease_id, patience);
        }
        std::ostringstream out;
        out << "rows " << found.rows << " reason " << found.reason << " state " << state << " " << name_of(got);
        return out.str();
    }

    std::string hold(int32_t first, size_t count) const {
        const auto tokens = tokens_of(first, count);
        kvt::planned planned;
        const status got = client->plan(tokens.data(), tokens.size(), 0, {}, {}, {}, fingerprints_of(tokens), patience, planned);
        return std::string(name_of(got)) + " " + std::to_string(planned.files.size());
    }

    std::string match(int32_t first, size_t count) const {
        const auto tokens = tokens_of(first, count);
        kvt::matched found;
        const auto began = std::chrono::steady_clock::now();
        const status got = client->match(tokens.data(), tokens.size(), 0, {}, {}, kvt::lookup_timeout, found);
        const auto took = std::chrono::steady_clock::now() - began;
        std::ostringstream out;
        out << name_of(got) << " in " << std::chrono::duration_cast<kvt::milliseconds>(took).count() << " ms";
        return out.str();
    }

    std::string finish() const {
        kvt::finished request;
        request.prompt_tokens = 100;
        request.memory_tokens = 20;
        request.restored_tokens = 70;
        request.reason = 2;
        request.at = 90;
        request.beside_tokens = 10;
        request.restored_bytes = 4096;
        request.prefill_seconds = 0.5;
        request.copy_seconds = 0.25;
        return name_of(client->finish(request, patience));
    }
};

// Known values (RFC 3720 appendix B.4), and all ways for every short length and place within a word, and for long ones, of
// which several parts are computed side by side.
bool checksums_agree() {
    const std::string zeros(32, '\0');
    bool same = kvt::crc32c("123456789", 9) == 0xe3069283 && kvt::crc32c(zeros.data(), zeros.size()) == 0x8a9136aa;
    std::string data;
    for (int i = 0; i < 9000; ++i) {
        data.push_back((char) (i*31 + i/7*i));
    }
    const auto ways = kvt::crc32c_ways();
    for (size_t at = 0; at < 8; ++at) {
        for (size_t bytes = 0; at + bytes <= data.size(); bytes += bytes < 600 ? 1 : 61) {
            const uint32_t whole = ways[0](data.data() + at, bytes, 0);
            for (const auto way : ways) {
                const uint32_t half = way(data.data() + at, bytes/2, 0);
                same = same && whole == way(data.data() + at, bytes, 0);
                same = same && whole == way(data.data() + at + bytes/2, bytes - bytes/2, half);
            }
        }
    }
    return same;
}

// A head is read as it was written, and every other one is refused.
bool heads_agree() {
    const kvt::state made = kvt::make_state({ 100, 20, 99 }, 3);
    kvt::state_head head;
    bool same = kvt::read_head(made.bytes, 100, head) && head.least == 20 && head.greatest == 99 && !kvt::read_head(made.bytes, 101, head);
    for (size_t i = 0; i < 16; ++i) { // magic, version, tokens
        auto other = made.bytes;
        other[i] = (char) (other[i] ^ 1);
        same = same && !kvt::read_head(other, 100, head);
    }
    for (const auto & wrong : { kvt::state_head { 100, -1, 99 }, kvt::state_head { 100, 50, 49 }, kvt::state_head { 100, 0, 100 } }) {
        same = same && !kvt::read_head(kvt::make_state(wrong, 3).bytes, 100, head);
    }
    return same && !kvt::read_head(kvt::make_state({ 100, 20, 99 }, 0).bytes, 100, head);
}

} // namespace

int main(int argc, char ** argv) {
    if (argc < 2 || !checksums_agree() || !heads_agree()) {
        std::cout << (argc < 2 ? "kvt_talk SOCKET" : "checksums or heads differ") << std::endl;
        return 1;
    }
    kvt::hello said = make_hello();
    said.states = argc > 2 && std::string(argv[2]) == "states";
    if (argc > 3 && std::string(argv[2]) == "unsupported") {
        said.unsupported = argv[3];
    }
    kvt::client client(argv[1], said);
    client->wait_first(patience);
    const talker talk { said, client };
    std::cout << (client->up() ? "up" : "not up: " + client->last_error()) << std::endl;
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream in(line);
        std::string what;
        int32_t first = 0;
        size_t count = 0;
        uint32_t at = 0;
        uint64_t bytes = 0;
        in >> what >> first >> count >> at >> bytes;
        std::string answer = "what?";
        if (what == "store") {
            answer = talk.store(first, count, at, bytes);
        } else if (what == "restore" || what == "report") {
            answer = talk.restore(first, count, at, what == "report");
        } else if (what == "hold") {
            answer = talk.hold(first, count);
        } else if (what == "match") {
            answer = talk.match(first, count);
        } else if (what == "payload") {
            std::istringstream words(line);
            std::string path;
            words >> what >> count >> path;
            answer = talker::payload(path, count);
        } else if (what == "finish") {
            answer = talk.finish();
        } else if (what == "up") {
            const auto until = std::chrono::steady_clock::now() + kvt::milliseconds(first);
            while (!client->up() && std::chrono::steady_clock::now() < until) {
                std::this_thread::sleep_for(kvt::milliseconds(5));
            }
            answer = client->up() ? "up" : "not up";
        }
        std::cout << answer << std::endl;
    }
    return 0;
}
