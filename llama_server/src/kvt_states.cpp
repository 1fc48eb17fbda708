#include "kvt_states.h"

#include "kvt_file.h"
#include "kvt_restore.h"
#include "kvt_wire.h"

#include <cstring>
#include <string>

#include <unistd.h>

namespace kvt {

namespace {

constexpr char magic[] = { 'K', 'V', 'T', 'C', 'K', 'P', 'T', '\n' };
constexpr uint32_t version = 1;
constexpr uint64_t most_state_bytes = 1u << 30; // docs/engine-protocol.md

} // namespace

state make_state(const state_head & head, size_t engine_bytes) {
    writer out;
    out.raw(magic, sizeof magic);
    out.u32(version);
    out.u32(head.n_tokens);
    out.u32((uint32_t) head.least);
    out.u32((uint32_t) head.greatest);
    state made;
    made.n_tokens = head.n_tokens;
    made.bytes.resize(state_head_bytes + engine_bytes);
    std::memcpy(made.bytes.data(), out.body().data(), state_head_bytes);
    return made;
}

bool read_head(const std::vector<char> & bytes, uint32_t n_tokens, state_head & head) {
    if (bytes.size() <= state_head_bytes || std::memcmp(bytes.data(), magic, sizeof magic) != 0) {
        return false;
    }
    reader in(bytes.data() + sizeof magic, state_head_bytes - sizeof magic);
    const bool known = in.u32() == version;
    head.n_tokens = in.u32();
    head.least    = (int32_t) in.u32();
    head.greatest = (int32_t) in.u32();
    return known && in.whole() && head.n_tokens == n_tokens && head.least >= 0 && head.least <= head.greatest &&
           (uint32_t) head.greatest < n_tokens;
}

uint32_t read_state(const file & named, lease & held, std::vector<char> & bytes) {
    if (named.kind == file_kind::rows || named.used == 0 || named.used > most_state_bytes || named.used > named.file_bytes) {
        return shortfall_sidecar_error;
    }
    const auto sizes = state_segments(named.used);
    std::string why;
    const int fd = sizes.size() == named.crcs.size() ? open_for_reading(named, why) : -1;
    if (fd < 0) {
        return shortfall_unreadable;
    }
    const opened closes(fd);
    bytes.resize((size_t) named.used);
    uint64_t offset = named.payload_offset;
    size_t at = 0;
    bool sound = true;
    for (size_t i = 0; i < sizes.size() && sound; ++i) {
        held.renew_in_time();
        sound = read_segment(fd, offset, bytes.data() + at, sizes[i], named.crcs[i], why);
        offset += page_aligned(sizes[i]);
        at += sizes[i];
    }
    return sound ? shortfall_none : shortfall_damaged;
}

bool write_state(const reserved & named, const char * bytes, size_t count, filled & done) {
    std::string why;
    const int fd = open_for_writing(named, why);
    if (fd < 0) {
        return false;
    }
    done.id = named.id;
    uint64_t offset = named.payload_offset;
    size_t at = 0;
    bool written = true;
    for (size_t part : state_segments(count)) {
        done.crcs.push_back(0);
        written = written && write_segment(fd, offset, bytes + at, part, done.crcs.back(), why);
        offset += page_aligned(part);
        at += part;
    }
    close(fd);
    return written;
}

} // namespace kvt
