#include "kvt_restore.h"

#include "kvt_file.h"

#include <algorithm>
#include <chrono>
#include <string>

#include <unistd.h>

namespace kvt {

namespace {

using clock = std::chrono::steady_clock;

constexpr milliseconds release_timeout { 200 };
constexpr uint32_t most_wait_ms = 5000; // for files that have to be copied up first

double seconds_since(clock::time_point began) { return std::chrono::duration<double>(clock::now() - began).count(); }

uint32_t reason_of(status got) {
    return got == status::late ? shortfall_sidecar_late : got == status::refused ? shortfall_sidecar_error : shortfall_sidecar_away;
}

// All segments of a block, checked, into `block`.
uint32_t read_block(const hello & said, const file & named, std::vector<char> & block) {
    const auto sizes = segment_bytes(said, named.rows);
    std::string why;
    const int fd = sizes.size() == named.crcs.size() ? open_for_reading(named, why) : -1;
    if (fd < 0) {
        return shortfall_unreadable;
    }
    block.resize(block_bytes(said, named.rows));
    uint64_t offset = named.payload_offset;
    size_t at = 0;
    bool sound = true;
    for (size_t i = 0; i < sizes.size() && sound; ++i) {
        sound = read_segment(fd, offset, block.data() + at, sizes[i], named.crcs[i], why);
        offset += page_aligned(sizes[i]);
        at += sizes[i];
    }
    close(fd);
    return sound ? shortfall_none : shortfall_damaged;
}

// The part of a file that is wanted; no rows if the answer makes no sense.
struct part {
    uint32_t first = 0;
    uint32_t rows = 0;
    uint32_t skip = 0;
};

part wanted_part(const file & one, uint32_t next, uint32_t rows) {
    const uint64_t end = std::min<uint64_t>((uint64_t) one.first_position + one.used, rows);
    if (one.rows == 0 || one.rows > block_tokens || one.used > one.rows || one.first_position > next || end <= next) {
        return {};
    }
    return { next, (uint32_t) end - next, next - one.first_position };
}

} // namespace

size_t block_bytes(const hello & said, uint32_t rows) {
    size_t bytes = 0;
    for (size_t size : segment_bytes(said, rows)) {
        bytes += size;
    }
    return bytes;
}

void restore(client & look_up, const hello & said, const std::vector<int32_t> & tokens, uint32_t have, row_sink & sink,
             finished & report) {
    if (tokens.size() < (size_t) have + 1 + look_up.greeting().min_tokens) {
        report.reason = shortfall_too_short; // as the sidecar would say: a resident hit does not ask
        return;
    }
    const auto began = clock::now();
    matched found;
    status got = look_up.match(tokens.data(), tokens.size(), have, have, {}, lookup_timeout, found);
    if (got == status::ok && found.pending) {
        const uint32_t most = std::min<uint32_t>(most_wait_ms, 200 + 2*std::min(found.expected_ms, most_wait_ms));
        got = look_up.wait(found.lease_id, milliseconds(most), found);
    }
    report.lookup_seconds = seconds_since(began);
    if (got != status::ok) {
        report.reason = reason_of(got);
        return;
    }
    report.reason = found.reason;
    report.at = found.at;
    std::vector<char> block;
    // The last token is always computed: sampling needs its logits. The sidecar knows, and is not trusted with it.
    const uint32_t rows = std::min(found.rows, (uint32_t) std::max<size_t>(tokens.size(), 1) - 1);
    uint32_t next = have;
    for (size_t i = 0; i < found.files.size() && next < rows; ++i) {
        const part one = wanted_part(found.files[i], next, rows);
        auto at = clock::now();
        const uint32_t lacking = one.rows > 0 ? read_block(said, found.files[i], block) : (uint32_t) shortfall_sidecar_error;
        report.fetch_seconds += seconds_since(at);
        if (lacking != shortfall_none) {
            report.reason = lacking;
            if (lacking == shortfall_damaged) {
                look_up.damaged(found.lease_id, (uint32_t) i, release_timeout);
            }
            break;
        }
        at = clock::now();
        const bool written = sink.write(one.first, one.rows, block.data(), found.files[i].rows, one.skip);
        report.copy_seconds += seconds_since(at);
        if (!written) {
            report.reason = shortfall_no_cells;
            break;
        }
        next += one.rows;
        report.restored_bytes += block.size()/found.files[i].rows*one.rows;
    }
    report.restored_tokens = next - have;
    if (found.lease_id != 0) {
        look_up.release(found.lease_id, release_timeout);
    }
}

} // namespace kvt
